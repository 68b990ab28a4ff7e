import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch

from shoal.kernels.dispatch import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def device() -> str:
    """Where the twins run: a CUDA device, or Triton's interpreter if there is none."""
    return DEVICE


@pytest.fixture(scope="module", params=["reference", "triton_dispatch"])
def twin(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Every implementation.

    Triton decides when a kernel is made whether to interpret it, and asks again as it goes. So the variable is set for
    as long as this fixture is in use, and nobody else gets a module that was made meanwhile.
    """
    if request.param == "reference":
        yield reference
        return
    pytest.importorskip("triton")
    name = "shoal.kernels.dispatch.triton_dispatch"
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            patch.delitem(sys.modules, name, raising=False)
        module = import_module(name)
        if DEVICE == "cpu":  # small ones, so that small tensors have many of them
            patch.setattr(module, "TILES", dict.fromkeys(module.TILES, module.Tile(16, 16, 16, 4, 1)))
            patch.setattr(module, "BLOCK_D", 16)
        yield module
        if DEVICE == "cpu":
            sys.modules.pop(name, None)
