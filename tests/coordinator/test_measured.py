"""What the coordinator believes of what peers report."""

import math
import random

import msgspec
import numpy as np
import pytest

from shoal.coordinator.allocate.measured import (
    BOAST,
    BOAST_CLAIMED,
    BOAST_MEASURED,
    JOB_VARIANCE,
    ODD_REPORTS,
    SPEED_REPORTS,
    WIDE,
    Estimate,
    speeds,
)
from shoal.coordinator.link_survey import LINKS_KEPT_MAX, LinkSurvey
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LINKS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import LinkReport

A, B, C, D = (PeerID(name) for name in "abcd")


def report(peer, *, round_trip_s=0.1, sends=1e6, receives=0.0, has_fallen=False):
    return LinkReport(
        peer=peer,
        round_trip_s=round_trip_s,
        bytes_per_s=sends,
        received_bytes_per_s=receives,
        num_probes=1,
        has_fallen=has_fallen,
    )


@pytest.fixture
def roster():
    return Roster(1.0)


@pytest.fixture
def book(roster):
    return LinkSurvey(roster)


def test_noise_of_ten_percent_leaves_two():
    rng = random.Random(5)
    figure = Estimate()
    settled = []
    for index in range(400):
        figure.add(3e8 * rng.uniform(0.9, 1.1), 0.0, JOB_VARIANCE)
        if index >= 32:
            settled.append(figure.value / 3e8)
    assert 0.96 < min(settled) < max(settled) < 1.04
    assert np.std(settled) < 0.02


def test_one_odd_figure_hardly_counts_and_three_are_believed():
    figure = Estimate()
    for _ in range(20):
        figure.add(100.0, 0.0, JOB_VARIANCE)
    figure.add(1000.0, 0.0, JOB_VARIANCE)
    assert 100.0 < figure.value < 103.0
    for _ in range(ODD_REPORTS - 1):
        figure.add(1000.0, 0.0, JOB_VARIANCE)
    assert figure.value == pytest.approx(1000.0)


def test_odd_figures_to_both_sides_are_noise():
    figure = Estimate()
    for _ in range(20):
        figure.add(100.0, 0.0, JOB_VARIANCE)
    for _ in range(10):
        figure.add(1000.0, 0.0, JOB_VARIANCE)
        figure.add(10.0, 0.0, JOB_VARIANCE)
    assert 90.0 < figure.value < 110.0


def test_who_measures_says_what_lies_between(book):
    book.note(A, [report(B, round_trip_s=0.08, sends=2e6)], 0.0)
    network = book.network([A, B, C], 0.0)
    assert network.latency_s[0, 1] == network.latency_s[1, 0] == pytest.approx(0.04)
    assert network.bytes_per_s[0, 1] == pytest.approx(2e6)
    assert math.isnan(network.bytes_per_s[1, 0])
    assert np.isnan(network.latency_s[2]).all()


def test_of_two_round_trips_the_longer_counts(book):
    book.note(A, [report(B, round_trip_s=0.001)], 0.0)
    book.note(B, [report(A, round_trip_s=0.2)], 0.0)
    assert book.network([A, B], 0.0).latency_s[0, 1] == pytest.approx(0.1)


def test_a_boast_is_bounded_by_what_has_arrived(book):
    book.note(A, [report(B, sends=1e9)], 0.0)
    assert book.network([A, B], 0.0).bytes_per_s[0, 1] == pytest.approx(1e9), "nobody else has measured it"
    book.note(B, [report(A, receives=1e6)], 0.0)
    assert book.network([A, B], 0.0).bytes_per_s[0, 1] == pytest.approx(BOAST * 1e6)


def test_a_receiver_cannot_make_a_link_faster_than_its_sender_says(book):
    book.note(A, [report(B, sends=1e6)], 0.0)
    book.note(B, [report(A, receives=1e11)], 0.0)
    assert book.network([A, B], 0.0).bytes_per_s[0, 1] == pytest.approx(1e6)


@pytest.mark.parametrize("figure", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_figures_that_cannot_be_are_not_kept(book, figure):
    book.note(A, [report(B, round_trip_s=figure, sends=figure, receives=figure), report(A, sends=5.0)], 0.0)
    network = book.network([A, B], 0.0)
    assert np.isnan(network.latency_s).all()
    assert np.isnan(network.bytes_per_s).all()


def test_nobody_fills_the_book(roster, book):
    for beat in range(50):
        book.note(A, [report(PeerID(f"p{beat}-{index}")) for index in range(1000)], 0.0)
    assert len(roster.at(A).links) == LINKS_KEPT_MAX
    assert f"p49-{LINKS_PER_HEARTBEAT_MAX - 1}" in roster.at(A).links
    roster.begin_term(frozenset([B]))
    assert not roster.at(A).links


def meet(book, sender, receiver, *, sends, receives):
    book.note(sender, [report(receiver, sends=sends)], 0.0)
    book.note(receiver, [report(sender, sends=0.0, receives=receives)], 0.0)


def test_a_link_is_falling_until_its_new_figure_is_believed(book):
    peers, falling = [A, B], []
    book.note(A, [report(B, sends=1e8)], 0.0)
    for _ in range(ODD_REPORTS):
        falling.append(book.is_falling(peers))
        book.note(A, [report(B, sends=1e7)], 0.0)
    assert falling == [False] + [True] * (ODD_REPORTS - 1)
    assert not book.is_falling(peers)
    book.note(A, [report(B, sends=1e6)], 0.0)
    assert book.is_falling(peers)
    assert not book.is_falling([A]), "the other end is none of them"


def test_a_fall_that_its_reporter_has_measured_twice_is_believed_at_once(book):
    book.note(A, [report(B, sends=1e7)], 0.0)
    book.note(A, [report(B, sends=1e6, has_fallen=True)], 0.0)
    network = book.network((A, B), 0.0)
    assert network.bytes_per_s[0, 1] == pytest.approx(1e6)
    assert network.is_certain[0, 1], "it is no lower bound"


def test_a_line_is_suspected_once_several_of_its_links_have_fallen(book):
    book.note(A, [report(other, sends=1e7) for other in (B, C, D)], 0.0)
    book.note(A, [report(B, sends=1e6, has_fallen=True)], 0.0)
    assert not book.degraded_links(), "it may as well be the line of the other end"
    book.note(A, [report(C, sends=1e6, has_fallen=True)], 0.0)
    assert book.degraded_links() == {A: 2}
    book.note(A, [report(C, sends=1e7)], 0.0)
    assert not book.degraded_links(), "it carries as much as before"


def test_what_is_known_of_a_slow_line_from_before_is_out_of_date(book):
    others = tuple(PeerID(f"p{number}") for number in range(7))
    for other in others:
        book.note(other, [report(A, sends=1e7), report(others[other == others[0]], sends=1e7)], 0.0)
        book.note(A, [report(other, sends=1e7)], 0.0)
    for number, other in enumerate(others[:4]):
        assert not np.isnan(book.network((A, *others), 0.0).bytes_per_s[1:, 0]).any(), f"{number} links have fallen"
        book.note(other, [report(A, sends=1e6, has_fallen=True)], 0.0)
    rates = book.network((A, *others), 0.0).bytes_per_s
    assert rates[1:5, 0] == pytest.approx(1e6)
    assert np.isnan(rates[5:, 0]).all(), "they were not measured since"
    assert np.isnan(rates[0]).all(), "nor was what A sends"
    assert not np.isnan(rates[2, 1]), "the lines of others are as they were"


def test_who_is_not_measured_uploads_as_it_claims_but_no_faster_than_others_do(book):
    meet(book, A, B, sends=1e6, receives=1e6)
    meet(book, A, C, sends=3e6, receives=3e6)
    assert book.uploads({A: 5e9, B: 1.0, C: 8e6, D: 1e5}) == {
        A: pytest.approx(2e6),
        B: pytest.approx(2e6),
        C: pytest.approx(2e6),
        D: 1e5,
    }
    assert LinkSurvey(Roster(1.0)).uploads({A: 1.0, B: 1.0}) == {A: 1.0, B: 1.0}


def test_a_line_that_only_its_owner_has_seen_is_a_claim(book):
    meet(book, A, B, sends=2e6, receives=2e6)
    meet(book, B, A, sends=2e6, receives=2e6)
    book.note(C, [report(A, sends=1e12), report(B, sends=1e12)], 0.0)
    assert book.uploads({A: 1.0, B: 1.0, C: 1e15})[C] == pytest.approx(2e6)
    assert book.network([A, B, C], 0.0).bytes_per_s[2, 0] == pytest.approx(BOAST * 2e6)


def working(**flop_per_s):
    """Reports of peers that have worked for a while."""
    reports = {PeerID(peer): Estimate() for peer in flop_per_s}
    for _ in range(SPEED_REPORTS):
        for peer, figure in flop_per_s.items():
            reports[peer].add(figure, 0.0, JOB_VARIANCE)
    return reports


def believed(reports, claims, *, seen, machines=None, now_s=0.0):
    return speeds(claims, reports, machines or dict.fromkeys(claims, ""), now_s, seen=seen)


def flop_per_s(reports, claims, *, seen):
    return {peer: speed.flop_per_s for peer, speed in believed(reports, claims, seen=seen).items()}


def test_a_device_is_as_fast_as_its_microbatches_say():
    reports = {A: Estimate()}
    for _ in range(SPEED_REPORTS):
        assert flop_per_s(reports, {A: 1e12}, seen="a") == {A: 1e12}
        reports[A].add(5e11, 0.0, JOB_VARIANCE)
    assert flop_per_s(reports, {A: 1e12}, seen="a") == {A: pytest.approx(5e11)}


def test_a_claim_is_worth_what_claims_have_been_worth_and_at_most_the_median():
    found = flop_per_s(working(a=5e11, b=2e11), {A: 1e12, B: 4e11, C: 3e11, D: 3e15}, seen="ab")
    assert found == {A: pytest.approx(5e11), B: pytest.approx(2e11), C: pytest.approx(1.5e11), D: pytest.approx(2e11)}
    assert flop_per_s({}, {A: 7.0}, seen="") == {A: 7.0}


def test_six_that_boast_get_no_more_than_six_that_work():
    """Row 11 of the issue: they got all the traffic of every stage."""
    honest, liars = ("a", "b", "c", "d", "e", "f"), ("u", "v", "w", "x", "y", "z")
    reports = working(**dict.fromkeys(honest, 1e12), **dict.fromkeys(liars, 1e18))
    claims = dict.fromkeys(honest, 2e12) | dict.fromkeys(liars, 1e15)
    found = flop_per_s(reports, claims, seen=honest)
    share = sum(found[peer] for peer in liars) / sum(found.values())
    assert share == pytest.approx(0.5)
    seen = flop_per_s(reports, claims, seen=honest + liars)
    assert max(seen.values()) <= BOAST_MEASURED * 1e12 * 1.01, "one that has worked may still praise itself this far"
    assert max(flop_per_s({}, {A: 1e12, B: 1e12, C: 1e15}, seen="").values()) == BOAST_CLAIMED * 1e12


def test_who_says_that_it_is_slow_is_believed_though_nobody_has_seen_it_at_work():
    found = flop_per_s(working(a=2.5e11, b=9e15), {A: 1e12, B: 1e12, C: 1e12}, seen="")
    assert found == pytest.approx(dict.fromkeys((A, B, C), 2.5e11)), "and so are the probes of others"


# --- variances ---


def test_a_probe_is_as_uncertain_as_probes_have_been_and_more_on_a_shared_machine():
    claims = dict.fromkeys((A, B, C), 1e12)
    nothing = believed({}, claims, machines={A: "m", B: "m", C: ""}, seen="abc")
    assert nothing[C].variance == pytest.approx(WIDE)
    assert nothing[A].variance == pytest.approx(WIDE + math.log(2) ** 2)
    alike = believed(working(a=5e11, b=5e11), claims, seen="ab")
    assert alike[C].variance < 0.2 * WIDE, "every probe has been off by the same factor"
    apart = believed(working(a=1e12, b=5e10), claims, seen="ab")
    assert apart[C].variance > WIDE


def test_a_speed_of_jobs_is_narrow_and_grows_old():
    now, later = (believed(working(a=5e11), {A: 1e12}, now_s=s, seen="a")[A] for s in (0.0, 600.0))
    assert now.variance < 0.1**2 < 0.2**2 < later.variance < 0.25**2
    assert believed(working(a=5e11), {A: 1e12}, seen="")[A].variance == WIDE, "nobody else has seen it at work"


def test_a_figure_far_from_the_average_widens_it():
    figure = Estimate()
    for _ in range(20):
        figure.add(100.0, 0.0, JOB_VARIANCE)
    narrow = figure.variance(0.0)
    figure.add(1000.0, 0.0, JOB_VARIANCE)
    assert figure.variance(0.0) > 3 * narrow


def test_a_link_is_more_certain_with_each_probe_and_less_beside_traffic():
    def variance(*num_probes, busy=()):
        book = LinkSurvey(Roster(1.0))
        for second, number in enumerate(num_probes):
            found = msgspec.structs.replace(report(B, sends=1e6 + second), num_probes=number)
            book.note(A, [found], float(second), busy=busy)
        return book.network([A, B], 0.0).rate_variance[0, 1]

    assert variance(1) > variance(1, 2) > variance(1, 2, 3) > variance(1, 2, 3, 3)
    assert variance(1, 2, 3, busy=[B]) > variance(1, 2, 3)
    book = LinkSurvey(Roster(1.0))
    for second in range(3):
        book.note(A, [report(B)], float(second))
    assert book.network([A, B], 0.0).rate_variance[0, 1] == pytest.approx(variance(1)), "one probe, told three times"
    assert math.isnan(book.network([A, B], 0.0).rate_variance[1, 0])
