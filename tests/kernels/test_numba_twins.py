"""Compiled twins are loaded in the background, and only where they give the reference's bytes."""

import sys
from types import SimpleNamespace

import pytest
import torch

from shoal.kernels import codec
from shoal.kernels.codec import FORMATS, reference
from shoal.kernels.numba_twins import NumbaTwin

NAME = "a_module_of_compiled_kernels"


def twin_that(monkeypatch, prove):
    module = SimpleNamespace(prove=prove)
    monkeypatch.setitem(sys.modules, NAME, module)
    return NumbaTwin(NAME), module


def test_a_module_is_there_once_it_is_proved(monkeypatch):
    proved = []
    twin, module = twin_that(monkeypatch, lambda: proved.append(1))
    assert twin.module is None
    assert twin.wait() is module is twin.module
    twin.start()
    assert twin.wait() is module
    assert proved == [1]


def test_a_module_whose_results_differ_is_not_used(monkeypatch, caplog):
    def differs():
        raise RuntimeError("it encodes int8 differently from the reference")

    twin, _ = twin_that(monkeypatch, differs)
    assert twin.wait() is None
    assert f"{NAME} stays unused, which is slower: it encodes int8 differently" in caplog.text


def test_a_module_that_is_not_there_is_done_without(caplog):
    assert NumbaTwin("no_such_module_anywhere").wait() is None
    assert "No module named 'no_such_module_anywhere'" in caplog.text


@pytest.mark.parametrize("wrong", ["encode", "decode"])
def test_the_compiled_codec_notices_that_its_bytes_differ(monkeypatch, wrong):
    numba_codec = codec.numba_twin.wait()
    right = getattr(numba_codec, wrong)
    monkeypatch.setattr(numba_codec, wrong, lambda *args, **kwargs: right(*args, **kwargs) + 1)
    twin = NumbaTwin("shoal.kernels.codec.numba_codec")
    assert twin.wait() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of a CPU")
def test_a_large_tensor_has_the_codec_loaded_and_a_small_one_has_not(monkeypatch):
    twin, module = twin_that(monkeypatch, lambda: None)
    module.encode, module.decode = (lambda *args, **kwargs: "compiled",) * 2
    monkeypatch.setattr(codec, "numba_twin", twin)
    form, small_N = FORMATS["hadamard4"], torch.arange(200.0)
    payload_B = codec.encode(small_N, form)
    assert torch.equal(payload_B, reference.encode(small_N, form))
    assert twin.module is None
    large_N = torch.zeros(codec._LARGE)
    codec.encode(large_N, form)
    assert twin.wait() is module
    assert codec.encode(small_N, form) == codec.decode(payload_B, 200, form) == "compiled"
