"""`shoal plan` on small networks: what it prints, what it writes, what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from shoal.coordinator.cost.placement import Cost, Placement
from shoal.deploy import cli
from shoal.deploy.planning.command import Proposal, _indexes, compare_view

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
    for word in ("stage", "layers", "cost", "compute", "tokens/s", "took"):
        assert word in result.stdout


def test_all_layouts_are_compared(tmp_path: Path) -> None:
    reports = planned(network(tmp_path), "--compare", "--stages", "2", "--seconds", "0.05")
    assert [report["layout"] for report in reports] == ["ours", "given", "random", "mod", "greedy", "dtfm-paper"]
    by_name = {report["layout"]: report for report in reports}
    assert [stage["devices"] for stage in by_name["given"]["stages"]] == [[0, 1], [2, 3]]
    assert [stage["devices"] for stage in by_name["mod"]["stages"]] == [[0, 2], [1, 3]]
    costs = [report["cost_s"] for report in reports if report["cost_s"] is not None]
    assert by_name["ours"]["cost_s"] == min(costs)


def test_the_other_objective_compares_its_own_search(tmp_path: Path) -> None:
    result = shoal("plan", network(tmp_path), "--compare", "--objective", "dtfm", "--stages", "2", "--seconds", "0.05")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[-6:]] == [
        "dtfm",
        "given",
        "random",
        "mod",
        "greedy",
        "dtfm-paper",
    ]


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
    assert _indexes((0, 1, 2, 5, 7, 8)) == "0-2 5 7-8"


def test_an_impossible_layout_is_a_line_of_the_table() -> None:
    good = Placement(stages=((0,), (1,)), bounds=(0, 1, 2))
    table = compare_view(
        [
            Proposal(name="ours", placement=good, cost=Cost(seconds=2.0), seconds=0.5),
            Proposal(name="given", placement=good, cost=Cost(seconds=3.0), seconds=0.0),
            Proposal(name="mod", placement=None, cost=Cost.impossible("too \x1b[31mlarge"), seconds=0.0),
        ]
    )
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert [line.split()[:4] for line in lines[1:3]] == [["ours", "2", "2.000", "s"], ["given", "2", "3.000", "s"]]
    assert "1.00" in lines[1]
    assert "1.50" in lines[2]
    assert "too ?[31mlarge" in lines[3]
