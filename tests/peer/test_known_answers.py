"""The answers that are written down are those of this machine, and a device with others makes no steps."""

import pytest
import torch

from shoal.peer.compute import known_answers
from shoal.peer.compute.known_answers import KNOWN, answer, steps_on
from shoal.protocol.errors import ShoalError

CPU, CARD = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("optimizer", KNOWN)
def test_this_machine_steps_as_all_others(optimizer):
    assert answer(optimizer, CPU) == KNOWN[optimizer]
    assert steps_on(optimizer, CPU) == CPU


@pytest.mark.parametrize("threads", [1, 2])
def test_it_does_not_depend_on_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert answer("muon", CPU) == KNOWN["muon"]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("optimizer", ["adamw", "nadam"])
def test_a_processor_that_flushes_small_numbers_to_zero_is_found(optimizer):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush them")
    try:
        assert answer(optimizer, CPU) != KNOWN[optimizer]
    finally:
        torch.set_flush_denormal(False)


def test_where_the_card_steps_otherwise_the_processor_steps(monkeypatch, caplog):
    monkeypatch.setattr(known_answers, "answer", lambda name, where: "other" if where == CARD else KNOWN[name])
    assert steps_on("adamw", CARD) == CPU
    assert "optimizer steps on meta (adamw) differ" in caplog.text


def test_where_neither_steps_as_others_the_peer_says_so_and_ends(monkeypatch):
    monkeypatch.setattr(known_answers, "answer", lambda name, where: "other")
    with pytest.raises(ShoalError, match=r"^this machine's optimizer steps \(adamw\)"):
        steps_on("adamw", CARD)
