"""Kills and suspends the network daemons of two peers at random moments, while both dial others."""

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil
from open_gate import everybody

from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.ports import Payload

GIVE_UP_S = 120.0


async def back_after_each(
    signals: Sequence[signal.Signals],
    folder: Path,
    rng: random.Random,
    say: Callable[[str], None] = lambda line: None,
) -> list[float]:
    """Send each signal to a daemon at a random moment; one in three hits the daemon that is being started, too.

    Returns: for each signal, the seconds until both peers could call each other and use the directory again.
    Raises: TimeoutError: they could not for `GIVE_UP_S`.
    """
    took_s = []
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        gone = await _peer(folder / "gone")
        absent = {gone.peer_id: gone.addresses()}
        await gone.close()
        absent[Identity.generate().peer_id] = (f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}",)
        peers, directories = [], []
        for name in ("a", "b"):
            peers.append(await _peer(folder / name, met=peers))
            stack.push_async_callback(peers[-1].close)
            directories.append(await LiveDirectory.start(peers[-1]))
            stack.push_async_callback(directories[-1].close)
        for peer, other in (peers, reversed(peers)):
            dialling = asyncio.create_task(_dial_on(peer, {other.peer_id: other.addresses(), **absent}, rng))
            stack.push_async_callback(_cancelled, dialling)
        for count, number in enumerate(signals):
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            began_s = time.monotonic()
            for _ in range(rng.choice((1, 1, 2))):
                _hit(number, rng)
                await asyncio.sleep(rng.uniform(0.0, 0.6))
            async with asyncio.timeout(GIVE_UP_S):
                await _until_whole(peers, directories, str(count).encode())
            took_s.append(time.monotonic() - began_s)
            say(f"{count + 1:3d} {number.name}: back after {took_s[-1]:.1f} s")
    return took_s


async def _peer(folder: Path, *, met: Sequence[LiveTransport] = ()) -> LiveTransport:
    known = [address for each in met for address in each.addresses()]
    transport = await LiveTransport.start(
        Identity.generate(), members=everybody("run"), state_dir=folder, use_relay=False, initial_peers=known
    )

    async def on_call(source: PeerID, request: bytes) -> bytes:
        return request

    async def on_frame(source: PeerID, meta: bytes, payload: Payload) -> None:
        pass

    transport.serve(on_call=on_call, on_frame=on_frame)
    return transport


async def _dial_on(peer: LiveTransport, others: dict[PeerID, Sequence[str]], rng: random.Random) -> None:
    peer.want(tuple(others))
    while True:
        other = rng.choice(tuple(others))
        await peer.introduce(other, others[other])
        with suppress(Unreachable):
            await peer.call(other, b"there?", timeout_s=rng.uniform(0.1, 2.0))
        await asyncio.sleep(rng.uniform(0.0, 0.2))


def _hit(number: signal.Signals, rng: random.Random) -> None:
    """Choose among the daemons by the processes that there are: one that is being started counts."""
    daemons = psutil.Process().children()
    if daemons:
        with suppress(ProcessLookupError):
            os.kill(rng.choice(daemons).pid, number)


async def _until_whole(peers: Sequence[LiveTransport], directories: Sequence[LiveDirectory], value: bytes) -> None:
    while True:
        try:
            for peer, other in (peers, reversed(peers)):
                await peer.call(other.peer_id, value, timeout_s=5.0)
            await directories[0].store("key", "sub", value, expires_in_s=60.0)
            if (await directories[1].get("key")).get("sub") == value:
                return
        except Unreachable:
            await asyncio.sleep(0.1)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
