"""The life of one replica, and how its parts work together, event by event."""

from shoal.peer.pipeline.microbatch import Microbatch, bitmap_of
from shoal.peer.replica.commands import (
    AnnouncePresence,
    AskRepair,
    Count,
    Forget,
    HandOut,
    Reduce,
    RejectMicrobatch,
    SendActivation,
    SendClaim,
    SendGradient,
    Tell,
)
from shoal.peer.replica.core import ReplicaCore
from shoal.peer.replica.events import (
    Arrived,
    Contributed,
    DrainBegun,
    Drained,
    DrainEnded,
    GradientArrived,
    GradientCounted,
    GrantArrived,
    JobDone,
    JoinedGroup,
    Lagging,
    Paused,
    PeerDied,
    PeerReborn,
    PeerSaid,
    PlanFollowed,
    ProgressArrived,
    RepairDeclined,
    Resumed,
    RoundArrived,
    Stepped,
    StepReady,
    TimerFired,
    VersionSet,
)
from shoal.peer.replica.flow import Window
from shoal.peer.replica.group_core import GroupCore
from shoal.peer.replica.job import Job
from shoal.peer.replica.member import ExpertCore
from shoal.peer.replica.microbatch_queue import MicrobatchQueue
from shoal.peer.replica.router import Router
from shoal.peer.replica.schedule import Schedule
from shoal.peer.replica.work_queue import WorkQueue
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Digest, ExpertPlace, PresenceUpdate, Progress, RoundMember, RoundStart
from shoal.protocol.plan import ExpertGroup, Member, Plan, Stage

ME, MATE, BEFORE, AFTER, OTHER = (PeerID(name) for name in ("me", "mate", "before", "after", "other"))
M = 2


def plan(*stages, experts=(), sequence=1):
    members = [tuple(Member(peer, 1.0, 1.0, 1) for peer in names) for names in stages]
    at = tuple(Stage(number, number + 1, of) for number, of in enumerate(members))
    return Plan("run", 1, sequence, "", stages[0][0], at, (OTHER,), experts=experts)


def group_core(group=0, *, has_loss=True):
    return GroupCore(
        me=ME,
        stage=group,
        steps=9,
        microbatches=M,
        tokens_per_microbatch=1,
        has_loss=has_loss,
        deadline_s=0.0,
        quorum=1.0,
    )


def replica(followed, stage=0, *, s_max=0):
    """Our part of plan `followed`, of which nothing has been heard yet."""
    stages = len(followed.stages)
    pipeline = Schedule(
        stage=stage,
        num_stages=stages,
        s_max=s_max,
        version=0,
        router=Router(),
        window=Window(num_stages=stages) if stage == 0 else None,
    )
    book = WorkQueue(steps=9, microbatches=M, s_max=s_max, validation_interval=0, validation_microbatches=1)
    group = group_core(stage, has_loss=stage == stages - 1)
    queue = MicrobatchQueue(book=book, group=group, demand=pipeline) if stage == 0 else None
    made = ReplicaCore(group, pipeline, queue, followed)
    made.handle(PlanFollowed(followed, upstream=frozenset((BEFORE,))), now_s=0.0)
    return made


def joined(made, *, version=0, remembers=True):
    made.handle(VersionSet(version), now_s=0.0)
    made.handle(Stepped(version, "digest", remembers=remembers), now_s=0.0)
    made.handle(JoinedGroup(remembers), now_s=0.0)
    return made


def presence(stage, *, ready=True, is_open=True, draining=False, incarnation=1, experts=()):
    return PresenceUpdate(
        incarnation=incarnation,
        plan_sequence=1,
        stage=stage,
        version=0,
        ready=ready,
        is_open=is_open,
        draining=draining,
        experts=experts,
    )


def feed(made, *events, now_s=0.0):
    """The commands of all events, one after the other; counts are counted, as a driver does."""
    commands = []
    for event in events:
        for command in made.handle(event, now_s=now_s):
            commands.append(command)
            if isinstance(command, Count):
                commands += feed(made, command.counted, now_s=now_s)
    return commands


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


# --- the life of a member ---


def test_a_replica_is_ready_and_open_once_it_holds_the_state():
    made = replica(plan([ME]))
    assert not made.group.ready
    made.handle(VersionSet(0), now_s=0.0)
    made.handle(Stepped(0, "digest"), now_s=0.0)
    assert AnnouncePresence() in made.handle(JoinedGroup(remembers=False), now_s=0.0)
    assert made.group.ready
    assert made.is_open


def test_a_newcomer_to_a_synchronous_run_stays_closed_until_its_first_own_step_if_another_is_open():
    made = replica(plan([ME, MATE]))
    feed(made, PeerSaid(MATE, presence(0)))
    joined(made, version=3, remembers=False)
    assert made.group.ready
    assert not made.is_open
    feed(made, Stepped(4, "digest", remembers=True))
    assert made.is_open


def test_a_newcomer_opens_at_once_when_nobody_else_takes_traffic():
    made = replica(plan([ME, MATE]))
    feed(made, PeerSaid(MATE, presence(0, is_open=False)))
    assert joined(made, version=3, remembers=False).is_open


def test_a_pause_closes_a_replica_until_it_is_over():
    made = joined(replica(plan([ME])))
    feed(made, Paused(at_once=False))
    assert not made.is_open
    assert made.group.ready
    feed(made, Resumed())
    assert made.is_open


def test_who_drains_takes_nothing_new_until_a_plan_gives_its_place_back():
    made = joined(replica(plan([ME])))
    assert of(SendClaim, feed(made, TimerFired()))
    feed(made, DrainBegun())
    assert not made.is_open
    feed(made, GrantArrived(ME, (), -1, 1.0))
    assert not of(SendClaim, feed(made, TimerFired()))
    feed(made, DrainEnded(), PlanFollowed(plan([ME], sequence=2)))
    assert made.is_open
    assert of(SendClaim, feed(made, TimerFired()))


def test_who_has_drained_is_ready_no_more():
    made = joined(replica(plan([ME])))
    assert AnnouncePresence() in feed(made, DrainBegun(), Drained())
    assert not made.group.ready


# --- a microbatch ---


def test_at_the_only_stage_a_granted_microbatch_is_told_run_counted_and_reduced():
    made = joined(replica(plan([ME])))
    feed(made, TimerFired())
    first, second = Microbatch(0, 0), Microbatch(0, 1)
    commands = feed(made, GrantArrived(ME, ((0, 0), (0, 1)), -1, 1.0))
    assert [command.message.step for command in of(Tell, commands)] == [0, 0]
    assert of(Job, commands) == [Job("loss", first, 0)]
    commands = feed(made, JobDone(Job("loss", first, 0), 2.0))
    assert of(Count, commands) == [Count(GradientCounted(first, 2.0, 0), False)]
    assert of(Job, commands) == [Job("loss", second, 0)]
    commands = feed(made, JobDone(Job("loss", second, 0), 4.0))
    (reduce,) = of(Reduce, commands)
    assert reduce.round.loss_sum == 6.0
    assert feed(made, StepReady(0)) == [Job("step", None, 0)]
    feed(made, JobDone(Job("step", None, 0)), Stepped(1, "digest", by=reduce.round, remembers=True))
    assert made.group.version == made.pipeline.version == 1


def test_who_led_until_just_now_tells_the_new_leader_at_once_what_it_runs_again():
    made = joined(replica(plan([MATE, ME])))
    feed(made, PeerSaid(MATE, presence(0)))
    assert made.group.leader == MATE
    (told,) = of(Tell, feed(made, RepairDeclined(MATE, (Microbatch(0, 1),))))
    assert not told.can_rest, "nobody else knows of it, so it would be granted once more"
    assert told.message.claimed == bitmap_of(0b10)


def test_in_the_middle_an_activation_goes_on_and_its_gradient_comes_back_the_same_way():
    made = joined(replica(plan([BEFORE], [ME], [AFTER]), stage=1))
    feed(made, PeerSaid(AFTER, presence(2)))
    m = Microbatch(0, 0)
    assert feed(made, Arrived(m, BEFORE)) == [Job("forward", m, 0)]
    assert feed(made, JobDone(Job("forward", m, 0))) == [SendActivation(m, AFTER)]
    assert feed(made, GradientArrived(m, AFTER)) == [Job("backward", m, 0)]
    commands = feed(made, JobDone(Job("backward", m, 0)))
    assert [type(command) for command in commands] == [Count, Tell, SendGradient, Forget]


def test_activations_that_overtake_their_senders_new_hello_are_kept():
    """Found by a run of the command line whose first step never came: the window of stage 0 was full of validations."""
    made = joined(replica(plan([BEFORE], [ME]), stage=1))
    feed(made, PeerSaid(BEFORE, presence(-1, ready=False, is_open=False, incarnation=7)))
    of_both = Microbatch(0, 0), Microbatch(0, 1)
    feed(made, Arrived(Microbatch(0, -1), BEFORE, incarnation=7))  # it runs
    feed(made, Arrived(of_both[0], BEFORE, incarnation=7), Arrived(of_both[1], BEFORE, incarnation=8))
    commands = feed(made, PeerReborn(BEFORE, 8), PeerSaid(BEFORE, presence(0, incarnation=8)))
    assert of(Forget, commands) == [Forget(of_both[0])], "nobody waits for its gradient"
    assert made.pipeline.holds(of_both[1])
    assert of(Forget, feed(made, PeerDied(BEFORE))) == [Forget(of_both[1])]


def test_activations_wait_until_somebody_of_the_next_stage_is_open():
    made = joined(replica(plan([BEFORE], [ME], [AFTER]), stage=1))
    m = Microbatch(0, 0)
    feed(made, PeerSaid(AFTER, presence(2, is_open=False)))
    assert feed(made, Arrived(m, BEFORE), JobDone(Job("forward", m, 0))) == [Job("forward", m, 0)]
    assert of(SendActivation, feed(made, PeerSaid(AFTER, presence(2)))) == [SendActivation(m, AFTER)]


def test_what_a_dead_replica_of_the_next_stage_had_goes_to_another():
    made = joined(replica(plan([BEFORE], [ME], [AFTER, OTHER]), stage=1))
    m = Microbatch(0, 0)
    feed(made, PeerSaid(AFTER, presence(2)), Arrived(m, BEFORE), JobDone(Job("forward", m, 0)))
    feed(made, PeerSaid(OTHER, presence(2)))
    assert of(SendActivation, feed(made, PeerDied(AFTER))) == [SendActivation(m, OTHER, True)]


def test_what_a_replica_of_the_next_stage_has_let_fall_goes_to_another():
    made = joined(replica(plan([BEFORE], [ME], [AFTER, OTHER]), stage=1))
    m = Microbatch(0, 0)
    feed(made, PeerSaid(AFTER, presence(2)), Arrived(m, BEFORE), JobDone(Job("forward", m, 0)))
    feed(made, PeerSaid(OTHER, presence(2)))
    draining = presence(2, is_open=False, draining=True)
    assert of(SendActivation, feed(made, PeerSaid(AFTER, draining))) == [], "it answers what it has"
    drained = presence(2, ready=False, is_open=False, draining=True)
    assert of(SendActivation, feed(made, PeerSaid(AFTER, drained))) == [SendActivation(m, OTHER, True)]


def test_activations_of_a_member_that_drains_from_the_stage_before_are_taken():
    made = joined(replica(plan([BEFORE], [ME]), stage=1))
    m = Microbatch(0, 0)
    assert feed(made, Arrived(m, OTHER)) == []
    feed(made, PeerSaid(OTHER, presence(0, draining=True)))
    assert feed(made, Arrived(m, OTHER)) == [Job("loss", m, 0)]
    feed(made, PeerSaid(OTHER, presence(-1)))
    assert feed(made, Arrived(Microbatch(0, 1), OTHER)) == []


def test_what_comes_while_a_round_stands_is_kept_apart_from_the_sum():
    made = joined(replica(plan([BEFORE], [ME, MATE]), stage=1))
    feed(made, PeerSaid(MATE, presence(1)))
    start = RoundStart(
        stage=1,
        step=0,
        attempt=1,
        members=(RoundMember(ME, 1.0, b""), RoundMember(MATE, 1.0, b"\x03")),
        duplicates=0,
        given_up=0,
        loss_sum=0.0,
        staleness_sum=0,
    )
    assert of(Reduce, feed(made, RoundArrived(MATE, start)))
    (count,) = of(Count, feed(made, Contributed(Microbatch(0, 0), 0)))
    assert count.counted.held_out


# --- what is lost runs again ---


def progress(*, indices=b"", claimed=b"", leader=ME, count=1):
    return Progress(
        incarnation=1,
        count=count,
        stage=0,
        step=0,
        indices=indices,
        leader=leader,
        claimed=claimed,
        loss_sum=0.0,
        staleness_sum=0,
    )


def test_at_stage_0_what_died_with_a_member_runs_again_at_those_who_are_left():
    made = joined(replica(plan([ME, MATE, OTHER])))
    for peer in (MATE, OTHER):
        feed(
            made, PeerSaid(peer, presence(0)), ProgressArrived(peer, progress(claimed=b"\x03" if peer == MATE else b""))
        )
    commands = feed(made, PeerDied(MATE), PlanFollowed(plan([ME, OTHER], sequence=2)))
    assert of(Job, commands) == [Job("loss", Microbatch(0, 0), 0)]
    assert of(HandOut, commands) == [HandOut(OTHER, (Microbatch(0, 1),))]
    assert of(AskRepair, commands) == [], "no other stage need be asked"


def test_at_a_later_stage_the_driver_is_asked_to_have_it_run_again():
    made = joined(replica(plan([BEFORE], [ME, MATE]), stage=1))
    feed(made, PeerSaid(MATE, presence(1)))
    feed(made, ProgressArrived(MATE, progress(indices=b"\x01")))
    commands = feed(made, PeerDied(MATE), PlanFollowed(plan([BEFORE], [ME], sequence=2)))
    assert of(AskRepair, commands) == [AskRepair(0, b"\x01")]


def test_what_a_stranger_has_made_is_granted_all_the_same():
    made = joined(replica(plan([ME])))
    assert feed(made, ProgressArrived(OTHER, progress(indices=b"\x03"))) == []
    assert made._queue is not None
    assert made._queue.book.admissible == M


# --- an expert's holder ---


def test_a_holder_of_an_expert_has_the_same_life_and_no_pipeline():
    units = tuple(ExpertGroup(0, expert, (Member(ME, 1.0, 1.0, 1), Member(MATE, 1.0, 1.0, 1))) for expert in range(2))
    followed = plan([OTHER], experts=units)
    made = ExpertCore(group_core(group=1, has_loss=False), followed)
    feed(made, PlanFollowed(followed))
    place = ExpertPlace(group=1, incarnation=1, version=0, ready=True, is_open=True, draining=False)
    feed(made, PeerSaid(MATE, presence(-1, experts=(place,))))
    assert made.group.ready_members == (MATE,)
    commands = feed(made, Stepped(0, "digest", remembers=True), JoinedGroup(True))
    assert made.is_open
    assert of(Tell, commands)
    (count,) = of(Count, feed(made, Contributed(Microbatch(0, 0), 0, retried=True)))
    assert count == Count(GradientCounted(Microbatch(0, 0), 0.0, 0, held_out=True), True)
    feed(made, PeerSaid(MATE, presence(-1)))
    assert made.group.ready_members == ()
    assert isinstance(of(Tell, commands)[0].message, Digest | Progress)


def test_a_light_member_that_lags_is_closed_and_claims_nothing_until_it_does_not():
    made = replica(plan([ME, MATE], [AFTER]), s_max=1)
    feed(made, Stepped(0, None, remembers=True), JoinedGroup(True, learner=True))
    assert made.is_open
    assert made.group.is_learner
    assert of(AnnouncePresence, feed(made, Lagging(True)))
    assert not made.is_open
    assert made._queue.is_stopped
    feed(made, Resumed(), DrainEnded())
    assert not made.is_open, "neither a pause that is over nor a plan opens it"
    assert made._queue.is_stopped
    (back,) = of(RejectMicrobatch, feed(made, Arrived(Microbatch(2, 0), None)))
    assert back == RejectMicrobatch(Microbatch(2, 0), None, False), "what is on its way goes back to the lead"
    assert of(AnnouncePresence, feed(made, Lagging(False)))
    assert made.is_open
    assert not made._queue.is_stopped
