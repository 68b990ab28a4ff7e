"""Which microbatches of a step are how stale, and when its commit comes (regime C): drawn from a few numbers.

The swarm's own are recorded from its drivers (`swarm.py`) and played as any other plan.
"""

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from settings import Steps

from shoal.peer.pipeline.weights import FRESHER

REPAIR_SLOTS = 2.0
"""A repair runs the microbatches that died through the pipeline once more: so many times its length."""


class Group(NamedTuple):
    """Microbatches of one step that compute with the same weights."""

    indices: tuple[int, ...]
    staleness: tuple[int, ...]
    """By stage."""
    seen: tuple[int, ...] = ()
    """Microbatches of the step that the weights are made at whose gradients the member has by then: what a compensation
    that sees is shown. (Of the steps between that one and theirs it has none.)"""


class Plan(Protocol):
    s_max: int

    @property
    def stages(self) -> Sequence[Sequence[str]]:
        """Layer keys by stage."""
        ...

    def groups(self, step: int) -> Sequence[Group]: ...

    def ends_s(self, step: int) -> float:
        """When the step's commit takes effect, of virtual time."""
        ...


class LightPlan:
    """All stages alike: a share of each step's microbatches is stale by 1, by 2, ..., the first ones of the step.

    Time: the bottleneck takes `slot_s` a microbatch. A synchronous step waits besides for the fill and drain of the
    pipeline and for the commit; each microbatch of the next step that is let in meanwhile takes its slot out of that.
    """

    def __init__(self, regime: Steps, microbatches_per_step: int, keys: Sequence[str], seed: int) -> None:
        self.s_max = regime.s_max
        self.stages = (tuple(keys),)
        self._regime = regime
        self._num = microbatches_per_step
        self._seed = seed
        self._ends_s: list[float] = []
        self._counts = _counts(regime.shares, microbatches_per_step)

    def groups(self, step: int) -> tuple[Group, ...]:
        counts: Mapping[int, int] = self._counts
        if step < self._regime.begins_synchronously:
            counts = {0: self._num}
        elif self.s_max and step > 0 and self.kills(step - 1):
            counts = {self.s_max: self._num}
        by_staleness: dict[int, list[int]] = {}
        first = 0
        for staleness, count in sorted(counts.items(), reverse=True):
            stale = min(staleness, step)  # the first step has no version before it
            by_staleness.setdefault(stale, []).extend(range(first, first + count))
            first += count
        groups = []
        for staleness, indices in by_staleness.items():
            if staleness == 0:
                groups.append(Group(tuple(indices), (0,)))
            elif staleness == 1:
                groups += self._sharing(indices)
            else:
                for member in range(self._regime.replicas):
                    of_member = tuple(index for index in indices if self._is_of(member, index))
                    groups.append(Group(of_member, (staleness,), self._own(member, self._num)))
        return tuple(group for group in groups if group.indices)

    def _sharing(self, stale: Sequence[int]) -> list[Group]:
        """Of those that are one step stale: who computes with the same weights, by the rule of `weights.py`."""
        num_early = len(stale) - round(len(stale) * self._regime.waiting)
        has_room = num_early <= self._num / 2  # those let in early have come back before the next step begins
        groups: list[Group] = []
        newest: dict[int, int] = {}  # member -> its group
        for place, index in enumerate(stale):
            member = index % self._regime.replicas
            seen = self._own(member, min(self._num, self._num - num_early + place))
            known = groups[newest[member]] if member in newest else None
            if known is None or (has_room and len(seen) > 0 and len(seen) >= FRESHER * len(known.seen)):
                newest[member] = len(groups)
                groups.append(Group((index,), (1,), seen))
            else:
                groups[newest[member]] = known._replace(indices=(*known.indices, index))
        return groups

    def _is_of(self, member: int, index: int) -> bool:
        return index % self._regime.replicas == member

    def _own(self, member: int, ended: int) -> tuple[int, ...]:
        """Of the first `ended` microbatches of a step, those that the member has computed itself."""
        return tuple(index for index in range(ended) if self._is_of(member, index))

    def ends_s(self, step: int) -> float:
        while len(self._ends_s) <= step:
            self._ends_s.append((self._ends_s[-1] if self._ends_s else 0.0) + self._takes_s(len(self._ends_s)))
        return self._ends_s[step]

    def kills(self, step: int) -> bool:
        """Whether a replica dies while this step is under way."""
        every = self._regime.steps_a_kill
        return every > 0 and random.Random(f"kills {self._seed} {step}").random() < 1 / every

    def _takes_s(self, step: int) -> float:
        r = self._regime
        length_s = r.slot_s + (r.stages - 1) * (r.slot_s + 2 * r.hop_s)  # of one microbatch, there and back
        idle_s = length_s - r.slot_s + r.commit_s + REPAIR_SLOTS * length_s * self.kills(step)
        let_in = sum(len(group.indices) for group in self.groups(step + 1) if group.staleness[0] > 0)
        return self._num * r.slot_s + max(0.0, idle_s - let_in * r.slot_s)


def _counts(shares: Sequence[float], num: int) -> dict[int, int]:
    """Staleness -> microbatches; together `num`."""
    ends = [round(num * sum(shares[: i + 1])) for i in range(len(shares))]
    counts = {i + 1: end - start for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))}
    return counts | {0: num - sum(counts.values())}
