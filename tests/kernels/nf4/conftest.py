from types import ModuleType

import pytest

import twins
from shoal.kernels.nf4 import reference


def _shrink(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Few tiles a program, so that small tensors have many programs."""
    patch.setattr(module, "TILES", 16)


twin = twins.twin_fixture(reference, "shoal.kernels.nf4.triton_nf4", shrink=_shrink)
