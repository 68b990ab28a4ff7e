"""Decides who makes which microbatch: the book that the leader of stage 0 keeps. Pure.

A stage-0 replica claims microbatches when its window has room, and the leader grants the next ones. So a fast replica
makes more without anyone computing a split, no (t, i) is made twice, and a plan change needs no agreement on a step
at which it takes effect. Every replica tells its mates what it has been granted (`Progress.claimed`), so that the
next leader knows what is taken.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.protocol.staleness import staleness_bound


@dataclass(kw_only=True, slots=True)
class WorkQueue:
    """Grants each training microbatch of each step once, in order, and validation when its version is there.

    Args:
        steps: the run's steps; step `steps` itself has only validation.
        microbatches: M, per step.
        s_max: steps ahead of the version that may be granted,
        synchronous_steps: none of the first of them.
        validation_interval: 0, never.
    """

    steps: int
    microbatches: int
    s_max: int
    validation_interval: int
    validation_microbatches: int
    synchronous_steps: int = 0
    version: int = 0
    halts_at: int | None = None
    """No step from this one on is begun; None: all may be."""
    ends_at: int = 0
    """The version at which the layout ends: the next layout begins the steps from it on. 0: it does not end."""
    _taken: dict[int, Indices] = field(default_factory=dict)
    _validation: list[Microbatch] = field(default_factory=list)
    _validated_version: int = -1

    def reach(self, version: int) -> None:
        """This replica has stepped to `version`. Validation at it may now be granted."""
        self.version = max(self.version, version)
        self._taken = {step: taken for step, taken in self._taken.items() if step >= self.version}
        due = self.validation_interval > 0 and (version % self.validation_interval == 0 or version == self.steps)
        due = due and not 0 < self.ends_at <= version
        if version > self._validated_version:
            # What an earlier lead has validated, or nobody could while it was current, is not to be caught up on.
            self._validated_version = version
            self._validation = [Microbatch(version, -1 - j) for j in range(self.validation_microbatches) if due]

    def validate_again(self, known: Collection[int]) -> None:
        """Somebody who was to validate the run's last version may have died: no later one is validated in its place.

        Args: known: j of the microbatches whose losses are here.
        """
        if self.validation_interval > 0 and self.version == self.steps:
            lost = (j for j in range(self.validation_microbatches) if j not in known)
            self._validation = [Microbatch(self.steps, -1 - j) for j in lost]

    def take(self, step: int, indices: Indices) -> None:
        """Somebody holds these already."""
        if step >= self.version:
            self._taken[step] = self._taken.get(step, 0) | indices

    @property
    def admissible(self) -> int:
        """Microbatches that could be granted now."""
        return sum(self.left.values()) + self.left_to_validate

    @property
    def left(self) -> dict[int, int]:
        """Each open step, in order -> how many of its microbatches nobody has."""
        return {step: self.microbatches - self._taken.get(step, 0).bit_count() for step in self._open_steps()}

    @property
    def left_to_validate(self) -> int:
        """How many validation microbatches nobody has."""
        return len(self._validation)

    def grant(
        self, count: int, due: Mapping[int, int] | None = None, *, due_to_validate: int | None = None
    ) -> list[Microbatch]:
        """Up to `count` microbatches for one claimant, of each step, and of validation, as many as are due to it at
        most; None: of each all that nobody has."""
        validating = count if due_to_validate is None else min(count, due_to_validate)
        granted, self._validation = self._validation[:validating], self._validation[validating:]
        for step in self._open_steps():
            taken, most = self._taken.get(step, 0), count
            if due is not None:
                most = min(count, len(granted) + due.get(step, 0))
            for index in range(self.microbatches):
                if len(granted) >= most:
                    break
                if not taken >> index & 1:
                    self._taken[step] = taken = taken | 1 << index
                    granted.append(Microbatch(step, index))
        return granted

    def halt(self, *, at_once: bool) -> int:
        """Begin no further step until `go_on`; `at_once`: nor grant what is left of those that have begun.

        Returns: the version that every stage comes to and none passes: what is granted of earlier steps is all of
        them. Each call may name a lower one, never a higher.
        """
        begun = {step: taken for step, taken in self._taken.items() if taken}
        if at_once:
            steps, all_of_it = range(self.version, self.steps), self.microbatches
            halts_at = next((step for step in steps if begun.get(step, 0).bit_count() < all_of_it), self.steps)
        else:
            halts_at = max(begun, default=self.version - 1) + 1
        self.halts_at = halts_at if self.halts_at is None else max(self.version, min(halts_at, self.halts_at))
        return self.halts_at

    def go_on(self) -> None:
        """The halt is over."""
        self.halts_at = None

    def _open_steps(self) -> list[int]:
        """Of which microbatches may be granted now, in order."""
        near = range(self.version, min(self.version + self.s_max, self.steps - 1) + 1)
        s_max, synchronous_steps = self.s_max, self.synchronous_steps
        return [
            step
            for step in near
            if step - self.version <= staleness_bound(step, s_max=s_max, synchronous_steps=synchronous_steps)
            and (self.halts_at is None or step < self.halts_at)
            and not 0 < self.ends_at <= step
        ]
