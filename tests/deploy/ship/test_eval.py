"""`shoal eval`: what it says is what a plain computation says, and it is kept for the model's card."""

import json
import math
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner, Result
from validating import validate

from shoal.deploy import cli
from shoal.deploy.run.run_text import load_own_corpus
from shoal.deploy.ship.export import export
from shoal.deploy.ship.found_snapshot import find_snapshots
from shoal.peer.disk.snapshot import write_snapshot
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.llama import rotary_tables, run_layers
from shoal.peer.model.state import LayerState
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec, TrainingSpec

MODEL = ModelSpec(dim=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=40, context=16)
KEYS = all_layer_keys(MODEL)
PARAMS = {key: layer_layout(MODEL, key).views(init_layer(MODEL, key, 1)) for key in KEYS}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def snapshot(tmp_path: Path, data: DataSpec) -> tuple[RunSpec, Path]:
    spec, _ = load_own_corpus(RunSpec(model=MODEL, data=data, training=TrainingSpec(validation_microbatches=3)))
    layers = {}
    for key in KEYS:
        param_N = init_layer(MODEL, key, 1)
        layers[key] = LayerState(param_N=param_N, moment1_N=param_N / 2, moment2_N=param_N.square())
    write_snapshot(LiveDisk(tmp_path / "peer"), PurePosixPath(), run="run7", version=5, layers=layers, spec=spec)
    return spec, tmp_path / "peer"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"the {i % 7}th fish of {i}"}) + "\n" for i in range(300)))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["eval", *map(str, arguments), "--device", "cpu"])


def said(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("masks", [None, True])
def test_validation_is_the_mean_over_all_that_training_never_saw(
    tmp_path: Path, text: Path, masks: bool | None
) -> None:
    spec, folder = snapshot(tmp_path, DataSpec(source=str(text), document_masks=masks, validation_fraction=0.1))
    (score,) = said(folder, "--data", text)["scores"]
    samples = load_own_corpus(spec)[1].samples(16, validates=True)
    counted = sum(samples.counted(number) for number in range(samples.count))
    assert (score["name"], score["tokens"]) == ("validation", counted)
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    # As the run itself validates, where that takes all samples.
    training = msgspec.structs.replace(spec.training, validation_microbatches=samples.count, microbatch_size=1)
    whole = msgspec.structs.replace(spec, training=training)
    assert score["loss"] == pytest.approx(validate(whole, load_own_corpus(spec)[1], PARAMS), abs=1e-5)
    (few,) = said(folder, "--data", text, "--samples", 2)["scores"]
    assert few["tokens"] == samples.counted(0) + samples.counted(samples.count // 2)


def test_each_source_has_a_score_of_its_own(tmp_path: Path, text: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": "yes" * (i % 3)}) + "\n" for i in range(90)))
    sources = [{"source": str(text)}, {"source": str(chat), "format": "chat"}]
    _, folder = snapshot(tmp_path, msgspec.convert({"sources": sources}, DataSpec))
    scores = said(folder, "--data", f"{text},{chat}")["scores"]
    assert [score["name"] for score in scores] == ["validation (lines.jsonl)", "validation (chat.jsonl)"]
    result = run(folder, "--data", text)
    assert result.exit_code == 2
    assert "this run reads 2 sources, and --data names 1" in result.output


@pytest.mark.parametrize("length", [3, 16, 17, 40, 41, 500])
def test_a_text_is_predicted_token_by_token_from_as_much_as_fits(tmp_path: Path, text: Path, length: int) -> None:
    _, folder = snapshot(tmp_path, DataSpec(source=str(text)))
    book = tmp_path / "book.txt"
    book.write_text(("the fish swims over größer hills " * 20)[:length])
    (score,) = said(folder, "--text", book)["scores"]
    tokens = [10, *book.read_bytes()]  # a document begins behind the end of another
    total = 0.0
    for place in range(1, len(tokens)):
        # Windows of 16 begin at 0, 8, 16 …; each token is asked of the first that has it as a target.
        start = 0 if place <= 16 else -(-(place - 16) // 8) * 8
        given = torch.tensor([tokens[start:place]])
        logits = run_layers(MODEL, KEYS, PARAMS, given, rotary_tables(MODEL))
        total -= float(logits[0, -1].log_softmax(-1)[tokens[place]].detach())
    assert score["tokens"] == len(tokens) - 1
    assert score["loss"] == pytest.approx(total / (len(tokens) - 1), abs=1e-5)
    assert score["bits_per_byte"] == pytest.approx(total / math.log(2) / len(book.read_bytes()), rel=1e-5)


def test_an_exported_folder_scores_as_its_snapshot(tmp_path: Path, text: Path) -> None:
    _, folder = snapshot(tmp_path, DataSpec(source=str(text)))
    export(find_snapshots(folder), tmp_path / "out")
    one, other = (said(where, "--text", text)["scores"][0]["loss"] for where in (folder, tmp_path / "out"))
    assert one == pytest.approx(other, abs=1e-6)


def test_what_was_found_is_in_the_card_of_that_version(tmp_path: Path, text: Path) -> None:
    _, folder = snapshot(tmp_path, DataSpec(source=str(text)))
    (score,) = said(folder, "--text", text)["scores"]
    said(folder, "--data", text)
    export(find_snapshots(folder), tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "shoal.json").read_text())
    assert [one["name"] for one in facts["evaluations"]] == ["lines.jsonl", "validation"]
    assert facts["evaluations"][0]["loss"] == score["loss"]
    assert f"| lines.jsonl | {score['loss']:.4g} |" in (tmp_path / "out" / "README.md").read_text()


def test_lines_for_people(tmp_path: Path, text: Path) -> None:
    _, folder = snapshot(tmp_path, DataSpec(source=str(text)))
    result = run(folder, "--data", text)
    assert result.stdout.startswith("run run7, version 5\n  validation: loss ")
    assert "nats a token, perplexity" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{peer}"], "the run's text is not known on this machine: name it with --data"),
        (["{peer}", "--text", "nowhere.txt"], "there is no file nowhere.txt to evaluate on"),
        (["{peer}", "--text", "{peer}"], "there is no file"),
        (["{peer}", "--data", "/nowhere"], "there is no file or folder /nowhere"),
        (["{out}"], "does not say what it was trained on: name a text with --text, or --tasks"),
        (["{empty}"], "there is no snapshot in"),
    ],
)
def test_what_cannot_be_evaluated_is_one_clear_line(
    tmp_path: Path, text: Path, arguments: list[str], sentence: str
) -> None:
    _, folder = snapshot(tmp_path, DataSpec(source=str(text)))
    export(find_snapshots(folder), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    places = {"peer": folder, "out": tmp_path / "out", "empty": tmp_path / "empty"}
    result = run(*(argument.format(**places) for argument in arguments))
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_tasks_without_the_library_are_one_clear_line(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = snapshot(tmp_path, DataSpec(source=str(text)))
    monkeypatch.setattr("shoal.deploy.ship.lm_tasks.importlib.util.find_spec", lambda name: None)
    result = run(folder, "--tasks", "arc_easy")
    assert result.exit_code == 2
    assert "--tasks needs the lm-eval library: pip install lm-eval" in result.stderr


# --- with lm-eval, where that is installed ---

CHOICES = """\
task: fish_choice
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc}]
"""
ROLLING = """\
task: fish_text
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
"""
WRITING = """\
task: fish_writing
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub", raising=False)
    folder = tmp_path / "tasks"
    folder.mkdir()
    return folder


def log_likelihood(before: bytes, after: bytes) -> float:
    tokens = list(before + after)[-17:]
    logits = run_layers(MODEL, KEYS, PARAMS, torch.tensor([tokens[:-1]]), rotary_tables(MODEL))[0].log_softmax(-1)
    asked = tokens[-len(after) :] if len(after) < len(tokens) else tokens[1:]
    return sum(float(logits[place - len(asked), token].detach()) for place, token in enumerate(asked))


def test_tasks_of_lm_eval_get_the_answers_that_the_model_gives(tmp_path: Path, text: Path, tasks: Path) -> None:
    _, folder = snapshot(tmp_path, DataSpec(source=str(text)))
    questions = [f"is {i} a fish and does it swim?" for i in range(12)]
    choices = ["no", "yes, maybe", "ask it"]
    likeliest = [
        max(range(3), key=lambda k: log_likelihood(question.encode(), b" " + choices[k].encode()))
        for question in questions
    ]
    rows = []
    for i, question in enumerate(questions):
        tokens = list(question.encode()[-10:])  # what leaves room for an answer of 6
        for _ in range(6):
            logits = run_layers(MODEL, KEYS, PARAMS, torch.tensor([tokens]), rotary_tables(MODEL))
            tokens.append(int(logits[0, -1].argmax()))
        written = bytes(tokens[10:]).decode(errors="replace").split("\n")[0]
        right = likeliest[i] if i % 4 else (likeliest[i] + 1) % 3  # three of four are right
        rows.append({"question": question, "choices": choices, "answer": right, "written": written})
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("choice", CHOICES), ("text", ROLLING), ("writing", WRITING)):
        (tasks / f"{name}.yaml").write_text(task.replace("QUESTIONS", str(tmp_path / "questions.jsonl")))
    found = said(folder, "--tasks", "fish_choice,fish_text,fish_writing", "--include", tasks)["scores"]
    values = {score["name"]: score["value"] for score in found}
    assert values["fish_choice acc"] == pytest.approx(0.75)
    said_bytes = [question.encode() for question in questions]
    total = sum(
        log_likelihood(b"\n" + one[:at], one[at : at + 16]) for one in said_bytes for at in range(0, len(one), 16)
    )
    bits = -total / math.log(2) / sum(map(len, said_bytes))
    assert values["fish_text bits_per_byte"] == pytest.approx(bits, abs=1e-5)
    assert values["fish_writing exact_match"] == pytest.approx(1.0)
    assert {score["examples"] for score in found} == {12}
    export(find_snapshots(folder), tmp_path / "out")
    of_folder = said(tmp_path / "out", "--tasks", "fish_choice,fish_text,fish_writing", "--include", tasks)["scores"]
    assert {score["name"]: score["value"] for score in of_folder} == pytest.approx(values, abs=1e-6)


def test_a_task_that_is_not_there_is_one_clear_line(tmp_path: Path, text: Path, tasks: Path) -> None:
    _, folder = snapshot(tmp_path, DataSpec(source=str(text)))
    result = run(folder, "--tasks", "no_such_task")
    assert result.exit_code == 2
    assert "lm-eval has no task 'no_such_task'" in result.stderr
