"""`shoal plan --experts`: what it prints, and what it refuses in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.deploy import cli

ASKED = {"slots": [2, 2, 2], "failure_probability": None, "loads": [1.0, 1.0, 1.0], "min_replicas": 2}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "experts.json"
    path.write_text(json.dumps(ASKED | changes))
    return str(path)


def shoal(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def planned(path: str, *arguments: str) -> Any:
    result = shoal("plan", "--experts", path, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_smallest_case_that_overlap_loses(tmp_path: Path) -> None:
    report = planned(write(tmp_path))
    assert report["replicas"] == [2, 2, 2]
    assert sorted(map(tuple, report["placement"])) == [(0, 1), (0, 2), (1, 2)]
    assert report["recovery_by_failures"] == [1.0, 1.0, 0.0, 0.0]
    assert report["busiest_replica_load_ratio"] == 1.0
    # Two or three of three nodes fail, each with 0.05.
    assert report["recovery_probability"] == pytest.approx(1 - (3 * 0.05**2 * 0.95 + 0.05**3))
    assert report["recovery_probability_is_exact"]


def test_every_slot_is_used_and_unequal_nodes_are_seen(tmp_path: Path) -> None:
    slots, chance = [4, 2, 3, 1], [0.3, 0.01, 0.02, 0.3]
    report = planned(write(tmp_path, slots=slots, failure_probability=chance, loads=[5, 1, 1]))
    assert [len(experts) for experts in report["placement"]] == slots
    assert sum(report["replicas"]) == 10
    for expert, count in enumerate(report["replicas"]):
        assert sum(experts.count(expert) for experts in report["placement"]) == count
    # The rare ones fill the reliable nodes but for one slot; the other expert is there, and on both flaky nodes.
    assert report["replicas"] == [6, 2, 2]
    assert report["placement"][1] == [1, 2]
    assert report["loss_probability"] == pytest.approx(1 - 0.998018)
    assert report["recovery_probability"] == 1 - report["loss_probability"]


def test_the_same_seed_gives_the_same_plan(tmp_path: Path) -> None:
    path = write(tmp_path, slots=[6] * 10, loads=[1.0] * 8)
    assert planned(path, "--seed", "4") == planned(path, "--seed", "4")


def test_a_person_sees_nodes_and_figures(tmp_path: Path) -> None:
    result = shoal("plan", "--experts", write(tmp_path, slots=[3, 3], loads=[9.0, 1.0], failure_probability=[0.1, 0.2]))
    assert result.exit_code == 0, result.output
    for words in ("node", "fails", "experts", "0x2 1", "replicas", "loss of an expert", "busiest replica"):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slots": []}, "between 1 and"),
        ({"slots": [2, -1, 9]}, "not negative"),
        ({"slots": [2.5]}, "slots[0] must be a whole number"),
        ({"slots": [1, 1, 1]}, "at most 1 different nodes"),
        ({"slots": [10**7]}, "at most"),
        ({"min_replicas": 0}, "at least one replica"),
        ({"min_replicas": 3}, "at most 2 different nodes"),
        ({"loads": []}, "no experts"),
        ({"loads": [1.0, -2.0]}, "not negative"),
        ({"failure_probability": [0.1]}, "one for each of the 3 nodes"),
        ({"failure_probability": [0.1, 0.1, 1.5]}, "between 0 and 1"),
        ({"experts": 3}, "there is no 'experts'"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    result = shoal("plan", "--experts", write(tmp_path, **changes))
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_what_is_no_json_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "experts.json"
    path.write_bytes(text.encode("latin-1"))
    result = shoal("plan", "--experts", str(path))
    assert result.exit_code == 2
    assert "is no description of experts" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = shoal("plan", "--experts", str(tmp_path / "none.json"))
    assert result.exit_code == 2
    assert "cannot read" in result.stderr


@pytest.mark.parametrize("both", [True, False])
def test_layers_or_experts_but_one_of_them(tmp_path: Path, both: bool) -> None:
    result = shoal("plan", *(["home-gpus", "--experts", write(tmp_path)] if both else []))
    assert result.exit_code == 2
    assert "either NETWORK.json or --experts" in result.stderr
