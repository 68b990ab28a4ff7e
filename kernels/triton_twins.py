"""Imports the Triton twins (equivalents on CUDA) of a folder's kernels, where they can run."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch


@cache
def triton_twins(module: str) -> ModuleType | None:
    """Return `module`, imported at the first call; None without CUDA or Triton. Call this only for GPU tensors."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return None
    return import_module(module)
