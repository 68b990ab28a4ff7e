"""`make demo-tune` with real peers: a base and its adapters, smaller than anybody would want them."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from two_corpora import write_two_corpora

STEPS = 20
TUNE = Path(__file__).parents[2] / "bench" / "tune.py"


def test_what_is_held_out_is_in_neither_text(tmp_path: Path) -> None:
    corpora = write_two_corpora(tmp_path)
    folders = {"code": corpora.code, "prose": corpora.prose}
    texts = {kind: [path.read_text() for path in folder.iterdir()] for kind, folder in folders.items()}
    assert len(texts["code"]) > 300
    assert len(texts["prose"]) > 50
    for kind, held_out in zip(folders, corpora.held_out, strict=True):
        text = held_out.read_text()
        assert 10_000 < len(text.encode()) <= 64 * 1024
        part = text[len(text) // 2 :][:400]
        assert not [other for kind_texts in texts.values() for other in kind_texts if part in other], kind
    prose = texts["prose"][0].splitlines()
    assert not [code for code in texts["code"] if all(line in code for line in prose)], "the base saw the prose"


@pytest.mark.process
@pytest.mark.timeout(400)
def test_a_base_is_trained_tuned_and_evaluated_in_one_command(world: Any) -> None:
    report = world.folder / "tuned.json"
    argv = ("--spec", world.spec(STEPS), "--peers", 2, "--stages", 2, "--json", report)
    demo = world.shoal(*argv, script=TUNE)
    assert demo.wait(380) == 0, demo.output + demo.errors + world.logs()
    summary = json.loads(report.read_text())
    assert (summary["steps"], summary["tune_steps"]) == (STEPS, STEPS // 2)
    assert 0 < summary["trained"] < summary["parameters"]
    losses = [summary[when][text] for when in ("before", "after") for text in ("code", "prose")]
    assert all(1.0 < loss < 5.545 for loss in losses), "less than log 256, the loss of who knows nothing"
    assert summary["after"]["prose"] < summary["before"]["prose"], "tuned on prose"
    adapters, model = Path(summary["adapters"]), Path(summary["model"])
    assert (adapters / "adapter_model.safetensors").stat().st_size < (model / "model.safetensors").stat().st_size
    assert json.loads((adapters / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    for words in ("a base of", "documentation", "fine-tuned", f"{summary['after']['prose']:.3f}", str(adapters)):
        assert words in demo.output
    assert not world.ours()


@pytest.mark.process
@pytest.mark.timeout(240)
def test_ctrl_c_ends_it_with_all_its_peers(world: Any) -> None:
    demo = world.shoal("--spec", world.spec(100_000), "--peers", 2, "--stages", 2, script=TUNE)
    demo.line("step ")
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait(100) == 130, demo.output + demo.errors
    assert "stopped; all files so far are in" in demo.output
    assert demo.errors == ""
    assert not world.ours()
