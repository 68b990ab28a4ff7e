from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.forward_times import ForwardTimes
from shoal.peer.replica.job import Job


def job(index: int, kind: str = "forward") -> Job:
    return Job(kind, Microbatch(0, index), 0)


def test_before_the_first_forward_has_ended_nothing_is_told() -> None:
    times = ForwardTimes()
    assert times.seconds == 0.0
    times.ran(job(0), 1.0)
    assert times.seconds == 0.0


def test_a_job_in_parts_counts_once_with_all_of_them() -> None:
    """Parts of two jobs take turns, as they do while either waits for experts."""
    times = ForwardTimes()
    for _ in range(3):
        times.ran(job(0), 1.0)
        times.ran(job(1), 2.0)
    times.ended(job(0))
    assert times.seconds == 3.0
    times.ended(job(1))
    assert times.seconds == 4.5


def test_what_is_no_forward_and_what_was_dropped_do_not_count() -> None:
    times = ForwardTimes()
    times.ran(job(0, "backward"), 5.0)
    times.ended(job(0, "backward"))
    times.ran(job(1), 5.0)
    times.dropped(job(1))
    assert times.seconds == 0.0
    times.ran(job(2, "loss"), 2.0)
    times.ended(job(2, "loss"))
    assert times.seconds == 2.0


def test_five_forwards_tell_that_a_device_has_become_slower() -> None:
    times = ForwardTimes()
    for index in range(40):
        times.ran(job(index), 1.0 if index < 35 else 4.0)
        times.ended(job(index))
    assert times.seconds == 4.0


def test_three_forwards_far_slower_than_usual_are_believed() -> None:
    times = ForwardTimes()
    for index, seconds in enumerate([1.0, 1.1, 0.9, 1.0, 1.0, 1.2, 1.0, 8.0, 9.0]):
        times.ran(job(index), seconds)
        times.ended(job(index))
    assert times.seconds == 1.0, "two may be noise"
    times.ran(job(9), 8.5)
    times.ended(job(9))
    assert times.seconds == 8.5
    for index, seconds in enumerate([1.0, 1.0, 1.0]):
        times.ran(job(10 + index), seconds)
        times.ended(job(10 + index))
    assert times.seconds == 1.0
