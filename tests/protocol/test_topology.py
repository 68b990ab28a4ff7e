import json
from pathlib import Path

import numpy as np
import pytest

from shoal.protocol.errors import LocalError
from shoal.protocol.topology import load_topology, make_topology

TWO = {"latency_ms": [[0, 10], [20, 0]], "bandwidth_gbps": [[0, 1], [2, 0]]}


def write(folder: Path, text: str) -> Path:
    path = folder / "network.json"
    path.write_text(text)
    return path


def test_a_file_is_read_in_si_units(tmp_path: Path) -> None:
    devices = [{"tflops": 80, "memory_gb": 24, "up_mbps": 40, "down_mbps": 100, "card": 7}, {"card": 7}]
    topology, (file, notes) = load_topology(write(tmp_path, json.dumps(TWO | {"devices": devices, "title": "two"})))
    assert topology.latency_s.tolist() == [[0.0, 0.01], [0.02, 0.0]]
    assert topology.bytes_per_s.tolist() == [[0.0, 1.25e8], [2.5e8, 0.0]]
    assert (topology.flop_per_s[0], topology.memory_bytes[0], topology.up_bytes_per_s[0]) == (80e12, 24e9, 5e6)
    assert topology.card.tolist() == [0, 0]
    assert file.title == "two"
    assert notes == (
        "the speed of 1 of 2 devices is assumed: 45 TFLOP/s",
        "the memory of 1 of 2 devices is assumed: 16 GB",
    )


def test_what_is_for_people_is_listed_and_what_belongs_to_devices_is_told(tmp_path: Path) -> None:
    """The fields of the DT-FM paper's published cases, and those that people put beside them."""
    published = {"num_devices": 2, "device_model": "NVIDIA V100", "gpus_per_region": {"Ohio": 2}, "regions": ["Ohio"]}
    paper = {"gradient_gigabytes_per_stage": 0.65, "activation_gigabytes_per_replica": 0.47, "bits_per_byte": 8}
    more = {"names": ["a", "b"], "memory_gb": 24, "tflops": 80, "workload": paper, "device_regions": ["Ohio", "Ohio"]}
    topology, (_, notes) = load_topology(write(tmp_path, json.dumps(TWO | published | more)))
    assert topology.memory_bytes.tolist() == [16e9, 16e9]
    assert notes == (
        "not read at the top of the file: memory_gb, tflops; say it in each entry of devices",
        "not read: num_devices, device_model, gpus_per_region, regions, names, workload.bits_per_byte",
        "the speed of every device is assumed: 45 TFLOP/s",
        "the memory of every device is assumed: 16 GB",
    )
    _, (_, notes) = load_topology(write(tmp_path, json.dumps(TWO | {f"of-{n}": n for n in range(100)})))
    assert notes[0].endswith("of-11 and 88 more")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"latency_ms": [[0, float("nan")], [1, 0]]}, "not a network"),
        ({"latency_ms": [[0, -1], [1, 0]]}, "latency of link 0 -> 1"),
        ({"latency_ms": [[0, 1, 2], [1, 0, 2]]}, "2 rows, but row 0 has 3"),
        ({"bandwidth_gbps": [[0, 0], [0, 0]]}, "no link to or from"),
        ({"bandwidth_gbps": [[0]]}, "between"),
        ({"bandwidth_gbps": None}, "lacks"),
        ({"device_regions": ["x"]}, "1 regions"),
        ({"devices": [{"tflops": 0}, {}]}, "speed of device-0"),
        ({"devices": [{"memory_gb": -1}, {}]}, "memory of device-0"),
        ({"latency_ms": []}, "empty"),
        ({"unreachable": [["device-0", "bob"]]}, "unreachable names bob"),
        ({"unreachable": [["device-0", "device-1"]]}, "no link to or from"),
        ({"devices": [{"behind_nat": True}, {"behind_nat": True}]}, "no link to or from"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = write(tmp_path, json.dumps(TWO | change))
    with pytest.raises(LocalError, match=says) as raised:
        load_topology(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_devices_behind_routers_of_their_own_do_not_meet(tmp_path: Path) -> None:
    ones = [[1.0] * 5] * 5
    inside = {"behind_nat": True}
    devices = [{"name": "open"}, inside, {**inside, "card": 7}, {**inside, "card": 7}, {"name": "bob"}]
    file = {"latency_ms": ones, "bandwidth_gbps": ones, "devices": devices, "unreachable": [["bob", "open"]]}
    topology, _ = load_topology(write(tmp_path, json.dumps(file)))
    apart = {(i, j) for i, j in np.argwhere(topology.bytes_per_s == 0.0).tolist() if i < j}
    assert apart == {(1, 2), (1, 3), (0, 4)}, "the two of one router meet, and whoever is behind none meets all"
    assert (topology.bytes_per_s == topology.bytes_per_s.T).all()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be read"):
        load_topology(tmp_path / "nowhere.json")
    with pytest.raises(LocalError, match="not a network"):
        load_topology(write(tmp_path, "{"))


def test_a_part_of_a_swarm() -> None:
    topology = make_topology(np.arange(9.0).reshape(3, 3), np.ones((3, 3)), flop_per_s=[1.0, 2.0, 3.0])
    part = topology.take([2, 0])
    assert part.flop_per_s.tolist() == [3.0, 1.0]
    assert part.latency_s.tolist() == [[0.0, 6.0], [2.0, 0.0]]
    with pytest.raises(ValueError, match="read-only"):
        part.flop_per_s[0] = 5.0
