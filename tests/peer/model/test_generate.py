from collections.abc import Mapping
from itertools import islice
from typing import Any

import pytest
import torch
from written_bytes import generate

from shoal.peer.model.generate import Sampler, stream
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.llama import Params, Remember, rotary_tables, run_layers
from shoal.protocol.spec import ModelSpec

MODEL = ModelSpec(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, context=8)
KEYS = all_layer_keys(MODEL)
PARAMS: Mapping[str, Params] = {key: layer_layout(MODEL, key).views(init_layer(MODEL, key, 1)) for key in KEYS}


def test_greedy_text_is_the_likeliest_byte_each_time_beyond_the_context_too() -> None:
    text = b"def f(x):"
    got = generate(MODEL, PARAMS, text, 12, temperature=0)
    for byte in got:
        window_BT = torch.tensor([list(text[-8:])])
        logits_BTV = run_layers(MODEL, KEYS, PARAMS, window_BT, rotary_tables(MODEL))
        assert byte == int(logits_BTV[0, -1].argmax())
        text += bytes([byte])
    assert len(got) == 12


def test_a_model_with_experts_writes_with_what_it_remembers_too() -> None:
    model = ModelSpec(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, context=8, num_experts=3)
    params = {key: layer_layout(model, key).views(init_layer(model, key, 1)) for key in KEYS}
    text = b"def"
    got = generate(model, params, text, 8, temperature=0)
    for byte in got:
        logits_BTV = run_layers(model, KEYS, params, torch.tensor([list(text[-8:])]), rotary_tables(model))
        assert byte == int(logits_BTV[0, -1].argmax())
        text += bytes([byte])


def test_the_seed_decides_the_sample() -> None:
    first, again, other = (generate(MODEL, PARAMS, b"x", 20, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_sampling_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generate(MODEL, PARAMS, b"x", 3, temperature=1.0)
    assert torch.equal(before, torch.get_rng_state())


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt"):
        generate(MODEL, PARAMS, b"", 1, temperature=1.0)


def test_what_is_remembered_gives_the_logits_of_the_whole_text() -> None:
    remembered: dict[str, list[torch.Tensor]] = {key: [] for key in KEYS}

    def remember(key: str) -> Remember:
        def add(keys_BGTK: torch.Tensor, values_BGTK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            remembered[key].append(torch.stack((keys_BGTK, values_BGTK)))
            both = torch.cat(remembered[key], dim=-2)
            return both[0], both[1]

        return add

    tokens_BT = torch.tensor([list(b"abcdefgh")])
    cos_TK, sin_TK = rotary_tables(MODEL)
    whole_BTV = run_layers(MODEL, KEYS, PARAMS, tokens_BT, (cos_TK, sin_TK))
    by_layer = {key: remember(key) for key in KEYS}
    steps = [slice(0, 3), *(slice(i, i + 1) for i in range(3, 8))]
    parts = [run_layers(MODEL, KEYS, PARAMS, tokens_BT[:, s], (cos_TK[s], sin_TK[s]), by_layer) for s in steps]
    assert torch.allclose(torch.cat(parts, dim=1), whole_BTV, atol=1e-5)


def test_a_forward_within_the_context_takes_one_token_and_beyond_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def counting(*arguments: Any) -> torch.Tensor:
        lengths.append(arguments[3].shape[1])
        return run_layers(*arguments)

    monkeypatch.setattr("shoal.peer.model.generate.run_layers", counting)
    generate(MODEL, PARAMS, b"abc", 8, temperature=0)
    assert lengths == [3, 1, 1, 1, 1, 1, 8, 8]


def test_top_p_draws_only_from_the_likeliest() -> None:
    logits_V = torch.tensor([0.5, 0.05, 0.3, 0.15]).log()
    drawn = {p: {chosen(logits_V, p, seed) for seed in range(60)} for p in (0.01, 0.5, 0.79, 0.81, 1.0)}
    assert drawn == {0.01: {0}, 0.5: {0}, 0.79: {0, 2}, 0.81: {0, 2, 3}, 1.0: {0, 1, 2, 3}}


def chosen(logits_V: torch.Tensor, top_p: float, seed: int) -> int:
    return Sampler(temperature=1.0, top_p=top_p, seed=seed).choose(logits_V)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top-p"), ({"top_p": 1.1}, "top-p")],
)
def test_settings_out_of_range_are_refused(arguments: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Sampler(**arguments)  # type: ignore[arg-type]


def test_a_stream_of_a_larger_vocabulary_ends_where_the_reader_stops() -> None:
    model = ModelSpec(vocab_size=700, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24, context=8)
    params = {key: layer_layout(model, key).views(init_layer(model, key, 1)) for key in all_layer_keys(model)}
    tokens = list(islice(stream(model, params, [699, 3], Sampler(temperature=2.0)), 9))
    assert len(tokens) == 9
    assert max(tokens) > 255
