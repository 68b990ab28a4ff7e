import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch

from shoal.kernels.optimizer import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def device() -> str:
    """Where the twins run: a CUDA device, or Triton's interpreter if there is none."""
    return DEVICE


@pytest.fixture(scope="module", params=["reference", "triton_advance"])
def twin(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Every implementation of the steps and predictions, but for Muon.

    Triton decides when a kernel is made whether to interpret it, and asks again as it goes. So the variable is set for
    as long as this fixture is in use, and nobody else gets a module that was made meanwhile.
    """
    if request.param == "reference":
        yield reference
        return
    pytest.importorskip("triton")
    name = "shoal.kernels.optimizer.triton_advance"
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            patch.delitem(sys.modules, name, raising=False)
        module = import_module(name)
        if DEVICE == "cpu":
            patch.setattr(module, "BLOCK", 1 << 14)  # an interpreted program takes milliseconds, however small
        yield module
        if DEVICE == "cpu":
            sys.modules.pop(name, None)
