"""Flat float32 vectors (gradient sums, layer states) between the device and the network: holds them in the host's
memory, cuts them into pieces, and turns pieces into bytes and back. A simulated peer that models its tensors replaces
`Vectors`.
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
"""Largest number that a member may contribute to a sum of gradients. float32 can hold the sum of the squares of 2^48
such numbers, so no member can make a mean that optimizers reject."""
REDUCED_MAX: Final = 2.0**44
"""Largest number accepted in a reduced gradient. Valid contributions never give more than a quarter of this limit, even
in a tied matrix (a rounded sum of two gradients)."""


class Vectors:
    """Makes, sends and receives flat float32 vectors.

    Args:
        host: the device on which vectors are summed and from which they are sent.
        chunk_bytes: the largest piece's size in bytes, as float32.
        sums: the formats in which the pieces of an all-reduce are sent.
    """

    def __init__(
        self, host: torch.device, *, chunk_bytes: int = BULK_CHUNK_BYTES, sums: Sequence[WireFormat] = ("fp32",)
    ) -> None:
        self.host = host
        self._recycling = Recycling()
        self.sums = tuple(sums)
        self.mean_form: WireFormat = "bf16" if self.sums == ("bf16",) else "fp32"
        """The format in which reduced gradients are sent. Nothing is lost: they were rounded to this format before."""
        self._mean_dtype = DTYPES[self.mean_form]
        self.mean_bytes = self._mean_dtype.itemsize
        """Bytes per number in `mean_form`."""
        self.narrows = self.sums != ("fp32",)
        """True if gradients are sent in a format other than float32, so that they must be converted first."""
        self.chunk = chunk_bytes // 4
        """The number of float32 elements in a piece of the largest size."""
        self.background_chunk = max(1, self.chunk // 4)
        """Elements of a piece sent at the lowest priority. They are few, since a frame under way delays an activation
        for the same peer (1 MiB takes 1.7 s at 5 Mbit/s), but not fewer, since each frame costs both ends a third of a
        millisecond (`protocol/live/MEASURED.md`)."""

    def empty(self, size: int) -> Tensor:
        """Return float32 [size], uninitialized."""
        return self._recycling.vector(size)

    def zeros(self, size: int) -> Tensor:
        return self.empty(size).zero_()

    def free(self) -> None:
        """Free the memory that is kept for reuse by later vectors."""
        self._recycling.clear()

    def on_host(self, values_N: Tensor) -> Tensor:
        """Return the vector on the host: `values_N` itself if it is on the host already."""
        return values_N.to(self.host)

    def copied(self, values_N: Tensor) -> Tensor:
        """Return a copy on the host."""
        return self.empty(values_N.numel()).copy_(values_N)

    def payload_of(self, values_C: Tensor) -> Payload:
        """Return the bytes of a float32 tensor, without copying."""
        return _payload(values_C, torch.float32)

    def values_of(self, payload: Payload) -> Tensor:
        """Return the bytes as float32 [bytes / 4], without copying."""
        return torch.frombuffer(payload, dtype=torch.float32)

    def piece_payload(self, values_C: Tensor, form: WireFormat, key: tuple[int, int]) -> Payload:
        """Encode a float32 piece of an all-reduce. bf16 rounds to nearest; formats of few bits round stochastically.
        Args: key: the seed of the stochastic rounding, unique to this piece, so that the piece always gets the same
        bytes."""
        if form in DTYPES:
            return _payload(values_C, DTYPES[form])
        payload_B = codec.encode(values_C.detach(), codec.FORMATS[form], key=key)
        return memoryview(payload_B.numpy().data)

    def piece_of(self, payload: Payload, form: WireFormat, size: int) -> Tensor:
        """Decode a piece of an all-reduce, which has `tensor_bytes(form, size)` bytes. Returns: float32 [size]."""
        if form in DTYPES:
            return torch.frombuffer(payload, dtype=DTYPES[form]).to(torch.float32)
        payload_B = torch.frombuffer(payload, dtype=torch.uint8)
        return codec.decode(payload_B, size, codec.FORMATS[form])

    def is_within(self, values_C: Tensor, largest: float) -> bool:
        """True if every number is finite and at most `largest` in magnitude. The check takes one pass and no copy."""
        if not values_C.numel():
            return True
        least, most = values_C.aminmax()  # NaN if any number is
        return bool((least >= -largest) & (most <= largest))

    def round_mean(self, mean_C: Tensor, form: WireFormat, key: tuple[int, int]) -> Payload | None:
        """Round a piece of a mean, in place, to the numbers that its receivers will decode. Returns: the encoded piece
        if the format has few bits (to encode the piece again would round it again); else None."""
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
        """Decode a piece of a reduced gradient. Returns: float32 [bytes / `mean_bytes`]."""
        return torch.frombuffer(payload, dtype=self._mean_dtype).to(torch.float32)

    def meet(self, mean_N: Tensor, spans: Sequence[slice], others_n: Sequence[Tensor]) -> None:
        """Write a tied matrix's full gradient into each slice `spans` of `mean_N`, float32 [N]: the sum of the slice
        `spans[0]` and all of `others_n`, float32 [n] each, rounded to the format of `mean_payload`."""
        total_n = mean_N[spans[0]].clone()
        for other_n in others_n:
            total_n += other_n
        total_n = total_n.to(self._mean_dtype).to(torch.float32)
        for span in spans:
            mean_N[span] = total_n

    def rounded(self, values_N: Tensor) -> Tensor:
        """Return bfloat16 [N] on the host, rounded to nearest, ties to even."""
        return self.on_host(values_N).to(torch.bfloat16)

    def empty_rounded(self, size: int) -> Tensor:
        """Return bfloat16 [size] on the host, uninitialized."""
        return torch.empty(size, dtype=torch.bfloat16)

    def rounded_payload(self, values_C: Tensor) -> Payload:
        """Return the bytes of numbers that have been rounded to bf16 before."""
        return _payload(values_C, torch.bfloat16)

    def difference_payload(self, before_C: Tensor, after_C: Tensor) -> Payload:
        """Encode the exact difference between two versions of bf16 weights (`difference.py`)."""
        return memoryview(difference(before_C, after_C).numpy().data)

    def changed(self, before_C: Tensor, payload: Payload) -> Tensor:
        """Apply a difference. Returns: the later version, bfloat16 [C]. Raises: ValueError: the payload is invalid."""
        return changed(before_C, torch.frombuffer(payload, dtype=torch.uint8))

    def rounded_of(self, payload: Payload) -> Tensor:
        """Return the bytes as bfloat16 [bytes / 2], without copying."""
        return torch.frombuffer(payload, dtype=torch.bfloat16)

    def layer_state(self, param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor) -> LayerState:
        return LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)


def _payload(values_C: Tensor, dtype: torch.dtype) -> Payload:
    narrow_C = values_C.detach().contiguous().to(dtype)
    return memoryview(narrow_C.view(torch.uint8).numpy().data).cast("B")


VECTORS = Vectors(torch.device("cpu"))
