from types import ModuleType

import pytest

import twins
from shoal.kernels.codec import reference


def _shrink(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Few tiles a program, so that small tensors have many programs."""
    patch.setattr(module, "TILES", 16)


twin = twins.twin_fixture(
    reference, "shoal.kernels.codec.triton_codec", shrink=_shrink, compiled="shoal.kernels.codec.numba_codec"
)
