"""Files that somebody else wrote and that ask for more than any machine has: one line within a second."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.deploy.simulate.scenario import find_scenario
from shoal.deploy.simulate.traces import load_trace, replay
from shoal.protocol.errors import LocalError
from shoal.protocol.limits import SCENARIO_DEVICES_MAX, TRACE_EVENTS_MAX
from shoal.protocol.toml.spec_file import load_spec

NETWORK = '[network]\nelsewhere = {{ latency_ms = 1, mbps = 1 }}\nregion = [{{ name = "a", count = 2{} }}]\n'
HUGE = ("1_000_000_000_000", "9223372036854775807", "0x" + "f" * 100_000, "9" * 5000)
OF_A_MODEL = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "context", "num_experts")
OF_A_STEP = ("steps", "microbatches_per_step", "microbatch_size", "s_max", "validation_microbatches")


def refused(load: Any, path: Path) -> str:
    """What is said of it. It is a line, and there within a second."""
    begun_s = time.process_time()
    with pytest.raises(LocalError) as error:
        load(path)
    assert time.process_time() - begun_s < 1.0
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 500
    return str(error.value)


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def scenario(path: Path) -> None:
    find_scenario(str(path))


@pytest.mark.parametrize("huge", HUGE, ids=lambda text: text[:8])
@pytest.mark.parametrize("field", OF_A_MODEL)
def test_a_model_beyond_all_bounds(tmp_path: Path, field: str, huge: str) -> None:
    text = f"[model]\n{field} = {huge}\n"
    refused(load_spec, written(tmp_path / "run.toml", text))
    refused(scenario, written(tmp_path / "scenario.toml", NETWORK.format("") + text))


@pytest.mark.parametrize("huge", HUGE, ids=lambda text: text[:8])
@pytest.mark.parametrize("field", OF_A_STEP)
def test_a_step_beyond_all_bounds(tmp_path: Path, field: str, huge: str) -> None:
    text = f"[training]\n{field} = {huge}\n"
    refused(load_spec, written(tmp_path / "run.toml", text))
    if field != "steps":  # which a scenario says at its top
        refused(scenario, written(tmp_path / "scenario.toml", NETWORK.format("") + text))


@pytest.mark.parametrize("huge", HUGE, ids=lambda text: text[:8])
@pytest.mark.parametrize("field", ["stages", "min_peers", "expert_slots", "expert_replicas"])
def test_a_swarm_beyond_all_bounds(tmp_path: Path, field: str, huge: str) -> None:
    text = f"[model]\nnum_experts = 8\n[swarm]\n{field} = {huge}\n"
    refused(load_spec, written(tmp_path / "run.toml", text))


@pytest.mark.parametrize("huge", HUGE, ids=lambda text: text[:8])
@pytest.mark.parametrize("field", ["steps", "stages"])
def test_a_scenario_beyond_all_bounds(tmp_path: Path, field: str, huge: str) -> None:
    refused(scenario, written(tmp_path / "scenario.toml", f"{field} = {huge}\n" + NETWORK.format("")))


@pytest.mark.parametrize("huge", HUGE, ids=lambda text: text[:8])
def test_a_region_beyond_all_bounds(tmp_path: Path, huge: str) -> None:
    path = tmp_path / "scenario.toml"
    refused(scenario, written(path, NETWORK.format("").replace("count = 2", f"count = {huge}")))
    refused(scenario, written(path, NETWORK.format(f", devices_per_card = {huge}")))


def test_regions_that_are_too_many_together(tmp_path: Path) -> None:
    regions = ", ".join(f'{{ name = "{name}", count = {SCENARIO_DEVICES_MAX} }}' for name in "ab")
    said = refused(scenario, written(tmp_path / "scenario.toml", f"[network]\nregion = [{regions}]\n"))
    assert f"{2 * SCENARIO_DEVICES_MAX} devices are more than {SCENARIO_DEVICES_MAX}" in said


@pytest.mark.parametrize(
    "text",
    [
        "a." * 20_000 + "b = 1",
        '"a" . ' * 20_000 + "b = 1",
        "[" + "'a b'." * 20_000 + "b]",
        "x = {" + "a." * 20_000 + "b = 1}",
        "x = " + "[" * 100_000,
        "x = " + "{a=" * 50_000,
        b"x = '\xff'",
        b"\0" * 100,
        b"#" * (2 << 20),
        'x = "' + "a" * 900_000,
        "x = 1\n" * 100_000,
    ],
    ids=["dots", "quoted dots", "heading", "inline", "lists", "tables", "latin", "zeros", "large", "open", "twice"],
)
def test_toml_that_takes_a_parser_long(tmp_path: Path, text: str | bytes) -> None:
    refused(load_spec, written(tmp_path / "run.toml", text))
    refused(scenario, written(tmp_path / "scenario.toml", text))


def test_a_device_without_an_end(tmp_path: Path) -> None:
    for name, load in (("a.toml", load_spec), ("b.toml", scenario), ("c.json", scenario), ("d.csv", load_trace)):
        (tmp_path / name).symlink_to("/dev/zero")
        refused(load, tmp_path / name)


def network(**fields: Any) -> dict[str, Any]:
    return {"latency_ms": [[0, 1], [1, 0]], "bandwidth_gbps": [[0, 1], [1, 0]]} | fields


def workload(**fields: Any) -> dict[str, Any]:
    return network(workload={"gradient_gigabytes_per_stage": 1.0, "activation_gigabytes_per_replica": 1.0} | fields)


ABSURD_NETWORKS = [
    network(num_stages=10**15),
    network(num_stages=-1),
    network(devices=[{}] * 10_000),
    network(latency_ms=[[]] * 10_000, bandwidth_gbps=[[]] * 10_000),
    network(devices=[{"card": 10**30}, {"tflops": 1e308}]),
    workload(num_layers=10**15),
    workload(num_layers=-5),
    workload(hidden_dim_of_model=10**15),
    workload(sequence_length_tokens=10**15),
    workload(sequence_length_tokens=-1),
    workload(global_batch_tokens=1e308),
    workload(num_layers=10**100),
]


@pytest.mark.parametrize("file", ABSURD_NETWORKS, ids=range(len(ABSURD_NETWORKS)))
def test_a_network_file_beyond_all_bounds(tmp_path: Path, file: dict[str, Any]) -> None:
    refused(scenario, written(tmp_path / "network.json", json.dumps(file)))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        '{"source": ' + "[" * 100_000,
        '{"x": ' + "9" * 5000 + "}",
        json.dumps(network()).rstrip("}") + ', "' + "l" * 5_000_000 + '": 1}',
        json.dumps({"latencyms": 1} | {f"latency_{i}": 1 for i in range(100_000)}),
    ],
    ids=["deep", "deep beside", "digits", "a long name", "many names"],
)
def test_json_that_takes_a_parser_long(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "network.json", text)
    begun_s = time.process_time()
    said = ""
    try:
        find_scenario(str(path))  # what is said beside the network is for people
    except LocalError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
    assert len(said) < 500
    assert time.process_time() - begun_s < 1.0


@pytest.mark.parametrize(
    "text",
    [
        "time_s,available\n" + "".join(f"{t},{100_000 * (t % 2)}\n" for t in range(1000)),
        "time_s,available\n0," + "9" * 5000,
        "time_s,available\n" + "9" * 5000 + ",1",
        "time_s,event,node\n" + "".join(f"{t},{('add', 'remove')[t % 2]},a\n" for t in range(300_000)),
        "x" * 200_000,
        "time_s,available\n" + '"' * 200_001,
    ],
    ids=["see-saw", "count", "time", "long", "header", "quotes"],
)
def test_a_trace_beyond_all_bounds(tmp_path: Path, text: str) -> None:
    refused(load_trace, written(tmp_path / "trace.csv", text))


def test_a_trace_of_one_node_is_not_played_by_thousands(tmp_path: Path) -> None:
    lines = "".join(f"{t},{('add', 'remove')[t % 2]},a\n" for t in range(TRACE_EVENTS_MAX // 10))
    trace = load_trace(written(tmp_path / "trace.csv", f"time_s,event,node\n{lines}"))
    with pytest.raises(LocalError, match="take fewer devices"):
        replay(trace, num_devices=SCENARIO_DEVICES_MAX, seconds=1e9)
