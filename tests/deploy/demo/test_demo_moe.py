"""Real peers share the experts of a mixture; who holds the busiest is killed, and the run loses nothing."""

from typing import Any

import pytest

STEPS = 40
MICROBATCHES = 12
"""Of a step: work for three. With four, two devices end a step as soon as three, and the third only stands by."""
EXPERTS = """
num_experts = 4
router_aux_loss = 0.0
[data]"""


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_killed_holder_of_experts_costs_no_step(world: Any) -> None:
    spec_path = world.spec(STEPS)
    text = spec_path.read_text().replace("[data]", EXPERTS).replace("[swarm]", "[swarm]\nexpert_slots = 2")
    spec_path.write_text(text.replace("microbatches_per_step = 4", f"microbatches_per_step = {MICROBATCHES}"))
    report = world.folder / "report.jsonl"
    demo = world.shoal("demo", "--moe", "--spec", spec_path, "--peers", 3, "--stages", 1, "--json", report)
    assert demo.wait(200) == 0, demo.output + world.logs()

    steps, faults, summary = world.report()
    assert [fault["kind"].partition("_")[0] for fault in faults] == ["kill"]
    assert faults[0]["expert"] in range(4)
    assert summary["finished"]
    assert [line["step"] for line in steps] == list(range(STEPS))
    assert (summary["duplicates"], summary["given_up"], summary["dissenting"], summary["rollbacks"]) == (0, 0, 0, 0)
    assert (summary["failed"], summary["chaos"]["kills"], summary["chaos"]["left_behind"]) == (0, 1, 0)
    experts = summary["experts"]
    assert experts["holders_min"] == 2, f"one death could have lost an expert: {demo.output}"
    assert experts["placements"] >= 1, "what it held was copied to the others"
    assert experts["load_max"] >= 1.0
    assert summary["loss_last"] < summary["loss_first"] - 0.5
    assert "experts of stage 0: load " in demo.output
    assert "each on 2" in demo.output
    assert not world.ours()


def test_a_run_without_experts_is_refused(world: Any) -> None:
    demo = world.shoal("demo", "--moe", "--spec", world.spec(10), "--peers", 2, "--stages", 2)
    assert demo.wait(60) == 2
    assert demo.errors == f"shoal: --moe needs a run with swarm.expert_slots; {world.folder}/run.toml has none\n"
