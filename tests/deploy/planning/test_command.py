"""`shoal plan` on small networks: what it prints, what it writes, what it refuses."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from shoal.deploy import cli
from shoal.deploy.planning.plan_view import compared_cells, said_indexes
from shoal.deploy.planning.proposal import PlanReport, StageLine, said_of_memory

GOOD = {
    "title": "Two pairs",
    "latency_ms": [[0, 1, 40, 40], [1, 0, 40, 40], [40, 40, 0, 1], [40, 40, 1, 0]],
    "bandwidth_gbps": [[0, 10, 1, 1], [10, 0, 1, 1], [1, 1, 0, 10], [1, 1, 10, 0]],
    "device_regions": ["here", "here", "there", "there"],
    "workload": {
        "gradient_gigabytes_per_stage": 0.1,
        "activation_gigabytes_per_replica": 0.1,
        "num_layers": 4,
        "hidden_dim_of_model": 512,
        "sequence_length_tokens": 256,
        "global_batch_tokens": 4096,
    },
}


def network(folder: Path, **changes: Any) -> str:
    path = folder / "net.json"
    path.write_text(json.dumps(GOOD | changes))
    return str(path)


def shoal(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def planned(*arguments: str) -> Any:
    result = shoal("plan", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout)


@pytest.mark.parametrize("objective", ["throughput", "dtfm"])
def test_a_plan_covers_layers_and_devices_once(tmp_path: Path, objective: str) -> None:
    report = planned(network(tmp_path), "--objective", objective, "--stages", "2", "--seconds", "0.05")
    assert [stage["stage"] for stage in report["stages"]] == [0, 1]
    assert [stage["first_layer"] for stage in report["stages"]] == [0, report["stages"][0]["last_layer"]]
    assert report["stages"][-1]["last_layer"] == 4
    devices = [device for stage in report["stages"] for device in stage["devices"]]
    assert sorted(devices + report["spares"]) == [0, 1, 2, 3]
    assert all(0 < stage["least_gb"] < stage["needs_gb"] < stage["has_gb"] for stage in report["stages"])
    assert 0 < report["cost_s"] < math.inf
    assert report["parts"]
    assert report["took_s"] > 0


def test_the_same_seed_gives_the_same_plan(tmp_path: Path) -> None:
    first, second = (planned(network(tmp_path), "--seed", "3", "--seconds", "0.05") for _ in range(2))
    assert {**first, "took_s": 0} == {**second, "took_s": 0}


def test_a_person_sees_stages_regions_and_parts(tmp_path: Path) -> None:
    result = shoal("plan", network(tmp_path), "--stages", "2", "--seconds", "0.05")
    assert result.exit_code == 0, result.output
    assert "Two pairs" in result.stdout
    assert "here" in result.stdout
    for word in ("stage", "layers", "at once", "searched", "tokens/s", "tokens a day", "predicted", "found in"):
        assert word in result.stdout


def test_what_a_small_card_does_is_said_for_each_stage() -> None:
    def stage(number: int, needs_gb: float, least_gb: float) -> StageLine:
        line = StageLine(stage=number, first_layer=number, last_layer=number + 1, devices=(number,))
        return msgspec.structs.replace(line, needs_gb=needs_gb, least_gb=least_gb, has_gb=12.0)

    roomy, full, small = stage(0, 10.0, 6.0), stage(1, 20.0, 11.0), stage(2, 30.0, 16.0)
    assert said_of_memory([roomy]) == ""
    assert said_of_memory([roomy, full]).startswith("Cards of stage 1 are too small for all of it: moments")
    assert "A member of stage 2 has too little even so" in said_of_memory([roomy, full, small])
    assert said_of_memory([full, stage(3, 20.0, 11.0)]).startswith("Cards of stages 1 and 3 are too small")


def test_all_layouts_are_compared(tmp_path: Path) -> None:
    reports = planned(network(tmp_path), "--compare", "--stages", "2", "--seconds", "0.05")
    names = [report["layout"] for report in reports]
    assert names == ["at-once", "ours", "given", "random", "mod", "greedy"]
    by_name = {report["layout"]: report for report in reports}
    assert [stage["devices"] for stage in by_name["given"]["stages"]] == [[0, 1], [2, 3]]
    assert [stage["devices"] for stage in by_name["mod"]["stages"]] == [[0, 2], [1, 3]]
    costs = [report["cost_s"] for report in reports if report["cost_s"] is not None]
    assert by_name["ours"]["cost_s"] == min(costs)


def test_x_first_is_the_quotient_of_the_steps_beside_it(tmp_path: Path) -> None:
    result = shoal("plan", network(tmp_path), "--compare", "--stages", "2", "--seconds", "0.05")
    steps = [
        (float(found[1].replace(",", "")) * (1.0 if found[2] == "s" else 1e-3), float(found[3]))
        for row in rows(result.stdout).values()
        if (found := re.match(r"\d+ +([\d,.]+) (m?s) +([\d.]+) ", row))
    ]
    assert len(steps) > 3
    assert len({times for _, times in steps}) > 1
    for step_s, times in steps:
        assert times == pytest.approx(step_s / steps[0][0], rel=0.01), "as far as three digits say"


def test_what_is_for_people_in_a_network_is_listed_and_what_is_assumed_is_said(tmp_path: Path) -> None:
    path = network(tmp_path, num_devices=4, device_model="NVIDIA V100", tflops=80)
    said = (
        "not read at the top of the file: tflops; say it in each entry of devices\n"
        "not read: num_devices, device_model\n"
        "the speed of every device is assumed: 45 TFLOP/s\n"
        "the memory of every device is assumed: 16 GB\n"
    )
    for arguments in (("plan", path), ("simulate", path, "--strategies", "given", "--steps", "2")):
        assert said in shoal(*arguments, "--seconds", "0.05").output
    assert planned(path, "--seconds", "0.05")["notes"] == said.splitlines()


def rows(stdout: str) -> dict[str, str]:
    """Of a comparison: layout -> the rest of its line."""
    names = "ours, at once|ours|dtfm|given|random|mod|greedy"
    found = (re.match(rf"({names})  +(\d.*)", line) for line in stdout.splitlines())
    return {match[1]: match[2] for match in found if match}


def test_the_other_objective_compares_its_own_search(tmp_path: Path) -> None:
    result = shoal("plan", network(tmp_path), "--compare", "--objective", "dtfm", "--stages", "2", "--seconds", "0.05")
    assert result.exit_code == 0, result.output
    assert list(rows(result.stdout))[:2] == ["ours, at once", "dtfm"]
    assert "not counted" in rows(result.stdout)["dtfm"], "the paper's objective knows no tokens"


def test_a_layout_under_two_names_is_said_once(tmp_path: Path) -> None:
    """Of two stages of one device each, whoever deals them out in order comes to the same."""
    pair = {
        "latency_ms": [[0, 1], [1, 0]],
        "bandwidth_gbps": [[0, 1], [1, 0]],
        "device_regions": ["here", "there"],
    }
    path = network(tmp_path, **pair)
    result = shoal("plan", path, "--compare", "--stages", "2", "--seconds", "0.05")
    assert result.exit_code == 0, result.output
    found = rows(result.stdout)
    assert "mod" not in found
    assert re.search(r"mod.*: the same layout as (given|ours|ours, at once)$", result.stdout, re.MULTILINE)
    reports = planned(path, "--compare", "--stages", "2", "--seconds", "0.05")
    twins = {report["layout"]: report["same_as"] for report in reports}
    assert twins["mod"]
    assert twins[twins["mod"]] == ""


def test_a_layout_that_cannot_be_says_why_in_its_row(tmp_path: Path) -> None:
    devices = [{"memory_gb": 0.05}] + [{"memory_gb": 16}] * 3
    result = shoal("plan", network(tmp_path, devices=devices), "--compare", "--stages", "2", "--seconds", "0.05")
    assert result.exit_code == 0, result.output
    assert "cannot be" in rows(result.stdout)["given"]
    assert " does not fit into the memory" in " ".join(result.stdout.split())
    assert not re.search(r"  -( |$)", result.stdout), "a dash says nothing"


LAB = """
title = "A lab and some homes"
[network]
region = [
  { name = "lab", count = 3, tflops = 20, memory_gb = 24, up_mbps = 10_000, down_mbps = 10_000, watts = 450 },
  { name = "home", count = 3, tflops = 20, memory_gb = 24, up_mbps = 10, down_mbps = 50, last_mile_ms = 10 },
]
elsewhere = { latency_ms = 10, mbps = 5_000 }
[model]
dim = 1024
num_layers = 8
num_heads = 8
num_kv_heads = 8
ffn_dim = 2816
context = 1024
vocab_size = 8000
[training]
microbatches_per_step = 256
microbatch_size = 1
"""


def test_what_it_means_for_everybody_is_said(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(LAB)
    arguments = (str(path), "--seconds", "0.05", "--tokens", "20B", "--price-kwh", "0.5")
    report = planned(*arguments)
    figures = report["figures"]
    per_day = report["parts"]["tokens_per_s"] * 86_400
    assert figures["tokens_per_day"] == pytest.approx(per_day)
    assert figures["days_to_goal"] == pytest.approx(20e9 / per_day)
    (lab,) = figures["members"]
    assert (lab["name"], lab["members"], lab["watts"], lab["watts_are_assumed"]) == ("lab", 3, 450.0, False)
    assert figures["kwh_per_day"] == pytest.approx(3 * 0.45 * 24)
    assert figures["kwh_per_billion_tokens"] == pytest.approx(3 * 0.45 * 24 / per_day * 1e9)
    assert figures["cost_per_billion_tokens"] == pytest.approx(0.5 * figures["kwh_per_billion_tokens"])
    (homes,) = report["left_out"]
    assert (homes["name"], homes["devices"]) == ("home", [3, 4, 5])
    assert homes["needs"][0]["line_mbps"] > 50
    result = shoal("plan", *arguments)
    for words in (
        "to 20 B tokens",
        "kWh a billion tokens",
        "3 home",
        "its line is too slow",
        "arithmetic: nothing was",
    ):
        assert words in result.stdout, words


RUN = """
[model]
dim = 256
num_layers = 4
context = 128
[training]
steps = 50
microbatches_per_step = 32
microbatch_size = 1
"""


def goal_of(*arguments: str) -> tuple[float, bool, str]:
    figures = planned(*arguments, "--seconds", "0.05")["figures"]
    assert figures["days_to_goal"] == pytest.approx(figures["goal_tokens"] / figures["tokens_per_day"])
    return figures["goal_tokens"], figures["goal_is_assumed"], figures["goal_why"]


def test_the_goal_is_the_run_s_own_where_that_is_known(tmp_path: Path) -> None:
    """20 tokens a parameter are for what trains from nothing: adapters beside 8 B would have 160 B before them."""
    lab, run, adapted = tmp_path / "lab.toml", tmp_path / "run.toml", tmp_path / "adapted.toml"
    lab.write_text(LAB)
    tokens, assumed, why = goal_of(str(lab))
    assert assumed
    assert tokens > 20 * 8000 * 1024
    assert why.startswith("20 tokens a parameter")

    adapted.write_text(LAB + '[adapter]\nkind = "lora"\n')
    tokens, assumed, why = goal_of(str(adapted))
    assert (tokens, assumed) == (400 * 256 * 1024, True)
    assert why.startswith("400 steps, as a fine-tuning run that does not say")

    run.write_text(RUN)
    assert goal_of(str(lab), "--run", str(run)) == (50 * 32 * 128, False, "the run's 50 steps")
    assert goal_of(str(lab), "--run", str(run), "--tokens", "3M") == (3e6, False, "")
    result = shoal("plan", str(lab), "--run", str(run), "--seconds", "0.05")
    assert "to 205 K tokens" in result.stdout
    assert "(the run's 50 steps)" in result.stdout
    assert "4,096 tokens a step" in result.stdout


@pytest.mark.parametrize("text", ["many", "-3B", "0", "3X", "inf"])
def test_a_goal_that_is_no_number_of_tokens(tmp_path: Path, text: str) -> None:
    result = shoal("plan", network(tmp_path), f"--tokens={text}")
    assert result.exit_code == cli.EXIT_USER_ERROR
    assert result.stderr == f"shoal: --tokens {text}: say a number of tokens, as in 20B, 300M or 1.5T\n"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"latency_ms": [[0, math.nan], [1, 0]]}, "is not a network: "),
        ({"latency_ms": [[0, -1, 1, 1]] * 4}, "the latency of link 0 -> 1 is -0.001"),
        ({"latency_ms": [[0, 1], [1]]}, "the latency matrix has 2 rows, but row 1 has 1 columns"),
        ({"latency_ms": [[0, 1], [1, 0]]}, "2"),
        ({"bandwidth_gbps": [[0, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1], [1, 0, 1, 0]]}, "device-1 has no link"),
        ({"device_regions": ["here"]}, "1 regions are named"),
    ],
)
def test_a_malformed_network_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    result = shoal("plan", network(tmp_path, **changes))
    assert result.exit_code == cli.EXIT_USER_ERROR, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"shoal: {tmp_path}/net.json is not a network: ")
    assert what in line


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--stages", "5"], "5 stages cannot be: there are 4 devices and 4 layers"),
        (["--objective", "beauty"], "'beauty' is no objective: take throughput or dtfm"),
    ],
)
def test_an_impossible_wish_is_refused_in_one_line(tmp_path: Path, arguments: list[str], what: str) -> None:
    result = shoal("plan", network(tmp_path), *arguments)
    assert result.exit_code == cli.EXIT_USER_ERROR, result.output
    assert what in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_no_plan_says_why(tmp_path: Path) -> None:
    devices = [{"memory_gb": 0.001}] * 4
    result = shoal("plan", network(tmp_path, devices=devices), "--stages", "2", "--seconds", "0.05")
    assert result.exit_code == cli.EXIT_USER_ERROR
    assert "no plan for " in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_network_that_is_not_there() -> None:
    result = shoal("plan", "nowhere.json")
    assert result.exit_code == cli.EXIT_USER_ERROR
    assert result.stderr == "shoal: nowhere.json cannot be read: No such file or directory\n"


def test_indexes_are_said_as_ranges() -> None:
    assert said_indexes((0, 1, 2, 5, 7, 8)) == "0-2 5 7-8"


def test_a_cell_has_a_figure_or_a_word() -> None:
    stages = tuple(StageLine(stage=k, first_layer=k, last_layer=k + 1, devices=(k,)) for k in range(2))

    def report(layout: str, cost_s: float | None, took_s: float, **parts: float) -> PlanReport:
        return PlanReport(
            layout=layout,
            objective="throughput",
            seed=0,
            stages=stages if cost_s else (),
            spares=(),
            cost_s=cost_s,
            parts=parts,
            why="" if cost_s else "too \x1b[31mlarge",
            took_s=took_s,
        )

    first = report("at-once", 1.9, 0.5, tokens_per_s=9.0, foreseen_s=2.0)
    assert compared_cells(first, 2.0) == (("ours, at once", "2", "2.000 s", "1.00", "9", "500 ms"), "")
    slower = report("given", 3.0, 1.0)
    assert compared_cells(slower, 2.0) == (("given", "2", "3.000 s", "1.50", "not counted", "1.000 s"), "")
    none = report("mod", None, 0.0)
    assert compared_cells(none, 2.0) == (("mod", "none", "cannot be", "none", "none", "0 ms"), "too ?[31mlarge")
