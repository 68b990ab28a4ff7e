"""The network daemons of peers are killed in the middle of a run: their processes live, and the run is whole."""

from pathlib import Path
from typing import Any

import psutil
import pytest
from single_process import train

from shoal.peer.data.corpus import load_corpus
from shoal.protocol.toml.spec_file import load_spec

STEPS = 50


def daemons(folder: Path) -> list[psutil.Process]:
    """Of the peers below `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name().startswith("p2pd") and str(folder) in str(process.environ().get("XDG_STATE_HOME")):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found, key=lambda process: process.create_time())


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_run_whose_peers_lose_their_network_daemons_learns_what_one_process_learns(world: Any) -> None:
    report, spec_path = world.folder / "report.jsonl", world.spec(STEPS, exact=True)
    demo = world.shoal("demo", "--spec", spec_path, "--peers", 4, "--stages", 2, "--json", report)
    for step, which in ((5, -1), (20, 0)):  # the youngest, then the oldest: that of the host
        world.until(lambda step=step: report.exists() and f'{{"step":{step},' in report.read_text(), timeout_s=120)
        daemons(world.folder)[which].kill()
    assert demo.wait(200) == 0, demo.output + world.logs()

    steps, _, summary = world.report()
    assert summary["finished"]
    assert [line["step"] for line in steps] == list(range(STEPS)), demo.output + world.logs()
    spec = load_spec(spec_path)
    single = train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)
    assert max(abs(line["loss"] - step.loss) for line, step in zip(steps, single, strict=True)) < 1e-4
    assert (summary["given_up"], summary["dissenting"], summary["duplicates"]) == (0, 0, 0)
    assert not world.ours()
