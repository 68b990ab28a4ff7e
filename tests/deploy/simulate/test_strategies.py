"""`shoal simulate` of a tiny scenario, and what it refuses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.link_survey import LinkSurvey
from shoal.deploy import cli
from shoal.deploy.commands.options import EXIT_FAILED
from shoal.deploy.simulate import strategies
from shoal.deploy.simulate.modelled import Churn
from shoal.deploy.simulate.outcome import Outcome, row_of
from shoal.deploy.simulate.scenario import STEPS_MAX, Scenario, find_scenario, shipped_names
from shoal.deploy.simulate.strategies import (
    CHURN_SECONDS,
    StrategyOptions,
    StrategyPatience,
    chosen_strategies,
    churn_of,
    play,
    prepare,
    with_options,
)
from shoal.deploy.simulate.strategy import DEFAULT, KNOWN, Strategy
from shoal.deploy.simulate.table import StrategyComparison
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import WireSpec

TINY = """
title = "Tiny"
steps = 5
stages = 2
[network]
region = [{ name = "A", count = 2, tflops = 0.001 }, { name = "B", count = 2, tflops = 0.001 }]
elsewhere = { latency_ms = 20, mbps = 100 }
[model]
num_layers = 4
[training]
microbatches_per_step = 8
"""
TRACE = "time_s,event,node\n0,add,a\n0,add,b\n0,add,c\n0,add,d\n50,remove,b\n"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def shoal(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["simulate", *map(str, arguments)])


def complaint(*arguments: object) -> str:
    """The one line that the command says."""
    result = shoal(*arguments)
    assert result.exit_code == cli.EXIT_USER_ERROR, result.output
    (line,) = result.stderr.splitlines()
    return line


def run_strategy(scenario: Scenario, strategy: Strategy, churn: Sequence[Churn], options: StrategyOptions) -> Outcome:
    """Plan and simulate."""
    return play(scenario, prepare(scenario, strategy, churn, options), options)


# --- the command ---


def test_placed_experts_are_played_and_cost_their_tokens_way(tmp_path: Path) -> None:
    path = tmp_path / "mixture.toml"
    experts = "num_experts = 4\n[experts]\nslots = 3\nloads = [3, 1, 1, 1]\n"
    whole = '[[strategy]]\nname = "whole"\nlayout = "given"\nexperts = false\n'
    path.write_text(TINY.replace("num_layers = 4\n", "num_layers = 4\n" + experts) + whole)
    json = tmp_path / "out.json"
    result = shoal(path, "--strategies", "given,whole", "--steps", 3, "--json", json)
    assert result.exit_code == 0, result.output
    placed, held_whole = msgspec.json.decode(json.read_bytes(), type=StrategyComparison).rows
    assert placed.steps == held_whole.steps == 3
    assert not placed.failures
    assert placed.tokens_per_s is not None
    assert held_whole.tokens_per_s is not None
    assert placed.bytes_per_step is not None
    assert held_whole.bytes_per_step is not None
    assert placed.bytes_per_step > held_whole.bytes_per_step


def test_strategies_are_compared_in_a_table_a_file_and_a_page(tmp_path: Path, tiny: Path) -> None:
    json, html = tmp_path / "out.json", tmp_path / "out.html"
    result = shoal(tiny, "--strategies", "given,mod", "--json", json, "--html", html, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "Tiny" in result.stdout
    found = msgspec.json.decode(json.read_bytes(), type=StrategyComparison)
    assert (found.scenario, found.seed, found.devices) == ("tiny", 3, ("A-0", "A-1", "B-0", "B-1"))
    given, mod = found.rows
    assert (given.strategy, given.stages, given.bounds) == ("given", ((0, 1), (2, 3)), (0, 2, 4))
    assert given.steps == mod.steps == 5
    assert given.tokens_per_s is not None
    assert given.predicted_tokens_per_s is not None
    assert given.measured_over_predicted == pytest.approx(given.tokens_per_s / given.predicted_tokens_per_s)
    assert given.idle_share is not None
    assert 0 < given.idle_share < 1
    assert (mod.strategy, mod.stages) == ("mod", ((0, 2), (1, 3)))
    assert mod.tokens_per_s is not None
    for row in found.rows:
        assert not row.failures
        assert row.strategy in result.stdout
    assert "<title>Tiny</title>" in html.read_text()


def test_shipped_scenarios_are_listed() -> None:
    result = shoal("--list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(shipped_names())


def test_what_cannot_be_simulated_is_said_in_a_line(tmp_path: Path, tiny: Path) -> None:
    assert "say what to simulate" in complaint()
    assert "'atlantis' is neither a file nor a shipped scenario" in complaint("atlantis")
    assert "'best' is not a strategy: take some of ours, " in complaint(tiny, "--strategies", "ours,best")
    assert "no strategy is named" in complaint(tiny, "--strategies", ",")
    (tmp_path / "trace.csv").write_text("when,what\n")
    assert "trace.csv is not a trace" in complaint(tiny, "--trace", tmp_path / "trace.csv")


def test_a_result_that_cannot_be_written_is_said_before_anything_is_simulated(tmp_path: Path, tiny: Path) -> None:
    for option in ("--json", "--html"):
        result = shoal(tiny, "--strategies", "given", option, tmp_path / "none" / "out")
        assert (result.exit_code, result.stdout) == (cli.EXIT_USER_ERROR, "")
        assert result.stderr == f"shoal: cannot write {tmp_path}/none/out: there is no folder {tmp_path}/none\n"


def test_what_cannot_be_placed_is_a_line_of_the_table_and_a_failure(tiny: Path) -> None:
    tiny.write_text(TINY.replace("stages = 2", "stages = 3").replace("count = 2, tflops", "count = 1, tflops"))
    result = shoal(tiny, "--strategies", "given")
    assert result.exit_code == EXIT_FAILED
    assert "3 stages cannot be" in " ".join(result.stdout.split())


def test_the_first_row_is_there_before_anything_is_searched_or_run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it says that it is arithmetic."""

    def stops(*_: object) -> None:
        raise LocalError("nothing is planned in this test")

    monkeypatch.setattr(strategies, "prepare", stops)
    result = shoal(tiny, "--strategies", "ours")
    assert result.exit_code == cli.EXIT_USER_ERROR
    assert "at once" in result.stdout
    assert "not run" in result.stdout
    assert "arithmetic, before any search: 4 devices in 2 stages" in result.stdout


def test_the_same_run_under_two_names_is_played_and_said_once(tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + "".join(f'[[strategy]]\nname = "{n}"\nlayout = "given"\n' for n in ("one", "two")))
    json, html = tmp_path / "out.json", tmp_path / "out.html"
    result = shoal(tiny, "--json", json, "--html", html)
    assert result.exit_code == 0, result.output
    assert "two: the same run as one" in result.stdout
    one, two = msgspec.json.decode(json.read_bytes(), type=StrategyComparison).rows
    assert (one.same_as, two.same_as) == ("", "one")
    assert two.trace_hash == one.trace_hash
    assert "two: the same run as one." in html.read_text()


def test_few_steps_are_measured_and_one_is_refused_at_once(tmp_path: Path, tiny: Path) -> None:
    json = tmp_path / "out.json"
    result = shoal(tiny, "--strategies", "given", "--steps", 3, "--json", json)
    assert result.exit_code == 0, result.output
    assert "of 3 steps 1 is counted" in " ".join(result.stdout.split())
    (row,) = msgspec.json.decode(json.read_bytes(), type=StrategyComparison).rows
    assert row.tokens_per_s is not None
    assert "1 step is too few: a figure needs 2 steps at least, and 4 to leave" in complaint(tiny, "--steps", 1)


def test_what_it_comes_to_is_counted_from_what_was_simulated(tmp_path: Path, tiny: Path) -> None:
    json = tmp_path / "out.json"
    tiny.write_text(TINY.replace('name = "A",', 'name = "A", watts = 200,'))
    result = shoal(tiny, "--strategies", "given", "--json", json, "--tokens", "1B", "--price-kwh", 0.5)
    assert result.exit_code == 0, result.output
    (row,) = msgspec.json.decode(json.read_bytes(), type=StrategyComparison).rows
    figures = row.figures
    assert figures is not None
    assert row.tokens_per_s is not None
    assert row.step_s is not None
    assert row.bytes_per_step is not None
    assert figures.days_to_goal == pytest.approx(1e9 / row.tokens_per_s / 86_400)
    assert figures.kwh_per_day == pytest.approx((2 * 200 + 2 * 350) / 1e3 * 24)
    # Two members a region, and no machine of two devices: all that moves crosses a card.
    month_gb = row.bytes_per_step * 30 * 86_400 / row.step_s / 1e9
    assert 2 * sum(each.up_gb_month[0] for each in figures.members) <= month_gb * (1 + 1e-9)
    assert 2 * sum(each.up_gb_month[1] for each in figures.members) >= month_gb * (1 - 1e-9)
    assert "Figures of given at its simulated pace" in result.stdout


def test_the_planner_and_the_simulation_agree_about_what_members_send(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2 %: messages have headers, and steps overlap. Probes of links are no part of a step."""
    monkeypatch.setattr(LinkSurvey, "choose_one", lambda *_: ())
    scenario = with_options(find_scenario(str(tiny)), StrategyOptions(steps=8))
    outcome = run_strategy(scenario, KNOWN["given"], (), StrategyOptions(steps=8))
    assert outcome.result is not None
    assert outcome.placement is not None
    objective = ThroughputObjective(scenario.topology, Workload.of(scenario.spec))
    foreseen = [each for stage in objective.sent_bytes(outcome.placement) for each in stage]
    assert list(outcome.result.bytes_per_step.sum(axis=1)) == pytest.approx(foreseen, rel=0.02)


# --- patience, and runs that stand still ---


def test_a_strategy_that_is_far_slower_is_cut_off_and_says_so(tiny: Path) -> None:
    scenario = with_options(find_scenario(str(tiny)), StrategyOptions())
    prepared = prepare(scenario, KNOWN["given"], (), StrategyOptions())
    impatient = StrategyPatience(name="ours", virtual_s=30.0, step_s=1.0, real_s=1e9)
    outcome = play(scenario, prepared, StrategyOptions(), patience=impatient)
    row = row_of(outcome)
    assert outcome.result is not None
    assert 30.0 <= outcome.result.ending.at_s < 32.0
    assert row.note == "cut off at 30 s of virtual time, 4 times what ours took"
    assert row.tokens_per_s is None
    assert row.tokens_per_s_below is not None
    whole = run_strategy(scenario, KNOWN["given"], (), StrategyOptions())
    assert whole.result is not None
    assert row.tokens_per_s_below > whole.result.tokens_per_s, "a bound, not a guess"
    soon = row_of(play(scenario, prepared, StrategyOptions(), patience=replace(impatient, virtual_s=1e9, real_s=0.0)))
    assert "of this machine's time" in soon.note
    assert (soon.steps, soon.tokens_per_s_below) == (0, None)


def test_patience_is_measured_by_the_first_strategy(tiny: Path) -> None:
    scenario = with_options(find_scenario(str(tiny)), StrategyOptions())
    first = run_strategy(scenario, KNOWN["given"], (), StrategyOptions())
    assert first.result is not None
    patience = StrategyPatience.beside(first, 60.0)
    assert patience is not None
    assert (patience.name, patience.virtual_s) == ("given", 4 * first.result.ending.at_s)
    assert StrategyPatience.beside(replace(first, result=None), 60.0) is None


@pytest.mark.parametrize(
    ("trace", "seconds", "why"),
    [
        ("12,remove,a\n12,remove,b\n12,remove,c\n", 16, "only 1 of the 4 members"),
        ("4,remove,a\n4,remove,b\n4,remove,c\n4,remove,d\n", 8, "no device was present"),
        ("", 8, "a step takes "),
    ],
)
def test_a_trace_without_a_step_says_why(tmp_path: Path, tiny: Path, trace: str, seconds: int, why: str) -> None:
    (tmp_path / "trace.csv").write_text("time_s,event,node\n0,add,a\n0,add,b\n0,add,c\n0,add,d\n" + trace)
    tiny.write_text(TINY + '[churn]\ntrace = "trace.csv"\nstart_s = 0\n')
    result = shoal(tiny, "--strategies", "live", "--seconds", seconds)
    assert result.exit_code == EXIT_FAILED
    said = " ".join(result.stdout.split())
    assert f"no steps in {seconds} s: " in said
    assert why in said


# --- what a strategy is ---


def test_strategies_of_the_scenario_hide_those_we_know(tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + '[[strategy]]\nname = "ours"\nlayout = "mod"\n')
    scenario = find_scenario(str(tiny))
    assert [s.layout for s in chosen_strategies(scenario, None)] == ["mod"]
    assert [s.layout for s in chosen_strategies(scenario, "given, ours")] == ["given", "mod"]


def test_where_nothing_is_named_churn_decides(tiny: Path) -> None:
    assert [s.name for s in chosen_strategies(find_scenario(str(tiny)), None)] == list(DEFAULT)
    assert [s.name for s in chosen_strategies(with_trace(tiny, StrategyOptions()), None)] == ["live", "peace"]


def test_a_strategy_changes_staleness_and_wire_only_where_it_says_so(tiny: Path) -> None:
    scenario = find_scenario(str(tiny))
    assert KNOWN["ours"].applied_to(scenario.spec) == scenario.spec
    changed = Strategy(name="x", layout="mod", s_max=0, wire=WireSpec(activations="fp32")).applied_to(scenario.spec)
    assert changed.training == msgspec.structs.replace(scenario.spec.training, s_max=0)
    assert changed.wire.activations == "fp32"


def test_a_strategy_may_have_the_model_in_a_subspace_and_is_told_where_that_cannot_be(tiny: Path) -> None:
    scenario = find_scenario(str(tiny))
    model = Strategy(name="x", layout="mod", subspace=8).applied_to(scenario.spec).model
    assert model == msgspec.structs.replace(scenario.spec.model, subspace=8)
    tiny.write_text(TINY + f'[[strategy]]\nname = "x"\nlayout = "mod"\nsubspace = {model.dim}\n')
    with pytest.raises(LocalError, match="is not a scenario: subspace must be in"):
        find_scenario(str(tiny))


def with_trace(tiny: Path, options: StrategyOptions) -> Scenario:
    (tiny.parent / "trace.csv").write_text(TRACE)
    tiny.write_text(TINY + '[churn]\ntrace = "trace.csv"\nstart_s = 0\n')
    return with_options(find_scenario(str(tiny)), options)


def test_a_time_or_a_trace_takes_the_place_of_steps(tiny: Path) -> None:
    def lasts(options: StrategyOptions, *, churn: bool = False) -> tuple[float | None, int]:
        found = with_trace(tiny, options) if churn else with_options(find_scenario(str(tiny)), options)
        return found.seconds, found.spec.training.steps

    assert lasts(StrategyOptions()) == (None, 5)
    assert lasts(StrategyOptions(steps=4)) == (None, 4)
    assert lasts(StrategyOptions(seconds=9.0)) == (9.0, STEPS_MAX)
    assert lasts(StrategyOptions(seconds=9.0, steps=4)) == (9.0, 4)
    (tiny.parent / "other.csv").write_text(TRACE)
    assert lasts(StrategyOptions(trace=tiny.parent / "other.csv")) == (CHURN_SECONDS, STEPS_MAX)
    assert lasts(StrategyOptions(trace=tiny.parent / "other.csv", steps=4)) == (None, 4)
    assert lasts(StrategyOptions(), churn=True) == (CHURN_SECONDS, 5), "the file says so many steps"


def test_a_swarm_lives_through_a_trace(tiny: Path) -> None:
    options = StrategyOptions(seconds=100.0, steps=1000)
    scenario = with_trace(tiny, options)
    churn = churn_of(scenario, 0)
    assert churn == ((50.0, "remove", 1),)
    outcome = run_strategy(scenario, KNOWN["live"], churn, options)
    row = row_of(outcome)
    assert outcome.result is not None
    assert (outcome.placement, row.predicted_tokens_per_s) == (None, None)
    assert not row.failures
    assert [event.device for event in outcome.result.events if event.change == "left"] == [1]
    assert outcome.result.steps[-1].committed_at_s > 65.0, "it went on without device 1"


def test_a_strategy_may_be_left_in_peace(tiny: Path) -> None:
    options = StrategyOptions(seconds=100.0, steps=2)
    scenario = with_trace(tiny, options)
    peace = Strategy(name="peace", layout="given", churn=False)
    outcome = run_strategy(scenario, peace, (Churn(1.0, "remove", 1),), options)
    assert outcome.result is not None
    assert not [event for event in outcome.result.events if event.change == "left"]
    assert len(outcome.result.steps) == 2


def test_a_layout_is_of_those_who_are_there_at_first(tiny: Path) -> None:
    options = StrategyOptions(steps=2)
    scenario = with_trace(tiny, options)
    (tiny.parent / "trace.csv").write_text("time_s,event,node\n0,add,a\n0,add,b\n0,add,c\n1000,add,d\n")
    outcome = run_strategy(scenario, KNOWN["mod"], churn_of(scenario, 0), options)
    assert outcome.placement is not None
    assert outcome.placement.stages == ((0, 2), (1,))


@pytest.mark.parametrize("options", [StrategyOptions(steps=4), StrategyOptions(seconds=100.0)])
def test_whoever_waits_hears_how_much_is_over(tiny: Path, options: StrategyOptions) -> None:
    heard: list[float] = []
    scenario = with_options(find_scenario(str(tiny)), options)
    run_strategy(scenario, KNOWN["mod"], (), replace(options, on_progress=heard.append))
    assert len(heard) >= 2
    assert heard == sorted(heard)
    assert 0.0 < heard[0] < 0.5
    assert 0.7 < heard[-1] <= 1.0


def test_nobody_there_is_an_outcome(tiny: Path) -> None:
    everybody_late = tuple(Churn(5.0, "add", device) for device in range(4))
    outcome = run_strategy(find_scenario(str(tiny)), KNOWN["mod"], everybody_late, StrategyOptions())
    assert (outcome.result, outcome.problem) == (None, "no device is present at the beginning")
