from collections.abc import Mapping

import pytest
import torch

from shoal.peer.model.generate import generate
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.llama import Params, rotary_tables, run_layers
from shoal.protocol.spec import ModelSpec

MODEL = ModelSpec(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, context=8)
KEYS = all_layer_keys(MODEL)
PARAMS: Mapping[str, Params] = {key: layer_layout(MODEL, key).views(5 * init_layer(MODEL, key, 1)) for key in KEYS}


def test_greedy_text_is_the_likeliest_byte_each_time_beyond_the_context_too() -> None:
    text = b"def f(x):"
    got = generate(MODEL, PARAMS, text, 12, temperature=0)
    for byte in got:
        window_BT = torch.tensor([list(text[-8:])])
        logits_BTV = run_layers(MODEL, KEYS, PARAMS, window_BT, rotary_tables(MODEL))
        assert byte == int(logits_BTV[0, -1].argmax())
        text += bytes([byte])
    assert len(got) == 12


def test_the_seed_decides_the_sample() -> None:
    first, again, other = (generate(MODEL, PARAMS, b"x", 20, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_sampling_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generate(MODEL, PARAMS, b"x", 3, temperature=1.0)
    assert torch.equal(before, torch.get_rng_state())


def test_an_empty_prompt_and_a_vocabulary_beyond_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt"):
        generate(MODEL, PARAMS, b"", 1, temperature=1.0)
    with pytest.raises(ValueError, match="not bytes"):
        generate(ModelSpec(vocab_size=300), {}, b"x", 1, temperature=1.0)
