from types import ModuleType

import pytest

import twins
from shoal.kernels.dispatch import reference


def _shrink(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Small tiles, so that small tensors have many of them."""
    patch.setattr(module, "TILES", dict.fromkeys(module.TILES, module.Tile(16, 16, 16, 4, 1)))
    patch.setattr(module, "BLOCK_D", 16)


twin = twins.twin_fixture(reference, "shoal.kernels.dispatch.triton_dispatch", shrink=_shrink)
