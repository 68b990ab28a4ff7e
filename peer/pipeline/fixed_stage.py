"""A copy of a stage at one fixed version, for inference: its output stays the same while the stage goes on training.

B samples   T tokens   D width   V vocabulary   K candidates
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.peer.data.labels import IGNORED
from shoal.peer.model import llama
from shoal.peer.model.documents import Documents
from shoal.peer.model.generate import KeysValues
from shoal.peer.model.layout import EMBED, HEAD
from shoal.peer.model.llama import Params
from shoal.peer.model.rotary import Rotary
from shoal.protocol.spec import ModelSpec


class FixedStage:
    """A stage with constant weights. While this object exists, the weights of its version stay in memory.

    Args: params: layer key -> its parameters, in `dtype`; rotary: tables for the whole context.
    """

    def __init__(
        self,
        model: ModelSpec,
        params: Mapping[str, Params],
        *,
        rotary: Rotary,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.device, self.dtype = device, dtype
        self._params, self._rotary = params, rotary
        self._keys = [key for key in params if key != HEAD]

    @property
    def has_head(self) -> bool:
        return HEAD in self._params

    @property
    def num_layers(self) -> int:
        return sum(key != EMBED for key in self._keys)

    def memory(self) -> dict[str, KeysValues]:
        """Return empty key and value caches for one inference session: layer key -> cache."""
        return {key: KeysValues(self.model.context) for key in self._keys if key != EMBED}

    def run(
        self,
        x: Tensor,
        *,
        position: int = 0,
        begins_BT: Tensor | None = None,
        memory: Mapping[str, KeysValues] | None = None,
    ) -> Tensor:
        """Run all layers but the head: tokens [B, T] or an activation [B, T, D] -> [B, T, D].

        Args:
            position: index of the first token; `memory` holds the tokens before it.
            begins_BT: True where a document begins (`Documents`); None: attention crosses documents.
            memory: the caches of `memory()`, which this call extends; None: nothing is cached.
        """
        x = x.to(self.device)
        if x.is_floating_point():
            x = x.to(self.dtype)
        documents, rotary = Documents.of(None if begins_BT is None else begins_BT.to(self.device), self._rotary)
        if documents is None:
            cos_TK, turned_TK = rotary
            rotary = cos_TK[position:], turned_TK[position:]
        return llama.run_layers(self.model, self._keys, self._params, x, rotary, memory, documents=documents)

    def log_likelihoods(self, y_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Score the targets; only at the last stage. Args: y_BTD: the output of `run`.

        Returns: on the CPU, the pair (log-likelihoods, float32 [B, T]; True if the target is the likeliest token, bool
        [B, T]). An IGNORED target gives 0 and True.
        """
        wanted = (targets_BT != IGNORED).to(self.device)
        x_ND, target_N = y_BTD[wanted], targets_BT.to(self.device)[wanted]
        value_N = x_ND.new_zeros(len(x_ND), dtype=torch.float32)
        likeliest_N = torch.ones_like(target_N, dtype=torch.bool)
        rows = max(1, (1 << 26) // (4 * self.model.vocab_size))  # at most 64 MiB of logits at a time
        for start in range(0, len(x_ND), rows):
            part = slice(start, start + rows)
            logit_NV = self._logits(x_ND[part])
            value_N[part] = logit_NV.log_softmax(-1).gather(1, target_N[part, None]).squeeze(1)
            likeliest_N[part] = logit_NV.argmax(-1) == target_N[part]
        value_BT, likeliest_BT = torch.zeros(targets_BT.shape), torch.ones(targets_BT.shape, dtype=torch.bool)
        value_BT[wanted.cpu()], likeliest_BT[wanted.cpu()] = value_N.cpu(), likeliest_N.cpu()
        return value_BT, likeliest_BT

    def candidates(self, y_1TD: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the K = `most` likeliest next tokens; only at the last stage. The result is on the CPU: (tokens, int64
        [K], in the order of the vocabulary; their logits, float32 [K]). Args: y_1TD: the output of `run`."""
        logit_V = self._logits(y_1TD[0, -1:])[0].cpu()
        if len(logit_V) <= most:
            return torch.arange(len(logit_V)), logit_V
        token_K = logit_V.topk(most).indices.sort().values
        return token_K, logit_V[token_K]

    def _logits(self, x_ND: Tensor) -> Tensor:
        return llama.head(self.model, self._params[HEAD], x_ND.unsqueeze(0))[0].float()
