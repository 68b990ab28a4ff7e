"""What is remembered of each peer's past, and what comes of it in the plan's groups of experts."""

import math
from itertools import combinations, islice

import pytest

from shoal.coordinator.experts.failure_records import (
    FAILURES_MAX,
    GAP_S_MAX,
    HANDED_OVER_MAX,
    RECORDS_MAX,
    SEEN_S_MAX,
    FailureRecords,
    failure_probability,
    rounded,
)
from shoal.coordinator.experts.groups import ExpertPlaces
from shoal.coordinator.experts.recovery import holder_masks, loss_probability
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEER_ID_CHARS_MAX
from shoal.protocol.messages import FailureRecord
from shoal.protocol.plan import ExpertGroup, Member, Plan, Stage

HOUR_S = 3600.0
A, B = PeerID("a"), PeerID("b")
PEERS = tuple(PeerID(f"p{number}") for number in range(8))
STAGE = Stage(0, 1, tuple(Member(peer, 1.0, 1.0, 1) for peer in PEERS))


def heard(records: FailureRecords, *peers: PeerID, begin_s: float = 0.0, end_s: float, apart_s: float = 30.0) -> None:
    for number in range(int((end_s - begin_s) / apart_s) + 1):
        for peer in peers:
            records.heard(peer, begin_s + number * apart_s)


def told(records: FailureRecords, *members: PeerID) -> dict[PeerID, tuple[float, float]]:
    return {record.peer: (record.failures, record.seen_s) for record in records.tell(members)}


def test_time_is_what_lies_between_heartbeats() -> None:
    records = FailureRecords()
    heard(records, A, end_s=HOUR_S)
    heard(records, A, begin_s=HOUR_S + 2 * GAP_S_MAX, end_s=2 * HOUR_S + 2 * GAP_S_MAX)
    records.heard(A, 0.0)  # a clock that goes back takes nothing away
    assert told(records, A) == {A: (0.0, 2 * HOUR_S)}


def test_who_was_lost_keeps_its_record_when_it_is_back() -> None:
    records = FailureRecords()
    heard(records, A, B, end_s=HOUR_S)
    for number in range(3):
        records.lost(A)
        heard(records, A, B, begin_s=(1 + number) * HOUR_S, end_s=(2 + number) * HOUR_S)
    assert told(records, A, B) == {A: (3.0, 4 * HOUR_S), B: (0.0, 4 * HOUR_S)}
    flaky, steady, newcomer = records.probabilities((A, B, PeerID("new")))
    assert steady < newcomer < flaky
    assert rounded(flaky) >= 2 * rounded(steady)


def test_a_record_fades_with_the_weeks() -> None:
    records = FailureRecords()
    records.take_over([FailureRecord(A, 8.0, SEEN_S_MAX)])
    heard(records, A, end_s=SEEN_S_MAX, apart_s=GAP_S_MAX)
    ((failures, seen_s),) = told(records, A).values()
    assert failures == pytest.approx(8.0 / math.e, rel=0.01)
    assert seen_s == SEEN_S_MAX


def test_the_heir_goes_on_from_what_it_is_told_and_counts_nothing_twice() -> None:
    first, heir = FailureRecords(), FailureRecords()
    heard(first, A, B, end_s=HOUR_S)
    heard(heir, A, end_s=60.0)  # in a term of its own, long ago
    first.lost(B)
    heir.take_over(first.tell((A, B)))
    heir.take_over(first.tell((A, B)))
    heir.heard(A, 90.0)
    assert told(heir) == told(first) == {A: (0.0, HOUR_S), B: (1.0, HOUR_S)}


def test_who_knows_less_does_not_overrule_who_knows_more() -> None:
    old, new = FailureRecords(), FailureRecords()
    heard(old, A, end_s=HOUR_S)
    old.lost(A)
    heard(new, A, end_s=60.0)
    old.take_over(new.tell((A,)))
    assert told(old) == {A: (1.0, HOUR_S)}


def test_members_are_told_of_first_and_then_who_was_here_last() -> None:
    records = FailureRecords()
    crowd = [PeerID(f"c{number}") for number in range(HANDED_OVER_MAX + 9)]
    heard(records, A, *crowd, end_s=30.0)
    names = [record.peer for record in records.tell((A, B))]
    assert names[:3] == [A, crowd[-1], crowd[-2]]
    assert len(names) == HANDED_OVER_MAX


def test_who_was_here_longest_ago_is_forgotten_first() -> None:
    records = FailureRecords()
    records.lost(A)
    for number in range(RECORDS_MAX):
        records.heard(PeerID(f"c{number}"), 0.0)
    a, newcomer = records.probabilities((A, PeerID("new")))
    assert a == newcomer
    assert len(records._pasts) == RECORDS_MAX


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, -1.0])
def test_a_word_that_cannot_be_is_not_taken(figure: float) -> None:
    records = FailureRecords()
    records.take_over([FailureRecord(A, figure, 1.0), FailureRecord(A, 1.0, figure)])
    records.take_over([FailureRecord(PeerID("x" * (PEER_ID_CHARS_MAX + 1)), 1.0, 1.0)])
    assert records == FailureRecords()


def test_a_predecessor_that_lies_costs_bounded_memory_and_drives_out_nobody() -> None:
    records = FailureRecords()
    heard(records, *PEERS, end_s=HOUR_S)
    for term in range(20):
        lies = (FailureRecord(PeerID(f"{term}/{number}"), 1e300, 1e300) for number in range(10**9))
        records.take_over(islice(lies, 2 * HANDED_OVER_MAX))
    assert len(records._pasts) == RECORDS_MAX
    assert {*PEERS} <= {*records._pasts}
    assert all(past.failures <= FAILURES_MAX and past.seen_s <= SEEN_S_MAX for past in records._pasts.values())
    assert 0.0 < records.probabilities((PeerID("19/0"),))[0] < 1.0


# --- what comes of it ---


def placed(places: ExpertPlaces, before: Plan | None = None, *, sequence: int = 1) -> Plan:
    experts = places.place((STAGE,), before, sequence=sequence)
    return Plan("r", 1, sequence, "", PEERS[0], (STAGE,), experts=experts)


def holders(plan: Plan) -> list[set[PeerID]]:
    return [set(entry.peers) for entry in plan.experts]


def loss(experts: tuple[ExpertGroup, ...], chances: FailureRecords) -> float:
    placement = tuple(tuple(e.expert for e in experts if peer in e.peers) for peer in PEERS)
    return loss_probability(holder_masks(placement, len(experts)), chances.probabilities(PEERS)).probability


def test_experts_are_safer_where_it_is_known_who_often_fails() -> None:
    """Whichever two of eight died three times in a day."""
    sums = [0.0, 0.0]
    for flaky in combinations(PEERS, 2):
        knows, guesses = (ExpertPlaces(num_experts=4, slots=2) for _ in range(2))
        knows.records.take_over([FailureRecord(peer, 3.0 * (peer in flaky), 24 * HOUR_S) for peer in PEERS])
        for places in (knows, guesses):
            places.take_over([[5.0, 3.0, 1.0, 1.0]])
        informed, blind = (loss(placed(places).experts, knows.records) for places in (knows, guesses))
        assert informed <= 1.001 * blind
        sums = [sums[0] + informed, sums[1] + blind]
    assert sums[0] < 0.5 * sums[1]


@pytest.mark.parametrize(("num_experts", "slots"), [(8, 4), (16, 5), (8, 8)])
def test_while_records_only_grow_older_nobody_moves(num_experts: int, slots: int) -> None:
    """Two quiet days of members with different pasts: each one's probability shrinks in its own time."""
    places = ExpertPlaces(num_experts=num_experts, slots=slots)
    places.take_over([[1.0 / (1 + expert) for expert in range(num_experts)]])
    pasts = [(0, 0), (0, 1), (1, 1), (0, 5), (3, 5), (1, 24), (0, 24), (6, 100)]
    places.records.take_over([FailureRecord(p, float(n), h * HOUR_S) for p, (n, h) in zip(PEERS, pasts, strict=True)])
    plan = first = placed(places)
    seen = [[rounded(p) for p in places.records.probabilities(PEERS)]]
    for hour in range(48):
        heard(places.records, *PEERS, begin_s=hour * HOUR_S, end_s=(hour + 1) * HOUR_S, apart_s=GAP_S_MAX)
        plan = placed(places, plan, sequence=hour + 2)
        assert holders(plan) == holders(first), f"after {hour + 1} hours"
        seen.append([rounded(p) for p in places.records.probabilities(PEERS)])
    assert len({*map(tuple, seen)}) > 5, "else this tests nothing"


def test_a_long_record_counts_for_more_than_the_prior() -> None:
    newcomer, steady, flaky = (
        failure_probability(*past) for past in ((0, 0.0), (0, 200 * HOUR_S), (200, 200 * HOUR_S))
    )
    assert steady < 0.001 < newcomer < flaky
    assert flaky == pytest.approx(0.154, abs=0.01)  # 1 - exp(-1/6): one failure an hour, within ten minutes


def test_like_estimates_are_the_same() -> None:
    assert rounded(0.11) == rounded(0.14) == 0.125
    assert rounded(0.0) == rounded(1e-9) == 2.0**-20
    assert rounded(1.0) == 1.0
