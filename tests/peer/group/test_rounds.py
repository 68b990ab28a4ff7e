"""Rounds that nobody can end any more, whenever a member hears of them, and rounds that nobody may open."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.commands import CatchUp, CommitCommand, ForgetMember, Reduce, Tell
from shoal.peer.replica.events import (
    DigestArrived,
    GradientCounted,
    MemberSilent,
    ProgressArrived,
    RoundArrived,
    Stepped,
    StoodStill,
    TimerFired,
)
from shoal.peer.replica.group_core import GroupCore
from shoal.peer.replica.rounds import attempt
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Digest, Progress, RoundMember, RoundStart
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.wire_format import AUTO_SUMS, Formats, WireFormat

A, B, C = (PeerID(name) for name in "abc")
BOTH = b"\x03"


def a_plan(*members: PeerID, sequence: int = 1, **more: Any) -> Plan:
    """The plan gives group 1 these members."""
    stages = (Stage(0, 1, ()), Stage(1, 2, tuple(Member(peer, 1, 1) for peer in members)))
    return Plan(run="run", term=1, sequence=sequence, previous="", coordinator=A, stages=stages, **more)


def core(me: PeerID, *members: PeerID, sums: tuple[WireFormat, ...] = ("fp32",)) -> GroupCore:
    """At version 1 of a run with two microbatches a step, under plan 1, its mates ready."""
    made = GroupCore(
        me=me,
        stage=1,
        steps=9,
        microbatches=2,
        tokens_per_microbatch=1,
        has_loss=False,
        deadline_s=0.0,
        quorum=1.0,
        sums=sums,
    )
    made.follow(a_plan(*members), (), now_s=0)
    made.handle(Stepped(1, "1"), now_s=0)
    made.take_part(True, now_s=0)
    for mate in members:
        if mate != me:
            made.member_said(mate, ready=True, is_open=True, incarnation=1, now_s=0)
            made.handle(DigestArrived(mate, Digest(stage=1, version=1, digest="1")), now_s=0)
    return made


def test_a_member_that_is_barred_is_no_mate_whatever_it_says() -> None:
    ours = core(A, A, B, C)
    assert ours.group_peers == (B, C)
    ours.member_lost(C, is_barred=True, now_s=1)
    for drains in (False, True):
        ours.member_said(C, ready=True, is_open=True, incarnation=9, drains=drains, has_moved=True, now_s=2)
    ours.follow(a_plan(A, B, C, sequence=2), (), now_s=3)
    assert ours.group_peers == ours.ready_members == (B,)
    assert ours.draining == ()
    assert not ours.has_place(C)
    with pytest.raises(Refused):
        ours.handle(RoundArrived(C, a_round(1, 5000, a=BOTH, b=b"", c=b"")), now_s=4)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(lambda ours: ours.member_lost(C, now_s=1), id="it died"),
        pytest.param(
            lambda ours: ours.member_said(C, ready=False, is_open=False, incarnation=1, now_s=1),
            id="it has dropped its state",
        ),
        pytest.param(lambda ours: ours.member_elsewhere(C, 2, now_s=1), id="it works in another group"),
        pytest.param(
            lambda ours: ours.member_said(C, ready=True, is_open=True, incarnation=2, now_s=1), id="it has begun anew"
        ),
    ],
)
def test_what_is_fetched_from_a_member_is_given_up_once_it_has_left(
    ends: Callable[[GroupCore], list[CommitCommand]],
) -> None:
    """A newcomer waited a minute for the gradient that a member was sending as it moved to another stage. Microbatches
    that the newcomer had taken waited too, and 64 peers with them."""
    ours = core(A, A, B, C)
    assert [command for command in ends(ours) if isinstance(command, ForgetMember)] == [ForgetMember(C)]


def a_round(step: int, number: int, *, form: WireFormat = "fp32", **brings: bytes) -> RoundStart:
    members = tuple(RoundMember(PeerID(peer), 1.0, indices) for peer, indices in brings.items())
    return RoundStart(
        stage=1,
        step=step,
        attempt=number,
        members=members,
        duplicates=0,
        given_up=0,
        loss_sum=0.0,
        staleness_sum=0,
        form=form,
    )


def names(core: GroupCore, mate: PeerID, leader: PeerID, *, count: int) -> list[CommitCommand]:
    word = Progress(
        incarnation=1,
        count=count,
        stage=1,
        step=1,
        indices=b"",
        leader=leader,
        claimed=b"",
        loss_sum=0,
        staleness_sum=0,
    )
    return core.handle(ProgressArrived(mate, word), now_s=2)


def contribute(core: GroupCore, step: int) -> list[CommitCommand]:
    """Both microbatches, as a tenure does: kept apart while a round stands."""
    held_out = core.has_round(step)
    contributed = [
        core.handle(GradientCounted(Microbatch(step, index), 1.0, 0, held_out=held_out), now_s=3) for index in range(2)
    ]
    return [command for commands in contributed for command in commands]


def hears(core: GroupCore, start: RoundStart) -> list[CommitCommand]:
    """A round that a mate opens."""
    source = next(member.peer for member in core.planned if member.peer != core.me)
    return core.handle(RoundArrived(source, start), now_s=1)


def reduced(commands: list[CommitCommand]) -> list[RoundStart]:
    return [command.round for command in commands if isinstance(command, Reduce)]


def test_a_round_of_a_later_step_that_died_is_opened_anew_once_its_step_is_due() -> None:
    ours = core(B, A, B)
    hears(ours, a_round(2, attempt(1, 7, rank=0, incarnation=1), a=BOTH, b=b""))
    assert reduced(contribute(ours, 2)) == []
    ours.member_lost(A, now_s=1)
    ours.follow(a_plan(B), (), now_s=1)
    (opened,) = reduced(ours.handle(Stepped(2, "2"), now_s=2))
    assert [(member.peer, member.indices) for member in opened.members] == [(B, BOTH)]
    assert opened.attempt > attempt(1, 7, rank=0, incarnation=1), "who holds to the dead round must heed it"


def test_the_lead_opens_rounds_in_the_format_of_its_plan_and_in_the_widest_if_that_says_none() -> None:
    ours = core(A, A, sums=AUTO_SUMS)
    (wide,) = reduced(contribute(ours, 1))
    ours.handle(Stepped(2, "2"), now_s=4)
    ours.follow(a_plan(A, sequence=2, formats=Formats(("bf16",), ("fp32", "hadamard4"))), (), now_s=4)
    (thin,) = reduced(contribute(ours, 2))
    assert (wide.form, thin.form) == ("int8", "hadamard4")


def test_a_round_in_a_format_that_the_run_has_not_is_refused() -> None:
    ours = core(B, A, B, sums=AUTO_SUMS)
    with pytest.raises(RemoteError, match="cannot be reduced"):
        hears(ours, a_round(1, 1, form="fp32", a=BOTH, b=b""))
    taken = a_round(1, 1, form="hadamard4", a=BOTH, b=b"")
    assert reduced(hears(ours, taken)) == [taken], "though our own plan says nothing of it yet"


def test_nothing_is_contributed_apart_for_ever() -> None:
    ours = core(B, A, B)
    hears(ours, a_round(2, 1, a=BOTH, b=b""))
    ours.member_lost(A, now_s=1)
    ours.follow(a_plan(B, sequence=2), (), now_s=1)
    ours.handle(Stepped(2, "2"), now_s=2)
    assert not ours.has_round(2)
    assert len(reduced(contribute(ours, 2))) == 1


@pytest.mark.parametrize("number", [1, attempt(5, 0, rank=0, incarnation=1)])
def test_the_acting_lead_takes_no_round_of_somebody_who_is_gone(number: int) -> None:
    ours = core(B, A, B, C)
    ours.member_lost(A, now_s=1)
    names(ours, C, B, count=1)
    assert ours.is_leader
    assert hears(ours, a_round(1, number, a=BOTH, b=b"", c=b"")) == []
    (opened,) = reduced(contribute(ours, 1))
    assert [member.peer for member in opened.members] == [B, C]


def test_a_follower_leaves_a_dead_round_for_one_of_any_number_but_not_for_itself() -> None:
    ours = core(C, A, B, C)
    ours.member_lost(A, now_s=1)
    dead = a_round(1, attempt(1, 3, rank=0, incarnation=1), a=BOTH, b=b"", c=b"")
    assert reduced(hears(ours, dead)) == [dead]
    assert hears(ours, dead) == [], "what has come of it would be lost"
    alive = a_round(1, attempt(1, 0, rank=1, incarnation=1), b=BOTH, c=b"")
    assert reduced(hears(ours, alive)) == [alive]
    assert hears(ours, a_round(1, alive.attempt - 1, b=BOTH, c=b"")) == []


def test_who_voids_a_round_of_another_lead_opens_the_next_above_it() -> None:
    ours = core(B, A, B, C)
    outgrown = a_round(1, attempt(1, 5, rank=0, incarnation=1), a=BOTH, b=b"", c=b"")
    hears(ours, outgrown)
    ours.member_said(A, ready=True, is_open=False, incarnation=1, now_s=1)  # it resigns
    names(ours, A, B, count=1)
    names(ours, C, B, count=1)
    assert ours.is_leader
    ours.handle(GradientCounted(Microbatch(1, 0), 1.0, 0), now_s=2)  # in the sum, since the round was not known then
    (opened,) = reduced(ours.handle(GradientCounted(Microbatch(1, 1), 1.0, 0), now_s=2))
    assert opened.attempt > outgrown.attempt
    assert ours.handle(StoodStill(), now_s=2) == [Tell(opened)]


def test_a_round_that_nobody_can_reduce_is_not_sound() -> None:
    ours = core(B, A, B)
    honest = a_round(1, attempt(3, 2, rank=1, incarnation=7), a=b"\x01", b=b"\x02")
    assert ours._rounds.is_sound(honest)
    for bandwidth in (0.0, -1.0, math.nan, math.inf):
        members = (RoundMember(A, bandwidth, b""), RoundMember(B, 1.0, b""))
        assert not ours._rounds.is_sound(msgspec.structs.replace(honest, members=members))
    assert not ours._rounds.is_sound(msgspec.structs.replace(honest, members=()))
    assert not ours._rounds.is_sound(msgspec.structs.replace(honest, members=honest.members[:1] * 2))
    assert not ours._rounds.is_sound(msgspec.structs.replace(honest, attempt=2**60))


def test_who_was_out_of_reach_while_it_drained_is_heard_again_when_the_group_stands_still() -> None:
    """The lead counts it lost, its PresenceUpdate comes again, and neither knows that its word on who leads is gone."""
    ours, leaver = core(A, A, B), core(B, A, B)
    names(ours, B, A, count=1)
    assert ours.is_leader
    for made in (ours, leaver):
        made.follow(a_plan(A, sequence=2), (), now_s=1)
    ours.handle(MemberSilent(B), now_s=1)
    ours.member_said(B, ready=True, is_open=False, incarnation=1, drains=True, now_s=2)
    assert not ours.is_leader, "B might take somebody else for the lead"
    said = [command.message for command in leaver.handle(StoodStill(), now_s=2) if isinstance(command, Tell)]
    for message in said:
        if isinstance(message, Progress):
            ours.handle(ProgressArrived(B, msgspec.structs.replace(message, incarnation=1)), now_s=3)
    assert ours.is_leader


def test_no_round_is_opened_from_the_version_on_at_which_the_layout_ends() -> None:
    """What is here of the step is kept: if the layout does not end after all it is committed."""
    ours = core(A, A)
    ours.follow(a_plan(A, sequence=2, cutover_version=1), (), now_s=2)
    assert not [command for command in contribute(ours, 1) if isinstance(command, Reduce)]
    assert not ours.handle(TimerFired(), now_s=900.0)
    assert ours.next_timer_s() == math.inf, "nothing is missing, and nobody asks for it"
    assert [c for c in ours.follow(a_plan(A, sequence=3), (), now_s=901.0) if isinstance(c, Reduce)]


def test_a_step_before_the_end_of_the_layout_is_committed() -> None:
    ours = core(A, A)
    ours.follow(a_plan(A, sequence=2, cutover_version=2), (), now_s=2)
    assert [command for command in contribute(ours, 1) if isinstance(command, Reduce)]


def test_who_is_in_no_round_asks_at_once_for_a_step_that_a_mate_has_committed() -> None:
    ours = core(B, A, B)
    ours.handle(DigestArrived(A, Digest(stage=1, version=2, digest="2")), now_s=5)
    assert ours.next_timer_s() == 5
    assert CatchUp(A, 1) in ours.handle(TimerFired(), now_s=5)


def test_who_is_in_a_round_gives_it_time_to_end_before_it_asks() -> None:
    ours = core(B, A, B)
    hears(ours, a_round(1, 1, a=BOTH, b=b""))
    ours.handle(DigestArrived(A, Digest(stage=1, version=2, digest="2")), now_s=5)
    assert ours.next_timer_s() > 5
    assert CatchUp(A, 1) not in ours.handle(TimerFired(), now_s=5)
    assert CatchUp(A, 1) in ours.handle(TimerFired(), now_s=ours.next_timer_s())


def test_who_becomes_ready_behind_its_mates_asks_at_once() -> None:
    ours = core(B, A, B)
    ours.take_part(False, now_s=4)
    ours.handle(DigestArrived(A, Digest(stage=1, version=2, digest="2")), now_s=4)
    assert CatchUp(A, 1) not in ours.handle(TimerFired(), now_s=4)
    ours.take_part(True, now_s=5)
    assert CatchUp(A, 1) in ours.handle(TimerFired(), now_s=5)


def test_all_are_past_a_step_when_each_mate_has_said_so_and_none_is_on_its_way() -> None:
    made = core(A, A, B, C)
    assert made.are_past(0)
    made.handle(Stepped(2, "2"), now_s=1)
    made.handle(DigestArrived(B, Digest(stage=1, version=2, digest="2")), now_s=1)
    assert not made.are_past(1), "c has not spoken of version 2"
    made.handle(DigestArrived(C, Digest(stage=1, version=2, digest="2")), now_s=1)
    assert made.are_past(1)
    made.follow(a_plan(A, B, C, PeerID("d"), sequence=2), (), now_s=1)
    assert not made.are_past(1), "a newcomer may replay it"


def test_whoever_is_alone_is_past_every_step() -> None:
    assert core(A, A).are_past(7)


def a_light_mate(core: GroupCore, mate: PeerID, *, learner: bool = True) -> list[CommitCommand]:
    return core.member_said(mate, ready=True, is_open=True, incarnation=1, learner=learner, now_s=1)


def test_who_is_light_neither_leads_nor_is_a_holder_until_it_holds_the_state() -> None:
    ours = core(C, A, B, C)
    assert (ours.leader, ours.holders, ours.standing) == (A, (A, B), (2, 3))
    a_light_mate(ours, A)
    assert (ours.leader, ours.holders, ours.standing) == (B, (B,), (1, 2))
    assert ours.ready_members == ours.open_members == (A, B), "it takes part, and traffic"
    assert ours.full_members == (B,)
    assert A not in ours.voters(B), "it has signed nothing"
    a_light_mate(ours, A, learner=False)
    assert (ours.leader, ours.holders) == (A, (A, B))


def test_where_all_are_light_nobody_leads() -> None:
    ours = core(C, A, C)
    a_light_mate(ours, A)
    ours.take_part(True, learner=True, now_s=1)
    assert (ours.leader, ours.is_leader, ours.holders) == (None, False, ())


def test_a_round_says_who_of_it_is_light() -> None:
    ours = core(A, A, B)
    a_light_mate(ours, B)
    names(ours, B, A, count=1)
    (opened,) = reduced(contribute(ours, 1))
    assert [member.peer for member in opened.members] == [A, B]
    assert opened.learners == (B,)


@pytest.mark.parametrize("learners", [(A, B), (C,)])
def test_a_round_of_light_members_alone_or_with_one_that_is_not_in_it_is_refused(learners: tuple[PeerID, ...]) -> None:
    ours = core(B, A, B)
    start = msgspec.structs.replace(a_round(1, 1, a=BOTH, b=b""), learners=learners)
    with pytest.raises(RemoteError, match="cannot be reduced"):
        hears(ours, start)


@pytest.mark.parametrize("named", [B, C])
def test_a_round_that_calls_somebody_light_who_holds_the_state_is_not_taken(named: PeerID) -> None:
    """A leader that lies so would have the only vote on what comes of it."""
    ours = core(B, A, B, C)
    called = msgspec.structs.replace(a_round(1, 1, a=BOTH, b=b"", c=b""), learners=(named,))
    assert hears(ours, called) == []
    if named == C:
        a_light_mate(ours, C)
    else:
        ours.take_part(True, learner=True, now_s=1)
    assert reduced(hears(ours, called)) == [called]


@pytest.mark.parametrize("named", [B, C])
def test_who_came_to_hold_the_state_in_this_step_may_be_called_light_by_its_round_and_the_next(named: PeerID) -> None:
    """A member that was light comes to hold the state. A round may still call it light, if it was opened before that or
    by a lead that has not heard so. Such a round was refused by all, and the step never ended."""

    def becomes(learner: bool) -> None:
        if named == C:
            a_light_mate(ours, C, learner=learner)
        else:
            ours.take_part(True, learner=learner, now_s=1)

    def called(step: int) -> RoundStart:
        return msgspec.structs.replace(a_round(step, step, a=BOTH, b=b"", c=b""), learners=(named,))

    ours = core(B, A, B, C)
    becomes(learner=True)
    becomes(learner=False)
    assert reduced(hears(ours, called(1))) == [called(1)]
    ours.handle(Stepped(2, "2"), now_s=2)
    assert reduced(hears(ours, called(2))) == [called(2)]
    ours.handle(Stepped(3, "3"), now_s=3)
    assert hears(ours, called(3)) == []


def test_a_light_member_says_no_digest_and_asks_for_what_its_mates_have_stepped_to() -> None:
    ours = core(B, A, B)
    ours.take_part(True, learner=True, now_s=1)
    said = ours.handle(Stepped(2, None), now_s=2)
    assert not [command for command in said if isinstance(command, Tell) and isinstance(command.message, Digest)]
    ours.handle(DigestArrived(A, Digest(stage=1, version=3, digest="3")), now_s=3)
    asked = ours.handle(TimerFired(), now_s=ours.next_timer_s())
    assert CatchUp(A, 2) in asked


def test_a_light_member_owes_nobody_its_version_and_a_holder_does_not_leave_its_state_to_one() -> None:
    ours = core(B, A, B)
    ours.handle(Stepped(2, "2"), now_s=2)
    assert ours.owes, "nobody else is there yet"
    ours.take_part(True, learner=True, now_s=3)
    assert not ours.owes


def test_a_member_is_left_behind_when_most_others_have_stepped_and_two_steps_have_passed() -> None:
    made = core(A, A, B, C)
    made.handle(Stepped(2, "2"), now_s=10)
    made.handle(Stepped(3, "3"), now_s=20)
    made.handle(DigestArrived(B, Digest(stage=1, version=4, digest="4")), now_s=22)
    assert not made.is_left_behind(60), "B alone is not most of the others"
    made.handle(DigestArrived(C, Digest(stage=1, version=4, digest="4")), now_s=23)
    assert not made.is_left_behind(40)
    assert made.is_left_behind(41)
    made.handle(Stepped(4, "4"), now_s=45)
    assert not made.is_left_behind(90)
