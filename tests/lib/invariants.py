"""The properties that must hold of a swarm at every moment: each invariant is a sentence and a pure checker.

A checker sees every event in order and returns a contradiction to its sentence, or None. It keeps no more state than it
needs and knows nothing of the swarm's internals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sightings import CommitSeen, Event, Failed, Held, Obeyed, Opened, Quiet, Started, Ticked

from shoal.peer.pipeline.microbatch import indices_from
from shoal.protocol.plan import Plan

LOSS_TOLERANCE = 1e-4
COMMITS_AGAIN_S = 30.0
ENDS_S = 60.0
STRAYS_S = 30.0


class Invariant(Protocol):
    sentence: str

    def see(self, event: Event) -> str | None:
        """Return the contradiction to the sentence, if this event is one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The promises of a run.

    Args:
        losses: by step, of the same training in one process; None if staleness or few bits change them.
    """

    steps: int
    microbatches: int
    stages: int
    losses: Sequence[float] | None


def all_invariants(expected: Expectation) -> tuple[Invariant, ...]:
    return (
        OnePlanPerOrder(),
        OrdersGrow(),
        OneChain(),
        VersionsGrow(),
        OneStatePerVersion(),
        StraysReturn(),
        NobodyDissents(),
        LedgerAddsUp(expected),
        RoundsAddUp(expected),
        Finite(),
        LossesEqual(expected),
        CommitsAgain(expected),
        EveryoneEnds(expected),
        NothingFails(),
    )


@dataclass(slots=True)
class OnePlanPerOrder:
    sentence: str = "for each (term, sequence) at most one plan is ever obeyed"
    _digests: dict[tuple[int, int], str] = field(default_factory=dict)

    def see(self, event: Event) -> str | None:
        if not isinstance(event, Obeyed):
            return None
        order = event.plan.plan.order
        known = self._digests.setdefault(order, event.plan.digest)
        return None if known == event.plan.digest else f"{order} is plan {known} and, for {event.name}, another"


@dataclass(slots=True)
class OrdersGrow:
    sentence: str = "the (term, sequence) that a peer obeys only grows, over its restarts too"
    _last: dict[str, tuple[int, tuple[int, int]]] = field(default_factory=dict)

    def see(self, event: Event) -> str | None:
        if not isinstance(event, Obeyed):
            return None
        life, last = self._last.get(event.name, (event.life, (0, 0)))
        order = event.plan.plan.order
        self._last[event.name] = (event.life, order)
        if order > last or (order == last and life != event.life):  # resumed from its disk
            return None
        return f"{event.name} obeyed {last} and now obeys {order}"


@dataclass(slots=True)
class OneChain:
    """A plan may be seen before its predecessor: news spread in any order."""

    sentence: str = "no plan that was ever obeyed has two successors that were"
    _successor: dict[str, Plan] = field(default_factory=dict)

    def see(self, event: Event) -> str | None:
        if not isinstance(event, Obeyed):
            return None
        plan = event.plan.plan
        known = self._successor.setdefault(plan.previous, plan)
        return None if known == plan else f"plans {known.order} and {plan.order} both follow plan {plan.previous!r}"


@dataclass(slots=True)
class VersionsGrow:
    sentence: str = "a replica's version only grows"
    _versions: dict[tuple[str, int, int, int], int] = field(default_factory=dict)

    def see(self, event: Event) -> str | None:
        if not isinstance(event, Held):
            return None
        key = (event.name, event.life, event.incarnation, event.stage)
        before = self._versions.get(key, -1)
        self._versions[key] = event.version
        return None if event.version >= before else f"{event.name} went from version {before} to {event.version}"


@dataclass(slots=True)
class OneStatePerVersion:
    """Finds two halves of a swarm that train apart."""

    sentence: str = "for each (era, stage, version) the replicas commit one state, bit for bit"
    _digests: dict[tuple[int, int, int], tuple[str, str]] = field(default_factory=dict)

    def see(self, event: Event) -> str | None:
        if not isinstance(event, CommitSeen):
            return None
        report = event.report
        key = (report.era, report.stage, report.step + 1)
        known, first = self._digests.setdefault(key, (report.digest, event.name))
        if known == report.digest:
            return None
        return f"version {key[2]} of stage {key[1]}, era {key[0]}: {known} at {first}, {report.digest} at {event.name}"


@dataclass(slots=True)
class StraysReturn:
    """A member that is cut off during a round may finish it alone, after the others have abandoned it and begun
    another. Its state then differs from its group's, which it must notice by the group's digests or the plan."""

    sentence: str = f"a member that differs from its group fetches its state, {STRAYS_S:.0f} s after all is healed"
    _committed: dict[tuple[int, int, int], str] = field(default_factory=dict)
    _held: dict[str, Held] = field(default_factory=dict)
    _quiet_s: float = math.inf

    def see(self, event: Event) -> str | None:
        match event:
            case Started():
                self._held.pop(event.name, None)
            case CommitSeen(report=report):
                self._committed.setdefault((report.era, report.stage, report.step + 1), report.digest)
            case Held():
                self._held[event.name] = event
            case Quiet():
                self._quiet_s = event.at_s
            case Ticked() if event.at_s > self._quiet_s + STRAYS_S:
                strays = [held for name, held in sorted(self._held.items()) if name in event.running]
                strays = [held for held in strays if self._is_stray(held) and event.at_s > held.at_s + STRAYS_S]
                return f"{strays[0]} since {strays[0].at_s:.1f} s" if strays else None
            case _:
                pass
        return None

    def _is_stray(self, held: Held) -> bool:
        return self._committed.get((held.era, held.stage, held.version), held.digest) != held.digest


@dataclass(slots=True)
class NobodyDissents:
    sentence: str = "no member of a commit has another state than its group, unless its memory was damaged"

    def see(self, event: Event) -> str | None:
        if not isinstance(event, CommitSeen) or not event.report.dissenting:
            return None
        return f"{event.report.dissenting} members at step {event.report.step} of stage {event.report.stage}"


@dataclass(slots=True)
class LedgerAddsUp:
    expected: Expectation
    sentence: str = "a commit has every microbatch of its step, or says how many it gave up, and why it may"

    def see(self, event: Event) -> str | None:
        if not isinstance(event, CommitSeen):
            return None
        report = event.report
        if report.microbatches == self.expected.microbatches and not report.given_up:
            return None
        return (
            f"step {report.step} of stage {report.stage} has {report.microbatches} microbatches and gave up "
            f"{report.given_up} of {self.expected.microbatches}"
        )


@dataclass(slots=True)
class RoundsAddUp:
    expected: Expectation
    sentence: str = "a round's members bring the whole step, each microbatch once or counted as a duplicate"

    def see(self, event: Event) -> str | None:
        if not isinstance(event, Opened):
            return None
        start, M = event.start, self.expected.microbatches
        brought = [indices_from(member.indices, count=M) for member in start.members]
        union = 0
        for indices in brought:
            union |= indices
        num = union.bit_count()
        duplicates = sum(indices.bit_count() for indices in brought) - num
        if (num + start.given_up, duplicates) == (M, start.duplicates):
            return None
        return (
            f"round {start.step} of stage {start.stage} has {num} of {M} and {duplicates} duplicates, and says "
            f"{start.given_up} given up and {start.duplicates} duplicates"
        )


@dataclass(slots=True)
class Finite:
    sentence: str = "every number of a committed state is finite"

    def see(self, event: Event) -> str | None:
        if isinstance(event, CommitSeen) and event.report.loss is not None and not math.isfinite(event.report.loss):
            return f"the loss of step {event.report.step} is {event.report.loss}"
        if isinstance(event, Held) and not event.is_finite:
            return f"{event.name} holds such a version {event.version} of stage {event.stage}"
        return None


@dataclass(slots=True)
class LossesEqual:
    """A microbatch that is lost, counted twice or computed with other weights changes the loss by more than the
    tolerance, at that step or the next. A duplicate in the ledger changes it, too, so the check ends at the first one.
    """

    expected: Expectation
    sentence: str = "with s_max = 0 every step's loss is that of the same training in one process"
    _duplicated_from: float = math.inf

    def see(self, event: Event) -> str | None:
        losses = self.expected.losses
        if losses is None or not isinstance(event, CommitSeen):
            return None
        step, loss = event.report.step, event.report.loss
        if event.report.duplicates:
            self._duplicated_from = min(self._duplicated_from, step)
        if loss is None or step >= self._duplicated_from or abs(loss - losses[step]) <= LOSS_TOLERANCE:
            return None
        return f"step {step} has loss {loss:.6f}, one process has {losses[step]:.6f}"


@dataclass(slots=True)
class CommitsAgain:
    expected: Expectation
    sentence: str = f"once all is healed there is a new commit every {COMMITS_AGAIN_S:.0f} s until the last step"
    _since_s: float = math.inf
    _new_at_s: float = 0.0
    _steps: dict[int, int] = field(default_factory=dict)
    """Stage -> newest step of the newest era; a repeated report of an old commit does not count."""
    _era: int = 0

    def see(self, event: Event) -> str | None:
        match event:
            case Quiet():
                self._since_s = event.at_s
            case CommitSeen(report=report) if report.era >= self._era:
                if report.era > self._era:
                    self._era, self._steps = report.era, {}
                if report.step > self._steps.get(report.stage, -1):
                    self._steps[report.stage] = report.step
                    self._new_at_s = event.at_s
            case Ticked():
                silent_s = event.at_s - max(self._since_s, self._new_at_s)
                if silent_s > COMMITS_AGAIN_S and not self._is_complete:
                    return f"no commit for {silent_s:.1f} s; stage -> last step: {dict(sorted(self._steps.items()))}"
            case _:
                pass
        return None

    @property
    def _is_complete(self) -> bool:
        return all(self._steps.get(stage) == self.expected.steps - 1 for stage in range(self.expected.stages))


@dataclass(slots=True)
class EveryoneEnds:
    expected: Expectation
    sentence: str = f"everyone alive hears that the run is done and ends, at most {ENDS_S:.0f} s after its last step"
    _complete: dict[int, float] = field(default_factory=dict)
    _quiet_s: float = math.inf

    def see(self, event: Event) -> str | None:
        match event:
            case Quiet():
                self._quiet_s = event.at_s
            case CommitSeen(report=report) if report.step == self.expected.steps - 1:
                if report.stage < self.expected.stages:  # else of experts
                    self._complete.setdefault(report.stage, event.at_s)
            case Ticked() if event.running and len(self._complete) == self.expected.stages:
                late_s = event.at_s - max(self._quiet_s, *self._complete.values())
                if late_s > ENDS_S:
                    return f"{', '.join(event.running)} still run {late_s:.0f} s later"
            case _:
                pass
        return None


@dataclass(slots=True)
class NothingFails:
    sentence: str = "no handler raises and no node gives up"

    def see(self, event: Event) -> str | None:
        return f"{event.name}: {event.error}" if isinstance(event, Failed) else None
