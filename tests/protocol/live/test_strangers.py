"""Strangers have an allowance for each network; members, newcomers and the neighbours at home are not hurt by it."""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID

from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import STRANGERS_ALLOWANCE
from shoal.protocol.live.loop import run
from shoal.protocol.live.strangers import Strangers
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members
from shoal.protocol.sim import loop as virtual

RUN = "0123456789abcdef"
OWNER = Identity(bytes(32))
MANY = int(STRANGERS_ALLOWANCE)


def members() -> Members:
    return Members(RUN, OWNER.peer_id)


class World:
    """Peers at addresses, and what becomes of them."""

    def __init__(self) -> None:
        self.members = members()
        self.where: dict[PeerID, list[str]] = {}
        self.gone: list[PeerID] = []
        self.shut_out: list[bytes] = []
        self.strangers = Strangers(
            self.members, connections=self.connections, hang_up=self.hang_up, shut_out=self.shut_out.append
        )

    async def connections(self) -> dict[PeerID, list[str]]:
        return self.where

    async def hang_up(self, peer: PeerID) -> None:
        self.gone.append(peer)

    def comes_from(self, multiaddr: str) -> PeerID:
        peer = Identity.generate().peer_id
        self.where[peer] = [multiaddr]
        return peer

    async def asks(self, peer: PeerID, times: int) -> int:
        """Returns: how often it was heard."""
        heard = [await self.strangers.admits(peer) for _ in range(times)]
        await asyncio.sleep(0)  # what was begun of hanging up
        return sum(heard)


def test_the_strangers_of_a_public_network_share_an_allowance_and_are_hung_up_on() -> None:
    async def main() -> None:
        world = World()
        first, second = (world.comes_from(f"/ip4/8.8.8.{n}/tcp/4001") for n in (1, 2))
        elsewhere = world.comes_from("/ip4/8.8.9.1/tcp/4001")
        assert await world.asks(first, MANY) == MANY
        assert await world.asks(second, 1) == 0
        assert world.gone == [second]
        assert world.shut_out == [bytes((8, 8, 8, 2))]
        assert await world.asks(elsewhere, 1) == 1

    virtual.run(main())


def test_a_member_is_never_counted() -> None:
    async def main() -> None:
        world = World()
        assert await world.asks(OWNER.peer_id, 2 * MANY) == 2 * MANY
        assert not world.gone

    virtual.run(main())


@pytest.mark.parametrize("place", ["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.7/tcp/1", "/ip6/fd00::1/tcp/1", ""])
def test_at_home_each_stranger_has_its_own_allowance_and_may_dial_again(place: str) -> None:
    async def main() -> None:
        world = World()
        noisy, quiet = world.comes_from(place), world.comes_from(place)
        assert await world.asks(noisy, MANY + 1) == MANY
        assert await world.asks(quiet, 10) == 10
        assert (world.gone, world.shut_out) == ([noisy], [])

    virtual.run(main())


def test_a_member_that_relays_for_a_stranger_does_not_pay_for_it() -> None:
    async def main() -> None:
        world = World()
        relayed = world.comes_from("/ip4/8.8.8.1/tcp/4001/p2p/12D3KooW/p2p-circuit")
        assert await world.asks(relayed, MANY + 1) == MANY
        assert (world.gone, world.shut_out) == ([relayed], [])

    virtual.run(main())


@pytest.mark.process
@pytest.mark.parametrize("kind", ["calls", "streams"])
def test_a_stranger_that_floods_is_hung_up_on_and_a_member_is_answered(
    tmp_path: Path,
    kind: str,
    eventually: Callable[[Callable[[], object]], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three thousand requests: all of them were read before."""
    # On a slow machine the flood would be no faster than strangers may ask in the long run.
    monkeypatch.setattr("shoal.protocol.live.strangers.STRANGERS_REQUESTS_PER_S", 0.0)

    async def main() -> None:
        heard = itertools.count()

        async def up(name: str, of_run: Members) -> LiveTransport:
            return await LiveTransport.start(identities[name], members=of_run, state_dir=tmp_path / name)

        async def answer(source: PeerID, request: bytes) -> bytes:
            if request != b"member":
                next(heard)
            return request

        async def nothing(*_: object) -> None: ...

        identities = {"flooded": Identity.generate(), "stranger": Identity.generate(), "member": OWNER}
        flooded = await up("flooded", members())
        flooded.serve(on_call=answer, on_frame=nothing)
        stranger = await up("stranger", members())
        stranger.serve(on_call=answer, on_frame=nothing)
        member = await up("member", members())
        member.serve(on_call=answer, on_frame=nothing)
        try:
            for one in (stranger, member):
                await one.introduce(flooded.peer_id, flooded.addresses())
            client = (await stranger.daemon.p2p())._client
            there = HivemindPeerID.from_base58(flooded.peer_id)

            async def ask() -> None:
                try:
                    async with asyncio.timeout(5):
                        if kind == "calls":
                            await client.call_unary_handler(there, stranger._call_name, os.urandom(100))
                        else:
                            _, writer = await stranger._open_stream_of(stranger._frames_name, flooded.peer_id)
                            writer.close()
                except Exception:
                    return

            for _ in range(30):
                await asyncio.gather(*(ask() for _ in range(100)))
                if stranger.peer_id not in await flooded.connected():
                    break
            await eventually(lambda: stranger.peer_id not in flooded._strangers._leaving)
            assert next(heard) <= MANY + 1000
            assert stranger.peer_id not in await flooded.connected()
            assert await member.call(flooded.peer_id, b"member", timeout_s=10) == b"member"
        finally:
            await member.close()
            await stranger.close()
            await flooded.close()

    run(main())
