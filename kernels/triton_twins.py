"""Find the Triton twins of a folder's kernels, where they can run."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch


@cache
def triton_twins(module: str) -> ModuleType | None:
    """Import `module`, for the first tensor that needs it, and return it; None without CUDA or Triton."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return None
    return import_module(module)
