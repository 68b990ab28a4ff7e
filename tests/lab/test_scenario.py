"""Scenario files are closed and complete, and both worlds are told the same; no process, no namespace."""

import asyncio
import json
import math
from pathlib import Path

import pytest

import virtual
from carried import CarriedTransport
from figures import Figures, Sides, Step, kept, paces, rate, table
from limited import LimitedCompute
from random_events import QUIET_S, with_random_events
from scenario import WORDS, find_scenario, load_scenario, shipped, spans, with_pin, with_seconds
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import Priority
from shoal.protocol.sim.dirt import CLEAN, Dirt
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World
from tcp import tcp_bytes_per_s
from virtual import carriers_of, dirt_of, play, topology_of

FIELD = ("homes-18m-share", "homes-18m-quota", "homes-18m", "homes-1m")
PLAIN = """
title = "two"
seconds = 20
hosts = [{ name = "a", last_mile_ms = 3, up_mbps = 20 }, { name = "b", place = "Rome", jitter_ms = 2 }]
"""


def load(folder, text):
    path = folder / "two.toml"
    path.write_text(text)
    return load_scenario(path)


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_scenario_can_be_read(name):
    scenario = find_scenario(name)
    assert scenario.spec.name == f"lab-{name}"
    assert scenario.spec.swarm.min_peers == sum(host.joins_s == 0.0 for host in scenario.hosts)
    assert topology_of(scenario, {host.name: 1.0 for host in scenario.hosts}).num_devices == len(scenario.hosts)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("colour = 1", "colour"),
        ('events = [{ at_s = 1, host = "a", do = "explode" }]', "must be one of set, "),
        ('events = [{ at_s = 1, host = "a", do = "set up_mbps" }]', "2 words follow 'set'"),
        ('events = [{ at_s = 1, host = "a", do = "set nat 3" }]', "can be set"),
        ('events = [{ at_s = 1, host = "a", do = "set loss much" }]', "no number"),
        ('events = [{ at_s = 1, host = "c", do = "cut" }]', "an event names 'c'"),
        ('events = [{ at_s = 1, host = "a", do = "sever c" }]', "an event names 'c'"),
        ('events = [{ at_s = 21, host = "a", do = "cut" }]', "all is over at 20 s"),
        ('paths = [{ between = ["a", "Oslo"], ms = 1 }]', "a path names 'Oslo'"),
        ('hosts = [{ name = "a", home = "h" }, { name = "b", home = "h" }]', "a needs a nat"),
        (
            'hosts = [{ name = "a", home = "h", nat = "symmetric" }, { name = "b", home = "h", up_mbps = 3 }]',
            "b shares the line of a",
        ),
        ("warm_up_s = 20", "of 20 s in all"),
        ('hosts = [{ name = "a", cores = 0 }]', "hosts[0].cores"),
        ("[model]\ndimm = 3", "dimm"),
        ("dirt = { jitter = 1 }", "jitter"),
        ('hosts = [{ name = "a", cores = 0.5, dirt = { throttled = 0.5 } }]', "a has a quota of cores"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, more, complaint):
    with pytest.raises(LocalError) as refused:
        load(
            tmp_path,
            "".join(line for line in PLAIN.splitlines(True) if "hosts" not in more or "hosts" not in line) + more,
        )
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_page_of_the_format_shows_a_scenario(tmp_path):
    shown = Path(__file__).with_name("SCENARIOS.md").read_text().partition("```toml\n")[2].partition("```")[0]
    scenario = load(tmp_path, shown)
    assert [host.joins_s for host in scenario.hosts] == [0, 0, 30]
    assert scenario.spec.swarm.min_peers == 2


def test_the_homes_of_the_field_differ_in_nothing_but_their_limits_and_the_model():
    limits = {name: {(host.compute_share, host.cores) for host in find_scenario(name).hosts} for name in FIELD}
    assert limits == {
        "homes-18m-share": {(0.2, None)},
        "homes-18m-quota": {(1.0, 0.25)},
        "homes-18m": {(1.0, None)},
        "homes-1m": {(1.0, None)},
    }
    homes = {json.dumps([find_scenario(name).file.paths, find_scenario(name).lines], default=str) for name in FIELD}
    assert len(homes) == 1
    tokens = [find_scenario(name).spec.tokens_per_step for name in FIELD]
    assert tokens == [16_384, 16_384, 16_384, 65_536]


def test_a_pinned_scenario_has_so_many_stages_and_everybody_from_the_beginning(tmp_path):
    scenario = with_pin(find_scenario("homes-1m"), 3)
    assert (scenario.name, scenario.spec.swarm.stages, scenario.is_pinned) == ("homes-1m-pin3", 3, True)
    with pytest.raises(LocalError, match="can be pinned to 1 to 6 stages, not 7"):
        with_pin(find_scenario("homes-1m"), 7)
    late = load(tmp_path, PLAIN.replace("jitter_ms = 2", "joins_s = 5"))
    with pytest.raises(LocalError, match="joins later"):
        with_pin(late, 1)


def test_a_pinned_layout_uses_everybody_and_stays():
    """One device is far slower than its probe says, so that a free swarm moves."""
    scenario = with_seconds(with_pin(find_scenario("small"), 2), 12.0)
    names = [host.name for host in scenario.hosts]
    figures = virtual.play(scenario, dict.fromkeys(names, 1.0), {name: 1.0 + 3.0 * (name == "a") for name in names})
    assert figures.layouts == 1
    assert figures.layout.count("|") == 1
    assert "spare" not in figures.layout
    assert figures.steps > 2


def test_a_shorter_play_leaves_out_what_comes_later():
    scenario = with_seconds(find_scenario("small"), 6.0)
    assert (scenario.file.seconds, scenario.file.warm_up_s, scenario.file.events) == (6.0, 1.5, ())
    assert spans(scenario) == [(1.5, 6.0)]


def test_no_scenario_of_that_name():
    with pytest.raises(LocalError, match="'smal' is no scenario"):
        find_scenario("smal")


def test_paths_lines_and_homes(tmp_path):
    scenario = load(tmp_path, PLAIN + 'elsewhere_ms = 9\npaths = [{ between = ["Rome", "a"], ms = 4, jitter_ms = 1 }]')
    assert scenario.path("a", "b") == scenario.path("b", "a") == (4.0, 1.0)
    topology = topology_of(scenario, {"a": 1.0, "b": 2.0})
    assert topology.latency_s[0, 1] == pytest.approx(0.0085), "4 + 3 ms, and half of 1 + 2 ms"
    assert topology.up_bytes_per_s[0] == pytest.approx(2.5e6)
    home = load_scenario_of_a_home(tmp_path)
    assert home.line_of == {"x": "flat", "y": "flat", "z": "z"}
    assert home.lines["flat"].up_mbps == 5
    assert list(topology_of(home, dict.fromkeys("xyz", 1.0)).card) == [0, 0, 1]


def test_a_path_that_loses_packets_carries_what_eight_connections_get_through(tmp_path):
    lossy = """
title = "two"
seconds = 9
hosts = [{ name = "a", loss = 0.004 }, { name = "b", loss = 0.006 }, { name = "c" }]
elsewhere_ms = 30
"""
    rates = topology_of(load(tmp_path, lossy), dict.fromkeys("abc", 1.0)).bytes_per_s
    assert rates[0, 1] == pytest.approx(8 * 1448 / 0.06 * (1.5 / 0.01) ** 0.5, rel=0.01)
    assert rates[0, 2] == pytest.approx(rates[0, 1] * (0.01 / 0.004) ** 0.5, rel=0.01)
    assert tcp_bytes_per_s(0.06, 0.0) == math.inf


def load_scenario_of_a_home(folder):
    hosts = (
        '{ name = "x", home = "flat", up_mbps = 5, nat = "symmetric" }',
        '{ name = "y", home = "flat" }',
        '{ name = "z" }',
    )
    return load(folder, f'title = "home"\nseconds = 9\nhosts = [{", ".join(hosts)}]\n')


def test_a_rate_counts_parts_of_steps_and_standstills():
    times_s = [0.0, 2.0, 4.0, 6.0]
    assert rate(times_s, 0.0, 6.0) == pytest.approx(0.5)
    assert rate(times_s, 1.0, 3.0) == pytest.approx(0.5)
    assert rate(times_s, 4.0, 10.0) == pytest.approx(1 / 6)
    assert rate([], 0.0, 10.0) == 0.0


def test_what_a_way_back_undoes_does_not_count_but_ends_a_gap(tmp_path):
    steps = [Step(number, 100.0 + at_s) for number, at_s in ((0, 0), (1, 4), (2, 8), (3, 12), (1, 15), (2, 18))]
    assert [step.at_s for step in kept(steps)] == [100.0, 115.0, 118.0]
    assert paces(load(tmp_path, PLAIN), steps) == (3, pytest.approx(2 / 20), (pytest.approx(2 / 20),), 4.0)
    assert paces(load(tmp_path, PLAIN), []) == (0, 0.0, (0.0,), 20.0)


def test_a_table_shows_one_world_or_both():
    real = Figures(
        world="real",
        first_step_s=4.0,
        steps=20,
        steps_per_s=2.0,
        parts=(2.0,),
        gap_s_max=1.0,
        up_mb={"a": 4.0},
        works_s={"b": 9.5},
    )
    virtual = Figures(
        world="virtual", first_step_s=2.0, steps=30, steps_per_s=3.0, parts=(3.0,), gap_s_max=0.5, up_mb={"a": 3.0}
    )
    both = table(Sides(scenario="x", title="two", real=real, virtual=virtual))
    assert "steps/s                    2           3      1.50" in both
    assert "up a" in both
    assert "b works                9.5 s" in both
    assert "1.50" not in table(Sides(scenario="x", title="two", real=real))


NATS = """
title = "nats"
seconds = 30
hosts = [
  { name = "far", last_mile_ms = 40 },
  { name = "near", last_mile_ms = 1 },
  { name = "a", home = "flat", nat = "symmetric" },
  { name = "b", home = "flat" },
  { name = "c", nat = "port-restricted" },
  { name = "d", nat = "full-cone" },
]
[swarm]
min_peers = 2
"""


@pytest.mark.parametrize("said", ["", 'nat_pairs = "carried"', 'nat_pairs = "open"'])
def test_which_hosts_behind_nats_meet(tmp_path, said):
    scenario = load(tmp_path, NATS.replace("[swarm]", said + "\n[swarm]"))
    assert scenario.nat_pairs == [("a", "c"), ("b", "c")], "not the two of one home, nor who lets others in"
    rates = topology_of(scenario, dict.fromkeys([host.name for host in scenario.hosts], 10.0)).bytes_per_s
    closed = {(i, j) for i in range(6) for j in range(i) if rates[i, j] == 0.0}
    assert closed == (set() if "open" in said else {(4, 2), (4, 3)})
    carriers = carriers_of(scenario)
    assert carriers == (dict.fromkeys([(2, 4), (4, 2), (3, 4), (4, 3)], 1) if "carried" in said else {})


def test_what_a_third_host_carries_takes_both_ways_and_its_uplink():
    async def scenario():
        world = World(1, uniform(0.05), acquainted=True)
        ports = {name: world.add_peer(name, up_bytes_per_s=1e6) for name in ("a", "b", "c")}
        ids = {name: port.peer_id for name, port in ports.items()}
        ways = {"a": {ids["b"]: ids["c"]}, "b": {ids["a"]: ids["c"]}, "c": {}}
        ends = {name: CarriedTransport(port.transport, ways[name]) for name, port in ports.items()}
        got = []

        async def answer(source, request):
            return request + b" from " + source.encode()

        async def take(source, meta, payload):
            got.append((source, meta, bytes(payload), world.now_s()))

        for end in ends.values():
            end.serve(on_call=answer, on_frame=take)
        world.partition([ports["a"]], [ports["b"]])
        asked_s = world.now_s()
        assert await ends["a"].call(ids["b"], b"hello", timeout_s=5.0) == b"hello from " + ids["a"].encode()
        assert world.now_s() - asked_s == pytest.approx(0.2, abs=0.01)
        sent_s = world.now_s()
        await ends["a"].send(ids["b"], b"meta", bytes(1_000_000), priority=Priority.BULK)
        await asyncio.sleep(5.0)
        ((source, meta, payload, at_s),) = got
        assert (source, meta, len(payload)) == (ids["a"], b"meta", 1_000_000)
        assert at_s - sent_s == pytest.approx(2.1, abs=0.05), "a second on each uplink"

    run(scenario())


def test_a_device_that_is_lent_for_a_quarter_of_the_time_makes_up_for_waiting_and_no_more():
    async def scenario():
        world = World(1, uniform(0.05))
        peer = world.add_peer("a", device_flop_per_s=1e9)
        device = LimitedCompute(peer.compute, 0.25)

        async def job():
            return await device.run("forward", lambda: None, flop=1e9)

        first = await job()
        assert first.ended_s - first.started_s == pytest.approx(4.0), "as long as its share takes to earn it"
        assert world.now_s() == pytest.approx(1.0), "and done as soon as a whole device has done it"
        await asyncio.sleep(100.0)
        begun_s = world.now_s()
        for _ in range(3):
            await job()
        assert world.now_s() - begun_s == pytest.approx(3.0), "10 s of waiting are made up for"
        begun_s = world.now_s()
        for _ in range(50):
            await job()
        assert world.now_s() - begun_s == pytest.approx(200.0, abs=4.0)

    run(scenario())


def test_the_dirt_of_a_host_is_its_own_or_else_the_scenarios(tmp_path):
    text = """
title = "dirty"
seconds = 20
machine_cores = 2
dirt = { compute_sd = 0.3 }
hosts = [
  { name = "a" },
  { name = "b", cores = 0.25 },
  { name = "c", dirt = { throttled = 0.6, burst_s = 60 } },
]
"""
    scenario = load(tmp_path, text)
    assert [dirt_of(scenario, device) for device in range(3)] == [
        Dirt(compute_sd=0.3, probe_waits=False),
        Dirt(compute_sd=0.3, throttled=0.25, burst_s=0.025, probe_waits=False),
        Dirt(throttled=0.6, burst_s=60.0, probe_waits=False),
    ]
    assert dirt_of(load(tmp_path, PLAIN), 0) == CLEAN


@pytest.mark.sim
def test_hosts_on_one_core_are_as_fast_as_one_and_a_quota_shows_at_work_alone(tmp_path):
    text = """
title = "two"
seconds = 60
warm_up_s = 10
hosts = [{ name = "a", gflops = 1, MORE }, { name = "b", gflops = 1, MORE }]
[model]
dim = 64
num_layers = 4
num_heads = 4
num_kv_heads = 2
ffn_dim = 176
context = 64
[training]
microbatches_per_step = 8
microbatch_size = 4
"""

    def steps_per_s(more, cores=""):
        scenario = load(tmp_path, text.replace("MORE", more).replace("[model]", cores + "[model]"))
        return play(scenario).steps_per_s

    free = steps_per_s("probed_gflops = 1")
    assert steps_per_s("probed_gflops = 1", "machine_cores = 1\n") == pytest.approx(free / 2, rel=0.15)
    assert steps_per_s("cores = 0.25") == pytest.approx(free, rel=0.15), "its gflops are within the quota"


def test_random_events_are_those_of_their_seed_and_each_is_over_before_the_end():
    scenario = find_scenario("six-homes")
    events = with_random_events(scenario, seed=3, seconds=3600.0).file.events
    assert events == with_random_events(scenario, seed=3, seconds=3600.0).file.events
    assert events != with_random_events(scenario, seed=4, seconds=3600.0).file.events
    assert len(events) > 60
    assert max(event.at_s for event in events) <= 3600.0 - QUIET_S
    assert {event.word for event in events} == {*WORDS} - {"sever", "join"}
    ends = {"cut": "heal", "suspend": "resume", "kill": "start", "leave": "start"}
    for name in {event.host for event in events}:
        words = [event.word for event in events if event.host == name and event.word not in ("set", "address")]
        assert words[1::2] == [ends[word] for word in words[::2]], "one thing at a time, and all of it ends"
