"""The functions of `pipeline.py`, compiled by numba under the same names; also decorators and random numbers for
searches.

Importing numba takes a second, so this module is imported only by searches and for large swarms. Compiling takes ten
seconds, once on a machine. There is no fastmath and no parallel loop: the results equal those of the plain functions,
bit for bit."""

import hashlib
import inspect
import sys
from types import FunctionType
from typing import Any

import numpy as np
from numba import njit
from numba.core.caching import FunctionCache

from shoal.coordinator.cost import pipeline

_njit: Any = njit  # the types of njit lack two of its options
_SOURCE = hashlib.sha256("".join(map(inspect.getsource, (pipeline, sys.modules[__name__]))).encode()).hexdigest()


class _KernelCache(FunctionCache):
    """A cache of compiled functions on disk. Numba's own cache notices changes only in the file of the function. This
    one also notices changes in `pipeline.py` and in this file: kernels contain compiled functions from both files."""

    def _index_key(self, *args: Any) -> Any:
        return (*super()._index_key(*args), _SOURCE)  # type: ignore[no-untyped-call]


def kernel(function: Any) -> Any:
    """Compile a function that Python code calls."""
    return _cached(_njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function))


def inner(function: Any) -> Any:
    """Compile a function that only compiled functions call."""
    return _cached(_njit(error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)(function))


def _cached(dispatcher: Any) -> Any:
    dispatcher._cache = _KernelCache(dispatcher.py_func)  # type: ignore[no-untyped-call]
    return dispatcher


def _compiled(function: FunctionType) -> Any:
    copy = FunctionType(function.__code__, globals(), function.__name__)  # it calls the compiled functions here
    return (kernel if function.__name__ in pipeline.ENTRIES else inner)(copy)


@inner
def draw(state: Any) -> Any:
    """Draw a uint64 by SplitMix64 (Steele, Lea, Flood 2014), equal on any machine. Args: state: uint64 [1], updated."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@inner
def below(state: Any, n: Any) -> Any:
    """Draw a random int64 in [0, n), for n < 2^32. Args: state: uint64 [1], updated."""
    return np.int64(((draw(state) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@inner
def unit(state: Any) -> Any:
    """Draw a random float64 in [0, 1). Args: state: uint64 [1], updated."""
    return np.float64(draw(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


for _name, _value in vars(pipeline).items():
    if isinstance(_value, FunctionType):
        globals()[_name] = _compiled(_value)
    elif not _name.startswith("__"):
        globals()[_name] = _value


def __getattr__(name: str) -> Any:
    """Raise AttributeError, as usual. This function makes type checkers accept the names that the loop above sets."""
    raise AttributeError(name)


def is_ready() -> bool:
    """True if `evaluate` is compiled in this process."""
    return bool(globals()["evaluate"].signatures)
