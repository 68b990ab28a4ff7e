"""What a page knows after what a peer has said."""

import msgspec
import pytest

import record_lines
from record_lines import validation
from shoal.deploy.dashboard.census import GONE_AFTER_S, TEXT_CHARS_MAX
from shoal.deploy.dashboard.feed import NEW_S
from shoal.deploy.dashboard.view import STALE_S
from shoal.deploy.record.lines import encode_line
from shoal.deploy.record.reading import record_of
from shoal.deploy.record.report import Joined, Left, LimitsNow, Note, Obeys, Phase, Ready, Recorded, Status, StepDone
from shoal.protocol.messages import Comparison, PlanNote
from shoal.protocol.wire_format import Formats


def step_done(step, loss=2.0, era=0, **says):
    usual = {"validation_loss": None, "validation_step": None, "tokens_per_s": 100.0, "staleness_mean": 0.0}
    more = {"duplicates": 0, "given_up": 0, "dissenting": 0, "term": 1, "peers": 2, "coordinator": "a"}
    return StepDone(step=step, loss=loss, era=era, **(usual | more | says))


def test_before_anything_is_heard_it_says_what_it_knows(feed):
    view = feed.view(0.0)
    assert (view.phase, view.name, view.steps, view.peers, view.mine) == ("starting", "a-run", 100, (), None)
    assert view.status_age_s is None


def test_a_status_becomes_peers_figures_and_a_point(feed, two_peers, id_of):
    feed.take(two_peers, 5.0)
    view = feed.view(6.5)
    assert [(peer.name, peer.stage, peer.state) for peer in view.peers] == [
        ("peer-a", 0, "training"),
        ("peer-b", 1, "training"),
    ]
    assert (view.phase, view.step, view.loss, view.tokens_per_s) == ("training", 10, 3.25, 500.0)
    assert view.status_age_s == 1.5
    assert view.elapsed_s == 61.5
    assert view.left_s == 180.0 - 1.5, "as the coordinator says, and time has passed"
    (point,) = feed.curves.points
    assert (point.step, point.loss, point.tokens_per_s, point.staleness) == (10, 3.25, 500.0, 0.5)


def test_the_first_peer_that_is_heard_of_is_this_one(feed, two_peers, id_of):
    feed.take(Ready(peer=id_of("b"), run="r", invite=""), 0.0)
    feed.take(Joined(peer=id_of("b"), name="peer-b", invite=""), 0.0)
    feed.take(Joined(peer=id_of("a"), name="peer-a", invite=""), 0.0)
    feed.take(two_peers, 1.0)
    assert [peer.is_me for peer in feed.view(1.0).peers] == [False, True]


def test_who_coordinates_is_in_the_newest_plan(feed, two_peers, id_of):
    feed.take(two_peers, 0.0)
    for sequence, letter in ((2, "b"), (1, "a")):
        feed.take(Obeys(term=1, sequence=sequence, coordinator=id_of(letter), reason="x", peers=2), 1.0)
    view = feed.view(1.0)
    assert (view.sequence, view.coordinator_name) == (2, "peer-b")
    assert [peer.is_coordinator for peer in view.peers] == [False, True]


def test_nobody_joins_with_the_first_table_and_newcomers_do_later(feed, make_status, make_peer):
    both = make_peer("a", 0), make_peer("b", 1)
    feed.take(Status(status=make_status(*both)), 0.0)
    assert not feed.view(0.0).changes
    assert not any(peer.is_new for peer in feed.view(0.0).peers)
    feed.take(Status(status=make_status(*both, make_peer("c", None))), 1.0)
    view = feed.view(1.0)
    assert [(change.kind, change.text) for change in view.changes] == [("joined", "peer-c joined")]
    assert [peer.is_new for peer in view.peers] == [False, False, True]
    assert not any(peer.is_new for peer in feed.view(1.0 + NEW_S).peers)


def test_one_table_without_a_peer_is_no_departure(feed, make_status, make_peer):
    both = make_peer("a", 0), make_peer("b", 1)
    times = [0.0, GONE_AFTER_S + 1, GONE_AFTER_S + 2]
    for at_s, peers in zip(times, (both, both[:1], both), strict=True):
        feed.take(Status(status=make_status(*peers)), at_s)
    assert not feed.view(times[-1]).changes


def test_who_is_missing_for_long_has_left_and_is_shown_for_a_while(feed, make_status, make_peer, id_of):
    both = make_peer("a", 0), make_peer("b", 1)
    feed.take(Status(status=make_status(*both)), 0.0)
    for at_s in (1.0, GONE_AFTER_S):
        feed.take(Status(status=make_status(both[0])), at_s)
    view = feed.view(GONE_AFTER_S + 1.0)
    assert [(gone.id, gone.name, gone.stage, gone.ago_s) for gone in view.gone] == [(id_of("b"), "peer-b", 1, 1.0)]
    assert view.changes[0].text == "peer-b left"
    assert not feed.view(GONE_AFTER_S + NEW_S).gone
    feed.take(Status(status=make_status(*both)), GONE_AFTER_S + 1.5)
    view = feed.view(GONE_AFTER_S + 1.5)
    assert (view.gone, view.changes[0].text) == ((), "peer-b joined")


@pytest.mark.parametrize("plan_first", [True, False])
def test_a_plan_that_says_who_came_says_it_alone(feed, make_status, make_peer, id_of, plan_first):
    a, c = make_peer("a", 0), make_peer("c", 1)
    feed.take(Status(status=make_status(a)), 0.0)
    plan = Obeys(term=1, sequence=2, coordinator=id_of("a"), reason="cccccccc joined", peers=2)
    table = Status(status=make_status(a, c))
    for report in (plan, table) if plan_first else (table, plan):
        feed.take(report, 1.0)
    assert [(change.kind, change.text) for change in feed.view(2.0).changes] == [("plan", "peer-c joined")]


def test_a_newcomer_gets_the_history_from_the_coordinator(feed, make_status, make_peer, id_of):
    plans = (
        PlanNote(1, 1, 90.0, id_of("a"), "first plan: 2 peers"),
        PlanNote(1, 2, 30.0, id_of("b"), "bbbbbbbb joined"),
    )
    status = Status(status=make_status(make_peer("a"), make_peer("b", 1), plans=plans))
    for at_s in (100.0, 101.0):
        feed.take(status, at_s)
    view = feed.view(101.0)
    assert [change.text for change in view.changes] == ["peer-b joined", "first plan: 2 peers"]
    assert view.now_s - view.changes[1].at_s == pytest.approx(91.0)
    assert (view.sequence, view.coordinator_name) == (2, "peer-b")


def test_what_came_of_a_plan_is_told_once_it_has_a_successor(feed, make_status, make_peer, id_of):
    first, second = (
        PlanNote(1, sequence, 9.0, id_of("a"), "why", f"foreseen 200, seen {sequence}\x07") for sequence in (1, 2)
    )
    for at_s, plans in enumerate(((first,), (first,), (first, second), (first, second))):
        feed.take(Status(status=make_status(make_peer("a", 0), plan_sequence=len(plans), plans=plans)), float(at_s))
        outcomes = {change.sequence: change.outcome for change in feed.view(at_s).changes if change.kind == "plan"}
    assert outcomes == {1: "foreseen 200, seen 1?", 2: ""}


def test_what_was_foreseen_is_shown_while_the_coordinator_answers(feed, make_status, make_peer):
    told = Comparison(200.0, "foreseen 200 tokens/s\x07")
    feed.take(Status(status=make_status(make_peer("a", 0), comparison=told)), 0.0)
    view = feed.view(1.0)
    shown = view.foreseen, view.foreseen_tokens_per_s, view.seen_tokens_per_s
    assert shown == ("foreseen 200 tokens/s?", 200.0, None)
    assert feed.view(STALE_S + 1.0).foreseen == ""


def test_a_step_is_one_point_whoever_tells_it(feed, two_peers):
    feed.take(step_done(9), 0.0)
    feed.take(two_peers, 0.5)
    feed.take(step_done(10), 1.0)
    assert [point.step for point in feed.curves.points] == [10, 11]


def test_after_a_roll_back_steps_come_again(feed):
    for era, step in ((0, 8), (0, 9), (1, 5), (0, 10), (1, 6)):
        feed.take(step_done(step, era=era), 0.0)
    assert [point.step for point in feed.curves.points] == [6, 7]


def test_a_validation_is_one_point_at_the_version_that_was_validated(feed, make_status, make_peer):
    told = ((10, None, None), (11, 2.5, 8), (12, 2.5, 8), (13, 2.25, 12))
    for at_s, (step, loss, version) in enumerate(told):
        status = make_status(make_peer("a"), step=step, validation_loss=loss, validation_step=version)
        feed.take(Status(status=status), float(at_s))
    assert [(known.step, known.loss) for known in feed.curves.validations] == [(8, 2.5), (12, 2.25)]
    view = feed.view(4.0)
    assert (view.validation_loss, view.validation_step) == (2.25, 12)


def test_a_late_joiner_does_not_call_an_old_validation_the_newest_step(feed, make_status, make_peer):
    feed.take(Status(status=make_status(make_peer("a"), step=4, validation_loss=5.6, validation_step=0)), 0.0)
    assert feed.view(0.0).validation_step == 0
    assert [known.step for known in feed.curves.validations] == [0]


def test_what_the_record_says_comes_in_place_of_what_the_status_says(feed, make_status, make_peer):
    feed.take(Status(status=make_status(make_peer("a"), step=3)), 0.0)
    feed.take(
        Recorded(
            steps=(record_lines.step(4, gradient_norm=1.5), record_lines.step(5)),
            validations=(validation(4, loss=2.0),),
        ),
        1.0,
    )
    feed.take(Status(status=make_status(make_peer("a"), step=7)), 2.0)
    feed.take(Recorded(steps=(record_lines.step(6), record_lines.step(7))), 3.0)
    assert [point.step for point in feed.curves.points] == [3, 4, 5, 6, 7]
    assert feed.curves.points[1].gradient_norm == 1.5
    assert [known.step for known in feed.curves.validations] == [4]


def test_after_a_restart_the_curves_begin_with_the_record(feed):
    lines = [*(record_lines.step(n) for n in range(1, 8)), record_lines.step(6, 1, loss=9.0), validation(5, loss=2.5)]
    feed.restore(record_of(map(encode_line, lines)))
    feed.take(Recorded(steps=(record_lines.step(6, 1), record_lines.step(7, 1))), 0.0)
    assert [(point.step, point.loss) for point in feed.curves.points] == [
        *((n, 1.0) for n in range(1, 6)),
        (6, 9.0),
        (7, 1.0),
    ]
    assert feed.view(0.0).validation_step == 5


def test_a_coordinator_that_was_suspended_is_not_believed(feed, make_status, make_peer):
    feed.take(Status(status=make_status(make_peer("a"), term=3, plan_sequence=5, step=20)), 0.0)
    feed.take(Status(status=make_status(make_peer("a"), term=2, plan_sequence=4, step=12)), 1.0)
    assert feed.view(1.0).step == 20


def test_it_says_when_the_coordinator_is_silent(feed, two_peers):
    feed.take(two_peers, 0.0)
    assert feed.view(STALE_S).phase == "training"
    assert "the coordinator has not answered for 16 s" in feed.view(STALE_S + 1.0).phase
    assert (feed.view(STALE_S).tokens_per_s, feed.view(STALE_S + 1.0).tokens_per_s) == (500.0, None)
    assert feed.view(STALE_S + 1.0).left_s is None


def test_it_says_what_is_waited_for(feed, make_status, make_peer, id_of):
    feed.take(Joined(peer=id_of("a"), name="peer-a", invite=""), 0.0)
    feed.take(Phase(name="waiting for peers: 1 of 2 are here"), 1.0)
    assert feed.view(1.0).phase == "waiting for peers: 1 of 2 are here"
    waits_for, risk = "stage 1: its only holder, \x07bob, is paused, for 40 s", "only bob has what stage 1 has learnt"
    status = make_status(make_peer("a", 0), stands_s=42.0, waits_for=waits_for, risks=(risk,))
    feed.take(Status(status=status), 2.0)
    feed.take(Phase(name="catching up"), 2.0)
    view = feed.view(2.0)
    assert view.phase == "waiting for stage 1: its only holder, ?bob, is paused, for 40 s"
    assert (view.standstill, view.risks) == ("no step for 42 s", (risk,))


def test_the_end_is_said(feed, make_status, make_peer, id_of):
    feed.take(Joined(peer=id_of("a"), name="peer-a", invite=""), 0.0)
    feed.take(Status(status=make_status(make_peer("a"), step=100)), 1.0)
    view = feed.view(1.0)
    assert (view.phase, view.left_s) == ("the run is done", None)
    feed.take(Left(peer=id_of("b"), state_dir="", finished=False), 2.0)
    assert feed.view(2.0).phase == "the run is done"
    feed.take(Left(peer=id_of("a"), state_dir="", finished=False), 2.0)
    assert feed.view(2.0).phase == "left"


def test_my_contribution_is_a_share_of_the_runs_work(feed, two_peers, make_contribution, id_of):
    feed.take(Joined(peer=id_of("a"), name="peer-a", invite=""), 0.0)
    feed.take(two_peers, 0.0)
    links = ((id_of("b"), 300.0, 100.0),)
    feed.take(make_contribution(microbatches_per_s=2.0, links=links), 1.0)
    mine = feed.view(1.0).mine
    # Two microbatches of 100 tokens a second through two of four layers, where the swarm makes 500 tokens/s.
    assert mine.tokens_per_s == 200.0
    assert mine.work_share == pytest.approx(200 * 2 / 4 / 500)
    assert (mine.sent_bytes_per_s, mine.received_bytes_per_s) == (300.0, 100.0)
    assert mine.limits is None
    assert feed.view(100.0).mine is None, "what was said long ago does not count"


def test_a_pause_and_limits_are_passed_on_and_may_be_absent(feed, two_peers, make_contribution, id_of):
    feed.take(Joined(peer=id_of("a"), name="peer-a", invite=""), 0.0)
    feed.take(two_peers, 0.0)
    limits = LimitsNow(paused=True, why="outside the hours", caps=("upload at most 5 Mbit/s",))
    feed.take(make_contribution(limits=limits), 1.0)
    mine = feed.view(1.0).mine
    assert mine.limits.caps == ("upload at most 5 Mbit/s",)
    assert (mine.limited_by.kind, mine.limited_by.text) == ("pause", "paused: outside the hours")


def test_a_demo_shows_what_each_of_its_peers_gives(feed, two_peers, make_contribution, id_of):
    feed.take(Ready(peer=id_of("a"), run="r", invite=""), 0.0)
    for letter in "ba":
        feed.take(make_contribution(letter), 0.5)
    feed.take(two_peers, 1.0)
    view = feed.view(1.0)
    assert view.mine.name == "peer-a"
    assert [other.name for other in view.others] == ["peer-b"]


def test_links_are_measured_where_an_end_has_measured_and_by_the_shares_elsewhere(
    feed, make_status, make_peer, make_contribution, id_of
):
    peers = make_peer("a", 0), make_peer("b", 1, share=0.75), make_peer("c", 1, share=0.25), make_peer("d", 2)
    status = make_status(*peers, stages=((0, 1), (1, 2), (2, 4)))
    feed.take(Status(status=status), 0.0)
    feed.take(make_contribution("a", links=((id_of("b"), 30.0, 10.0), (id_of("x"), 5.0, 5.0))), 0.0)
    view = feed.view(0.0)
    shown = {(link.source[-1], link.target[-1]): (link.bytes_per_s, link.measured) for link in view.links}
    both_ways = 2 * 500.0 * 8
    assert shown == {
        ("a", "b"): (40.0, True),
        ("b", "d"): (0.75 * both_ways, False),
        ("c", "d"): (0.25 * both_ways, False),
    }
    assert view.flows == (both_ways, both_ways)


def test_what_flows_over_each_cut_is_in_the_format_that_the_plan_gives_it(feed, make_status, make_peer):
    peers = make_peer("a", 0), make_peer("b", 1), make_peer("c", 2)
    stages = (0, 1), (1, 2), (2, 4)
    bf16, int8 = 2 * 500.0 * 8, round(2 * 500.0 * 8 * 66 / 128)
    formats = Formats(("int8", "bf16"), ("int8", "int8", "hadamard4"))
    feed.take(Status(status=make_status(*peers, stages=stages, formats=formats)), 0.0)
    view = feed.view(0.0)
    assert view.flows == (int8, bf16)
    assert [link.bytes_per_s for link in view.links] == [int8, bf16]
    assert view.formats == formats.sentence
    for wrong in (Formats(("int8",), ("int8",)), Formats((), ())):  # another peer wrote it
        feed.take(Status(status=make_status(*peers, stages=stages, formats=wrong)), 0.0)
        assert feed.view(0.0).flows == (bf16, bf16)


def test_what_a_peer_says_is_printable_and_short(feed, make_status, make_peer, id_of):
    evil = "<img src=x onerror=alert(1)>\x1b[2J\u202e" + "y" * 1000
    feed.take(Status(status=make_status(make_peer("a", name=evil, device=evil))), 0.0)
    feed.take(Obeys(term=1, sequence=2, coordinator=id_of("a"), reason=evil, peers=1), 0.0)
    feed.take(Note(text=evil), 0.0)
    view = feed.view(0.0)
    texts = [view.peers[0].name, view.peers[0].device, view.reason, *(change.text for change in view.changes)]
    for text in texts:
        assert text.isprintable()
        assert len(text) <= TEXT_CHARS_MAX
    assert "img" in view.changes[0].text, "what is left is text: escaping is for who shows it"


def test_a_plan_is_no_younger_because_this_peer_has_just_come(feed, two_peers, id_of):
    feed.take(Obeys(term=1, sequence=9, coordinator=id_of("a"), reason="x", peers=2), 100.0)
    note = PlanNote(1, 9, 300.0, id_of("a"), "x")
    feed.take(Status(status=msgspec.structs.replace(two_peers.status, plan_sequence=9, plans=(note,))), 105.0)
    view = feed.view(105.0)
    (change,) = (change for change in view.changes if change.kind == "plan")
    assert view.now_s - change.at_s == 300.0
