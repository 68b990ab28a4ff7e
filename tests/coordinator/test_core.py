"""State, events, expected commands.

This file is long because every row of the core's table has its tests here, on the same few helpers.
"""

import itertools
import random

import msgspec
import pytest

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.coordination_events import (
    Answered,
    Ask,
    Beat,
    CoordinationTimerFired,
    HeadFound,
    Heard,
    LogReason,
    LookUp,
    Obey,
    Persist,
    Publish,
    Received,
    Reply,
    ReportDue,
    SendHeartbeat,
    Unanswered,
)
from shoal.coordinator.core import CoordinationCore
from shoal.coordinator.failure_detector import CLOSE_FLOOR_HEARTBEATS
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.role import CLOSE_PEERS, STAGGER_HEARTBEATS, rank, standing
from shoal.coordinator.roster import FLOOR_HEARTBEATS
from shoal.protocol.messages import (
    Done,
    HeartbeatReply,
    Leave,
    Ping,
    PlanHead,
    PlanLive,
    PlanOffer,
    PlanVote,
    Refusal,
    TermGrant,
    TermRequest,
    TransferLeadership,
    ValidationReport,
)
from shoal.protocol.spec import RunSpec, SwarmSpec

PEERS = "abcdef"
GROUPS = [["a", "d"], ["b", "e"], ["c", "f"]]
SPEC = RunSpec(swarm=SwarmSpec(stages=3, min_peers=6, heartbeat_s=1.0, term_s=60.0))

ENDS = tuple((peer, b"yes") for peer in "abcdef")


@pytest.fixture
def first(make_plan):
    return make_plan(GROUPS, coordinator="a")


@pytest.fixture
def make_core(make_unsigned, make_heartbeat, make_chain):
    def make(me, live=None, now_s=0.0):
        core = CoordinationCore(
            run="run",
            me=me,
            owner="a",
            spec=SPEC,
            chain=make_chain(),
            policy=ReplanPolicy(ClusterView("run", SPEC), GreedyAllocator()),
            sign=make_unsigned,
            sign_statement=lambda topic, body: b"yes",
            verify=lambda topic, signer, signature, body: signature == b"yes",
            rng=random.Random(7),
            now_s=now_s,
        )
        core.handle(Beat(heartbeat=make_heartbeat(me)), now_s=now_s)
        core.handle(HeadFound(head=None), now_s=now_s)
        if live is not None:
            core.handle(Received(source="a", message=PlanLive(plan=live.link), plan=live), now_s=now_s)
        return core

    return make


def only(commands, kind):
    return [command for command in commands if isinstance(command, kind)]


def asks(commands, kind):
    return {command.peer: command.message for command in only(commands, Ask) if isinstance(command.message, kind)}


def said(commands):
    (reply,) = only(commands, Reply)
    return reply.message


def tick(core, *, begin_s, end_s):
    """All that the core wants between two times, with when."""
    happened = []
    while core.next_timer_s() <= end_s:
        now_s = max(begin_s, core.next_timer_s())
        happened += [(now_s, command) for command in core.handle(CoordinationTimerFired(), now_s=now_s)]
    return happened


def hear(core, make_heartbeat, peers, now_s, **says):
    for peer in peers:
        yield from core.handle(Received(source=peer, message=make_heartbeat(peer, **says)), now_s=now_s)


def coordinate(core, make_heartbeat, live, *, until_s, peers=PEERS, begin_s=0.0):
    """Let `peers` report every second. Returns: what the core wanted."""
    commands = []
    now_s = begin_s
    while now_s <= until_s:
        commands += hear(core, make_heartbeat, peers, now_s, plan_sequence=live.plan.sequence, plan_digest=live.digest)
        commands += [command for _, command in tick(core, begin_s=now_s, end_s=now_s + 0.99)]
        now_s += 1.0
    return commands


# --- everyone ---


def test_reports_to_the_owner_before_there_is_a_plan(make_core):
    commands = make_core("b").handle(CoordinationTimerFired(), now_s=0.0)
    assert SendHeartbeat(target="a") in commands


def test_heartbeats_are_a_heartbeat_apart(make_core):
    beats = [at for at, c in tick(make_core("b"), begin_s=0.0, end_s=30.0) if isinstance(c, SendHeartbeat)]
    gaps = [after - before for before, after in itertools.pairwise(beats)]
    assert all(0.95 <= gap <= 1.05 for gap in gaps)
    assert len(set(gaps)) > 1


def test_a_live_plan_is_kept_and_obeyed_in_that_order(make_core, first):
    core = make_core("b")
    commands = core.handle(Received(source="a", message=PlanLive(plan=first.link), plan=first), now_s=1.0)
    assert commands == [Persist(record=core.chain.record()), Obey(plan=first), Reply(message=Done())]
    again = core.handle(Received(source="a", message=PlanLive(plan=first.link), plan=first), now_s=2.0)
    assert again == [Reply(message=Done())]


def test_a_vote_is_durable_before_it_is_cast(make_core, make_plan, first):
    core = make_core("b", first)
    second = make_plan(GROUPS, coordinator="a", order=(1, 2), base=first)
    offer = PlanOffer(term=1, plan=second.envelope, predecessor=first.link)
    persist, reply = core.handle(Received(source="a", message=offer, plan=second, base=first), now_s=1.0)
    assert persist == Persist(record=core.chain.record())
    assert persist.record.accepted == second.envelope
    assert reply == Reply(message=PlanVote(accepted=True, term=1, signature=b"yes"))


def test_who_reports_to_the_wrong_peer_is_told_the_right_one(make_core, make_heartbeat, first):
    reply = said(make_core("b", first).handle(Received(source="c", message=make_heartbeat("c")), now_s=1.0))
    assert reply == HeartbeatReply(coordinator="a", term=1, is_coordinator=False, plan=first.link)


def test_who_has_the_plan_is_not_sent_it_again(make_core, make_heartbeat, first):
    beat = make_heartbeat("c", plan_sequence=1, plan_digest=first.digest)
    assert said(make_core("a", first).handle(Received(source="c", message=beat), now_s=1.0)).plan == b""


def test_a_newer_plan_found_in_the_directory_is_gone_after(make_core, first):
    core = make_core("b", first)
    core.handle(CoordinationTimerFired(), now_s=0.0)
    head = PlanHead(term=4, sequence=9, digest="", coordinator="e", addresses=())
    core.handle(HeadFound(head=head), now_s=0.2)
    assert core.next_timer_s() == 0.2
    assert SendHeartbeat(target="e") in core.handle(CoordinationTimerFired(), now_s=0.2)


# --- the first plan ---


def test_the_owner_makes_the_first_plan_alone_when_enough_are_here(make_core, make_heartbeat):
    core = make_core("a")
    list(hear(core, make_heartbeat, "abcde", 0.0))
    assert LogReason(text="waiting for peers: 5 of 6 are here") in core.handle(CoordinationTimerFired(), now_s=0.0)
    list(hear(core, make_heartbeat, "f", 0.1))
    commands = core.handle(CoordinationTimerFired(), now_s=0.5)
    (obeyed,) = only(commands, Obey)
    plan = obeyed.plan.plan
    assert (plan.order, plan.coordinator, plan.previous, plan.not_started) == ((1, 1), "a", "", True)
    assert sorted(plan.members) == list(PEERS)
    assert sorted(asks(commands, PlanLive)) == list("bcdef")
    assert Publish(plan=obeyed.plan) in commands


def test_the_owner_waits_for_what_the_directory_says(make_core, make_heartbeat):
    core = make_core("a")
    core.handle(HeadFound(head=PlanHead(term=3, sequence=5, digest="", coordinator="c", addresses=())), now_s=0.0)
    list(hear(core, make_heartbeat, PEERS, 0.0))
    assert not only(core.handle(CoordinationTimerFired(), now_s=0.0), Obey)
    assert core.coordinator == "c"


def test_others_never_make_the_first_plan(make_core, make_heartbeat):
    core = make_core("b")
    list(hear(core, make_heartbeat, PEERS, 0.0))
    assert not any(isinstance(command, Obey) for _, command in tick(core, begin_s=0.0, end_s=3.0))


# --- the coordinator ---


def test_nothing_happens_while_nothing_changes(make_core, make_heartbeat, first):
    commands = coordinate(make_core("a", first), make_heartbeat, first, until_s=50.0)
    assert not only(commands, Ask)
    assert not only(commands, Obey)


def test_a_newcomer_is_offered_a_plan_that_goes_live_with_a_majority(make_core, make_heartbeat, first):
    core = make_core("a", first)
    coordinate(core, make_heartbeat, first, until_s=3.0)
    offers = asks(coordinate(core, make_heartbeat, first, begin_s=4.0, until_s=4.0, peers=PEERS + "g"), PlanOffer)
    assert sorted(offers) == list("bcdefg"), "the members, and the newcomer"
    offer = offers["b"]
    for voter in "bc":
        vote = Answered(peer=voter, asked=offer, reply=PlanVote(accepted=True, term=1, signature=b"yes"))
        assert not only(core.handle(vote, now_s=5.0), Obey)
    newcomer = Answered(peer="g", asked=offer, reply=PlanVote(accepted=True, term=1, signature=b"yes"))
    assert not only(core.handle(newcomer, now_s=5.0), Obey), "who is not a member has no vote"
    last = Answered(peer="d", asked=offer, reply=PlanVote(accepted=True, term=1, signature=b"yes"))
    commands = core.handle(last, now_s=5.0)
    (obeyed,) = only(commands, Obey)
    assert obeyed.plan.plan.order == (1, 2)
    assert obeyed.plan.plan.previous == first.digest
    assert "g" in obeyed.plan.plan.members
    assert sorted(asks(commands, PlanLive)) == list("bcdefg")


def test_the_silent_are_left_out_and_the_one_who_left_sooner(make_core, make_heartbeat, first):
    core = make_core("a", first)
    coordinate(core, make_heartbeat, first, until_s=10.0)
    core.handle(Received(source="f", message=Leave()), now_s=10.5)
    commands = coordinate(core, make_heartbeat, first, begin_s=11.0, until_s=11.0, peers="abcde")
    assert len(asks(commands, PlanOffer)) == 5
    silent = make_core("a", first)
    coordinate(silent, make_heartbeat, first, until_s=10.0)
    patient = coordinate(silent, make_heartbeat, first, begin_s=11.0, until_s=12.0, peers="abcde")
    assert not asks(patient, PlanOffer)
    assert list(asks(patient, Ping)) == ["f"], "it is looked for"
    assert asks(coordinate(silent, make_heartbeat, first, begin_s=13.0, until_s=14.0, peers="abcde"), PlanOffer)


def test_a_member_that_is_heard_by_its_frames_is_not_left_out_for_its_heartbeats(make_core, make_heartbeat, first):
    core = make_core("a", first)
    coordinate(core, make_heartbeat, first, until_s=10.0)
    for second in range(11, 31):
        core.handle(Heard(peer="f"), now_s=float(second))
        commands = coordinate(core, make_heartbeat, first, begin_s=second, until_s=second, peers="abcde")
        assert not asks(commands, PlanOffer)
    assert asks(coordinate(core, make_heartbeat, first, begin_s=31.0, until_s=34.0, peers="abcde"), PlanOffer)


def test_nobody_is_moved_before_everybody_has_been_heard(make_core, make_heartbeat, first):
    core = make_core("a", first)
    commands = coordinate(core, make_heartbeat, first, until_s=FLOOR_HEARTBEATS - 2, peers="abcg")
    assert not asks(commands, PlanOffer)


def test_a_sleep_of_ours_is_nobodys_death(make_core, make_heartbeat, first):
    core = make_core("a", first)
    coordinate(core, make_heartbeat, first, until_s=10.0)
    commands = core.handle(CoordinationTimerFired(), now_s=40.0)
    assert LookUp() in commands
    assert not only(commands, Ask)


def test_at_the_end_of_its_term_the_first_in_turn_is_asked(make_core, make_heartbeat, first):
    core = make_core("a", first)
    commands = coordinate(core, make_heartbeat, first, until_s=60.0)
    order = rank("run", 2, PEERS)
    assert order[0] != "a", "else this tests nothing"
    transfers = asks(commands, TransferLeadership)
    assert list(transfers) == [order[0]]
    assert transfers[order[0]].plan == first.link
    assert sorted(peer for peer, _ in transfers[order[0]].roster) == list(PEERS)


def test_the_next_in_turn_is_asked_when_the_first_does_not_answer(make_core, make_heartbeat, first):
    core = make_core("a", first)
    heir, transfer = next(iter(asks(coordinate(core, make_heartbeat, first, until_s=60.0), TransferLeadership).items()))
    core.handle(Unanswered(peer=heir, asked=transfer, reason="silent"), now_s=61.0)
    commands = coordinate(core, make_heartbeat, first, begin_s=61.0, until_s=61.0)
    order = [peer for peer in rank("run", 2, PEERS) if peer != heir]
    if order[0] == "a":
        assert asks(commands, TermRequest)
    else:
        assert list(asks(commands, TransferLeadership)) == [order[0]]


def test_a_draining_coordinator_does_not_wait_for_the_end(make_core, make_heartbeat, first):
    core = make_core("a", first)
    coordinate(core, make_heartbeat, first, until_s=3.0)
    core.handle(Beat(heartbeat=make_heartbeat("a", draining=True)), now_s=4.0)
    assert asks(coordinate(core, make_heartbeat, first, begin_s=4.0, until_s=4.0), TransferLeadership)


def test_a_plan_above_ours_ends_our_term_and_our_offer(make_core, make_heartbeat, make_plan, first):
    core = make_core("a", first)
    coordinate(core, make_heartbeat, first, until_s=3.0)
    coordinate(core, make_heartbeat, first, begin_s=4.0, until_s=4.0, peers=PEERS + "g")
    other = make_plan(GROUPS, coordinator="b", order=(2, 2), base=first)
    commands = core.handle(Received(source="b", message=PlanLive(plan=other.link), plan=other), now_s=5.0)
    assert Obey(plan=other) in commands
    assert not core.is_coordinator
    later = tick(core, begin_s=5.0, end_s=6.0)
    assert not asks([command for _, command in later], PlanOffer)


def at_the_end(make_heartbeat, peer, stage, **says):
    """A member has come to the last version, and signs it."""
    return make_heartbeat(peer, stage=stage, synced=True, version=SPEC.training.steps, **({"end": b"yes"} | says))


def test_when_the_run_is_done_everyone_hears_it_and_nobody_is_planned(make_core, make_heartbeat, first):
    core = make_core("a", first)
    for peer in "abcdef":
        beat = at_the_end(make_heartbeat, peer, first.plan.stage_of(peer))
        reply = said(core.handle(Received(source=peer, message=beat), now_s=0.0))
        assert not reply.ends, "nobody has validated it yet"
    report = ValidationReport(step=SPEC.training.steps, loss=1.5, microbatches=4)
    beat = at_the_end(make_heartbeat, "a", 0, validations=(report,))
    ends = said(core.handle(Received(source="a", message=beat), now_s=0.1)).ends
    assert dict(ends).keys() == set("abcdef")
    commands = coordinate(core, make_heartbeat, first, until_s=20.0, peers="ab")
    assert not asks(commands, PlanOffer)
    follower = make_core("b", first)
    beat = make_heartbeat("b")
    answer = HeartbeatReply(coordinator="a", term=1, is_coordinator=True, ends=ends)
    follower.handle(Answered(peer="a", asked=beat, reply=answer), now_s=1.0)
    assert follower.done


def test_a_run_that_is_done_by_one_peers_word_goes_on(make_core, make_heartbeat, first):
    """Row 3 of the issue: six calls ended every process at the beginning of 100,000 steps."""
    core = make_core("a", first)
    report = ValidationReport(step=SPEC.training.steps, loss=1.5, microbatches=4)
    for peer in ("stranger", "b", "c"):
        for stage in range(3):
            for version in (SPEC.training.steps, 2**63):
                beat = at_the_end(make_heartbeat, peer, stage, validations=(report,))
                beat = msgspec.structs.replace(beat, version=version, ends=tuple((p, b"no") for p in "abcdef"))
                assert not said(core.handle(Received(source=peer, message=beat), now_s=0.0)).ends
    assert not core.done
    assert core.view.ledger.step == 0


@pytest.mark.parametrize(
    ("signers", "signature", "done"),
    [
        ("abcdef", b"yes", True),
        ("abcdefxyz", b"yes", True),  # three have signed and left, and the plan without them is ours already
        ("adbecf", b"no", False),
        ("abc", b"yes", False),
        ("adbe", b"yes", False),
        ("", b"", False),
    ],
)
def test_a_peer_ends_only_when_a_majority_of_every_stage_has_signed(
    make_core, make_heartbeat, first, signers, signature, done
):
    ends = tuple((peer, signature) for peer in signers)
    follower, heir = make_core("b", first), make_core("a", first)
    answer = HeartbeatReply(coordinator="a", term=1, is_coordinator=True, ends=ends)
    follower.handle(Answered(peer="a", asked=make_heartbeat("b"), reply=answer), now_s=1.0)
    assert follower.done is done
    heir.handle(Received(source="b", message=make_heartbeat("b", ends=ends)), now_s=1.0)
    assert heir.done is done, "a coordinator that has not heard it all learns it in the same way"


def test_who_trains_by_another_revision_is_not_counted_in_and_its_end_is_not_ours(make_core, make_heartbeat, first):
    core = make_core("a", first)
    coordinate(core, make_heartbeat, first, until_s=3.0)
    beat = make_heartbeat("b", stage=1, version=SPEC.training.steps, ends=ENDS, revision=1)
    answer = said(core.handle(Received(source="b", message=beat), now_s=3.0))
    assert (answer.is_coordinator, answer.ends, answer.revision) == (True, (), 0)
    assert core.newest_revision == 1
    assert not core.done
    assert "b" not in core.view.roster.alive(3.0)
    core.handle(Received(source="b", message=make_heartbeat("b", stage=1)), now_s=4.0)
    assert "b" in core.view.roster.alive(4.0), "it goes by ours now"
    follower = make_core("b", first)
    answer = HeartbeatReply(coordinator="a", term=1, is_coordinator=True, ends=ENDS, revision=2)
    follower.handle(Answered(peer="a", asked=beat, reply=answer), now_s=1.0)
    assert not follower.done
    assert follower.newest_revision == 2


# --- taking over ---


def test_the_heir_asks_for_the_term_and_then_for_votes(make_core, first):
    core = make_core("b", first)
    transfer = TransferLeadership(plan=first.link, roster=(), permit=b"yes")
    commands = core.handle(Received(source="a", message=transfer, plan=first), now_s=60.0)
    assert said(commands) == Done()
    requests = asks(commands, TermRequest)
    assert sorted(requests) == list("acdef")
    request = requests["a"]
    assert (request.term, request.permit) == (2, b"yes")
    for voter in "ac":
        core.handle(Answered(peer=voter, asked=request, reply=TermGrant(granted=True, term=2)), now_s=60.1)
    commands = core.handle(Answered(peer="d", asked=request, reply=TermGrant(granted=True, term=2)), now_s=60.1)
    offer = asks(commands, PlanOffer)["a"]
    for voter in "acd":
        commands = core.handle(
            Answered(peer=voter, asked=offer, reply=PlanVote(accepted=True, term=2, signature=b"yes")), now_s=60.2
        )
    (obeyed,) = only(commands, Obey)
    plan = obeyed.plan.plan
    assert (plan.order, plan.coordinator, plan.stages) == ((2, 2), "b", first.plan.stages)
    assert plan.reason == "term 2: hand-over from a"
    assert core.is_coordinator


def test_the_heir_lets_the_layout_end_where_it_was_to_end(make_core, make_plan, first):
    live = make_plan(GROUPS, coordinator="a", not_started=False, cutover_version=60, next_layout=first.plan.stages)
    core = make_core("b", live)
    transfer = TransferLeadership(plan=live.link, roster=(), permit=b"yes", version=58)
    commands = core.handle(Received(source="a", message=transfer, plan=live), now_s=60.0)
    request = asks(commands, TermRequest)["a"]
    for voter in "acd":
        granted = Answered(peer=voter, asked=request, reply=TermGrant(granted=True, term=2))
        commands = core.handle(granted, now_s=60.1)
    offer = asks(commands, PlanOffer)["a"]
    for voter in "acd":
        voted = Answered(peer=voter, asked=offer, reply=PlanVote(accepted=True, term=2, signature=b"yes"))
        commands = core.handle(voted, now_s=60.2)
    (obeyed,) = only(commands, Obey)
    plan = obeyed.plan.plan
    assert (plan.era, plan.stages) == (0, live.plan.stages)
    assert (plan.cutover_version, plan.next_layout) == (60, first.plan.stages)


def test_a_will_that_came_to_nothing_is_forgotten(make_core, make_plan, make_advert, first):
    core = make_core("b", first)
    transfer = TransferLeadership(
        plan=first.link, roster=(("ghost", make_advert("ghost")),), permit=b"yes", elapsed_s=5.0
    )
    core.handle(Received(source="a", message=transfer, plan=first), now_s=60.0)
    other = make_plan(GROUPS, coordinator="c", order=(2, 2), base=first)
    core.handle(Received(source="c", message=PlanLive(plan=other.link), plan=other), now_s=61.0)
    own = make_plan(GROUPS, coordinator="b", order=(3, 3), base=other)
    core.handle(Received(source="d", message=PlanLive(plan=own.link), plan=own), now_s=7200.0)
    assert core.is_coordinator
    assert "ghost" not in core.view.roster.presences
    assert core.view.begun_s == 0.0


def test_only_the_coordinator_hands_over(make_core, first):
    core = make_core("b", first)
    transfer = TransferLeadership(plan=first.link, roster=(), permit=b"yes")
    assert isinstance(said(core.handle(Received(source="c", message=transfer, plan=first), now_s=1.0)), Refusal)


def test_the_unwilling_and_the_draining_take_nothing_over(make_core, make_heartbeat, make_advert, first):
    for says in ({"draining": True}, {"advert": make_advert("b", willing_to_coordinate=False)}):
        core = make_core("b", first)
        core.handle(Beat(heartbeat=make_heartbeat("b", **says)), now_s=0.0)
        transfer = TransferLeadership(plan=first.link, roster=(), permit=b"yes")
        assert isinstance(said(core.handle(Received(source="a", message=transfer, plan=first), now_s=1.0)), Refusal)
        assert not any(isinstance(command, Ask) for _, command in tick(core, begin_s=1.0, end_s=60.0)), (
            "nor when the coordinator is silent"
        )


ANSWER = HeartbeatReply(coordinator="a", term=1, is_coordinator=True)


def missing(core, make_heartbeat, *, heard_s=(), end_s=12.0):
    """A member whose coordinator answered its heartbeats at `heard_s` and then nothing. Returns: what it wanted."""
    for now_s in heard_s:
        core.handle(Answered(peer="a", asked=make_heartbeat("x"), reply=ANSWER, took_s=0.04), now_s=now_s)
        tick(core, begin_s=now_s, end_s=now_s)
    return tick(core, begin_s=max(heard_s, default=0.0), end_s=end_s)


@pytest.mark.parametrize("me", "bcdef")
def test_each_waits_its_turn_when_the_coordinator_is_silent(make_core, make_heartbeat, first, me):
    core = make_core(me, first)
    turn = standing("run", first.plan, me)
    floor_s = CLOSE_FLOOR_HEARTBEATS if turn < CLOSE_PEERS else FLOOR_HEARTBEATS
    heard_s = [0.1 * count for count in range(1, 100)]
    happened = missing(core, make_heartbeat, heard_s=heard_s, end_s=20.0)
    begun_s, request = next((at, c.message) for at, c in happened if isinstance(c, Ask) and c.message != Ping())
    due_s = heard_s[-1] + floor_s + turn * STAGGER_HEARTBEATS
    assert due_s <= begun_s <= due_s + 0.2 * turn + 0.6, "ticks, and round trips of 40 ms"
    assert (request.term, request.permit, request.prevote) == (2, b"", True)
    pinged = [at for at, c in happened if isinstance(c, Ask) and c.message == Ping()]
    assert bool(pinged) == (turn < CLOSE_PEERS)


def candidate(make_core, make_heartbeat, first, *, turn=0):
    """The standby, at the moment at which it has asked who misses the coordinator. Returns: core, now, question."""
    (me,) = (peer for peer in "bcdef" if standing("run", first.plan, peer) == turn)
    core = make_core(me, first)
    for quarter in range(40):
        for at, command in tick(core, begin_s=quarter / 4, end_s=(quarter + 1) / 4):
            if isinstance(command, Ask) and command.message != Ping():
                return core, at, command.message
    raise AssertionError("it never asks")


def others_of(core):
    return [peer for peer in "bcdef" if peer != core.me]


def agree(core, question, now_s, *, reply=TermGrant(granted=True, term=1)):  # noqa: B008
    commands = []
    for peer in others_of(core):
        commands += core.handle(Answered(peer=peer, asked=question, reply=reply, took_s=0.04), now_s=now_s)
    return commands


def test_a_term_is_asked_for_once_a_majority_misses_the_coordinator(make_core, make_heartbeat, first):
    core, now_s, question = candidate(make_core, make_heartbeat, first)
    assert core.chain.granted_term == 1, "nothing is promised by asking"
    commands = agree(core, question, now_s)
    request = asks(commands, TermRequest)["a"]
    assert (request.term, request.prevote) == (2, False)
    assert core.chain.granted_term == 2


def test_no_term_is_spent_while_the_others_hear_the_coordinator(make_core, make_heartbeat, first):
    core, now_s, question = candidate(make_core, make_heartbeat, first)
    no = TermGrant(granted=False, reason="still hears the coordinator", term=1)
    assert not only(agree(core, question, now_s, reply=no), Ask)
    core.handle(Answered(peer="a", asked=Ping(), reply=Ping(), took_s=0.04), now_s=now_s)
    assert not asks([c for _, c in tick(core, begin_s=now_s, end_s=now_s + 1.0)], TermRequest)
    assert core.chain.granted_term == 1


def test_being_asked_promises_nothing(make_core, first):
    core = make_core("b", first)
    question = TermRequest(term=2, live=first.link, permit=b"", prevote=True)
    reply = said(core.handle(Received(source="c", message=question, base=first), now_s=5.0))
    assert reply == TermGrant(granted=True, term=1)
    assert core.chain.granted_term == 1
    stranger = said(core.handle(Received(source="z", message=question, base=first), now_s=5.0))
    assert not stranger.granted


@pytest.mark.parametrize(("turn", "other_turn", "goes_on"), [(0, 1, True), (1, 0, False)])
def test_of_two_candidates_the_later_in_turn_gives_way(make_core, make_heartbeat, first, turn, other_turn, goes_on):
    core, now_s, question = candidate(make_core, make_heartbeat, first, turn=turn)
    other = next(peer for peer in "bcdef" if standing("run", first.plan, peer) == other_turn)
    assert said(core.handle(Received(source=other, message=question, base=first), now_s=now_s)).granted
    assert bool(asks(agree(core, question, now_s), TermRequest)) == goes_on


def test_a_term_that_too_many_have_promised_to_another_is_given_up(make_core, make_heartbeat, first):
    core, now_s, question = candidate(make_core, make_heartbeat, first)
    request = asks(agree(core, question, now_s), TermRequest)["a"]
    no = TermGrant(granted=False, reason="granted term 2 to another candidate", term=2)
    commands = agree(core, request, now_s, reply=no)
    assert "promised it to another" in only(commands, LogReason)[0].text
    assert not asks([c for _, c in tick(core, begin_s=now_s, end_s=now_s + 0.2)], TermRequest)


def test_an_heir_asks_for_the_next_term_when_another_has_got_this(make_core, first):
    core = make_core("b", first)
    transfer = TransferLeadership(plan=first.link, roster=(), permit=b"yes")
    request = asks(core.handle(Received(source="a", message=transfer, plan=first), now_s=60.0), TermRequest)["c"]
    no = TermGrant(granted=False, reason="granted term 2 to another candidate", term=2)
    commands = core.handle(Answered(peer="c", asked=request, reply=no), now_s=60.1)
    assert asks(commands, TermRequest)["c"].term == 3


def test_whoever_is_asked_and_disagrees_looks_for_himself(make_core, make_heartbeat, first):
    me = next(peer for peer in "bcdef" if standing("run", first.plan, peer) == 4)
    core = make_core(me, first)
    core.handle(Answered(peer="a", asked=make_heartbeat(me), reply=ANSWER, took_s=0.04), now_s=0.5)
    assert not asks([c for _, c in tick(core, begin_s=0.5, end_s=0.9)], Ping)
    question = TermRequest(term=2, live=first.link, permit=b"", prevote=True)
    assert not said(core.handle(Received(source="c", message=question, base=first), now_s=1.0)).granted
    assert asks([c for _, c in tick(core, begin_s=1.0, end_s=1.2)], Ping)
    for now_s in (1.3, 1.5):
        core.handle(Unanswered(peer="a", asked=Ping(), reason="gone", refused=True, took_s=0.04), now_s=now_s)
    assert said(core.handle(Received(source="c", message=question, base=first), now_s=1.5)).granted, "needs no waiting"


def test_refused_connections_need_no_waiting(make_core, make_heartbeat, first):
    (me,) = (peer for peer in "bcdef" if standing("run", first.plan, peer) == 0)
    core = make_core(me, first)
    for now_s in (0.1, 0.3):
        core.handle(Unanswered(peer="a", asked=Ping(), reason="gone", refused=True, took_s=0.04), now_s=now_s)
    assert asks([c for _, c in tick(core, begin_s=0.3, end_s=0.4)], TermRequest)


def test_who_still_hears_the_coordinator_grants_nobody_its_term(make_core, make_heartbeat, first):
    core = make_core("b", first)
    answer = HeartbeatReply(coordinator="a", term=1, is_coordinator=True)
    for now_s in range(1, 11):
        core.handle(Answered(peer="a", asked=make_heartbeat("b"), reply=answer), now_s=float(now_s))
    request = TermRequest(term=2, live=first.link, permit=b"")
    early = said(core.handle(Received(source="c", message=request, base=first), now_s=10.9))
    assert not early.granted
    assert core.chain.granted_term == 1
    late = said(core.handle(Received(source="c", message=request, base=first), now_s=11.2))
    assert late.granted


def test_a_plan_for_which_no_majority_can_have_voted_is_not_finished(make_core, make_heartbeat, make_plan, first):
    """Else one liar would force on the others what they have refused."""
    core, now_s, question = candidate(make_core, make_heartbeat, first)
    lie = make_plan([["d"], ["d2"], ["d3"]], coordinator="a", order=(1, 2), base=first)
    request = asks(agree(core, question, now_s), TermRequest)["a"]
    c, d, e = others_of(core)[:3]
    grant = TermGrant(granted=True, term=2, accepted=lie.envelope, accepted_term=1)
    core.handle(Answered(peer=c, asked=request, reply=grant, accepted=lie), now_s=now_s)
    core.handle(Answered(peer=d, asked=request, reply=TermGrant(granted=True, term=2)), now_s=now_s)
    commands = core.handle(Answered(peer=e, asked=request, reply=TermGrant(granted=True, term=2)), now_s=now_s)
    assert asks(commands, PlanOffer)[c].plan != lie.envelope


@pytest.mark.parametrize(("permit", "granted"), [(b"yes", True), (b"", False), (b"forged", False)])
def test_a_term_that_the_coordinator_hands_over_is_granted_while_it_lives(make_core, first, permit, granted):
    core = make_core("b", first)
    request = TermRequest(term=2, live=first.link, permit=permit)
    assert said(core.handle(Received(source="c", message=request, base=first), now_s=1.0)).granted is granted


def test_an_heir_without_a_permit_does_not_ask(make_core, first):
    core = make_core("b", first)
    transfer = TransferLeadership(plan=first.link, roster=(), permit=b"forged")
    (reply,) = core.handle(Received(source="a", message=transfer, plan=first), now_s=60.0)
    assert "no permit" in reply.message.reason


def test_what_a_dead_coordinator_left_half_voted_is_finished_first(make_core, make_heartbeat, make_plan, first):
    core, now_s, question = candidate(make_core, make_heartbeat, first)
    half = make_plan([*GROUPS[:2], ["c", "f", "g"]], coordinator="a", order=(1, 2), base=first)
    request = asks(agree(core, question, now_s), TermRequest)["a"]
    c, d, e = others_of(core)[:3]
    grant = TermGrant(granted=True, term=2, accepted=half.envelope, accepted_term=1)
    core.handle(Answered(peer=c, asked=request, reply=grant, accepted=half), now_s=now_s)
    core.handle(Answered(peer=d, asked=request, reply=grant, accepted=half), now_s=now_s)
    commands = core.handle(Answered(peer=e, asked=request, reply=TermGrant(granted=True, term=2)), now_s=now_s)
    offer = asks(commands, PlanOffer)[c]
    assert (offer.plan, offer.term) == (half.envelope, 2)
    assert core.chain.accepted is None, "it judges another's plan like everybody else, before it votes for it"
    assert asks(commands, PlanOffer)[core.me] == offer
    for voter in (core.me, c, d, e):
        commands = core.handle(
            Answered(peer=voter, asked=offer, reply=PlanVote(accepted=True, term=2, signature=b"yes")), now_s=now_s
        )
    (obeyed,) = only(commands, Obey)
    assert (obeyed.plan.digest, obeyed.plan.proof.ballot) == (half.digest, 2)
    again = asks(commands, TermRequest)["g"]
    assert (again.term, again.live) == (2, obeyed.plan.link), "and then asks its members for the term"


def test_a_candidate_that_is_told_of_a_higher_term_stops(make_core, first):
    core = make_core("b", first)
    transfer = TransferLeadership(plan=first.link, roster=(), permit=b"yes")
    request = asks(core.handle(Received(source="a", message=transfer, plan=first), now_s=1.0), TermRequest)["c"]
    no = TermGrant(granted=False, reason="granted term 7, above 2", term=7)
    commands = core.handle(Answered(peer="c", asked=request, reply=no), now_s=1.1)
    assert "granted term 7" in only(commands, LogReason)[0].text
    more = tick(core, begin_s=1.1, end_s=3.0)
    assert not asks([command for _, command in more], TermRequest)


def test_a_term_that_cannot_be_outbid_stops_nobody(make_core, first):
    core = make_core("b", first)
    transfer = Received(source="a", message=TransferLeadership(plan=first.link, roster=(), permit=b"yes"), plan=first)
    request = asks(core.handle(transfer, now_s=1.0), TermRequest)["c"]
    lie = TermGrant(granted=False, reason="granted another", term=2**64 - 1)
    for _ in range(9):
        assert core.handle(Answered(peer="c", asked=request, reply=lie), now_s=1.1) == []
    tick(core, begin_s=1.1, end_s=8.0)
    commands = core.handle(transfer, now_s=8.0)
    (kept,) = only(commands, Persist)
    assert kept.record.granted_term == 3
    assert msgspec.msgpack.encode(kept.record)


def test_an_opinion_that_cannot_be_outbid_stops_nobody(make_core, make_heartbeat, first):
    core, now_s, question = candidate(make_core, make_heartbeat, first)
    liar = others_of(core)[0]
    lie = TermGrant(granted=False, reason="granted another", term=2**64 - 1)
    core.handle(Answered(peer=liar, asked=question, reply=lie, took_s=0.04), now_s=now_s)
    assert asks(agree(core, question, now_s), TermRequest)["a"].term == 2


def test_a_vote_that_carries_alone_counts_once_it_is_on_disk(make_core, make_plan):
    first = make_plan([["a"], ["b"]], coordinator="a")
    live = make_plan([["a"], ["b"]], coordinator="b", order=(2, 2), base=first)
    core = make_core("a", first)
    core.handle(Received(source="b", message=PlanLive(plan=live.link), plan=live), now_s=0.5)
    transfer = Received(source="b", message=TransferLeadership(plan=live.link, roster=(), permit=b"yes"), plan=live)
    commands = core.handle(transfer, now_s=1.0)
    assert sorted(asks(commands, TermRequest)) == ["a", "b"], "the owner's vote decides between two"
    request = asks(commands, TermRequest)["a"]
    reply = said(core.handle(Received(source="a", message=request, base=live), now_s=1.0))
    offers = asks(core.handle(Answered(peer="a", asked=request, reply=reply), now_s=1.0), PlanOffer)
    assert core.chain.live is live, "the driver asks it, as it does others, once the votes are kept"
    plan = core.chain.accepted
    vote = said(core.handle(Received(source="a", message=offers["a"], plan=plan, base=live), now_s=1.0))
    (obeyed,) = only(core.handle(Answered(peer="a", asked=offers["a"], reply=vote), now_s=1.0), Obey)
    assert obeyed.plan.digest == plan.digest


def test_a_coordinator_that_has_forgotten_its_plan_is_reminded(make_core, make_heartbeat, first):
    answer = HeartbeatReply(coordinator="a", term=0, is_coordinator=False)
    commands = make_core("b", first).handle(Answered(peer="a", asked=make_heartbeat("b"), reply=answer), now_s=1.0)
    assert asks(commands, PlanLive) == {"a": PlanLive(plan=first.link)}


def test_an_owner_to_whom_somebody_reports_a_plan_makes_none(make_core, make_heartbeat, first):
    core = make_core("a")
    (reply,) = only(hear(core, make_heartbeat, "b", 0.0, plan_sequence=1, plan_digest=first.digest), Reply)
    assert not reply.message.is_coordinator
    list(hear(core, make_heartbeat, PEERS, 0.0))
    assert not any(isinstance(command, Obey) for _, command in tick(core, begin_s=0.0, end_s=20.0))


def test_answers_to_what_is_not_asked_any_more_are_ignored(make_core, first):
    core = make_core("b", first)
    old = TermRequest(term=2, live=first.link, permit=b"yes")
    assert core.handle(Answered(peer="c", asked=old, reply=TermGrant(granted=True, term=2)), now_s=1.0) == []


def test_messages_that_are_not_for_it_are_refused(make_core):
    assert isinstance(said(make_core("b").handle(Received(source="c", message=Done()), now_s=0.0)), Refusal)
    assert isinstance(said(make_core("b").handle(Received(source="c", message=Leave()), now_s=0.0)), Refusal)


def test_a_peer_reports_at_once_when_somebody_waits_for_it(make_core, first):
    core = make_core("b", first)
    tick(core, begin_s=0.0, end_s=0.5)
    assert core.next_timer_s() > 0.5
    core.handle(ReportDue(), now_s=0.5)
    assert only(core.handle(CoordinationTimerFired(), now_s=0.5), SendHeartbeat)
