"""A text of bytes, continued by the model."""

from collections.abc import Mapping
from itertools import islice

from shoal.peer.model.generate import Sampler, stream
from shoal.peer.model.llama import Params
from shoal.protocol.spec import ModelSpec


def generate(
    model: ModelSpec, params: Mapping[str, Params], prompt: bytes, num_tokens: int, *, temperature: float, seed: int = 0
) -> bytes:
    """Return the first `num_tokens` bytes after `prompt`."""
    sampler = Sampler(temperature=temperature, seed=seed)
    return bytes(islice(stream(model, params, prompt, sampler), num_tokens))
