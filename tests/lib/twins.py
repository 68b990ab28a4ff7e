"""A Triton module as the suite runs it: on the card if there is one, else under Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def twin(name: str, *, shrink: Callable[[pytest.MonkeyPatch, ModuleType], None]) -> Iterator[ModuleType]:
    """The module of that name. `shrink` makes its blocks fit for being interpreted.

    Triton decides when a kernel is made whether to interpret it, and asks again as it goes. So the variable is set for
    as long as the module is in use, and nobody else gets a module that was made meanwhile.
    """
    pytest.importorskip("triton")
    if DEVICE != "cpu":
        yield import_module(name)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, name, raising=False)
        module = import_module(name)
        shrink(patch, module)
        yield module
        sys.modules.pop(name, None)


def twin_fixture(
    reference: ModuleType, name: str, *, shrink: Callable[[pytest.MonkeyPatch, ModuleType], None], compiled: str = ""
) -> Any:
    """A pytest fixture that gives every implementation: `reference`, the numba module `compiled` if there is one (on a
    CPU), then the Triton module of that name."""
    on_cpu = [compiled] if compiled and DEVICE == "cpu" else []

    @pytest.fixture(scope="module", params=["reference", *on_cpu, name], ids=lambda of: of.rpartition(".")[2])
    def twin_of(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
        if request.param == "reference":
            yield reference
            return
        if request.param in on_cpu:
            yield import_module(request.param)
            return
        with twin(name, shrink=shrink) as module:
            yield module

    return twin_of


def said_of_a_card(code: str, cache: Path) -> Any:
    """Run Python that compiles kernels for a card and prints JSON, in a process in which nothing is interpreted.

    Args: cache: a folder for what Triton compiles.
    """
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argv, environment["TRITON_CACHE_DIR"] = [sys.executable, "-c", code], str(cache)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
