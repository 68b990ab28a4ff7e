import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol.errors import LocalError
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import CardSpec, LinkSpec, Network, uniform
from shoal.protocol.sim.world import World

LATENCY_S = [[0.0, 0.01, 0.02], [0.03, 0.0, 0.04], [0.05, 0.06, 0.0]]
BANDWIDTH = [[1.0, 8e6, 16e6], [8e6, 1.0, 8e6], [8e6, 8e6, 1.0]]


def test_a_matrix_gives_each_directed_pair_its_link(listen: Any) -> None:
    network = Network.from_matrices(LATENCY_S, BANDWIDTH)
    assert network.link(0, 2) == LinkSpec(latency_s=0.02, rate_bytes_per_s=2e6)
    assert network.link(2, 0) == LinkSpec(latency_s=0.05, rate_bytes_per_s=1e6)
    assert network.typical_latency_s == 0.03

    async def main() -> None:
        world = World(0, network)
        a, _, c = (world.add_peer(name) for name in "abc")
        await listen(world)
        await a.transport.call(c.peer_id, b"", timeout_s=1.0)
        assert world.now_s() == pytest.approx(0.02 + 0.05)
        with pytest.raises(LocalError, match="3 places"):
            world.add_peer("d")

    run(main())


def test_a_peer_may_choose_its_place() -> None:
    async def main() -> None:
        world = World(0, Network.from_matrices(LATENCY_S, BANDWIDTH))
        a = world.add_peer("a", place=1)
        assert [world.add_peer(name).transport.card.place for name in "bc"] == [0, 2]
        with pytest.raises(LocalError, match="taken by 'b'"):
            world.add_peer("d", place=0)
        world.crash(a)
        assert world.add_peer("a").transport.card.place == 1
        await asyncio.sleep(0.0)

    run(main())


@pytest.mark.parametrize(
    ("names", "latency_factor", "bandwidth_factor"),
    [(("latency_s", "bandwidth_bits_per_s"), 1.0, 1.0), (("latency_ms", "bandwidth_gbps"), 1e3, 1e-9)],
)
def test_both_spellings_of_the_file_load_to_the_same_network(
    names: tuple[str, str], latency_factor: float, bandwidth_factor: float, tmp_path: Path
) -> None:
    file = {
        "title": "for people",
        names[0]: [[value * latency_factor for value in row] for row in LATENCY_S],
        names[1]: [[value * bandwidth_factor for value in row] for row in BANDWIDTH],
    }
    path = tmp_path / "network.json"
    path.write_text(json.dumps(file))
    network = Network.load(path, jitter_s=0.5, loss=0.1)
    link = network.link(1, 2)
    assert (link.latency_s, link.rate_bytes_per_s) == pytest.approx((0.04, 1e6))
    assert (link.jitter_s, link.loss) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("latency_s", "bandwidth", "complaint"),
    [
        ([[0.0, math.nan], [0.1, 0.0]], [[1.0, 1.0], [1.0, 1.0]], "0 -> 1 has latency nan"),
        ([[0.0, 0.1], [-0.1, 0.0]], [[1.0, 1.0], [1.0, 1.0]], "1 -> 0 has latency -0.1"),
        ([[0.0, 0.1], [math.inf, 0.0]], [[1.0, 1.0], [1.0, 1.0]], "1 -> 0 has latency inf"),
        ([[0.0, 0.1], [0.1, 0.0]], [[1.0, 0.0], [1.0, 1.0]], "bandwidth 0"),
        ([[0.0, 0.1], [0.1, 0.0]], [[1.0, -5.0], [1.0, 1.0]], "bandwidth -5"),
        ([[0.0, 0.1], [0.1, 0.0]], [[1.0, math.nan], [1.0, 1.0]], "bandwidth nan"),
        ([[0.0, 0.1, 0.1], [0.1, 0.0, 0.1]], [[1.0, 1.0], [1.0, 1.0]], "2 rows, but row 0 has 3 columns"),
        ([[0.0, 0.1], [0.1]], [[1.0, 1.0], [1.0, 1.0]], "2 rows, but row 1 has 1 columns"),
        ([[0.0]], [[1.0, 1.0], [1.0, 1.0]], "between 1 places, bandwidth between 2"),
        ([], [], "empty"),
    ],
)
def test_an_impossible_matrix_is_refused_in_one_line(
    latency_s: list[list[float]], bandwidth: list[list[float]], complaint: str
) -> None:
    with pytest.raises(LocalError, match=complaint) as caught:
        Network.from_matrices(latency_s, bandwidth)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"latency_s": [[0]]}',
        '{"latency_s": [["x"]], "bandwidth_bits_per_s": [[1]]}',
        '{"latency_s": [[0, NaN], [0, 0]], "bandwidth_bits_per_s": [[1, 1], [1, 1]]}',
        '{"latency_s": [[0, -1], [0, 0]], "bandwidth_bits_per_s": [[1, 1], [1, 1]]}',
    ],
)
def test_a_file_that_is_no_network_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_text(text)
    with pytest.raises(LocalError, match="is not a network") as caught:
        Network.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be read"):
        Network.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "impossible",
    [
        {"latency_s": -1.0},
        {"latency_s": math.nan},
        {"latency_s": 0.0, "rate_bytes_per_s": 0.0},
        {"latency_s": 0.0, "rate_bytes_per_s": math.nan},
        {"latency_s": 0.0, "jitter_s": -1.0},
        {"latency_s": 0.0, "loss": 1.0},
        {"latency_s": 0.0, "loss": math.nan},
        {"latency_s": 0.0, "retransmit_s": -1.0},
        {"latency_s": 0.0, "queue_bytes": 0.0},
    ],
)
def test_an_impossible_link_is_refused(impossible: dict[str, float]) -> None:
    with pytest.raises(LocalError):
        LinkSpec(**impossible)


def test_an_impossible_card_is_refused() -> None:
    with pytest.raises(LocalError):
        CardSpec(up_bytes_per_s=0.0)
    with pytest.raises(LocalError):
        CardSpec(down_bytes_per_s=math.nan)


def test_a_uniform_network_has_room_for_everyone() -> None:
    network = uniform(0.05, 1e6)
    assert network.link(3, 10**6) == network.link(0, 1) == LinkSpec(latency_s=0.05, rate_bytes_per_s=1e6)
