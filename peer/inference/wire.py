"""Encodes inference requests as bytes, and checks them before anything is computed.

Tokens are int32. Activations are float32, or bfloat16 if the run computes in bfloat16, whatever format training sends.
In a model with a subspace, each token is sent with its k coordinates in the subspace in place of its activation. Sizes
follow from the header, which is checked against the run spec.

B rows   T tokens   D width   W numbers sent for a token: D, or the k of a subspace
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.peer.data.labels import IGNORED
from shoal.peer.model.subspace import Subspace
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import INFERENCE_TOKENS_MAX
from shoal.protocol.messages import InferenceInput, InferenceRequest
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """The decoded input of one stage."""

    x: Tensor
    """int64 tokens [B, T], or a float activation [B, T, D]; on the CPU."""
    tokens_BT: Tensor | None
    """int64, at stage 0 and at all stages of a subspace model; else None."""
    targets_BT: Tensor | None
    begins_BT: Tensor | None


def bytes_of(*tensors: Tensor) -> bytearray:
    """Return the bytes of all tensors, one after the other."""
    parts = (tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return bytearray().join(parts)


class InferenceWire:
    """The encoding between the stages of one run."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec, self._model = spec, spec.model
        self._dtype = torch.bfloat16 if spec.training.compute == "bf16" else torch.float32

    def check_request(self, request: InferenceRequest, source: PeerID) -> int:
        """Check a request. Returns: T, the tokens in each row. Raises: RemoteError: the request is invalid."""
        rows, num = request.rows, len(request.tokens)
        length, rest = divmod(num, TOKEN_BYTES * max(1, rows))
        if rows < 1 or length < 1 or rest or rows * length > INFERENCE_TOKENS_MAX:
            raise RemoteError(source, f"asks about {rows} rows in {num} bytes")
        self._check_place(rows, length, request.position, request.session, source)
        if len(request.targets) not in (0, num) or len(request.begins) not in (0, rows * length):
            raise RemoteError(source, "asks with different numbers of tokens, targets and beginnings")
        if request.begins and request.position:
            raise RemoteError(source, "asks about documents in the middle of a session")
        self._check_known(request.tokens, source)
        self._check_known(request.targets, source, ignored=True)
        if not request.targets and rows > 1:
            raise RemoteError(source, f"asks what follows {rows} rows at once")
        return length

    def check_input(self, meta: InferenceInput, payload: Payload, source: PeerID) -> None:
        """Check a stage's input. Raises: RemoteError: the header or a token is invalid, or the payload's size is not
        the one that follows from the header."""
        if meta.rows < 1 or meta.length < 1 or meta.rows * meta.length > INFERENCE_TOKENS_MAX:
            raise RemoteError(source, f"asks about {meta.rows} rows of {meta.length} tokens")
        self._check_place(meta.rows, meta.length, meta.position, meta.session, source)
        tokens = meta.rows * meta.length
        size = sum(self._sizes(meta, tokens))
        if len(payload) != size:
            raise RemoteError(source, f"sent {len(payload):,} bytes for a request of {size:,}")
        _, token_part, target_part, _ = self._parts(meta, payload)
        self._check_known(token_part, source)
        self._check_known(target_part, source, ignored=True)

    def encode(self, x_BTD: Tensor, question: StageInput) -> bytearray:
        """Encode our result as the next stage's input. Args: x_BTD: the output of our layers; question: our own input,
        from which targets, beginnings of documents and, in a subspace model, tokens are passed on."""
        parts = [x_BTD.to(self._dtype)]
        if self._model.subspace:
            tokens_BT = question.tokens_BT
            assert tokens_BT is not None, "a question of a subspace model without its tokens"
            subspace = Subspace.of(self._spec, x_BTD.device)
            coordinates_BTK = subspace.coordinates(x_BTD, tokens_BT.to(x_BTD.device))
            parts = [coordinates_BTK.to(self._dtype), tokens_BT.to(torch.int32)]
        if question.targets_BT is not None:
            parts.append(question.targets_BT.to(torch.int32))
        if question.begins_BT is not None:
            parts.append(question.begins_BT.to(torch.uint8))
        return bytes_of(*parts)

    def decode(self, meta: InferenceInput, payload: Payload) -> StageInput:
        """Decode an input that `check_input` has accepted: an output of `encode`, or a client's request."""
        B, T = meta.rows, meta.length
        x, tokens, targets, begins = self._parts(meta, payload)
        tokens_BT = torch.frombuffer(bytearray(tokens), dtype=torch.int32).view(B, T).long() if tokens else None
        return StageInput(
            x=self._activation(meta, x, tokens_BT),
            tokens_BT=tokens_BT,
            targets_BT=torch.frombuffer(bytearray(targets), dtype=torch.int32).view(B, T).long() if targets else None,
            begins_BT=torch.frombuffer(bytearray(begins), dtype=torch.uint8).view(B, T).bool() if begins else None,
        )

    def _activation(self, meta: InferenceInput, x: Payload, tokens_BT: Tensor | None) -> Tensor:
        if meta.stage == 0:
            assert tokens_BT is not None, "a question without tokens"
            return tokens_BT
        x_BTW = torch.frombuffer(bytearray(x), dtype=self._dtype).view(meta.rows, meta.length, -1)
        if not self._model.subspace:
            return x_BTW
        assert tokens_BT is not None, "a question of a subspace model without its tokens"
        return Subspace.of(self._spec, x_BTW.device).restored(x_BTW.float(), tokens_BT)

    def _check_known(self, tokens: Payload, source: PeerID, *, ignored: bool = False) -> None:
        """Check tokens. Raises: RemoteError: a token is outside the vocabulary; as an index it would destroy a GPU's
        context. Args: ignored: also accept IGNORED, which marks a target that is not scored."""
        token_N = np.frombuffer(tokens, np.int32)
        known_N = (token_N >= 0) & (token_N < self._model.vocab_size)
        if not (known_N | (token_N == IGNORED) if ignored else known_N).all():
            raise RemoteError(source, f"names a token outside the vocabulary of {self._model.vocab_size}")

    def _check_place(self, rows: int, length: int, position: int, session: int, source: PeerID) -> None:
        if position < 0 or position + length > self._model.context:
            raise RemoteError(
                source, f"asks about tokens up to {position + length}; the context is {self._model.context}"
            )
        if session and rows > 1:
            raise RemoteError(source, f"begins a session with {rows} rows")
        if position and not session:
            raise RemoteError(source, "continues tokens without a session")

    def _parts(self, meta: InferenceInput, payload: Payload) -> list[memoryview]:
        """Split a payload into the parts that `_sizes` gives; a missing part is empty."""
        at, parts = memoryview(payload), []
        for size in self._sizes(meta, meta.rows * meta.length):
            parts.append(at[:size])
            at = at[size:]
        return parts

    def _sizes(self, meta: InferenceInput, tokens: int) -> tuple[int, int, int, int]:
        """Return the bytes of each part: activation (or coordinates), tokens, targets, beginnings of documents."""
        of_token = 0 if meta.stage == 0 else self._dtype.itemsize * self._model.written_width
        names_tokens = meta.stage == 0 or self._model.subspace > 0
        of_tokens = TOKEN_BYTES * tokens * names_tokens
        return tokens * of_token, of_tokens, TOKEN_BYTES * tokens * meta.has_targets, tokens * meta.has_begins
