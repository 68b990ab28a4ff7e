"""Sampling from the model, token by token.

The keys and values of past tokens are cached, so the next token takes a forward of one token. Once the text is longer
than the context, each new token shifts all positions, and the cached keys, rotated for the old positions, are useless:
the next token takes a forward of the last `context` tokens.

B samples (always 1)   T tokens   G key and value heads   K head size   V vocabulary
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shoal.peer.model.layout import all_layer_keys
from shoal.peer.model.llama import Params, rotary_tables, run_layers
from shoal.protocol.spec import ModelSpec


class Sampler:
    """Chooses tokens from logits.

    Args:
        temperature: 0 takes the likeliest token.
        top_p: in (0, 1]; draw only from the likeliest tokens that together have this probability.
        seed: the same seed gives the same tokens on the same machine.
    Raises: ValueError: temperature or top_p is out of range.
    """

    def __init__(self, *, temperature: float = 0.8, top_p: float = 1.0, seed: int = 0) -> None:
        if not temperature >= 0:
            raise ValueError(f"temperature must not be negative, is {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top-p must be in (0, 1], is {top_p}")
        self._temperature = temperature
        self._top_p = top_p
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits_V: Tensor) -> int:
        """Choose the next token from its logits, float32 [V] on the CPU."""
        if self._temperature == 0:
            return int(logits_V.argmax())
        weights_V = torch.softmax(logits_V / self._temperature, dim=-1)
        if self._top_p < 1:
            weights_V = self._nucleus(weights_V)
        return int(torch.multinomial(weights_V, 1, generator=self._generator))

    def _nucleus(self, weights_V: Tensor) -> Tensor:
        """Zero all weights but those of the fewest tokens that together have at least the probability `top_p`."""
        ordered_V, index_V = weights_V.sort(descending=True, stable=True)
        before_V = ordered_V.cumsum(-1) - ordered_V
        return torch.zeros_like(weights_V).scatter(-1, index_V, ordered_V.where(before_V < self._top_p, 0.0))


class KeysValues:
    """The keys and values of one layer, [B, G, T, K] each; memory for the whole context is allocated once."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._length = 0
        self._keys = self._values = torch.empty(0)

    def __call__(self, key_BGTK: Tensor, value_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        if self._length == 0:
            B, G, _, K = key_BGTK.shape
            self._keys, self._values = (key_BGTK.new_empty(B, G, self._context, K) for _ in range(2))
        start, self._length = self._length, self._length + key_BGTK.shape[2]
        self._keys[:, :, start : self._length] = key_BGTK
        self._values[:, :, start : self._length] = value_BGTK
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]


def stream(
    model: ModelSpec, params_by_key: Mapping[str, Params], prompt: Sequence[int], sampler: Sampler
) -> Iterator[int]:
    """Yield the tokens that continue `prompt`, without end, computed on the device of the parameters.
    Raises: ValueError: the prompt is empty."""
    if not prompt:
        raise ValueError("the prompt must have at least one token")
    return _stream(model, params_by_key, list(prompt), sampler)


def _stream(
    model: ModelSpec, params_by_key: Mapping[str, Params], tokens: list[int], sampler: Sampler
) -> Iterator[int]:
    keys = all_layer_keys(model)
    device = params_by_key[keys[-1]]["model.norm.weight"].device
    cos_TK, turned_TK = rotary_tables(model, device)
    remember = {key: KeysValues(model.context) for key in keys}
    known = 0  # tokens in the cache
    while True:
        # Not a decorator of this generator: between two tokens the mode would stay on in the caller.
        with torch.inference_mode():
            if len(tokens) <= model.context:
                new_BT = torch.tensor([tokens[known:]], device=device)
                rotary = cos_TK[known:], turned_TK[known:]
                known = len(tokens)
                logits_BTV = run_layers(model, keys, params_by_key, new_BT, rotary, remember)
            else:
                window_BT = torch.tensor([tokens[-model.context :]], device=device)
                logits_BTV = run_layers(model, keys, params_by_key, window_BT, (cos_TK, turned_TK))
            token = sampler.choose(logits_BTV[0, -1].float().cpu())
        tokens = [*tokens[-model.context :], token] if len(tokens) > model.context else [*tokens, token]
        yield token
