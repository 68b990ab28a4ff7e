"""Scenario files: what they become, and one clear line for what they cannot be."""

import re
from pathlib import Path

import numpy as np
import pytest

from shoal.deploy.simulate.scenario import SHIPPED, Scenario, find_scenario, load_scenario, shipped_names
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import SwarmSpec

TWO_PLACES = """
[network]
region = [
  { name = "A", count = 3, devices_per_card = 2, up_mbps = 80, down_mbps = 800, tflops = 2, inside_ms = 4 },
  { name = "B", count = 1, last_mile_ms = 5, memory_gb = 2, has_text = false },
]
path = [{ between = ["A", "B"], latency_ms = 10, mbps = 16, back_mbps = 8 }]
"""


def scenario(folder: Path, text: str) -> Scenario:
    (folder / "mine.toml").write_text(text)
    return find_scenario(str(folder / "mine.toml"))


def test_regions_become_devices(tmp_path: Path) -> None:
    found = scenario(tmp_path, TWO_PLACES).topology
    assert found.names == ("A-0", "A-1", "A-2", "B-0")
    assert found.regions == ("A", "A", "A", "B")
    assert list(found.card) == [0, 0, 2, 3]
    assert list(found.flop_per_s) == [2e12, 2e12, 2e12, 45e12]
    assert list(found.memory_bytes) == [16e9, 16e9, 16e9, 2e9]
    assert list(found.up_bytes_per_s) == [1e7, 1e7, 1e7, np.inf]
    assert list(found.down_bytes_per_s) == [1e8, 1e8, 1e8, np.inf]
    assert list(found.may_feed) == [True, True, True, False]


def test_paths_have_two_directions_and_last_miles(tmp_path: Path) -> None:
    found = scenario(tmp_path, TWO_PLACES).topology
    assert found.latency_s[0, 3] == pytest.approx(0.015)
    assert found.latency_s[3, 0] == pytest.approx(0.015)
    assert (found.bytes_per_s[0, 3], found.bytes_per_s[3, 0]) == (2e6, 1e6)
    assert found.latency_s[0, 2] == pytest.approx(0.004), "two machines of one place"
    assert found.latency_s[0, 1] == pytest.approx(1e-5), "one machine"


def test_regions_of_one_place_are_near_and_as_slow_as_the_slower(tmp_path: Path) -> None:
    text = """
    [network]
    region = [
      { name = "DSL", place = "town", count = 1, inside_ms = 3, inside_mbps = 800, last_mile_ms = 15 },
      { name = "fibre", place = "town", count = 1, inside_ms = 1, inside_mbps = 80 },
    ]
    """
    found = scenario(tmp_path, text).topology
    assert found.latency_s[0, 1] == pytest.approx(0.018)
    assert found.bytes_per_s[1, 0] == 1e7


def test_sections_are_those_of_a_run_spec(tmp_path: Path) -> None:
    text = 'steps = 3\n[model]\nnum_layers = 4\n[training]\ns_max = 2\n[wire]\nactivations = "fp32"\n' + TWO_PLACES
    spec = scenario(tmp_path, text).spec
    assert (spec.model.num_layers, spec.training.s_max, spec.wire.activations) == (4, 2, "fp32")
    assert spec.training.steps == 3
    assert spec.training.validation_interval_steps == 0


def test_what_the_model_leaves_out_follows_its_width_as_in_a_run_file(tmp_path: Path) -> None:
    spec = scenario(tmp_path, "stages = 4\n[model]\ndim = 1024\nnum_layers = 24\ncontext = 1024\n" + TWO_PLACES).spec
    assert (spec.model.ffn_dim, spec.model.num_heads, spec.model.num_kv_heads) == (2816, 16, 8)
    assert 150_000 < spec.tokens_per_step < 300_000


def test_a_network_file_and_a_trace_are_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text('{"latency_ms": [[0, 1], [1, 0]], "bandwidth_gbps": [[0, 1], [1, 0]]}')
    (tmp_path / "churn.csv").write_text("time_s,event,node\n0,add,a\n")
    found = scenario(tmp_path, '[network]\nfile = "net.json"\n[churn]\ntrace = "churn.csv"\n')
    assert found.topology.num_devices == 2
    assert found.trace == tmp_path / "churn.csv"
    assert found.strategies == ()


def test_a_network_alone_is_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text(
        '{"title": "Two", "latency_ms": [[0, 1], [1, 0]], "bandwidth_gbps": [[0, 1], [1, 0]], "num_stages": 2,'
        '"workload": {"gradient_gigabytes_per_stage": 1, "activation_gigabytes_per_replica": 1, "num_layers": 4,'
        '"hidden_dim_of_model": 1024, "sequence_length_tokens": 512, "global_batch_tokens": 8192}}'
    )
    found = find_scenario(str(path))
    assert (found.title, found.stages, found.spec.model.dim, found.spec.model.num_layers) == ("Two", 2, 1024, 4)
    assert found.spec.training.microbatches_per_step == 16
    assert found.spec.tokens_per_step == 8192


EXPERTS = "[model]\nnum_experts = 4\n[experts]\nslots = 3\n"


def test_experts_are_placed_where_the_file_says_so(tmp_path: Path) -> None:
    found = scenario(tmp_path, EXPERTS + "holders = 3\nloads = [4, 2, 1, 1]\n" + TWO_PLACES)
    assert (found.spec.swarm.expert_slots, found.spec.swarm.expert_replicas) == (3, 3)
    assert found.expert_loads == (4.0, 2.0, 1.0, 1.0)
    auto = scenario(tmp_path, EXPERTS + 'holders = "auto"\n' + TWO_PLACES)
    assert (auto.spec.swarm.expert_slots, auto.spec.swarm.expert_replicas) == (3, SwarmSpec().expert_replicas)
    assert auto.expert_loads == ()


def test_experts_that_no_section_places_are_held_whole(tmp_path: Path) -> None:
    found = scenario(tmp_path, "[model]\nnum_experts = 4\n" + TWO_PLACES)
    assert (found.spec.model.num_experts, found.spec.swarm.expert_slots) == (4, 0)


def test_a_strategy_may_place_no_experts(tmp_path: Path) -> None:
    whole = '[[strategy]]\nname = "whole"\nlayout = "ours"\nexperts = false\n'
    found = scenario(tmp_path, EXPERTS + whole + TWO_PLACES)
    assert found.strategies[0].applied_to(found.spec).swarm.expert_slots == 0


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_scenarios_can_be_read(name: str) -> None:
    found = load_scenario(SHIPPED / f"{name}.toml")
    assert found.name == name
    assert found.title != name, "it has no title"
    if name == "speed-run":
        assert found.topology.num_devices == 8, "those who published it had eight"
    else:
        assert found.topology.num_devices >= 16


def test_the_promised_scenarios_are_shipped() -> None:
    of_homes = {"home-gpus", "lora-homes", "lora-experts"}
    others = {"data-centre", "two-universities", "eight-cities", "mixed-cards", "mixture"}
    assert of_homes | others <= set(shipped_names())


def test_the_example_of_the_readme_can_be_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (SHIPPED.parent / "SCENARIOS.md").read_text(), re.DOTALL)
    (tmp_path / "spot.csv").write_text("time_s,event,node\n0,add,a\n")
    assert scenario(tmp_path, example).topology.num_devices == 13


REGION = '[network]\nregion = [{ name = "A", count = 2 }]\n'


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("= 3", "Invalid statement"),
        ("steps = 3\n", "network is missing"),
        ("[network]\n", "give either file or regions"),
        ('[network]\nfile = "x.json"\nregion = [{ name = "A", count = 2 }]\n', "give either file or regions"),
        ('[network]\nfile = "x.json"\npath = [{between=["A","A"], latency_ms=1, mbps=1}]\n', "paths are for regions"),
        ('[network]\nfile = "none.json"\n', "none.json cannot be read"),
        ('[network]\nregion = [{ name = "A", count = 0 }]\n', "count must be in [1, 4096], is 0"),
        (
            '[network]\nregion = [{ name = "A", count = 2, tflop = 1 }]\n',
            "[network.region[0]] has no 'tflop': did you mean tflops?",
        ),
        ('[network]\nregion = [{ name = "A", count = 2, tflops = nan }]\n', "tflops must be positive, is nan"),
        ('[network]\nregion = [{ name = "A", count = 2, up_mbps = -1 }]\n', "up_mbps must be positive, is -1"),
        ('[network]\nregion = [{ name = "A", count = 2, inside_ms = nan }]\n', "inside_ms must be 0 or more, is nan"),
        ('[network]\nregion = [{ name = "A", count = 2 }, { name = "A", count = 2 }]\n', "two regions have one name"),
        (
            '[network]\nregion = [{ name = "A", count = 2 }, { name = "B", count = 2 }]\n',
            "there is no path between 'A' and 'B'",
        ),
        (REGION.rstrip() + '\npath = [{between=["A","C"], latency_ms=1, mbps=1}]\n', "a path names 'C'"),
        (REGION.rstrip() + '\npath = [{between=["A"], latency_ms=1, mbps=1}]\n', "length 2"),
        (REGION.rstrip() + '\npath = [{between=["A","A"], latency_ms=-1, mbps=1}]\n', "latency_ms must be 0 or more"),
        ("steps = 0\n" + REGION, "steps must be in [1, 1000000], is 0"),
        ("stages = 7\n" + REGION, "stages must be in [1, 6], is 7"),
        ("seconds = inf\n" + REGION, "seconds must be positive, is inf"),
        ("[training]\nsteps = 9\n" + REGION, "training.steps has no effect here"),
        ("[training]\ns_max = 9\n" + REGION, "s_max must be in [0, 8]"),
        ("[churn]\n" + REGION, "[churn] trace is missing"),
        ('[churn]\ntrace = "none.csv"\n' + REGION, "there is no trace"),
        ('[churn]\ntrace = "none.csv"\nspeedup = 0\n' + REGION, "speedup must be positive"),
        ("[experts]\nslots = 2\n" + REGION, "[experts] means nothing in a dense model"),
        ("[model]\nnum_experts = 4\n[experts]\n" + REGION, "[experts] slots is missing"),
        ("[model]\nnum_experts = 4\n[experts]\nslots = 0\n" + REGION, "slots must be in [1, 1024], is 0"),
        ("[model]\nnum_experts = 4\n[experts]\nslots = 5\n" + REGION, "experts.slots is 5, of 4 experts"),
        (EXPERTS + "holders = 0\n" + REGION, "holders must be in [1, 20000], is 0"),
        (EXPERTS + 'holders = "all"\n' + REGION, "'all'"),
        (EXPERTS + "loads = [1, 2]\n" + REGION, "experts.loads has 2 of 4 experts"),
        (EXPERTS + "loads = [0, 0, 0, 0]\n" + REGION, "loads must be 0 or more, and at least one above 0"),
        ('[[strategy]]\nname = "x"\nlayout = "best"\n' + REGION, "'best'"),
        ('[[strategy]]\nname = ""\nlayout = "ours"\n' + REGION, "name must have 1 to 40 characters"),
        ('[[strategy]]\nname = "x"\nlayout = "ours"\n' * 2 + REGION, "two strategies have one name"),
    ],
)
def test_what_is_no_scenario_is_refused_in_a_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(LocalError) as caught:
        scenario(tmp_path, text)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_shipped() -> None:
    with pytest.raises(LocalError, match="'atlantis' is neither a file nor a shipped scenario: data-centre, "):
        find_scenario("atlantis")


def test_a_workload_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text(
        '{"latency_ms": [[0, 1], [1, 0]], "bandwidth_gbps": [[0, 1], [1, 0]],'
        '"workload": {"gradient_gigabytes_per_stage": 1, "activation_gigabytes_per_replica": 1, "num_layers": -4}}'
    )
    with pytest.raises(LocalError, match="num_layers must be positive, is -4"):
        find_scenario(str(path))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ('"latency_mss": []', "there is no 'latency_mss': did you mean latency_ms?"),
        ('"devices": [{"tflop": 3}, {}]', "[devices[0]] has no 'tflop': did you mean tflops?"),
        ('"devices": [{"tflops": "many"}, {}]', "devices[0].tflops must be a number, not a text in quotes"),
        (
            '"workload": {"gradient_gigabytes_per_stage": 1, "activation_gigabytes_per_replica": 1, "num_layer": 2}',
            "in workload there is no 'num_layer': did you mean num_layers?",
        ),
    ],
)
def test_a_misspelt_field_of_a_network_is_told_by_its_nearest_name(tmp_path: Path, fields: str, what: str) -> None:
    path = tmp_path / "net.json"
    path.write_text(
        '{"latency_ms": [[0, 1], [1, 0]], "bandwidth_gbps": [[0, 1], [1, 0]], "source": "x", ' + fields + "}"
    )
    with pytest.raises(LocalError, match=re.escape(f"net.json is not a network: {what}")):
        find_scenario(str(path))


def test_watts_are_of_a_region_or_of_a_device(tmp_path: Path) -> None:
    text = '[network]\nregion = [{ name = "A", count = 2, watts = 300 }, { name = "B", count = 1 }]\n'
    text += "elsewhere = { latency_ms = 1, mbps = 1 }\n"
    assert scenario(tmp_path, text).watts == (300.0, 300.0, None)
    path = tmp_path / "net.json"
    entries = '"devices": [{"watts": 250}, {}]'
    path.write_text('{"latency_ms": [[0, 1], [1, 0]], "bandwidth_gbps": [[0, 1], [1, 0]], ' + entries + "}")
    assert find_scenario(str(path)).watts == (250.0, None)
