"""Each invariant, shown what it must find and what it must let pass: a check that cannot fail checks nothing."""

from collections.abc import Sequence

import pytest
from invariants import (
    CommitsAgain,
    EveryoneEnds,
    Expectation,
    Finite,
    Invariant,
    LedgerAddsUp,
    LossesEqual,
    NobodyDissents,
    NothingFails,
    OneChain,
    OnePlanPerOrder,
    OneStatePerVersion,
    OrdersGrow,
    RoundsAddUp,
    StraysReturn,
    VersionsGrow,
    all_invariants,
)
from sightings import CommitSeen, Event, Failed, Held, Obeyed, Opened, Quiet, Started, Ticked

from shoal.peer.pipeline.microbatch import bitmap_of
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, RoundMember, RoundStart
from shoal.protocol.plan import Member, Plan, SignedPlan, Stage, plan_digest

EXPECTED = Expectation(steps=2, microbatches=4, stages=1, losses=(3.0, 2.0))
ME = PeerID("me")


def obeyed(name: str, term: int, sequence: int, *, previous: str = "", life: int = 0, reason: str = "") -> Obeyed:
    stages = (Stage(0, 1, (Member(ME, 1.0, 1.0),)),)
    plan = Plan(run="r", term=term, sequence=sequence, previous=previous, coordinator=ME, stages=stages, reason=reason)
    return Obeyed(at_s=0.0, name=name, life=life, plan=SignedPlan(plan, b"", plan_digest(plan)))


def held(
    name: str,
    version: int,
    *,
    at_s: float = 0.0,
    digest: str = "d",
    era: int = 0,
    finite: bool = True,
    incarnation: int = 0,
) -> Held:
    return Held(
        at_s=at_s,
        name=name,
        life=0,
        incarnation=incarnation,
        era=era,
        stage=0,
        version=version,
        digest=digest,
        is_finite=finite,
    )


def committed(
    step: int,
    *,
    at_s: float = 0.0,
    microbatches: int = 4,
    duplicates: int = 0,
    given_up: int = 0,
    loss: float | None = None,
    digest: str = "d",
    dissenting: int = 0,
    era: int = 0,
) -> CommitSeen:
    report = CommitReport(
        era=era,
        stage=0,
        step=step,
        members=2,
        microbatches=microbatches,
        duplicates=duplicates,
        given_up=given_up,
        tokens=0,
        staleness_steps_mean=0.0,
        loss=loss,
        digest=digest,
        dissenting=dissenting,
    )
    return CommitSeen(at_s=at_s, name="a", life=0, report=report)


def opened(*bitmaps: int, duplicates: int = 0, given_up: int = 0) -> Opened:
    members = tuple(RoundMember(PeerID(f"p{i}"), 1.0, bitmap_of(bits)) for i, bits in enumerate(bitmaps))
    start = RoundStart(
        stage=0,
        step=0,
        attempt=1,
        members=members,
        duplicates=duplicates,
        given_up=given_up,
        loss_sum=0.0,
        staleness_sum=0,
    )
    return Opened(at_s=0.0, name="a", life=0, start=start)


def ticked(at_s: float, *running: str) -> Ticked:
    return Ticked(at_s=at_s, running=running or ("a",))


def quiet(at_s: float) -> Quiet:
    return Quiet(at_s=at_s)


def started(name: str, life: int) -> Started:
    return Started(at_s=0.0, name=name, life=life, peer=ME)


FIRST = obeyed("a", 1, 1)

OFFENDERS: list[tuple[Invariant, Sequence[Event]]] = [
    (OnePlanPerOrder(), [FIRST, obeyed("b", 1, 1, reason="another")]),
    (OrdersGrow(), [obeyed("a", 2, 5), obeyed("a", 1, 6)]),
    (OrdersGrow(), [obeyed("a", 2, 5), obeyed("a", 2, 5)]),
    (OrdersGrow(), [obeyed("a", 2, 5), obeyed("a", 2, 4, life=1)]),
    (OneChain(), [obeyed("a", 1, 2, previous="x"), obeyed("b", 2, 3, previous="x")]),
    (VersionsGrow(), [held("a", 3), held("a", 2)]),
    (OneStatePerVersion(), [committed(0), committed(0, digest="e")]),
    (StraysReturn(), [held("a", 1, digest="e"), committed(0), quiet(0.0), ticked(31.0)]),
    (NobodyDissents(), [committed(0, dissenting=1)]),
    (LedgerAddsUp(EXPECTED), [committed(0, microbatches=3)]),
    (LedgerAddsUp(EXPECTED), [committed(0, microbatches=3, given_up=1)]),
    (RoundsAddUp(EXPECTED), [opened(0b0011, 0b0100)]),
    (RoundsAddUp(EXPECTED), [opened(0b0011, 0b1110)]),
    (RoundsAddUp(EXPECTED), [opened(0b0011, 0b1100, duplicates=1)]),
    (Finite(), [held("a", 1, finite=False)]),
    (Finite(), [committed(0, loss=float("nan"))]),
    (LossesEqual(EXPECTED), [committed(0, loss=3.001)]),
    (LossesEqual(EXPECTED), [committed(1, duplicates=1, loss=2.5), committed(0, loss=2.5)]),
    (CommitsAgain(EXPECTED), [committed(0), quiet(1.0), ticked(32.0)]),
    (CommitsAgain(EXPECTED), [quiet(1.0), committed(0, at_s=20.0), committed(0, at_s=40.0), ticked(51.0)]),
    (CommitsAgain(EXPECTED), [quiet(1.0), committed(1), committed(0, era=1), ticked(32.0)]),
    (EveryoneEnds(EXPECTED), [quiet(0.0), committed(1, at_s=10.0), ticked(71.0)]),
    (NothingFails(), [Failed(at_s=0.0, name="a", life=0, error="ValueError")]),
]


@pytest.mark.parametrize(("invariant", "events"), OFFENDERS)
def test_an_offender_is_found_by_its_last_event(invariant: Invariant, events: Sequence[Event]) -> None:
    *before, last = events
    assert [invariant.see(event) for event in before] == [None] * len(before)
    assert invariant.see(last)


INNOCENTS: list[tuple[Invariant, Sequence[Event]]] = [
    (OnePlanPerOrder(), [FIRST, obeyed("b", 1, 1), obeyed("a", 1, 2, previous=FIRST.plan.digest)]),
    (OrdersGrow(), [obeyed("a", 1, 6), obeyed("a", 2, 5), obeyed("a", 2, 5, life=1), obeyed("b", 1, 1)]),
    (OneChain(), [obeyed("a", 1, 2, previous="x"), obeyed("b", 1, 2, previous="x"), obeyed("b", 1, 3, previous="y")]),
    (VersionsGrow(), [held("a", 3), held("a", 3), held("a", 1, era=1, incarnation=1), held("b", 1)]),
    (VersionsGrow(), [held("a", 3), held("a", 2, incarnation=1)]),
    (OneStatePerVersion(), [committed(0), committed(0), committed(1, digest="e"), committed(0, digest="e", era=1)]),
    (StraysReturn(), [held("a", 1, digest="e"), committed(0), quiet(0.0), ticked(9.0), held("a", 2), ticked(40.0)]),
    (StraysReturn(), [held("a", 1, digest="e"), committed(0), quiet(0.0), started("a", 1), ticked(40.0)]),
    (StraysReturn(), [held("a", 1, digest="e"), committed(0), quiet(0.0), ticked(40.0, "b")]),
    (NobodyDissents(), [committed(0)]),
    (LedgerAddsUp(EXPECTED), [committed(0), committed(1, duplicates=2)]),
    (RoundsAddUp(EXPECTED), [opened(0b0011, 0b1100), opened(0b0111, 0b1100, duplicates=1), opened(1, given_up=3)]),
    (Finite(), [held("a", 1), committed(0, loss=3.0), committed(1)]),
    (LossesEqual(EXPECTED), [committed(0, loss=3.00005), committed(1, loss=2.5, duplicates=1)]),
    (CommitsAgain(EXPECTED), [ticked(50.0), quiet(50.0), ticked(79.0), committed(0, at_s=80.0), ticked(109.0)]),
    (CommitsAgain(EXPECTED), [quiet(0.0), committed(1, at_s=1.0), ticked(99.0)]),
    (EveryoneEnds(EXPECTED), [quiet(20.0), committed(1, at_s=10.0), ticked(79.0), Ticked(at_s=99.0, running=())]),
    (NothingFails(), [FIRST]),
]


@pytest.mark.parametrize(("invariant", "events"), INNOCENTS)
def test_what_is_right_passes(invariant: Invariant, events: Sequence[Event]) -> None:
    assert [invariant.see(event) for event in events] == [None] * len(events)


def test_each_invariant_is_checked_and_has_an_offender_and_a_sentence_of_its_own() -> None:
    used = {type(invariant) for invariant in all_invariants(EXPECTED)}
    assert used == {type(invariant) for invariant, _ in OFFENDERS} == {type(invariant) for invariant, _ in INNOCENTS}
    assert len({invariant.sentence for invariant in all_invariants(EXPECTED)}) == len(used)
