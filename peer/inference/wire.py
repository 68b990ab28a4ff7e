"""Requests to the model as bytes, and what is checked of them before anything is computed.

Tokens are int32, activations float32, or bfloat16 where every member computes in it (`training.compute = "bf16"`), so
that the answer does not depend on how thin the training's wire is. Sizes follow from the header, which follows from the
run spec.

B rows   T tokens   D width
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.peer.data.labels import IGNORED
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import INFERENCE_TOKENS_MAX
from shoal.protocol.messages import InferenceInput, InferenceRequest
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one stage is given."""

    x: Tensor
    """int64 tokens [B, T], or a float activation [B, T, D]; on the CPU."""
    targets_BT: Tensor | None
    begins_BT: Tensor | None


class InferenceWire:
    """Both ends of a stage's way, of one run."""

    def __init__(self, spec: RunSpec) -> None:
        self._model = spec.model
        self._dtype = torch.bfloat16 if spec.training.compute == "bf16" else torch.float32

    def check_request(self, request: InferenceRequest, source: PeerID) -> int:
        """Returns: T. Raises: RemoteError: it is none that this run's model answers."""
        rows, num = request.rows, len(request.tokens)
        length, rest = divmod(num, TOKEN_BYTES * max(1, rows))
        if rows < 1 or length < 1 or rest or rows * length > INFERENCE_TOKENS_MAX:
            raise RemoteError(source, f"asks about {rows} rows in {num} bytes")
        self._check_place(rows, length, request.position, request.session, source)
        if len(request.targets) not in (0, num) or len(request.begins) not in (0, rows * length):
            raise RemoteError(source, "asks with other numbers of tokens, targets and beginnings")
        if request.begins and request.position:
            raise RemoteError(source, "asks about documents in the middle of a session")
        self._check_known(request.tokens, source)
        self._check_known(request.targets, source, ignored=True)
        if not request.targets and rows > 1:
            raise RemoteError(source, f"asks what follows {rows} rows at once")
        return length

    def check_input(self, meta: InferenceInput, payload: Payload, source: PeerID) -> None:
        """Raises: RemoteError: `source` sent another number of bytes than its header says."""
        if meta.rows < 1 or meta.length < 1 or meta.rows * meta.length > INFERENCE_TOKENS_MAX:
            raise RemoteError(source, f"asks about {meta.rows} rows of {meta.length} tokens")
        self._check_place(meta.rows, meta.length, meta.position, meta.session, source)
        tokens = meta.rows * meta.length
        size = sum(self._sizes(meta, tokens))
        if len(payload) != size:
            raise RemoteError(source, f"sent {len(payload):,} bytes for a question of {size:,}")
        x_bytes, targets_bytes, _ = self._sizes(meta, tokens)
        at = memoryview(payload)
        if meta.stage == 0:
            self._check_known(at[:x_bytes], source)
        self._check_known(at[x_bytes : x_bytes + targets_bytes], source, ignored=True)

    def encode(self, x: Tensor, targets_BT: Tensor | None, begins_BT: Tensor | None) -> bytearray:
        """A question for the next stage, or of tokens for the first."""
        x = x.to(self._dtype) if x.is_floating_point() else x.to(torch.int32)
        parts = [x]
        if targets_BT is not None:
            parts.append(targets_BT.to(torch.int32))
        if begins_BT is not None:
            parts.append(begins_BT.to(torch.uint8))
        payload = bytearray()
        for part in parts:
            payload += part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return payload

    def decode(self, meta: InferenceInput, payload: Payload) -> Question:
        """What `encode` has made, and `check_input` has checked."""
        B, T = meta.rows, meta.length
        x_bytes, targets_bytes, _ = self._sizes(meta, B * T)
        at = memoryview(payload)
        dtype = torch.int32 if meta.stage == 0 else self._dtype
        x = torch.frombuffer(bytearray(at[:x_bytes]), dtype=dtype)
        targets, begins = at[x_bytes : x_bytes + targets_bytes], at[x_bytes + targets_bytes :]
        return Question(
            x=x.view(B, T).long() if meta.stage == 0 else x.view(B, T, self._model.dim),
            targets_BT=torch.frombuffer(bytearray(targets), dtype=torch.int32).view(B, T).long() if targets else None,
            begins_BT=torch.frombuffer(bytearray(begins), dtype=torch.uint8).view(B, T).bool() if begins else None,
        )

    def _check_known(self, tokens: Payload, source: PeerID, *, ignored: bool = False) -> None:
        """Raises: RemoteError: the model does not know them all. An index out of range costs a GPU its context."""
        token_N = np.frombuffer(tokens, np.int32)
        known_N = (token_N >= 0) & (token_N < self._model.vocab_size)
        if not (known_N | (token_N == IGNORED) if ignored else known_N).all():
            raise RemoteError(source, f"names a token that the model does not know: it has {self._model.vocab_size}")

    def _check_place(self, rows: int, length: int, position: int, session: int, source: PeerID) -> None:
        if position < 0 or position + length > self._model.context:
            raise RemoteError(
                source, f"asks about tokens up to {position + length}; the context is {self._model.context}"
            )
        if session and rows > 1:
            raise RemoteError(source, f"begins a session with {rows} rows")
        if position and not session:
            raise RemoteError(source, "goes on behind tokens of no session")

    def _sizes(self, meta: InferenceInput, tokens: int) -> tuple[int, int, int]:
        """Bytes of tokens or activation, of targets, of beginnings."""
        of_token = TOKEN_BYTES if meta.stage == 0 else self._dtype.itemsize * self._model.dim
        return tokens * of_token, TOKEN_BYTES * tokens * meta.has_targets, tokens * meta.has_begins
