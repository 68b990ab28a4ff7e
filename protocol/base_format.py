"""Storage format of a base model's frozen weights, and its size in bytes. Pure.

A layer's tensors lie one behind the other in the order of `tensors.layer_tensors`, each padded to `ALIGNMENT` bytes.
"int8" is the format of `kernels/codec`, "nf4" that of `kernels/nf4`.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from shoal.protocol.layers import EMBED, HEAD, all_layer_keys
from shoal.protocol.spec import BaseFormat, ModelSpec
from shoal.protocol.tensors import ROUTER, layer_tensors
from shoal.protocol.wire_format import tensor_bytes

ALIGNMENT: Final = 16


def stored_tensors(
    model: ModelSpec, base: BaseFormat, key: str
) -> Iterator[tuple[str, tuple[int, ...], BaseFormat, int, int]]:
    """Yield each tensor of a layer: (name, shape, its own format, first byte, end)."""
    matrices, vectors = layer_tensors(model, key)
    first = 0
    for name, shape in (matrices | vectors).items():
        form = _form_of(base, key, shape, is_router=name.endswith(ROUTER))
        end = first + tensor_bytes(form, math.prod(shape))
        yield name, shape, form, first, end
        first = end + -end % ALIGNMENT


@lru_cache(maxsize=4096)
def base_bytes(model: ModelSpec, base: BaseFormat, key: str) -> int:
    """Return the size in bytes of a layer's base, a multiple of `ALIGNMENT`."""
    *_, (_, _, _, _, end) = stored_tensors(model, base, key)
    return end + -end % ALIGNMENT


def model_bytes(model: ModelSpec, base: BaseFormat) -> int:
    """Return the size in bytes of the whole model's base."""
    return sum(base_bytes(model, base, key) for key in all_layer_keys(model))


def _form_of(base: BaseFormat, key: str, shape: tuple[int, ...], *, is_router: bool) -> BaseFormat:
    # A router is small, and rounding it would send tokens to other experts.
    if len(shape) == 1 or is_router:
        return "fp32" if base == "fp32" else "bf16"
    # Every token passes through embedding and head, and each of their rows belongs to one token: 4 bits cost much
    # there.
    return "int8" if base == "nf4" and key in (EMBED, HEAD) else base
