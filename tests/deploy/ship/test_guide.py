"""`deploy/guides/fine-tuner.md`: each of its blocks is typed, in its order, by a host and two friends."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pages import bare, blocks, guide, sample_of, typed
from shoal.deploy.cli import app

GUIDE = guide("fine-tuner")
LINES = [bare(line) for line in typed(GUIDE, samples=False)]
SETUP = ["make setup", "source .venv/bin/activate"]
"""What sets up an environment: a test has one."""
STEPS = 12


def line_of(start: str) -> str:
    """The guide's line that begins so."""
    (found,) = [line for line in LINES if line.startswith(f"shoal {start}")]
    return found


@pytest.mark.process
@pytest.mark.timeout(560)
def test_friends_tune_a_model_as_the_guide_says(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    monkeypatch.chdir(world.folder)
    save_model(world.folder / "model", transformers)
    save_chats(world.folder / "chats.jsonl")
    done = []

    def types(start: str, *more: object, invite: str = "") -> Any:
        done.append(line_of(start))
        return world.shoal(*[invite if word == "INVITE" else word for word in shlex.split(done[-1])[1:]], *more)

    def does(start: str, *more: object) -> str:
        command = types(start, *more)
        assert command.wait(120) == 0, f"{start}: {command.errors}"
        return str(command.output)

    assert "embedding and head are one matrix and stay so" in does("import")
    run = world.folder / "run.toml"
    text = run.read_text()
    changes = {"steps": STEPS, "min_peers": 3, "microbatches_per_step": 4}
    for field, value in changes.items():
        text, found = re.subn(rf"^{field} = .*$", f"{field} = {value}", text, flags=re.M)
        assert found == 1, f"the guide or this test names a field {field} that the file has not"
    run.write_text(text)
    assert f"the run's {STEPS} steps" in " ".join(does("plan", "--seconds", "0.05").split())

    alone = ("--threads", 1, "--device", "cpu", "--listen", "127.0.0.1:0")
    host = types("host", *alone)
    invite = host.line("shoal join ").split()[-1]
    assert "data passes" in host.output
    friends = [types("join INVITE --base", *alone, invite=invite)]
    done.append("shoal join INVITE")
    friends.append(world.shoal("join", invite, *alone))
    assert host.wait(300) == 0, world.logs()
    assert [friend.wait(60) for friend in friends] == [0, 0], world.logs()

    assert "validation: loss" in does("eval")
    assert does("generate", "-n", 5).startswith("How do fish sleep?")
    assert "peft.PeftModel" in does("export my-adapters")
    assert "transformers" in does("export merged")
    assert set(done) == set(LINES) - set(SETUP)

    (program,) = [block for language, block in blocks(GUIDE) if language == "python"]
    found: dict[str, Any] = {}
    exec(program, found)
    assert isinstance(found["model"], peft.PeftModel)
    trained = [value.abs().max() for name, value in found["model"].named_parameters() if "lora_B" in name]
    assert trained
    assert all(value > 0 for value in trained), "as it begins, not as it was trained"


def test_the_sample_of_import_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_of("import")
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model", pytest.importorskip("transformers"))
    save_chats(tmp_path / "chats.jsonl")
    result = CliRunner().invoke(app, shlex.split(line)[1:], env={"XDG_STATE_HOME": str(tmp_path / "state")})
    assert result.exit_code == 0, result.output
    assert sample_of(line) == result.output.replace(f"{tmp_path}/", "").splitlines()


def save_chats(path: Path) -> None:
    chats = [{"prompt": f"How do {n} fish sleep?", "completion": f"{n} at a time, {n} hours."} for n in range(200)]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def save_model(folder: Path, transformers: Any) -> None:
    """A small Qwen of bytes, whose head is its embedding."""
    config = transformers.Qwen2Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
