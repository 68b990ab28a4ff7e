"""Large vectors whose memory is used again, once nobody holds them or a part of them."""

import gc
import threading

import torch

from shoal.peer.encoding.recycling import KEPT_MAX, LARGE, SIZES_MAX, Recycling
from shoal.peer.encoding.vectors import Vectors


def test_memory_comes_back_with_the_last_who_holds_a_part_of_it():
    recycling = Recycling()
    vector_N = recycling.vector(LARGE).fill_(1.0)
    where = vector_N.data_ptr()
    part_C = vector_N[7:9]
    payload = memoryview(part_C.numpy().data).cast("B")
    del vector_N, part_C
    gc.collect()
    assert len(recycling) == 0
    assert recycling.vector(LARGE).data_ptr() != where
    assert bytes(payload) == torch.ones(2).numpy().tobytes()
    free = len(recycling)
    del payload
    gc.collect()
    assert len(recycling) == free + 1
    held = [recycling.vector(LARGE) for _ in range(free + 1)]
    assert where in [vector_N.data_ptr() for vector_N in held]


def test_a_few_are_kept_of_few_sizes_and_small_ones_are_not():
    recycling = Recycling()
    held = [recycling.vector(LARGE + size) for size in range(SIZES_MAX + 2) for _ in range(KEPT_MAX + 2)]
    assert len({vector_N.data_ptr() for vector_N in held}) == len(held)
    held.clear()
    assert 0 < len(recycling) <= SIZES_MAX * KEPT_MAX
    before = len(recycling)
    recycling.vector(LARGE - 1)
    assert len(recycling) == before


def test_no_two_threads_get_the_same_memory():
    recycling = Recycling()
    wrong = []

    def work(number):
        for turn in range(200):
            vector_N = recycling.vector(LARGE)
            value = float(1000 * number + turn)
            vector_N[:64] = value
            vector_N[-64:] = value
            if not (vector_N[:64] == value).all() or not (vector_N[-64:] == value).all():
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_zeros_and_copies_are_nobody_elses():
    vectors = Vectors(torch.device("cpu"))
    dirty_N = vectors.empty(LARGE).fill_(3.0)
    copy_N = vectors.copied(dirty_N)
    assert torch.equal(copy_N, dirty_N)
    assert copy_N.data_ptr() != dirty_N.data_ptr()
    del dirty_N
    assert not vectors.zeros(LARGE).any()
    assert copy_N.sum() == 3.0 * LARGE
