"""What a live swarm reaches of what is planned: rates over time, standstills, and the sentence that says so."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.simulate.logbook import SimLedger
from shoal.deploy.simulate.outcome import Outcome, row_of
from shoal.deploy.simulate.reached import reached, said_of
from shoal.deploy.simulate.result import Change, Ending, Happened, SimResult, StepCommitted
from shoal.deploy.simulate.strategy import KNOWN, Strategy
from shoal.deploy.simulate.table import StrategyComparison
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run
from shoal.protocol.spec import RunSpec

TINY = """
title = "Tiny"
steps = 5
[network]
region = [{ name = "A", count = 2, tflops = 0.002 }]
[model]
num_layers = 4
[training]
microbatches_per_step = 8
"""


def committed(*at_s: float, until_s: float, events: tuple[Happened, ...] = ()) -> SimResult:
    """A run of a hundred tokens a step."""
    return SimResult(
        steps=tuple(StepCommitted(step, each_s) for step, each_s in enumerate(at_s)),
        tokens_per_step=100,
        timeline=(),
        busy_s=(),
        traffic_bytes=np.zeros((1, 1), dtype=np.int64),
        events=events,
        duplicates=0,
        given_up=0,
        failures=(),
        ending=Ending(at_s=until_s, wall_s=1.0, num_events=0),
        trace_hash="",
    )


def outcome(name: str, result: SimResult | None) -> Outcome:
    return Outcome(strategy=KNOWN[name], spec=RunSpec(), result=result)


# --- figures of a run ---


def test_a_step_in_flight_counts_for_the_part_that_is_over() -> None:
    result = committed(10, 20, 30, 40, until_s=45)
    assert result.tokens_by(25) == pytest.approx(250)
    assert result.tokens_by(5) == pytest.approx(50), "the first one is in flight from the beginning"
    assert result.tokens_by(1e9) == pytest.approx(400)
    assert committed(until_s=45).tokens_by(30) == 0


def test_a_rate_is_measured_from_any_time_to_the_last_commit() -> None:
    result = committed(10, 20, 30, 40, until_s=45)
    assert result.tokens_per_s_from(15) == pytest.approx(10)
    assert math.isnan(result.tokens_per_s_from(35)), "half a step is no rate"
    assert math.isnan(committed(until_s=45).tokens_per_s_from(0))


def test_a_standstill_counts_in_the_rate_also_at_the_end() -> None:
    stood = committed(10, 20, 30, 100, 110, 120, until_s=125)
    assert stood.tokens_per_s_from(10) == pytest.approx(500 / 110)
    assert stood.standstill_s == pytest.approx(60)
    ended = committed(10, 20, 30, until_s=100)
    assert ended.tokens_per_s_from(10) == pytest.approx(200 / 90)
    assert ended.standstill_s == pytest.approx(60)


def test_a_slow_layout_before_a_quick_one_is_no_standstill() -> None:
    assert committed(*range(100, 700, 100), *range(610, 660, 10), until_s=655).standstill_s == 0
    assert committed(10, until_s=500).standstill_s == 0, "with one step nobody knows what is usual"


def test_a_run_is_settled_after_five_minutes_or_half_of_it() -> None:
    assert committed(10, 350, 360, until_s=365).settled_from_s == 300
    assert committed(10, 20, until_s=400).settled_from_s == 200
    assert committed(10, 20, until_s=900).settled_from_s == 300


def test_the_pace_of_steps_that_end_in_pairs_is_that_of_a_pair() -> None:
    paired = committed(10, 20, 30, 36, 50, 56, 70, 76, 90, until_s=95)
    assert paired.step_s == pytest.approx(10)
    one_long = committed(*range(10, 100, 10), 190, *range(200, 260, 10), until_s=255)
    assert one_long.step_s == pytest.approx(10), "a standstill is no pace"
    assert committed(10, 20, until_s=25).step_s == pytest.approx(10)
    assert math.isnan(committed(10, until_s=25).step_s)


# --- divisions ---


def plan(sequence: int, bounds: tuple[int, ...], *, era: int = 0, restore: int = 0, cutover_version: int = 0) -> Plan:
    stages = tuple(
        Stage(first_layer=first, last_layer=last, members=(Member(peer=PeerID(f"p{first}"), share=1.0, bandwidth=1.0),))
        for first, last in pairwise(bounds)
    )
    return Plan(
        run="r",
        term=1,
        sequence=sequence,
        previous="",
        coordinator=PeerID("p0"),
        stages=stages,
        era=era,
        restore_version=restore,
        cutover_version=cutover_version,
    )


@pytest.mark.parametrize(
    ("cutover_version", "restore", "change", "text"),
    [
        (7, 7, "division", "2 stages became 3 at step 7"),
        (7, 5, "era", "back to version 5"),
        (0, 5, "era", "back to version 5"),
        (0, 0, "era", "back to version 0"),
    ],
)
def test_an_era_that_goes_on_where_the_layout_ended_is_a_division(
    cutover_version: int, restore: int, change: Change, text: str
) -> None:
    async def obey() -> tuple[list[Happened], list[StepCommitted], list[StepCommitted]]:
        ledger = SimLedger(1, steps=10, keeps_timeline=False)
        ledger.obeyed(plan(1, (0, 2, 4), cutover_version=cutover_version))
        ledger.steps = [StepCommitted(step, float(step)) for step in range(7)]
        ledger.obeyed(plan(2, (0, 1, 2, 4), era=1, restore=restore))
        return ledger.events, ledger.steps, ledger.undone

    events, steps, undone = run(obey())
    assert [(e.change, e.text) for e in events if e.change != "plan"] == [(change, text)]
    assert [step.step for step in steps] == list(range(restore))
    assert [step.step for step in undone] == list(range(restore, 7))


# --- live beside planned ---


def events(*changes: Change) -> tuple[Happened, ...]:
    return tuple(Happened(1.0, change, -1, "") for change in changes)


def test_what_a_live_swarm_reaches_is_said() -> None:
    live = committed(*range(100, 1000, 20), until_s=990, events=events("plan", "division", "plan"))
    planned = committed(*range(10, 100, 10), until_s=100)
    found = reached([outcome("ours", planned), outcome("live", live)])
    assert found is not None
    assert (found.live, found.planned, found.from_s) == ("live", "ours", 300)
    assert found.share == pytest.approx(0.5)
    assert found.work_share == pytest.approx(live.tokens_by(600) / 6000)
    assert said_of(found).startswith(
        "live: the live swarm reaches 0.50 of what is planned (5 of 10 tokens/s of ours) from 300 s of virtual time "
        "on. By 600 s it has done 0.43 of the work: its first step was over after 100 s, "
    )
    assert said_of(found).endswith("It made 2 plans, and divided the layers into other stages once.")


def test_a_short_run_says_that_it_was_short() -> None:
    live = committed(*range(10, 200, 10), until_s=200)
    found = reached([outcome("ours", committed(*range(10, 100, 10), until_s=100)), outcome("live", live)])
    assert found is not None
    assert found.from_s == 100
    assert "from 100 s of virtual time on, though a swarm has 300 s to settle" in said_of(found)


def test_only_what_is_alike_is_compared() -> None:
    live, planned = committed(*range(10, 200, 10), until_s=200), committed(*range(10, 100, 10), until_s=100)
    assert reached([outcome("ours-sync", planned), outcome("live", live)]) is None
    assert reached([outcome("ours", planned)]) is None
    assert reached([outcome("ours", None), outcome("live", live)]) is None
    assert reached([outcome("ours", planned), outcome("live", committed(until_s=200))]) is None
    sync = replace(outcome("live", live), strategy=Strategy(name="live-sync", layout="live", s_max=0))
    found = reached([outcome("ours", planned), outcome("ours-sync", planned), sync])
    assert found is not None
    assert found.planned == "ours-sync"


def test_the_figures_of_a_live_row_are_those_of_what_it_has_come_to() -> None:
    slow_then_quick = committed(*range(30, 240, 30), *range(240, 300, 10), until_s=300)
    row = row_of(outcome("live", slow_then_quick))
    assert row.tokens_per_s == pytest.approx(slow_then_quick.tokens_per_s_from(150))
    assert row.step_s == pytest.approx(100 / slow_then_quick.tokens_per_s_from(150))
    assert row_of(outcome("ours", slow_then_quick)).tokens_per_s == slow_then_quick.tokens_per_s


def test_the_command_plays_the_live_swarm_beside_the_planned_one(tmp_path: Path) -> None:
    """It goes on until the swarm has settled, however few steps the scenario asks for."""
    (tmp_path / "tiny.toml").write_text(TINY)
    json = tmp_path / "out.json"
    arguments = ["simulate", str(tmp_path / "tiny.toml"), "--strategies", "ours,live", "--json", str(json)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    found = msgspec.json.decode(json.read_bytes(), type=StrategyComparison)
    assert found.reached is not None
    assert found.reached.from_s == 300
    ours, live = found.rows
    assert ours.steps == 5
    assert live.simulated_s == pytest.approx(300 + 8 * (ours.step_s or 0), abs=1)
    assert live.tokens_per_s == pytest.approx(found.reached.tokens_per_s)
    assert said_of(found.reached) in " ".join(result.stdout.split())
