import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.sim.clock import WALL_AT_ZERO_S
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.phantom import Phantom
from shoal.protocol.sim.trace import Event, Kind
from shoal.protocol.sim.world import SimPeer, World

SCENARIO = Path(__file__).parent / "scenario.py"


def scenario(seed: int, hash_seed: str) -> str:
    finished = subprocess.run(
        [sys.executable, str(SCENARIO), str(seed)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return finished.stdout


def test_one_seed_gives_one_trace_in_every_process_and_another_seed_another() -> None:
    first = scenario(1, "1")
    num_events = int(first.split()[1])
    assert num_events > 1000
    assert scenario(1, "2") == first
    assert scenario(2, "1").split()[0] != first.split()[0]


def test_the_hash_covers_what_was_sent_not_only_when(listen: Any) -> None:
    async def main(request: bytes) -> str:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        await listen(world)
        await a.transport.call(b.peer_id, request, timeout_s=1.0)
        return world.trace_hash()

    assert run(main(b"x")) == run(main(b"x"))
    assert run(main(b"x")) != run(main(b"y"))


def test_identities_follow_from_seed_and_name() -> None:
    def peer_id(seed: int, name: str) -> str:
        return World(seed, uniform(0.0)).add_peer(name).peer_id

    assert peer_id(1, "a") == peer_id(1, "a")
    assert len({peer_id(1, "a"), peer_id(1, "b"), peer_id(2, "a")}) == 3


def test_generators_follow_from_seed_and_name_alone() -> None:
    world = World(1, uniform(0.0))
    first = world.rng("a").random()
    world.rng("b").random()
    assert world.rng("a").random() == first
    assert len({first, world.rng("b").random(), World(2, uniform(0.0)).rng("a").random()}) == 3


def test_the_events_can_be_watched(listen: Any) -> None:
    events: list[Event] = []

    async def main() -> None:
        world = World(0, uniform(0.05), watch=events.append)
        a, b = world.add_peer("a"), world.add_peer("b")
        await listen(world)
        await a.transport.call(b.peer_id, b"12", timeout_s=1.0)
        world.crash(b)
        assert world.num_events == len(events)

    run(main())
    assert [(event.kind, event.source, event.destination) for event in events] == [
        (Kind.JOINED, 0, 0),
        (Kind.JOINED, 1, 1),
        (Kind.CALL_SENT, 0, 1),
        (Kind.CALL_ARRIVED, 0, 1),
        (Kind.REPLY_SENT, 1, 0),
        (Kind.REPLY_ARRIVED, 1, 0),
        (Kind.CRASHED, 1, -1),
        (Kind.STREAM_BROKEN, 1, 0),
    ]


def test_clocks_show_the_loops_time() -> None:
    async def main() -> None:
        world = World(0, uniform(0.0))
        clock = world.add_peer("a").clock
        await asyncio.sleep(2.0)
        assert clock.now_s() == asyncio.get_running_loop().time() == 12.0
        assert clock.wall_s() == WALL_AT_ZERO_S + 12.0

    run(main(), start_s=10.0)


def test_a_world_refuses_real_time() -> None:
    async def main() -> None:
        world = World(0, uniform(0.0))
        with pytest.raises(LocalError, match="lives inside"):
            world.add_peer("a").clock.now_s()

    asyncio.run(main())


def test_a_world_refuses_a_second_loop() -> None:
    world = World(0, uniform(0.0))
    clock = world.add_peer("a").clock

    async def now_s() -> float:
        return clock.now_s()

    assert run(now_s()) == 0.0
    with pytest.raises(LocalError, match="lives inside"):
        run(now_s())


def test_a_peer_cannot_be_cut_off_from_itself() -> None:
    async def main() -> None:
        world = World(0, uniform(0.0))
        a, b = world.add_peer("a"), world.add_peer("b")
        with pytest.raises(LocalError, match="itself"):
            world.partition([a, b], [b])

    run(main())


@pytest.mark.sim
def test_a_thousand_modelled_peers_pass_phantoms_around_a_ring() -> None:
    num_peers, num_tokens, num_hops = 1000, 100, 5000

    async def main() -> tuple[str, float]:
        world = World(5, uniform(0.05, 1e7, jitter_s=0.01), modelled=True)
        ring = [world.add_peer(f"peer {i}", up_bytes_per_s=1e7, down_bytes_per_s=1e7) for i in range(num_peers)]
        hops = asyncio.Queue[int]()
        await asyncio.gather(*(serve(index, ring, hops) for index in range(num_peers)))
        for index in range(0, num_peers, num_peers // num_tokens):
            hand_on(ring[index], ring[index + 1])
        for _ in range(num_hops):
            await hops.get()
        assert not world.failures
        return world.trace_hash(), world.now_s()

    def hand_on(peer: SimPeer, following: SimPeer) -> None:
        peer.spawn(peer.transport.send(following.peer_id, b"", Phantom(10**6), priority=Priority.ACTIVATION))

    async def serve(index: int, ring: list[SimPeer], hops: "asyncio.Queue[int]") -> None:
        peer, following = ring[index], ring[(index + 1) % len(ring)]

        async def on_call(source: PeerID, request: bytes) -> bytes:
            return b""

        async def on_frame(source: PeerID, meta: bytes, payload: Payload) -> None:
            await peer.compute.run("forward", lambda: None, flop=1e11)
            hops.put_nowait(index)
            hand_on(peer, following)

        peer.transport.serve(on_call=on_call, on_frame=on_frame)
        await peer.transport.introduce(following.peer_id, following.transport.addresses())

    first_hash, took_s = run(main())
    # A hop: 1 MB at 10 MB/s, 50 to 60 ms on the way, 0.1 s on the device; 50 of them by each token.
    assert 50 * 0.25 <= took_s <= 50 * 0.26 + 0.01
    assert run(main()) == (first_hash, took_s)
