"""Real peers are killed, replaced and suspended, and the run is whole all the same."""

from typing import Any

import pytest
from single_process import train

from shoal.peer.data.corpus import load_corpus
from shoal.protocol.toml.spec_file import load_spec

STEPS = 60
"""Time for a few faults, and each of them starts a process: 120 steps had twice as many."""


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_run_whose_peers_are_killed_and_suspended_learns_what_one_process_learns(world: Any) -> None:
    report = world.folder / "report.jsonl"
    chaos = ("--chaos", "--chaos-seed", 5, "--kill-every", 4, "--suspend-for", 6)
    spec_path = world.spec(STEPS, exact=True)
    demo = world.shoal("demo", "--spec", spec_path, "--peers", 6, "--stages", 2, "--json", report, *chaos)
    assert demo.wait(200) == 0, demo.output + world.logs()

    steps, faults, summary = world.report()
    kinds = [fault["kind"] for fault in faults]
    kills = kinds.count("kill") + kinds.count("kill_coordinator")
    assert kills >= 1, "it was over before anything happened"
    # The run may end in the tenth of a second between a kill and the start that follows it.
    unanswered = int(kinds[-1] in ("kill", "kill_coordinator"))
    assert kinds.count("start") + kinds.count("return") == kills - unanswered
    figures = summary["chaos"]
    assert (figures["kills"], figures["suspensions"]) == (kills, kinds.count("suspend"))

    assert summary["finished"]
    assert summary["rollbacks"] == 0, f"{faults}\n{world.coordination()}"
    assert [line["step"] for line in steps] == list(range(STEPS)), "a step's line died with somebody"
    spec = load_spec(spec_path)
    single = train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)
    assert max(abs(line["loss"] - step.loss) for line, step in zip(steps, single, strict=True)) < 1e-4
    assert summary["duplicates_share"] < 0.001
    assert (summary["given_up"], summary["dissenting"]) == (0, 0)
    assert (summary["failed"], figures["left_behind"]) == (0, 0), demo.output + world.logs()
    assert summary["loss_last"] < summary["loss_first"] - 0.5
    assert summary["sample"].startswith("def ")
    assert not world.ours()
