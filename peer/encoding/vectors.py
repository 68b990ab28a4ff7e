"""Flat float32 vectors (gradient sums, layer states): where they live between the device and the wire, in what pieces
they travel, and how they become bytes and numbers again. A modelled peer replaces `Vectors`.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from shoal.kernels import codec
from shoal.peer.encoding.difference import changed, difference
from shoal.peer.encoding.recycling import Recycling
from shoal.peer.model.state import LayerState
from shoal.protocol.limits import BULK_CHUNK_BYTES
from shoal.protocol.ports import Payload
from shoal.protocol.wire_format import WireFormat

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONTRIBUTION_MAX: Final = 2.0**40
"""Largest number that a member may contribute to a sum of gradients. float32 holds the sum of 2^48 squares of it, so
that no member can make a mean that optimizers reject."""
REDUCED_MAX: Final = 2.0**44
"""The largest number in a reduced gradient: both ends of a tied matrix, with rounding, reach a quarter of it."""


class Vectors:
    """Makes, sends and receives flat float32 vectors.

    Args:
        host: the device that vectors are on while they are summed and sent.
        chunk_bytes: the largest piece, as float32.
    """

    def __init__(
        self, host: torch.device, *, chunk_bytes: int = BULK_CHUNK_BYTES, sums: Sequence[WireFormat] = ("fp32",)
    ) -> None:
        self.host = host
        self._recycling = Recycling()
        self.sums = tuple(sums)
        self.mean_form: WireFormat = "bf16" if self.sums == ("bf16",) else "fp32"
        """Format of a reduced gradient that is rounded already: it must arrive without loss."""
        self._mean_dtype = DTYPES[self.mean_form]
        self.mean_bytes = self._mean_dtype.itemsize
        """Bytes per number in `mean_form`."""
        self.narrows = self.sums != ("fp32",)
        """True if a gradient's bytes on the wire are converted, not a view of it."""
        self.chunk = chunk_bytes // 4
        """Elements."""
        self.background_chunk = max(1, self.chunk // 4)
        """Elements of a background frame. A frame that has begun delays an activation for the same peer, and 1 MiB
        takes 1.7 s at 5 Mbit/s; each frame takes a third of a millisecond of both ends
        (`protocol/live/MEASURED.md`)."""

    def empty(self, size: int) -> Tensor:
        """float32 [size], uninitialized."""
        return self._recycling.vector(size)

    def zeros(self, size: int) -> Tensor:
        return self.empty(size).zero_()

    def free(self) -> None:
        """Free the memory that is kept for the next vectors."""
        self._recycling.clear()

    def on_host(self, values_N: Tensor) -> Tensor:
        """Return a vector on the host; `values_N` itself if it is there already."""
        return values_N.to(self.host)

    def copied(self, values_N: Tensor) -> Tensor:
        """Copy to a new vector on the host."""
        return self.empty(values_N.numel()).copy_(values_N)

    def payload_of(self, values_C: Tensor) -> Payload:
        """Return the bytes of a float32 tensor, without copying."""
        return _payload(values_C, torch.float32)

    def values_of(self, payload: Payload) -> Tensor:
        """float32 [bytes / 4], without copying."""
        return torch.frombuffer(payload, dtype=torch.float32)

    def piece_payload(self, values_C: Tensor, form: WireFormat, key: tuple[int, int]) -> Payload:
        """Encode a float32 piece of a round: bf16 rounds to nearest, formats of few bits stochastically. Args: key:
        unique to this piece, so that it has the same bytes every time."""
        if form in DTYPES:
            return _payload(values_C, DTYPES[form])
        payload_B = codec.encode(values_C.detach(), codec.FORMATS[form], key=key)
        return memoryview(payload_B.numpy().data)

    def piece_of(self, payload: Payload, form: WireFormat, size: int) -> Tensor:
        """Decode a piece of a round, of `tensor_bytes(form, size)` bytes. Returns: float32 [size]."""
        if form in DTYPES:
            return torch.frombuffer(payload, dtype=DTYPES[form]).to(torch.float32)
        payload_B = torch.frombuffer(payload, dtype=torch.uint8)
        return codec.decode(payload_B, size, codec.FORMATS[form])

    def is_within(self, values_C: Tensor, largest: float) -> bool:
        """True if every number is finite and at most `largest` in magnitude. One pass without a copy."""
        if not values_C.numel():
            return True
        least, most = values_C.aminmax()  # NaN if any number is
        return bool((least >= -largest) & (most <= largest))

    def round_mean(self, mean_C: Tensor, form: WireFormat, key: tuple[int, int]) -> Payload | None:
        """Round in place to what others will read of it. Returns: its bytes in formats of few bits, where
        `piece_payload` would round it a second time, else None."""
        if form in DTYPES:
            if form != "fp32":
                mean_C.copy_(mean_C.to(DTYPES[form]))
            return None
        payload = self.piece_payload(mean_C, form, key)
        mean_C.copy_(self.piece_of(payload, form, mean_C.numel()))
        return payload

    def mean_payload(self, mean_C: Tensor) -> Payload:
        """Encode a piece of a reduced gradient, without loss."""
        return _payload(mean_C, self._mean_dtype)

    def mean_of(self, payload: Payload) -> Tensor:
        """float32 [bytes / `mean_bytes`]."""
        return torch.frombuffer(payload, dtype=self._mean_dtype).to(torch.float32)

    def meet(self, mean_N: Tensor, spans: Sequence[slice], others_n: Sequence[Tensor]) -> None:
        """Set each part `spans` of a reduced gradient, float32 [N], in place to the part at `spans[0]` plus all of
        `others_n`, float32 [n] each, rounded as `mean_payload` will send it."""
        total_n = mean_N[spans[0]].clone()
        for other_n in others_n:
            total_n += other_n
        total_n = total_n.to(self._mean_dtype).to(torch.float32)
        for span in spans:
            mean_N[span] = total_n

    def rounded(self, values_N: Tensor) -> Tensor:
        """bfloat16 [N] on the host, rounded to nearest, ties to even."""
        return self.on_host(values_N).to(torch.bfloat16)

    def empty_rounded(self, size: int) -> Tensor:
        """bfloat16 [size] on the host, uninitialized."""
        return torch.empty(size, dtype=torch.bfloat16)

    def rounded_payload(self, values_C: Tensor) -> Payload:
        """Return the bytes of numbers that are rounded to bf16 already."""
        return _payload(values_C, torch.bfloat16)

    def difference_payload(self, before_C: Tensor, after_C: Tensor) -> Payload:
        """Encode the difference between two versions in bf16, exactly (`difference.py`)."""
        return memoryview(difference(before_C, after_C).numpy().data)

    def changed(self, before_C: Tensor, payload: Payload) -> Tensor:
        """Apply a difference. Returns: the later version, bfloat16 [C]. Raises: ValueError: it is not a difference."""
        return changed(before_C, torch.frombuffer(payload, dtype=torch.uint8))

    def rounded_of(self, payload: Payload) -> Tensor:
        """bfloat16 [bytes / 2], without copying."""
        return torch.frombuffer(payload, dtype=torch.bfloat16)

    def layer_state(self, param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor) -> LayerState:
        return LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)


def _payload(values_C: Tensor, dtype: torch.dtype) -> Payload:
    narrow_C = values_C.detach().contiguous().to(dtype)
    return memoryview(narrow_C.view(torch.uint8).numpy().data).cast("B")


VECTORS = Vectors(torch.device("cpu"))
