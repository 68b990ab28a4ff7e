"""The device that is asked for, and how many threads a volunteer takes."""

import os
import sys

import pytest
import torch

from shoal.deploy.manners import device
from shoal.deploy.manners.device import check_machine, own_threads, pick_device, spare_threads, stand_back, untested
from shoal.deploy.manners.limits import Limits
from shoal.protocol.errors import LocalError


@pytest.mark.parametrize(
    ("cores", "own", "at_host", "at_volunteer"),
    [
        (1, 1, 1, 1),
        (2, 2, 2, 2),
        (2, 1, 1, 1),
        (3, 3, 3, 2),
        (8, 8, 8, 7),
        (8, 4, 4, 4),
        (64, 32, 32, 32),
        (0.25, 32, 1, 1),  # of a container, on a machine of 64
        (1.5, 32, 1, 1),
        (2.5, 32, 2, 2),
        (4.0, 32, 4, 3),
    ],
)
def test_threads_fit_the_processors_and_a_volunteer_leaves_one_of_more_than_two(
    monkeypatch, cores, own, at_host, at_volunteer
):
    monkeypatch.setattr(device, "processors", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: own)
    assert (own_threads(), spare_threads()) == (at_host, at_volunteer)


def test_a_limit_above_what_the_machine_has_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(device, "total_bytes", lambda _: 19_990_000_000)
    monkeypatch.setattr(device, "processors", lambda: 1.5)
    check_machine(Limits(memory_gb=19.9), torch.device("cpu"), 2)
    with pytest.raises(LocalError, match=r"^memory_gb is 9999, and cpu has 19.9 GB: set less; 0 takes what is free$"):
        check_machine(Limits(memory_gb=9999.0), torch.device("cpu"), 0)
    with pytest.raises(LocalError, match=r"^--threads 3: this process may use 2 processors; 0 lets shoal choose$"):
        check_machine(Limits(), torch.device("cpu"), 3)


@pytest.mark.skipif(sys.platform != "linux", reason="a process has one priority elsewhere, and it is left alone")
@pytest.mark.parametrize(("before", "nice", "after"), [(0, 5, 5), (10, 5, 10), (10, 19, 19)])
def test_a_thread_never_steps_forward(monkeypatch, before, nice, after):
    given = []
    monkeypatch.setattr(os, "getpriority", lambda which, thread: before)
    monkeypatch.setattr(os, "setpriority", lambda which, thread, priority: given.append(priority))
    stand_back(Limits(nice=nice))
    assert given == [after]


def test_left_open_it_is_a_gpu_of_nvidias_or_the_processor(monkeypatch):
    assert pick_device("auto") == torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["cuda:63", "xpu:63", "xpu"])
def test_what_torch_does_not_see_is_refused_in_one_line(wanted):
    with pytest.raises(LocalError, match=rf"^--device {wanted}: torch sees \d+ devices of that kind on this machine$"):
        pick_device(wanted)


def test_an_amd_gpu_needs_a_torch_that_sees_it_and_is_cuda_to_it(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(LocalError, match="not PyTorch's ROCm build"):
        pick_device("rocm:1")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("rocm:1") == torch.device("cuda:1")
    assert "nobody has run shoal on rocm" in untested(torch.device("cuda:1"))


def test_what_nobody_has_run_is_said_to_be_untested(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert untested(torch.device("cpu")) == untested(torch.device("cuda:0")) == ""
    assert "on mps yet" in untested(torch.device("mps"))
