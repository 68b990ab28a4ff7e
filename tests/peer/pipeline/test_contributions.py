"""What a sum holds is what had been told of when it was asked for, whichever thread makes it and whenever."""

import threading

import torch

from shoal.peer.encoding.vectors import VECTORS
from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.weight_set import WeightSet

SIZE = 4


def contribute(contributions, step, index, value, *, version=0, held_out=False):
    microbatch = Microbatch(step, index)
    contributions.finish(microbatch, torch.full((SIZE,), value))
    return contributions.contribute(microbatch, version=version, held_out=held_out)


def test_a_sum_that_is_made_late_holds_nothing_that_was_told_after_it_was_asked_for():
    contributions = Contributions(SIZE, VECTORS)
    contribute(contributions, 0, 0, 1.0)
    first = contributions.total(0)
    contribute(contributions, 0, 1, 2.0)
    second = contributions.total(0)
    contribute(contributions, 0, 2, 4.0)
    assert [second().sum_N[0], first().sum_N[0]] == [3.0, 1.0], "in whatever order they are made"
    assert contributions.total(0)().sum_N[0] == 7.0


def test_telling_touches_no_tensor():
    contributions = Contributions(SIZE, VECTORS)
    contribute(contributions, 0, 0, 1.0)
    contribute(contributions, 0, 1, 2.0)
    assert sorted(contributions._sums) == []
    assert contributions.has(Microbatch(0, 1))
    contributions.settle()
    assert sorted(contributions._sums) == [0]


def test_what_is_kept_apart_is_in_the_sums_that_ask_for_it():
    contributions = Contributions(SIZE, VECTORS)
    assert not contribute(contributions, 0, 0, 1.0)
    assert contribute(contributions, 0, 1, 2.0, held_out=True)
    without, whole = contributions.total(0, 0b01), contributions.total(0, 0b11)
    assert [without().sum_N[0], whole().sum_N[0]] == [1.0, 3.0]
    assert contributions.total(0)().num == 2


def test_what_comes_after_its_step_is_in_no_sum_and_says_so():
    contributions = Contributions(SIZE, VECTORS)
    assert contribute(contributions, 0, 0, 1.0, version=1, held_out=True) is None
    contributions.settle()
    assert sorted(contributions._sums) == []
    assert not contributions.has(Microbatch(0, 0))


def test_what_was_told_of_a_step_that_is_committed_meanwhile_is_dropped():
    contributions = Contributions(SIZE, VECTORS)
    contribute(contributions, 0, 0, 1.0)
    contribute(contributions, 1, 0, 2.0)
    contributions.forget_before(1)
    contributions.settle()
    assert sorted(contributions._sums) == [1]


def test_many_threads_make_sums_while_the_loop_tells():
    contributions = Contributions(SIZE, VECTORS)
    made = []
    threads = []
    for index in range(200):
        contribute(contributions, 0, index, 1.0)
        make = contributions.total(0)
        threads.append(threading.Thread(target=lambda index=index, make=make: made.append((index, make().sum_N))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(made) == 200
    assert all(torch.equal(sum_N, torch.full((SIZE,), index + 1.0)) for index, sum_N in made)


def stale(contributions, step, index, value):
    """A gradient that was taken at weights of the version before its step."""
    microbatch = Microbatch(step, index)
    weights = WeightSet({"layer": torch.full((SIZE,), value)}, step - 1)
    contributions.finish(microbatch, torch.full((SIZE,), value), weights)
    contributions.contribute(microbatch, version=step - 1, held_out=False)
    contributions.settle()


def test_what_somebody_looks_at_stays_as_it_is_and_is_copied_for_nobody_else():
    contributions = Contributions(SIZE, VECTORS)
    stale(contributions, 1, 0, 1.0)
    look = contributions.seen(1)
    stale(contributions, 1, 1, 2.0)
    assert (look.sum_N[0], look.places.sum_N[0], look.num, look.places.num) == (1.0, 1.0, 1, 1)
    look = contributions.seen(1)
    sum_N, places_N = look.sum_N, look.places.sum_N
    assert (sum_N[0], places_N[0]) == (3.0, 3.0)
    del look
    stale(contributions, 1, 2, 4.0)
    assert (sum_N[0], places_N[0]) == (7.0, 7.0), "it was added where it was: nobody looked any more"


def test_of_two_who_look_neither_sees_what_comes_later():
    contributions = Contributions(SIZE, VECTORS)
    contribute(contributions, 0, 0, 1.0)
    contributions.settle()
    first, second = contributions.seen(0), contributions.seen(0)
    del second
    contribute(contributions, 0, 1, 2.0)
    contributions.settle()
    assert first.sum_N[0] == 1.0
    assert contributions.seen(0).sum_N[0] == 3.0


def test_a_sum_that_is_made_after_its_step_is_none():
    contributions = Contributions(SIZE, VECTORS)
    contribute(contributions, 0, 0, 1.0)
    contributions.settle()
    contributions.forget_before(1)
    assert contributions.total(0)() is None
