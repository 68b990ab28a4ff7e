import asyncio
import math
from typing import Any

import pytest

from shoal.protocol.errors import LocalError
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import CardSpec, LinkSpec, MatrixNetwork, uniform
from shoal.protocol.sim.world import World
from shoal.protocol.topology import make_topology

LATENCY_S = [[0.0, 0.01, 0.02], [0.03, 0.0, 0.04], [0.05, 0.06, 0.0]]
RATE_BYTES_PER_S = [[1.0, 1e6, 2e6], [1e6, 1.0, 1e6], [1e6, 1e6, 1.0]]


def three_places() -> MatrixNetwork:
    return MatrixNetwork(make_topology(LATENCY_S, RATE_BYTES_PER_S))


def test_a_matrix_gives_each_directed_pair_its_link(listen: Any) -> None:
    network = three_places()
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
        world = World(0, three_places())
        a = world.add_peer("a", place=1)
        assert [world.add_peer(name).transport.card.place for name in "bc"] == [0, 2]
        with pytest.raises(LocalError, match="taken by 'b'"):
            world.add_peer("d", place=0)
        world.crash(a)
        assert world.add_peer("a").transport.card.place == 1
        await asyncio.sleep(0.0)

    run(main())


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
