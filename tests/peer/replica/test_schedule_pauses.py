"""A pause, at one replica: what goes back, and what is still finished."""

from pipeline_cores import DOWN, OTHER, UP, A, B, C, core, feed, job
from shoal.peer.replica.commands import Forget, RejectMicrobatch, SendActivation, SendGradient
from shoal.peer.replica.events import (
    Arrived,
    Contributed,
    GradientArrived,
    HandedBack,
    JobDone,
    Lagging,
    Paused,
    Resumed,
    StepReady,
)
from shoal.peer.replica.job import Job


def test_a_pause_hands_back_what_has_not_begun_and_finishes_what_has() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(B, UP), Arrived(C, OTHER))
    assert feed(made, Paused(at_once=False)) == [RejectMicrobatch(C, OTHER, False), Forget(C)]
    assert feed(made, JobDone(job("forward", 0, 1))) == [SendActivation(B, DOWN)]
    assert feed(made, GradientArrived(A, DOWN)) == [job("backward", 0, 0)]
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]
    assert feed(made, Paused(at_once=True)) == [RejectMicrobatch(B, UP, True), Forget(B)]
    assert made.is_idle
    assert feed(made, GradientArrived(B, DOWN)) == []
    assert feed(made, Arrived(B, UP)) == [RejectMicrobatch(B, UP, False), Forget(B)], "it was on its way"
    feed(made, Resumed())
    assert feed(made, Arrived(B, UP)) == [job("forward", 0, 1)]


def test_the_job_that_runs_when_everything_goes_back_still_counts() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), GradientArrived(A, DOWN))
    assert feed(made, Paused(at_once=True)) == []
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]


def test_who_lags_hands_back_what_has_not_begun_and_finishes_what_has() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(B, UP), Arrived(C, OTHER))
    assert feed(made, Lagging(True)) == [RejectMicrobatch(C, OTHER, False), Forget(C)]
    feed(made, JobDone(job("forward", 0, 1)))
    assert feed(made, GradientArrived(A, DOWN)) == [job("backward", 0, 0)], "its gradient is as good as others'"
    feed(made, JobDone(job("backward", 0, 0)))
    assert feed(made, Arrived(C, UP)) == [RejectMicrobatch(C, UP, False), Forget(C)], "it was on its way"
    feed(made, Paused(at_once=False), Resumed())
    assert feed(made, Arrived(C, UP)) == [RejectMicrobatch(C, UP, False), Forget(C)], "it lags as before"
    feed(made, Lagging(False))
    assert feed(made, Arrived(C, UP)) == [job("forward", 0, 2)]


def test_a_commit_is_stepped_during_a_pause() -> None:
    assert feed(core(), Paused(at_once=True), StepReady(0)) == [Job("step", None, 0)]


def test_what_is_handed_back_goes_to_another_replica() -> None:
    made = core(targets=(DOWN, OTHER))
    feed(made, Arrived(A, UP))
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    assert feed(made, HandedBack(A, OTHER)) == [], "it does not have it"
    assert feed(made, HandedBack(A, DOWN)) == [SendActivation(A, OTHER, True)]
    assert feed(made, GradientArrived(A, DOWN)) == []
    assert feed(made, GradientArrived(A, OTHER)) == [job("backward", 0, 0)]


def test_stage_0_forgets_in_its_window_what_it_hands_back() -> None:
    made = core(stage=0)
    feed(made, Arrived(A, None), JobDone(job("forward", 0, 0)), Arrived(B, None), JobDone(job("forward", 0, 1)))
    assert made.window is not None
    assert made.window.in_flight == 2
    back = feed(made, Paused(at_once=True))
    assert [c for c in back if isinstance(c, RejectMicrobatch)] == [
        RejectMicrobatch(A, None, True),
        RejectMicrobatch(B, None, True),
    ]
    assert made.window.in_flight == 0
