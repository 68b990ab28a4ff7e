"""How many threads a volunteer takes."""

import os
import sys

import pytest
import torch

from shoal.deploy.manners.device import spare_threads


@pytest.mark.parametrize(
    ("cores", "own", "taken"),
    [(1, 1, 1), (2, 2, 2), (2, 1, 1), (3, 3, 2), (8, 8, 7), (8, 4, 4), (64, 32, 32)],
)
def test_a_core_of_more_than_two_is_left_free(monkeypatch, cores, own, taken):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: own)
    assert spare_threads() == taken
