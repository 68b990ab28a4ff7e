"""Sample text from the model."""

from collections.abc import Mapping

import torch

from shoal.peer.model.layout import all_layer_keys
from shoal.peer.model.llama import Params, rotary_tables, run_layers
from shoal.protocol.spec import ModelSpec


@torch.inference_mode()
def generate(
    model: ModelSpec,
    params_by_key: Mapping[str, Params],
    prompt: bytes,
    num_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> bytes:
    """Continue `prompt` by `num_tokens` bytes and return only the continuation.

    Each token is one forward over the last `context` bytes. Temperature 0 takes the likeliest byte.
    Raises: ValueError: the prompt is empty, or the vocabulary is larger than bytes.
    """
    if not prompt:
        raise ValueError("the prompt must have at least one byte")
    if model.vocab_size > 256:
        raise ValueError(f"a vocabulary of {model.vocab_size} tokens is not bytes")
    keys = all_layer_keys(model)
    rotary = rotary_tables(model)
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(num_tokens):
        tokens_BT = torch.tensor([list(text[-model.context :])])
        logits_V = run_layers(model, keys, params_by_key, tokens_BT, rotary)[0, -1].float()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            weights_V = torch.softmax(logits_V / temperature, dim=-1)
            token = int(torch.multinomial(weights_V, 1, generator=generator))
        text.append(token)
    return bytes(text[len(prompt) :])
