"""The list of granted microbatches, from which the leader of stage 0 grants the next ones. Pure.

A stage-0 replica claims microbatches when it may have more in flight (its window has room), and the leader grants the
next ones. A fast replica thus computes more without a precomputed split, no microbatch (t, i) is computed twice, and
members need not agree on a step at which a new plan takes effect. Every replica reports to its group which microbatches
were granted to it (`Progress.claimed`), so that the next leader knows them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.protocol.staleness import staleness_bound


@dataclass(kw_only=True, slots=True)
class WorkQueue:
    """Grants each training microbatch of each step once, in order, and those that validate a version once it is
    reached.

    Args:
        steps: number of the run's steps; step `steps` itself has only validation.
        microbatches: M, number per step.
        s_max: microbatches are granted of steps that are at most this far ahead of the version.
        synchronous_steps: number of first steps that are never granted ahead.
        validation_interval: steps between validations; 0: never.
    """

    steps: int
    microbatches: int
    s_max: int
    validation_interval: int
    validation_microbatches: int
    synchronous_steps: int = 0
    version: int = 0
    halts_at: int | None = None
    """The first step that may not begin; None: no halt."""
    cutover_version: int = 0
    """The version at which the layout ends: the next layout makes the steps from there on. 0: no end is planned."""
    _taken: dict[int, Indices] = field(default_factory=dict)
    _validation: list[Microbatch] = field(default_factory=list)
    _validated_version: int = -1

    def reach(self, version: int) -> None:
        """Record that this replica has reached `version`. Its validation may now be granted."""
        self.version = max(self.version, version)
        self._taken = {step: taken for step, taken in self._taken.items() if step >= self.version}
        due = self.validation_interval > 0 and (version % self.validation_interval == 0 or version == self.steps)
        due = due and not 0 < self.cutover_version <= version
        if version > self._validated_version:
            # Never repeat an earlier leader's validation, and never validate a past version.
            self._validated_version = version
            self._validation = [Microbatch(version, -1 - j) for j in range(self.validation_microbatches) if due]

    def validate_again(self, known: Collection[int]) -> None:
        """Grant the validation of the run's last version again: a member with a part of that work may have died, and no
        later version will be validated. Args: known: numbers of the validation microbatches with a known loss."""
        if self.validation_interval > 0 and self.version == self.steps:
            lost = (j for j in range(self.validation_microbatches) if j not in known)
            self._validation = [Microbatch(self.steps, -1 - j) for j in lost]

    def take(self, step: int, indices: Indices) -> None:
        """Record that these microbatches are granted already."""
        if step >= self.version:
            self._taken[step] = self._taken.get(step, 0) | indices

    @property
    def admissible(self) -> int:
        """Number of microbatches that could be granted now."""
        return sum(self.left.values()) + self.left_to_validate

    @property
    def left(self) -> dict[int, int]:
        """Open step -> number of its microbatches not granted yet, in order of steps."""
        return {step: self.microbatches - self._taken.get(step, 0).bit_count() for step in self._open_steps()}

    @property
    def left_to_validate(self) -> int:
        """Number of validation microbatches not granted yet."""
        return len(self._validation)

    def grant(
        self, count: int, due: Mapping[int, int] | None = None, *, due_to_validate: int | None = None
    ) -> list[Microbatch]:
        """Grant up to `count` microbatches. Args: due: step -> how many microbatches of that step to grant at most;
        due_to_validate: how many validation microbatches to grant at most. None: no further limit."""
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
        """Begin no further step until `go_on`; `at_once`: also grant nothing more of the steps that have begun.
        Returns: the version at which every stage will stop; a further call may lower it, but never raise it."""
        begun = {step: taken for step, taken in self._taken.items() if taken}
        if at_once:
            steps, all_of_it = range(self.version, self.steps), self.microbatches
            halts_at = next((step for step in steps if begun.get(step, 0).bit_count() < all_of_it), self.steps)
        else:
            halts_at = max(begun, default=self.version - 1) + 1
        self.halts_at = halts_at if self.halts_at is None else max(self.version, min(halts_at, self.halts_at))
        return self.halts_at

    def go_on(self) -> None:
        self.halts_at = None

    def _open_steps(self) -> list[int]:
        near = range(self.version, min(self.version + self.s_max, self.steps - 1) + 1)
        s_max, synchronous_steps = self.s_max, self.synchronous_steps
        return [
            step
            for step in near
            if step - self.version <= staleness_bound(step, s_max=s_max, synchronous_steps=synchronous_steps)
            and (self.halts_at is None or step < self.halts_at)
            and not 0 < self.cutover_version <= step
        ]
