from types import ModuleType

import pytest

import twins
from shoal.kernels.optimizer import reference


def _shrink(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    patch.setattr(module, "BLOCK", 1 << 14)  # an interpreted program takes milliseconds, however small


twin = twins.twin_fixture(reference, "shoal.kernels.optimizer.triton_advance", shrink=_shrink)  # but for Muon
