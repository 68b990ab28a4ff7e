"""What a person sees of a snapshot that writes."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from written_bytes import generate

from shoal.deploy import cli
from shoal.deploy.manners import device
from shoal.deploy.ship import generate as writing
from shoal.deploy.ship.generate import fit_for_terminal
from shoal.deploy.ship.loaded_model import LoadedModel, load_model
from shoal.peer.data.tokenizer import FileTokenizer, train_bpe
from shoal.peer.disk.snapshot import write_snapshot
from shoal.peer.model.generate import Sampler
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.state import LayerState
from shoal.protocol.errors import LocalError
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec, SwarmSpec

TEXTS = [f"the {i % 7}th fish of shoal {i % 13} schwimmt größer\n" for i in range(200)]
MODEL = ModelSpec(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, context=16)
BPE_MODEL = ModelSpec(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, context=16, vocab_size=290)


def layer(model: ModelSpec, key: str) -> torch.Tensor:
    return init_layer(model, key, 1)


def write(folder: Path, model: ModelSpec, data: DataSpec | None = None) -> Path:
    layers = {}
    for key in all_layer_keys(model):
        param_N = layer(model, key)
        layers[key] = LayerState(param_N=param_N, moment1_N=param_N / 2, moment2_N=param_N.square())
    spec = RunSpec(model=model, data=data or DataSpec(), swarm=SwarmSpec(stages=2))
    write_snapshot(LiveDisk(folder), PurePosixPath(), run="run", version=7, layers=layers, spec=spec)
    return folder


def shoal(*arguments: object, stdin: str | None = None) -> str:
    result = CliRunner().invoke(cli.app, ["generate", *map(str, arguments)], input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_writes_what_the_model_does(tmp_path: Path) -> None:
    folder = write(tmp_path, MODEL)
    params = {key: layer_layout(MODEL, key).views(layer(MODEL, key)) for key in all_layer_keys(MODEL)}
    expected = generate(MODEL, params, b"fish", 30, temperature=0.7, seed=5).decode(errors="replace")
    options = ("--temperature", 0.7, "--top-p", 1, "--seed", 5, "--device", "cpu", "--json", "-n", 30)
    said = json.loads(shoal(folder, "--prompt", "fish", *options))
    assert said == {"run": "run", "version": 7, "seed": 5, "prompt": "fish", "text": said["text"]}
    assert expected.startswith(said["text"])
    assert len(expected) - len(said["text"]) <= 1  # a character that its last byte only begins
    assert json.loads(shoal(folder, "--prompt", "-", *options, stdin="fish"))["text"] == said["text"]


def test_no_more_threads_than_the_containers_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(device, "processors", lambda: 1.5)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    folder = write(tmp_path, MODEL)
    shoal(folder, "--prompt", "fish", "-n", 1, "--device", "cpu")
    shoal_eval = CliRunner().invoke(cli.app, ["eval", str(folder), "--text", __file__, "--device", "cpu"])
    assert shoal_eval.exit_code == 0, shoal_eval.output
    assert given == [1, 1]


def test_a_person_sees_the_prompt_and_the_text_and_a_pipe_gets_nothing_else(tmp_path: Path) -> None:
    folder = write(tmp_path, MODEL)
    options = ["--prompt", "fish", "--seed", "5", "--device", "cpu", "-n", "30"]
    text = json.loads(shoal(folder, *options, "--json"))["text"]
    result = CliRunner().invoke(cli.app, ["generate", str(folder), *options])
    assert result.stdout == f"fish{text}\n"
    assert result.stderr.startswith("run run, version 7, seed 5: 30 tokens, ")


def test_without_a_seed_two_texts_differ_and_each_says_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path, MODEL)
    one, other = (json.loads(shoal(folder, "--json", "--device", "cpu", "-n", 20)) for _ in range(2))
    assert one["seed"] != other["seed"]
    assert one["text"] != other["text"]


def test_a_text_ends_where_the_model_ends_it(tmp_path: Path) -> None:
    vocabulary = train_bpe(TEXTS, 290)
    (tmp_path / "tokenizer.json").write_bytes(vocabulary)
    end = FileTokenizer(vocabulary, name="bpe").end_of_text
    write(tmp_path / "peer", BPE_MODEL, DataSpec(tokenizer=str(tmp_path / "tokenizer.json")))
    loaded = load_model(tmp_path / "peer", device=torch.device("cpu"))

    class Ending:
        """Chooses two tokens, then the end."""

        def __init__(self) -> None:
            (tokens,) = loaded.tokenizer.encode(["fish"])
            self._tokens = iter([*tokens.tolist(), end])

        def choose(self, logits_V: torch.Tensor) -> int:
            assert logits_V.shape == (290,)
            return next(self._tokens)  # type: ignore[return-value]

    assert "".join(writing.write(loaded, "the ", 50, Ending())) == "fish"  # type: ignore[arg-type]
    assert len(list(writing.write(loaded, "", 3, Sampler(seed=1)))) <= 3  # begins a document of its own


class Saying:
    """Chooses these tokens, one after the other."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)

    def choose(self, logits_V: torch.Tensor) -> int:
        return next(self._tokens)


TURNS = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def chat_folder(folder: Path) -> tuple[Path, FileTokenizer]:
    """A vocabulary as Llama 3 has one: a turn ends with another token than a text."""
    vocabulary = json.loads(train_bpe(TEXTS, 286))
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for number, content in enumerate(("<|turn|>", "<|eot_id|>", "<|stop|>", "<|other|>")):
        vocabulary["added_tokens"].append({"id": 286 + number, "content": content, **special})
        vocabulary["model"]["vocab"][content] = 286 + number
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    (folder / "chat_template.jinja").write_text(TURNS)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder / "tokenizer.json", FileTokenizer((folder / "tokenizer.json").read_bytes(), name="chat")


def test_a_model_that_has_learnt_chats_is_asked_as_its_template_does_and_stops_where_its_turn_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokenizer = chat_folder(tmp_path / "model")
    write(tmp_path / "peer", BPE_MODEL, DataSpec(tokenizer=str(path), format="chat"))
    loaded = load_model(tmp_path / "peer", device=torch.device("cpu"))
    asked: list[str] = []

    def stream(self: object, prompt: list[int], sampler: Saying) -> Iterator[int]:
        asked.append(tokenizer.decode(prompt))
        while True:
            yield sampler.choose(torch.empty(0))

    monkeypatch.setattr(LoadedModel, "stream", stream)
    answer = [*tokenizer.encode(["fish"])[0].tolist(), *tokenizer.encode(["<|eot_id|> more"], special=True)[0].tolist()]
    manner = writing.manner_of(loaded, chat=None)
    assert "".join(writing.write(loaded, "the", 50, Saying(answer), manner)) == "fish"  # type: ignore[arg-type]
    assert asked == ["<|turn|>user\nthe<|eot_id|><|turn|>assistant\n"]
    raw = writing.manner_of(loaded, chat=False)
    assert "".join(writing.write(loaded, "the", 50, Saying(answer), raw)) == "fish"  # type: ignore[arg-type]
    assert asked[1] == "the"
    with pytest.raises(LocalError, match="say what to ask it with --prompt"):
        writing.write(loaded, "", 5, Sampler(seed=1), manner)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", {"eos_token_id": 288}),
        ("generation_config.json", {"eos_token_id": [289, 288]}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|stop|>"}}),
    ],
)
def test_a_text_ends_at_the_tokens_that_the_models_files_name(tmp_path: Path, name: str, says: dict[str, Any]) -> None:
    path, tokenizer = chat_folder(tmp_path / "model")
    (path.parent / name).write_text(json.dumps(says))
    write(tmp_path / "peer", BPE_MODEL, DataSpec(tokenizer=str(path)))
    loaded = load_model(tmp_path / "peer", device=torch.device("cpu"))
    said = [*tokenizer.encode(["fish"])[0].tolist(), 288]
    assert "".join(writing.write(loaded, "the ", len(said) + 5, Saying(said))) == "fish"  # type: ignore[arg-type]


def test_bytes_end_a_turn_letter_by_letter(tmp_path: Path) -> None:
    write(tmp_path, MODEL, DataSpec(format="chat"))
    loaded = load_model(tmp_path, device=torch.device("cpu"))
    said = Saying(list(b"a <|im_fish<|im_end|>more"))
    assert "".join(writing.write(loaded, "the ", 50, said)) == "a <|im_fish"  # type: ignore[arg-type]
    cut = Saying(list(b"fish <|im"))
    assert "".join(writing.write(loaded, "the ", 9, cut)) == "fish <|im"  # type: ignore[arg-type]


def test_a_terminal_gets_no_commands_from_a_model() -> None:
    assert fit_for_terminal("a\x1b[2J\tü\r\n\x07€") == "a?[2J\tü?\n?€"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("/nowhere",), "there is no file or folder /nowhere"),
        (("SNAPSHOT", "--top-p", 0), "top-p must be in"),
        (("SNAPSHOT", "--device", "gpu7"), "shoal computes on cpu"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: tuple[object, ...], sentence: str) -> None:
    folder = write(tmp_path, MODEL)
    words = [str(folder) if word == "SNAPSHOT" else str(word) for word in arguments]
    result = CliRunner().invoke(cli.app, ["generate", *words])
    assert result.exit_code == cli.EXIT_USER_ERROR
    (line,) = result.stderr.splitlines()
    assert sentence in line
