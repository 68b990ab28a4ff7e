from collections.abc import Iterator
from types import ModuleType

import pytest

import twins
from shoal.kernels.optimizer import reference


def _shrink(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    patch.setattr(module, "BLOCK", 1 << 14)  # an interpreted program takes milliseconds, however small


@pytest.fixture(scope="module", params=["reference", "triton_advance"])
def twin(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Every implementation of the steps and predictions, but for Muon."""
    if request.param == "reference":
        yield reference
        return
    with twins.twin("shoal.kernels.optimizer.triton_advance", shrink=_shrink) as module:
        yield module
