"""Recognizes out-of-memory errors: of torch on a GPU, of torch's allocator on a CPU, and of Python."""

from typing import Final

import torch

_WORDS: Final = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in `RuntimeError`s that mean too little memory: those of torch's allocator (Linux, Windows) and cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` says that a job had too little memory; the job may be tried again once memory is free."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
