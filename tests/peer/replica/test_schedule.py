import itertools

import pytest

from pipeline_cores import DOWN, OTHER, UP, A, B, C, core, feed, job
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.commands import Finished, Forget, SendActivation, SendGradient
from shoal.peer.replica.events import (
    Arrived,
    Contributed,
    GradientArrived,
    JobDone,
    JobParked,
    PeerLost,
    PeerReady,
    StepReady,
    VersionSet,
)
from shoal.peer.replica.flow import Control
from shoal.peer.replica.job import Job
from shoal.peer.replica.schedule import Schedule
from shoal.protocol.running_ahead import Choice
from shoal.protocol.staleness import Price


def test_a_microbatch_goes_forward_on_back_and_home() -> None:
    made = core()
    assert feed(made, Arrived(A, UP)) == [job("forward", 0, 0)]
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    assert feed(made, GradientArrived(A, DOWN)) == [job("backward", 0, 0)]
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]
    assert made.is_idle


def test_a_schedule_says_where_its_microbatches_are() -> None:
    made = core()
    assert made.whereabouts(0.0) == "none here"
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(B, UP), Arrived(C, UP))
    assert made.whereabouts(7.0) == f"1 at {DOWN[-8:]} for 7 s, 1 waiting", "one is in a job"
    feed(made, GradientArrived(A, DOWN))
    assert made.whereabouts(7.0) == "1 waiting, 1 returned"
    feed(made, PeerLost(DOWN), JobDone(job("forward", 0, 1)))
    assert "1 unsent" in made.whereabouts(7.0)


def test_while_a_job_is_parked_the_device_does_others() -> None:
    """Backwards behind it too, or it might wait for the version that they make."""
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(Microbatch(1, 0), UP), GradientArrived(A, DOWN))
    assert feed(made, JobParked(job("forward", 1, 0))) == [job("backward", 0, 0)]
    assert feed(made, JobParked(job("backward", 0, 0)), StepReady(0)) == [Job("step", None, 0)]
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]
    assert feed(made, JobDone(job("forward", 1, 0))) == [SendActivation(Microbatch(1, 0), DOWN)]
    assert not made.is_idle


def test_what_comes_again_waits_for_its_parked_job() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobParked(job("forward", 0, 0)))
    assert feed(made, PeerLost(UP)) == []
    assert feed(made, Arrived(A, OTHER)) == []
    assert feed(made, JobDone(job("forward", 0, 0))) == [job("forward", 0, 0)]


def test_the_last_stage_does_all_in_one_job() -> None:
    made = core(stage=2)
    assert feed(made, Arrived(A, UP)) == [job("loss", 0, 0)]
    assert feed(made, JobDone(job("loss", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]


def test_a_lone_stage_is_first_and_last() -> None:
    made = core(stage=0, num_stages=1)
    assert feed(made, Arrived(A, None)) == [job("loss", 0, 0)]
    assert feed(made, JobDone(job("loss", 0, 0))) == [Contributed(A, 0), Finished(A), Forget(A)]


def test_backward_goes_before_forward() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(B, UP), Arrived(C, UP))
    feed(made, GradientArrived(A, DOWN))
    assert feed(made, JobDone(job("forward", 0, 1))) == [SendActivation(B, DOWN), job("backward", 0, 0)]


def test_after_a_backward_the_forward_that_waits_has_its_turn() -> None:
    """Or a burst of gradients would starve the stages behind us."""
    made = core()
    for index in range(2):
        feed(made, Arrived(Microbatch(0, index), UP), JobDone(job("forward", 0, index)))
    feed(made, Arrived(Microbatch(0, 2), UP), Arrived(Microbatch(0, 3), UP))
    feed(made, GradientArrived(Microbatch(0, 0), DOWN), GradientArrived(Microbatch(0, 1), DOWN))
    order = [job("forward", 0, 2), job("backward", 0, 0), job("forward", 0, 3), job("backward", 0, 1)]
    for now, then in itertools.pairwise(order):
        assert feed(made, JobDone(now))[-1] == then


def test_a_step_goes_before_backward_and_lower_microbatches_before_higher() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(B, UP), GradientArrived(A, DOWN))
    feed(made, Arrived(Microbatch(1, 0), UP), Arrived(C, UP), StepReady(0))
    assert feed(made, JobDone(job("forward", 0, 1))) == [SendActivation(B, DOWN), Job("step", None, 0)]
    assert feed(made, JobDone(Job("step", None, 0))) == [job("backward", 0, 0, 1)]
    assert feed(made, JobDone(job("backward", 0, 0, 1)))[-1] == job("forward", 0, 2, 1)


def test_a_microbatch_too_far_ahead_waits_for_the_step() -> None:
    made = core(s_max=1)
    assert feed(made, Arrived(Microbatch(2, 0), UP)) == []
    assert feed(made, StepReady(0)) == [Job("step", None, 0)]
    assert feed(made, JobDone(Job("step", None, 0))) == [job("forward", 2, 0, 1)]
    commands = feed(made, JobDone(job("forward", 2, 0, 1)), GradientArrived(Microbatch(2, 0), DOWN))
    assert commands == [job("backward", 2, 0, 1)]
    assert feed(made, JobDone(job("backward", 2, 0, 1)))[0] == Contributed(Microbatch(2, 0), 1)


def test_a_microbatch_of_a_synchronous_step_waits_for_its_version() -> None:
    """Where the stage before is a version further."""
    made = core(synchronous_steps=2)
    assert feed(made, Arrived(Microbatch(1, 0), UP)) == []
    assert feed(made, StepReady(0)) == [Job("step", None, 0)]
    commands = feed(made, JobDone(Job("step", None, 0)))
    assert job("forward", 1, 0, 1) in commands
    feed(made, JobDone(job("forward", 1, 0, 1)))
    assert feed(made, Arrived(Microbatch(2, 0), UP)) == [job("forward", 2, 0, 1)], "which may be stale"


def test_staleness_is_that_of_the_forward_not_of_the_backward() -> None:
    made = core(stage=1)
    late = Microbatch(1, 0)
    feed(made, Arrived(late, UP), JobDone(job("forward", 1, 0)), StepReady(0), JobDone(Job("step", None, 0)))
    feed(made, GradientArrived(late, DOWN))
    assert feed(made, JobDone(job("backward", 1, 0, 1)))[0] == Contributed(late, 1)


def test_validation_waits_for_its_version_whatever_s_max_allows() -> None:
    made = core(s_max=3)
    check = Microbatch(1, -1)
    assert feed(made, Arrived(check, UP)) == []
    feed(made, StepReady(0))
    assert feed(made, JobDone(Job("step", None, 0))) == [job("validate", 1, -1, 1)]


def test_validation_comes_home_without_a_backward() -> None:
    made = core()
    check = Microbatch(0, -1)
    feed(made, Arrived(check, UP), JobDone(job("validate", 0, -1)))
    assert feed(made, GradientArrived(check, DOWN)) == [SendGradient(check, UP), Forget(check)]


def test_a_loaded_version_admits_what_waited_for_it() -> None:
    made = core(s_max=0)
    assert feed(made, Arrived(Microbatch(3, 0), UP)) == []
    assert feed(made, VersionSet(3)) == [job("forward", 3, 0, 3)]


def test_a_step_that_a_loaded_state_has_overtaken_is_not_taken() -> None:
    """Its gradient belongs to a version that we no longer have."""
    made = core()
    feed(made, Arrived(A, UP), StepReady(0), VersionSet(2))
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    assert made.version == 2


def test_stage_zero_holds_back_what_the_window_has_no_room_for() -> None:
    made = core(stage=0)
    assert made.window is not None
    made.window.size = 1
    feed(made, Arrived(A, None), Arrived(B, None))
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    feed(made, GradientArrived(A, DOWN))
    assert feed(made, JobDone(job("backward", 0, 0)))[-1] == job("forward", 0, 1)


def test_a_dead_target_is_replaced() -> None:
    made = core(targets=(DOWN, OTHER))
    feed(made, Arrived(A, UP))
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    assert feed(made, PeerLost(DOWN)) == [SendActivation(A, OTHER, retried=True)]
    assert feed(made, GradientArrived(A, DOWN)) == []  # the dead man's answer
    assert feed(made, GradientArrived(A, OTHER)) == [job("backward", 0, 0)]


def test_without_any_target_it_waits_for_one() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)))
    assert feed(made, PeerLost(DOWN)) == []
    assert feed(made, PeerReady(DOWN)) == [SendActivation(A, DOWN, retried=True)]


def test_what_a_dead_source_sent_is_dropped_wherever_it_is() -> None:
    made = core(targets=(DOWN,))
    other = [Microbatch(0, i) for i in (4, 5)]
    for microbatch in (A, B):
        feed(made, Arrived(microbatch, UP), JobDone(job("forward", microbatch.step, microbatch.index)))
    feed(made, Arrived(other[0], OTHER), GradientArrived(A, DOWN), Arrived(C, UP))
    assert feed(made, PeerLost(UP)) == [Forget(A), Forget(B), Forget(C)]
    assert feed(made, JobDone(job("forward", 0, 4))) == [SendActivation(other[0], DOWN)]
    assert feed(made, GradientArrived(B, DOWN)) == []
    feed(made, GradientArrived(other[0], DOWN), JobDone(job("backward", 0, 4)))
    assert made.is_idle
    assert made.router._outstanding == {}


def test_a_target_lost_while_its_gradient_is_used_is_not_asked_again() -> None:
    made = core(targets=(DOWN, OTHER))
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), GradientArrived(A, DOWN))
    assert feed(made, PeerLost(DOWN)) == []
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]
    assert made.is_idle


def test_a_gradient_that_comes_twice_is_used_once() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), GradientArrived(A, DOWN))
    assert feed(made, GradientArrived(A, DOWN)) == []
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]


def test_all_who_sent_it_get_the_gradient() -> None:
    """Before us OTHER took over from UP, which was doubted. If only one were answered, the other could wait forever."""
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(A, OTHER), GradientArrived(A, DOWN))
    done = [Contributed(A, 0), SendGradient(A, OTHER), SendGradient(A, UP), Forget(A)]
    assert feed(made, JobDone(job("backward", 0, 0))) == done


def test_a_microbatch_is_dropped_with_the_last_of_its_sources() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(A, OTHER))
    assert feed(made, PeerLost(UP)) == []
    assert feed(made, PeerLost(OTHER)) == [Forget(A)]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_in_the_gradient_sum_is_told_even_if_its_source_was_lost_meanwhile(stage: int) -> None:
    made = core(stage=stage)
    kind = "loss"
    feed(made, Arrived(A, UP))
    if stage == 1:
        kind = "backward"
        feed(made, JobDone(job("forward", 0, 0)), GradientArrived(A, DOWN))
    assert feed(made, PeerLost(UP)) == []
    assert feed(made, JobDone(job(kind, 0, 0))) == [Contributed(A, 0), Forget(A)]


def test_a_microbatch_that_comes_again_while_its_orphan_runs_is_run_for_its_new_source() -> None:
    made = core()
    feed(made, Arrived(A, UP), PeerLost(UP))
    assert feed(made, Arrived(A, OTHER)) == []
    assert feed(made, JobDone(job("forward", 0, 0))) == [job("forward", 0, 0)]
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    feed(made, GradientArrived(A, DOWN))
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, OTHER), Forget(A)]


def test_time_in_queues_travels_back_with_the_gradient_and_time_at_work_does_not() -> None:
    made = core()
    made.handle(Arrived(A, UP), now_s=0.0)
    made.handle(Arrived(B, UP), now_s=1.0)
    made.handle(JobDone(job("forward", 0, 0)), now_s=3.0)  # B has waited for 2 s
    made.handle(PeerLost(DOWN), now_s=3.5)
    made.handle(JobDone(job("forward", 0, 1)), now_s=4.0)
    made.handle(PeerReady(DOWN), now_s=9.0)  # and 5 s more, for somebody to send it to
    made.handle(GradientArrived(A, DOWN, 0.0), now_s=11.0)
    made.handle(GradientArrived(B, DOWN, 10.0), now_s=12.0)  # 10 s later on
    made.handle(JobDone(job("backward", 0, 0)), now_s=16.0)  # and 4 s more here
    commands = made.handle(JobDone(job("backward", 0, 1)), now_s=20.0)
    assert commands == [Contributed(B, 0), SendGradient(B, UP, 21.0), Forget(B)]


def test_stage_zero_measures_training_and_not_validation() -> None:
    made = core(stage=0)
    assert made.window is not None
    check = Microbatch(0, -1)
    feed(made, Arrived(check, None), JobDone(job("validate", 0, -1)), GradientArrived(check, DOWN))
    assert made.is_idle
    assert (made.window.in_flight, len(made.window._round_trips_s)) == (0, 0)
    feed(made, Arrived(A, None), JobDone(job("forward", 0, 0)), GradientArrived(A, DOWN))
    feed(made, JobDone(job("backward", 0, 0)))
    assert (made.window.in_flight, len(made.window._round_trips_s)) == (0, 1)


def test_what_is_asked_for_again_goes_to_somebody_else() -> None:
    made = core(targets=(DOWN, OTHER))
    feed(made, Arrived(A, UP))
    (sent,) = feed(made, JobDone(job("forward", 0, 0)))
    assert isinstance(sent, SendActivation)
    (again,) = feed(made, Arrived(A, UP))
    assert isinstance(again, SendActivation)
    assert {sent.target, again.target} == {DOWN, OTHER}
    (once_more,) = feed(made, Arrived(A, UP))
    assert isinstance(once_more, SendActivation)
    assert once_more.target == sent.target


def test_what_is_asked_for_again_goes_to_the_same_if_there_is_nobody_else() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)))
    assert feed(made, Arrived(A, UP)) == [SendActivation(A, DOWN, True)]


# --- running ahead ---


def head(*, steps_ahead: int, in_flight_max: int | None = None) -> Schedule:
    """A stage 0 whose control has chosen: of later steps none, or while fewer than so many are in flight."""
    made = core(stage=0)
    made.control = Control(s_max=1, price=Price(0.2))
    made.control.choice = Choice(steps_ahead=steps_ahead, gain=1.0, step_s=1.0, staleness_steps=0.0)
    assert made.window is not None
    if in_flight_max is not None:
        made.window.round_trip_s, made.window.rate_per_s = in_flight_max - 1.0, 1.0
        assert made.window.size_at(1.0) == in_flight_max
    return made


NEXT = Microbatch(1, 0)


def test_what_may_not_run_ahead_waits_for_the_version() -> None:
    made = head(steps_ahead=0)
    assert feed(made, Arrived(NEXT, None)) == []
    assert feed(made, Arrived(A, None)) == [job("forward", 0, 0)]
    feed(made, JobDone(job("forward", 0, 0)), GradientArrived(A, DOWN), JobDone(job("backward", 0, 0)))
    feed(made, StepReady(0))
    assert feed(made, JobDone(Job("step", None, 0))) == [job("forward", 1, 0, 1)]


def test_a_repair_does_not_wait_with_the_others() -> None:
    made = head(steps_ahead=0)
    assert feed(made, Arrived(Microbatch(1, 1), None)) == []
    assert feed(made, Arrived(NEXT, None, retried=True)) == [job("forward", 1, 0)]


def test_some_run_ahead_and_a_loaded_version_lets_in_the_others() -> None:
    made = head(steps_ahead=1, in_flight_max=2)
    assert feed(made, Arrived(NEXT, None)) == [job("forward", 1, 0)]
    assert feed(made, Arrived(Microbatch(1, 1), None), JobDone(job("forward", 1, 0)))[-1] == job("forward", 1, 1)
    feed(made, Arrived(Microbatch(1, 2), None))
    assert feed(made, JobDone(job("forward", 1, 1))) == [SendActivation(Microbatch(1, 1), DOWN)]
    assert feed(made, VersionSet(1)) == [job("forward", 1, 2, 1)]


def test_the_current_step_has_the_whole_window() -> None:
    made = head(steps_ahead=1, in_flight_max=2)
    for index in range(3):
        commands = feed(made, Arrived(Microbatch(0, index), None))
        if index:
            commands = feed(made, JobDone(job("forward", 0, index - 1)))
        assert commands[-1] == job("forward", 0, index)


def test_room_is_what_could_begin_now() -> None:
    made = head(steps_ahead=0)
    assert made.window is not None
    assert made.room == made.window.size
    feed(made, Arrived(A, None))
    assert made.room == made.window.size - 1
    feed(made, Arrived(NEXT, None))
    assert made.room == 0, "a claim would bring more of what must wait"


def test_the_stage_before_is_told_how_long_commits_take() -> None:
    made = core()
    made.handle(VersionSet(1), now_s=0.0)
    for step, done_s, version_s in ((1, 1.0, 2.0), (2, 5.0, 8.0)):
        made.handle(Arrived(Microbatch(step, 0), UP), now_s=done_s)
        made.handle(JobDone(job("forward", step, 0, step)), now_s=done_s)
        made.handle(GradientArrived(Microbatch(step, 0), DOWN, commit_s=0.5), now_s=done_s)
        sent = made.handle(JobDone(job("backward", step, 0, step)), now_s=done_s)
        assert SendGradient(Microbatch(step, 0), UP, commit_s=0.5) in sent
        made.handle(StepReady(step), now_s=version_s)
        made.handle(JobDone(Job("step", None, step)), now_s=version_s)
    made.handle(Arrived(Microbatch(3, 0), UP), now_s=9.0)
    made.handle(JobDone(job("forward", 3, 0, 3)), now_s=9.0)
    made.handle(GradientArrived(Microbatch(3, 0), DOWN, commit_s=0.5), now_s=9.0)
    sent = made.handle(JobDone(job("backward", 3, 0, 3)), now_s=9.0)
    assert SendGradient(Microbatch(3, 0), UP, commit_s=3.0) in sent
