"""A caller that gives up takes the handler with it: libp2p resets the stream, hivemind cancels the task."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer, World

NEAR = pytest.approx

GiveUp = Callable[[World, SimPeer, Coroutine[Any, Any, bytes]], Coroutine[Any, Any, None]]


async def time_out(world: World, caller: SimPeer, call: Coroutine[Any, Any, bytes]) -> None:
    with pytest.raises(Unreachable, match="no answer"):
        await call


async def be_cancelled(world: World, caller: SimPeer, call: Coroutine[Any, Any, bytes]) -> None:
    task = caller.spawn(call)
    await asyncio.sleep(1.0)
    task.cancel()


async def crash(world: World, caller: SimPeer, call: Coroutine[Any, Any, bytes]) -> None:
    caller.spawn(call)
    await asyncio.sleep(1.0)
    world.crash(caller)


async def lose_its_daemon(world: World, caller: SimPeer, call: Coroutine[Any, Any, bytes]) -> None:
    task = caller.spawn(call)
    await asyncio.sleep(1.0)
    world.kill_daemon(caller)
    with suppress(Unreachable):
        await task


def serve_slowly(world: World, peer: SimPeer) -> list[tuple[float, str]]:
    ended: list[tuple[float, str]] = []

    async def on_call(source: PeerID, request: bytes) -> bytes:
        ended.append((world.now_s(), "began"))
        try:
            await asyncio.sleep(3.0)
            ended.append((world.now_s(), "finished"))
        except asyncio.CancelledError:
            ended.append((world.now_s(), "cancelled"))
            raise
        return request

    async def on_frame(source: PeerID, meta: bytes, payload: object) -> None:
        return None

    peer.transport.serve(on_call=on_call, on_frame=on_frame)
    return ended


@pytest.mark.parametrize(
    "give_up", [time_out, be_cancelled, crash, lose_its_daemon], ids=lambda give_up: give_up.__name__
)
def test_the_handler_is_cancelled_one_latency_after_its_caller_gave_up(give_up: GiveUp) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        ended = serve_slowly(world, b)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        await give_up(world, a, a.transport.call(b.peer_id, b"?", timeout_s=1.0 if give_up is time_out else 9.0))
        await asyncio.sleep(10.0)
        assert ended == [(NEAR(0.05), "began"), (NEAR(1.05), "cancelled")]
        assert world.failures == []

    run(main())


def test_behind_a_cut_the_handler_never_hears_of_it() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        ended = serve_slowly(world, b)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        call = a.transport.call(b.peer_id, b"?", timeout_s=1.0)
        asyncio.get_running_loop().call_later(0.5, world.partition, [a], [b])
        await time_out(world, a, call)
        await asyncio.sleep(10.0)
        assert [what for _, what in ended] == ["began", "finished"]

    run(main())


def test_a_paused_handler_gets_as_far_as_its_first_wait() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        ended = serve_slowly(world, b)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        world.pause(b)
        await time_out(world, a, a.transport.call(b.peer_id, b"?", timeout_s=1.0))
        await asyncio.sleep(10.0)
        assert ended == []
        world.resume(b)
        await asyncio.sleep(5.0)
        assert [what for _, what in ended] == ["began", "cancelled"]

    run(main())


def test_one_that_gives_up_leaves_the_calls_of_others_alone() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b, c = (world.add_peer(name) for name in "abc")
        ended = serve_slowly(world, b)
        for peer in (a, c):
            await peer.transport.introduce(b.peer_id, b.transport.addresses())
        calls = [
            asyncio.create_task(peer.transport.call(b.peer_id, b"?", timeout_s=timeout_s))
            for peer, timeout_s in ((a, 1.0), (a, 9.0), (c, 9.0))
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(outcomes[0], Unreachable)
        assert outcomes[1:] == [b"?", b"?"]
        assert [what for _, what in ended] == ["began"] * 3 + ["cancelled"] + ["finished"] * 2

    run(main())
