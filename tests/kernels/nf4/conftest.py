from collections.abc import Iterator
from types import ModuleType

import pytest

import twins
from shoal.kernels.nf4 import reference


def _shrink(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Few tiles a program, so that small tensors have many programs."""
    patch.setattr(module, "TILES", 16)


@pytest.fixture(scope="module", params=["reference", "triton_nf4"])
def twin(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Every implementation."""
    if request.param == "reference":
        yield reference
        return
    with twins.twin("shoal.kernels.nf4.triton_nf4", shrink=_shrink) as module:
        yield module
