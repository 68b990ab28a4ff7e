"""Who makes which microbatch, event by event."""

from dataclasses import dataclass, field

import pytest

from shoal.peer.pipeline.microbatch import Microbatch, bitmap_of
from shoal.peer.replica.commands import (
    Answer,
    DropClaim,
    HandOut,
    Make,
    MemberGranted,
    ReportValidation,
    SendClaim,
    TellValidation,
)
from shoal.peer.replica.events import (
    ClaimArrived,
    ClaimFailed,
    GrantArrived,
    HaltAsked,
    RepairArrived,
    RepairAsked,
    RepairDeclined,
    RunAhead,
    TimerFired,
    ValidationArrived,
    WorkReturned,
)
from shoal.peer.replica.flow import Control, Window
from shoal.peer.replica.microbatch_queue import HALT_S, PATIENCE_S, RETRY_S, MicrobatchQueue
from shoal.peer.replica.work_queue import WorkQueue
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import HALTED_S_MAX
from shoal.protocol.messages import Grant, Halted, ValidationReport, ValidationResult
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.staleness import FREE

A, B, C, NEXT, STRANGER = (PeerID(name) for name in ("a", "b", "c", "next", "stranger"))


@dataclass
class Group:
    """Three members with equal shares, all ready and open."""

    me: PeerID = A
    ready: bool = True
    leader: PeerID | None = A
    ready_members: tuple[PeerID, ...] = (B, C)
    open_members: tuple[PeerID, ...] = (B, C)
    lacking: set[tuple[int, int]] = field(default_factory=set)

    @property
    def is_leader(self) -> bool:
        return self.leader == self.me

    def share_of(self, peer: PeerID) -> float:
        return 1.0 / (1 + len(self.ready_members))

    def has_place(self, peer: PeerID) -> bool:
        return peer in (A, B, C)

    def lacks(self, step: int, index: int) -> bool:
        return (step, index) in self.lacking


@dataclass
class Pipeline:
    """A pipeline with room for two microbatches."""

    room: int = 2
    num_waiting: int = 0
    window: Window | None = field(default_factory=lambda: Window(num_stages=2))
    control: Control | None = None


def queue(group=None, pipeline=None, *, M=9, s_max=0, validation=2):
    book = WorkQueue(steps=4, microbatches=M, s_max=s_max, validation_interval=2, validation_microbatches=validation)
    return MicrobatchQueue(book=book, group=group or Group(), demand=pipeline or Pipeline())


def after(made, *events, now_s=0.0):
    """The commands of the last event, or call of the replica's core."""
    commands = []
    for event in events:
        commands = event(made, now_s) if callable(event) else made.handle(event, now_s=now_s)
    return commands


def look_again(made, now_s):
    return made.look_again(now_s)


def said(source, step, indices, granted):
    return lambda made, now_s: made.note(source, step, indices, granted, now_s=now_s)


def lost(peer):
    return lambda made, now_s: made.lost(peer, now_s=now_s)


def reached(version):
    return lambda made, now_s: made.reach(version, now_s=now_s)


def again(step, indices):
    return lambda made, now_s: made.run_again(step, indices, now_s=now_s)


def validated(microbatch, loss):
    return lambda made, now_s: made.validated(microbatch, loss)


def follows(plan):
    return lambda made, now_s: made.follow(plan, now_s=now_s)


def stopped(is_stopped):
    return lambda made, now_s: setattr(made, "is_stopped", is_stopped)


def granted(commands):
    """What the members are granted: call -> the indices, all of step 0."""
    return {c.call: [index for _, index in c.message.items] for c in commands if isinstance(c, Answer)}


def indices(*values):
    return sum(1 << value for value in values)


def a_plan(*, with_next=True):
    members = tuple(Member(peer, 1.0, 1.0, 1) for peer in (A, B, C))
    later = (Member(NEXT, 1.0, 1.0, 1),) if with_next else (Member(STRANGER, 1.0, 1.0, 1),)
    stages = (Stage(0, 1, members), Stage(1, 2, later))
    return Plan(run="run", term=1, sequence=1, previous="", coordinator=A, stages=stages, spares=())


# --- the claimant ---


def test_a_member_with_room_claims_what_fits_and_one_more():
    made = queue(Group(me=B, leader=A))
    assert made.look_again(1.0) == []
    assert made.next_timer_s() == 1.0, "at the end of this turn"
    assert made.handle(TimerFired(), now_s=1.0) == [SendClaim(A, 3)]


def test_one_claim_is_under_way_at_a_time():
    made = queue(Group(me=B, leader=A))
    assert after(made, look_again, TimerFired()) == [SendClaim(A, 3)]
    assert after(made, look_again, TimerFired()) == []


def test_who_is_not_ready_claims_nothing():
    assert after(queue(Group(me=B, leader=A, ready=False)), look_again, TimerFired()) == []


def test_nobody_claims_where_nobody_leads():
    assert after(queue(Group(me=B, leader=None)), look_again, TimerFired()) == []


def test_a_full_pipeline_claims_nothing():
    assert after(queue(Group(me=B, leader=A), Pipeline(room=-1)), look_again, TimerFired()) == []


def test_what_is_granted_is_made_and_the_next_claim_follows():
    made = queue(Group(me=B, leader=A))
    after(made, look_again, TimerFired())
    commands = made.handle(GrantArrived(A, ((0, 0), (0, 4)), 1, 1.5), now_s=0.1)
    assert commands == [RunAhead(1, 1.5), Make(Microbatch(0, 0), False), Make(Microbatch(0, 4), False)]
    assert made.handle(TimerFired(), now_s=0.1) == [SendClaim(A, 3)]


def test_what_a_member_was_granted_it_does_not_grant_when_it_leads_next():
    group = Group(me=B, leader=A)
    made = queue(group)
    after(made, look_again, TimerFired(), GrantArrived(A, ((0, 0), (0, 1)), -1, 1.0))
    group.leader = B
    commands = after(made, ClaimArrived(C, 2, call=1), TimerFired())
    assert granted(commands) == {1: [2, 3]}


def test_a_claim_that_failed_is_made_again_a_little_later():
    made = queue(Group(me=B, leader=A))
    after(made, look_again, TimerFired(), ClaimFailed(A))
    assert after(made, look_again, TimerFired()) == []
    assert made.next_timer_s() == RETRY_S
    assert made.handle(TimerFired(), now_s=RETRY_S) == [SendClaim(A, 3)]


@pytest.mark.parametrize("item", [(0, 9), (5, 0), (-1, 0), (0, -3)])
def test_a_grant_of_what_the_run_has_not_is_the_fault_of_the_leader_and_claimed_again_later(item):
    made = queue(Group(me=B, leader=A))
    after(made, look_again, TimerFired())
    with pytest.raises(RemoteError):
        made.handle(GrantArrived(A, (item,), -1, 1.0), now_s=0.0)
    assert made.handle(TimerFired(), now_s=RETRY_S) == [SendClaim(A, 3)]


@pytest.mark.parametrize("gain", [0.5, float("inf"), float("nan")])
def test_no_leader_wants_less_in_flight_than_the_pipeline_holds(gain):
    made = queue(Group(me=B, leader=A))
    after(made, look_again, TimerFired())
    with pytest.raises(RemoteError):
        made.handle(GrantArrived(A, (), 1, gain), now_s=0.0)


def test_a_new_leader_ends_the_claim_to_the_old_one_and_its_choice():
    group = Group(me=B, leader=A)
    made = queue(group)
    after(made, look_again, TimerFired())
    group.leader = C
    assert after(made, look_again) == [DropClaim(), RunAhead(-1, 1.0)]
    assert after(made, TimerFired()) == [SendClaim(C, 3)]
    assert after(made, GrantArrived(A, ((0, 0),), -1, 1.0)) == [], "too late"


def test_who_drains_claims_no_more_until_it_stays():
    made = queue(Group(me=B, leader=A))
    assert after(made, stopped(True), look_again, TimerFired()) == []
    assert after(made, stopped(False), look_again, TimerFired()) == [SendClaim(A, 3)]


# --- the leader ---


def test_claims_of_one_turn_are_served_together_and_each_gets_at_most_its_share():
    made = queue(M=9)
    after(made, ClaimArrived(B, 9, call=1), ClaimArrived(C, 1, call=2))
    commands = after(made, TimerFired())
    assert granted(commands) == {1: [0, 1, 2], 2: [3]}
    assert MemberGranted(C, Microbatch(0, 3)) in commands


def test_who_has_had_its_share_gets_more_as_it_holds_less_than_its_share_of_what_is_left():
    made = queue(M=9)
    assert granted(after(made, ClaimArrived(B, 9, call=1), TimerFired())) == {1: [0, 1, 2]}
    assert after(made, ClaimArrived(B, 9, call=2), TimerFired()) == []
    after(made, said(B, 0, bitmap_of(indices(0)), b""))
    assert after(made, TimerFired()) == [], "it holds 2, as many as are its share of the 6 that are left"
    after(made, said(B, 0, bitmap_of(indices(0, 1)), b""))
    assert granted(after(made, TimerFired())) == {2: [3]}


def test_who_is_quicker_than_planned_makes_a_tenth_more_than_its_share_and_leaves_the_rest_to_the_others():
    made = queue(M=90)
    assert granted(after(made, ClaimArrived(B, 90, call=1), TimerFired())) == {1: [*range(33)]}
    assert after(made, ClaimArrived(B, 90, call=2), TimerFired()) == []


def test_who_has_had_its_share_goes_on_with_the_next_step():
    made = queue(M=9, s_max=1)
    assert granted(after(made, ClaimArrived(B, 9, call=1), TimerFired())) == {1: [0, 1, 2, 0, 1, 2]}


def test_who_has_had_its_share_does_not_go_on_with_a_step_that_may_not_begin_yet():
    control = Control(s_max=1, price=FREE)
    control.follow(0, 1.0)
    made = queue(pipeline=Pipeline(control=control), M=9, s_max=1)
    assert granted(after(made, ClaimArrived(B, 9, call=1), TimerFired())) == {1: [0, 1, 2]}


def test_before_anything_is_measured_all_of_a_step_is_granted_before_the_next():
    made = queue(pipeline=Pipeline(control=Control(s_max=1, price=FREE)), M=9, s_max=1)
    claims = [ClaimArrived(peer, 9, call=call) for call, peer in enumerate((A, B, C), start=1)]
    assert granted(after(made, claims[0], TimerFired())) == {1: [0, 1, 2]}
    assert granted(after(made, claims[1], TimerFired())) == {2: [3, 4, 5]}
    commands = after(made, claims[2], TimerFired())
    last = next(command for command in commands if isinstance(command, Answer))
    assert last.message.items[:3] == ((0, 6), (0, 7), (0, 8))
    assert {step for step, _ in last.message.items[3:]} == {1}, "whoever takes the last ones goes on with the next step"


def test_what_a_member_had_of_another_leader_counts_as_its_share():
    made = queue(Group(leader=B), M=9)
    after(made, said(C, 0, bitmap_of(indices(0)), bitmap_of(indices(1, 2))))
    made.group.leader = A
    assert granted(after(made, ClaimArrived(C, 9, call=1), TimerFired())) == {1: [3, 4]}, "its share of what is left"


def test_what_a_new_leader_was_granted_itself_counts_as_its_share():
    group = Group(leader=B)
    made = queue(group, M=9)
    after(made, look_again, TimerFired(), GrantArrived(B, ((0, 0), (0, 1), (0, 2)), -1, 1.0))
    group.leader = A
    assert granted(after(made, ClaimArrived(A, 9, call=1), TimerFired())) == {1: [3, 4]}, "its share of what is left"


def test_what_died_with_a_member_it_has_not_had_when_it_comes_back():
    made = queue(M=9)
    after(made, ClaimArrived(B, 9, call=1), TimerFired(), lost(B))
    assert granted(after(made, ClaimArrived(B, 9, call=2), TimerFired())) == {2: [3, 4, 5]}


def test_validation_is_no_part_of_a_share():
    made = queue(M=9, validation=6)
    after(made, reached(2))
    assert granted(after(made, ClaimArrived(B, 3, call=1), TimerFired())) == {1: [-1, -2, 0]}
    after(made, said(C, 2, bitmap_of(indices(1, 2, 3, 4, 5, 6)), b""))
    assert granted(after(made, ClaimArrived(B, 9, call=2), TimerFired())) == {2: [-3, -4, 7, 8]}


def test_each_validates_its_share():
    made = queue(M=1, validation=4)
    after(made, reached(4), ClaimArrived(B, 9, call=1), ClaimArrived(C, 9, call=2))
    assert granted(after(made, TimerFired())) == {1: [-1, -2], 2: [-3, -4]}


def test_who_drains_has_no_share():
    made = queue(Group(open_members=(B,)), M=8)
    assert granted(after(made, ClaimArrived(B, 9, call=1), TimerFired())) == {1: [0, 1, 2, 3]}


def test_a_claim_that_has_waited_in_vain_gets_its_share_of_what_could_be_granted():
    made = queue(M=9)
    assert granted(after(made, ClaimArrived(B, 9, call=1), TimerFired())) == {1: [0, 1, 2]}
    assert after(made, ClaimArrived(B, 9, call=2), TimerFired()) == []
    assert made.next_timer_s() == PATIENCE_S
    assert granted(made.handle(TimerFired(), now_s=PATIENCE_S)) == {2: [3, 4]}, "A and C have claimed nothing"


def test_who_has_become_slow_gets_no_more_of_a_step_than_it_makes_in_time():
    """B takes 3 s for one, the others 1 s: of the next step it gets its share, of this one no second microbatch."""
    made = queue(M=12, s_max=1)
    after(made, ClaimArrived(A, 1, call=1), ClaimArrived(B, 2, call=2), ClaimArrived(C, 1, call=3), TimerFired())
    made.made(Microbatch(0, 0), now_s=1.0)
    made.note(C, 0, bitmap_of(indices(3)), b"", now_s=1.0)
    made.note(B, 0, bitmap_of(indices(1)), b"", now_s=3.0)
    made.note(C, 0, bitmap_of(indices(3, 4, 5, 6, 7, 8, 9)), b"", now_s=3.0)
    after(made, ClaimArrived(B, 1, call=4), now_s=3.0)
    commands = made.handle(TimerFired(), now_s=3.0)
    assert [c.message.items for c in commands if isinstance(c, Answer)] == [((1, 0),)]


def test_only_the_leader_grants_and_only_to_members():
    with pytest.raises(Refused):
        queue(Group(me=B, leader=A)).handle(ClaimArrived(C, 1, call=1), now_s=0.0)
    with pytest.raises(Refused):
        queue().handle(ClaimArrived(STRANGER, 1, call=1), now_s=0.0)


def test_a_claim_stays_open_until_there_is_something_to_grant():
    made = queue(M=3)
    after(made, said(C, 0, bitmap_of(indices(0, 1, 2)), b""))
    assert after(made, ClaimArrived(B, 2, call=1), TimerFired()) == []
    assert made.open_claims == (B,)
    assert granted(after(made, reached(1), TimerFired())) == {1: [0]}


def test_a_claim_that_cannot_be_served_is_answered_with_nothing_in_the_end():
    made = queue(M=3)
    after(made, said(C, 0, b"", bitmap_of(indices(0, 1, 2))))
    after(made, ClaimArrived(B, 2, call=1), TimerFired())
    assert made.next_timer_s() == PATIENCE_S
    assert made.handle(TimerFired(), now_s=PATIENCE_S) == [Answer(1, Grant(items=()))]


def test_a_second_claim_takes_the_place_of_the_first():
    made = queue()
    assert after(made, ClaimArrived(B, 2, call=1), ClaimArrived(B, 1, call=2)) == [Answer(1, Grant(items=()))]
    assert granted(after(made, TimerFired())) == {2: [0]}


def test_the_open_claim_of_a_lost_member_is_answered_with_nothing():
    made = queue()
    after(made, ClaimArrived(B, 2, call=1))
    assert after(made, lost(B)) == [Answer(1, Grant(items=()))]
    assert after(made, TimerFired()) == []


def test_who_leads_again_serves_no_claim_of_before():
    group = Group()
    made = queue(group, M=1)
    after(made, ClaimArrived(C, 2, call=1), TimerFired())
    assert granted(after(made, ClaimArrived(B, 2, call=2), TimerFired())) == {}, "C has all of the step"
    group.leader = B
    assert after(made, look_again) == [Answer(2, Grant(items=()))]
    group.leader = A
    assert granted(after(made, reached(1), TimerFired())) == {}, "B awaits no answer from us any more"


def test_a_new_leader_validates_what_died_with_the_leader_before_it():
    """Somebody leads who has led before, claimed of itself then, and has heard of no loss since."""
    group = Group()
    made = queue(group, M=1, validation=2)
    after(made, reached(3), ClaimArrived(B, 1, call=1), TimerFired())
    after(made, look_again, TimerFired(), ClaimArrived(A, 2, call=2), TimerFired())
    group.leader = B
    after(made, look_again, reached(4))
    group.leader = A
    after(made, lost(B), TimerFired(), ClaimArrived(C, 2, call=3), ClaimArrived(A, 2, call=4))
    commands = after(made, TimerFired())
    assert granted(commands) == {3: [-1], 4: [-2]}, "nothing of it went to the claim that nobody waits for"


def test_who_is_not_ready_waits_with_its_claim():
    made = queue(Group(ready_members=(B,)))
    assert after(made, ClaimArrived(C, 2, call=1), TimerFired()) == []
    assert made.open_claims == (C,)


def test_who_is_far_slower_than_the_others_is_granted_nothing_for_a_while():
    made = queue(M=9, s_max=1)
    after(made, ClaimArrived(B, 1, call=1), ClaimArrived(C, 1, call=2), TimerFired())
    made.note(B, 0, bitmap_of(indices(0)), b"", now_s=1.0)
    made.note(C, 0, bitmap_of(indices(1)), b"", now_s=20.0)
    after(made, ClaimArrived(B, 1, call=3), ClaimArrived(C, 1, call=4), now_s=20.0)
    assert granted(made.handle(TimerFired(), now_s=20.0)) == {3: [2]}
    assert granted(made.handle(ClaimArrived(C, 1, call=5), now_s=500.0)) == {4: []}, "the older claim"
    assert granted(made.handle(TimerFired(), now_s=500.0)) == {5: [3]}, "to see whether it has recovered"


def test_a_member_whose_work_others_repeat_is_as_slow_as_one_that_makes_it_late():
    made = queue(Group(open_members=(B,)), M=9, s_max=1)
    after(made, ClaimArrived(B, 1, call=1), ClaimArrived(C, 1, call=2), TimerFired())
    made.note(B, 0, bitmap_of(indices(0)), b"", now_s=1.0)
    after(made, again(0, indices(1)), now_s=20.0)
    after(made, ClaimArrived(B, 1, call=3), ClaimArrived(C, 1, call=4), now_s=20.0)
    assert granted(made.handle(TimerFired(), now_s=20.0)) == {3: [2]}


def test_what_a_pausing_member_returns_is_made_by_the_leader():
    assert after(queue(), WorkReturned(B, Microbatch(0, 1), True)) == [Make(Microbatch(0, 1), True)]
    with pytest.raises(Refused):
        queue().handle(WorkReturned(STRANGER, Microbatch(0, 1), True), now_s=0.0)


# --- what runs again ---


def test_lost_contributions_are_divided_among_the_open_members():
    commands = after(queue(M=6), again(0, indices(0, 1, 2, 3, 4)))
    assert [c for c in commands if isinstance(c, Make)] == [Make(Microbatch(0, 0), True), Make(Microbatch(0, 3), True)]
    assert [c for c in commands if isinstance(c, HandOut)] == [
        HandOut(B, (Microbatch(0, 1), Microbatch(0, 4))),
        HandOut(C, (Microbatch(0, 2),)),
    ]
    assert MemberGranted(B, Microbatch(0, 4)) in commands, "if it dies with them they are known to be lost"


def test_the_leader_makes_what_a_member_declines():
    made = queue(Group(open_members=(B,)))
    after(made, again(0, indices(0, 1)))
    assert after(made, RepairDeclined(B, (Microbatch(0, 1),))) == [Make(Microbatch(0, 1), True)]


def test_what_runs_again_is_not_granted_too():
    made = queue(M=3)
    after(made, again(0, indices(0, 1)))
    assert granted(after(made, ClaimArrived(B, 2, call=1), TimerFired())) == {1: [2]}


def test_a_later_stage_gets_again_what_is_back_at_stage_0_and_the_rest_comes_by_itself():
    group = Group(open_members=(), lacking={(0, 1)})
    made = queue(group)
    after(made, follows(a_plan()))
    commands = after(made, RepairAsked(NEXT, 0, bitmap_of(indices(0, 1))))
    assert commands == [Make(Microbatch(0, 0), True)]


@pytest.mark.parametrize(("source", "step", "error"), [(STRANGER, 0, Refused), (NEXT, 4, RemoteError)])
def test_only_a_holder_has_a_step_of_the_run_repaired(source, step, error):
    made = queue()
    after(made, follows(a_plan()))
    with pytest.raises(error):
        made.handle(RepairAsked(source, step, b"\x01"), now_s=0.0)


def test_a_member_takes_its_part_from_its_leader_alone():
    made = queue(Group(me=B, leader=A))
    assert after(made, RepairArrived(A, ((0, 3),))) == [Make(Microbatch(0, 3), True)]
    for source, items in ((C, ((0, 3),)), (A, ((3, 0),))):
        with pytest.raises(Refused):
            made.handle(RepairArrived(source, items), now_s=0.0)
    with pytest.raises(RemoteError):
        made.handle(RepairArrived(A, ((0, -1),)), now_s=0.0)
    after(made, stopped(True))
    with pytest.raises(Refused):
        made.handle(RepairArrived(A, ((0, 3),)), now_s=0.0)


def test_what_runs_again_by_one_members_word_has_a_share_and_more_if_the_run_stands_still():
    made = queue(M=4, s_max=0)
    after(made, follows(a_plan()))
    for version in range(1, 4):
        after(made, reached(version), now_s=10.0 * version)

    def asked(at_s):
        try:
            commands = made.handle(RepairAsked(NEXT, 2, b"\x0f"), now_s=at_s)
        except Refused:
            return 0
        makes = sum(isinstance(command, Make) for command in commands)
        return makes + sum(len(command.microbatches) for command in commands if isinstance(command, HandOut))

    assert [asked(30.0 + at_s) for at_s in range(8)] == [4, 4, 0, 0, 0, 0, 0, 0], "two steps at once"
    assert [at_s for at_s in range(38, 100) if asked(float(at_s))] == [50, 70, 80, 90], "once in two steps' time"


# --- halts ---


def test_a_halt_lets_no_further_step_begin_until_nobody_asks_for_it():
    made = queue(M=6, s_max=1)
    after(made, follows(a_plan()))
    assert after(made, HaltAsked(NEXT, False, call=1)) == [Answer(1, Halted(version=0))]
    assert after(made, ClaimArrived(B, 2, call=2), TimerFired(), now_s=HALT_S - 1.0) == []
    assert made.halts == (NEXT,)
    assert granted(made.handle(TimerFired(), now_s=HALT_S)) == {2: [0, 1]}
    assert made.halts == ()


def test_a_halt_ends_when_a_plan_has_no_place_for_who_asked():
    made = queue()
    after(made, follows(a_plan()), HaltAsked(NEXT, True, call=1))
    after(made, follows(a_plan(with_next=False)))
    assert made.halts == ()


def test_a_member_that_asks_for_a_halt_and_does_not_go_is_waited_for_once():
    made = queue(M=6, s_max=1)
    after(made, follows(a_plan()))
    for at_s in range(int(HALTED_S_MAX)):
        after(made, HaltAsked(NEXT, True, call=at_s), TimerFired(), now_s=float(at_s))
        assert made.halts == (NEXT,)
    assert made.next_timer_s() == HALTED_S_MAX
    after(made, TimerFired(), now_s=HALTED_S_MAX)
    assert made.halts == ()
    for at_s in (HALTED_S_MAX, 600.0):
        with pytest.raises(Refused, match="once it has been away"):
            made.handle(HaltAsked(NEXT, True, call=99), now_s=at_s)
    after(made, follows(a_plan()), now_s=601.0)
    with pytest.raises(Refused):
        made.handle(HaltAsked(NEXT, True, call=99), now_s=602.0)
    after(made, follows(a_plan(with_next=False)), follows(a_plan()), now_s=603.0)
    after(made, HaltAsked(NEXT, True, call=99), now_s=604.0)
    assert made.halts == (NEXT,)


def test_no_stranger_halts_the_run():
    made = queue()
    after(made, follows(a_plan()))
    with pytest.raises(Refused):
        made.handle(HaltAsked(STRANGER, True, call=1), now_s=0.0)
    assert made.halts == ()


# --- validation ---


def test_the_leader_reports_the_mean_once_all_losses_are_there():
    made = queue(validation=2)
    assert after(made, validated(Microbatch(2, -1), 3.0)) == []
    reports = after(made, ValidationArrived(B, 2, 1, 5.0))
    assert reports == [ReportValidation(ValidationReport(step=2, loss=4.0, microbatches=2))]
    assert after(made, ValidationArrived(B, 2, 1, 5.0)) == [], "it was said twice"


def test_a_member_tells_the_leader_what_it_has_validated():
    made = queue(Group(me=B, leader=A))
    result = ValidationResult(step=2, index=1, loss=3.0)
    assert after(made, validated(Microbatch(2, -2), 3.0)) == [TellValidation(A, result)]


@pytest.mark.parametrize(
    ("source", "step", "index", "error"),
    [(STRANGER, 2, 0, Refused), (B, 2, 2, RemoteError), (B, 5, 0, RemoteError)],
)
def test_a_loss_that_the_run_has_not_is_not_recorded(source, step, index, error):
    with pytest.raises(error):
        queue().handle(ValidationArrived(source, step, index, 1.0), now_s=0.0)


# --- pace ---


def test_who_waits_for_a_stage_that_is_still_fetching_its_state_is_not_slow():
    made = queue(M=9, s_max=1)
    after(made, ClaimArrived(A, 1, call=1), ClaimArrived(B, 1, call=2), ClaimArrived(C, 1, call=3), TimerFired())
    made.made(Microbatch(0, 0), now_s=100.0)  # now the last stage is there
    made.note(B, 0, bitmap_of(indices(1)), b"", now_s=101.0)
    after(made, ClaimArrived(A, 1, call=4), TimerFired(), now_s=101.0)
    made.made(Microbatch(0, 3), now_s=103.0)  # two seconds, which all of them will take
    made.note(C, 0, bitmap_of(indices(2)), b"", now_s=104.0)
    after(made, *(ClaimArrived(peer, 1, call=5 + i) for i, peer in enumerate((A, B, C))), now_s=104.0)
    assert granted(made.handle(TimerFired(), now_s=104.0)) == {5: [4], 6: [5], 7: [6]}


def test_who_is_slow_once_the_others_are_at_work_is_known_for_it():
    made = queue(M=9, s_max=1)
    after(made, ClaimArrived(A, 1, call=1), ClaimArrived(B, 1, call=2), ClaimArrived(C, 1, call=3), TimerFired())
    made.made(Microbatch(0, 0), now_s=100.0)
    for i, now_s in enumerate((102.0, 104.0, 106.0)):
        after(made, ClaimArrived(A, 1, call=4 + i), TimerFired(), now_s=now_s - 2.0)
        made.made(Microbatch(0, 3 + i), now_s=now_s)
    made.note(B, 0, bitmap_of(indices(1)), b"", now_s=250.0)
    made.note(C, 0, bitmap_of(indices(2)), b"", now_s=103.0)
    after(made, ClaimArrived(B, 1, call=8), ClaimArrived(C, 1, call=9), now_s=250.0)
    assert granted(made.handle(TimerFired(), now_s=250.0)) == {9: [6]}


def test_what_is_made_says_how_fast_its_maker_is():
    made = queue(M=9)
    after(made, ClaimArrived(A, 1, call=1), TimerFired())
    made.made(Microbatch(0, 0), now_s=2.0)
    assert made._pace._takes_s == {A: 2.0}
