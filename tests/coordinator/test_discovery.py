"""What a peer reads in the directory, and finds there under its own name."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from open_gate import OpenGate

from shoal.coordinator.discovery import MOVE_S, MOVES_AT_ONCE, Discovery
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Advert
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

ADVERT = Advert(
    name="a",
    device="cpu",
    flop_per_s=1.0,
    memory_bytes=1,
    upload_bytes_per_s=1.0,
    download_bytes_per_s=1.0,
    addresses=(),
    has_data=True,
)


def test_a_peer_whose_copy_was_started_elsewhere_finds_that_out_with_its_next_advert() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        here, elsewhere = world.add_peer("a"), world.add_peer("b")
        first, later = (
            Endpoint(here.identity, peer.transport, run="run", gate=OpenGate(), first_sequence=started)
            for peer, started in ((here, 1_000_000), (elsewhere, 2_000_000))
        )
        one, other = (
            Discovery(endpoint, peer.directory, peer.clock) for endpoint, peer in ((first, here), (later, elsewhere))
        )
        await one.advertise(ADVERT)
        await one.advertise(ADVERT)
        await other.advertise(ADVERT)
        assert (first.is_displaced, later.is_displaced) == (False, False)
        await one.advertise(ADVERT)
        await other.advertise(ADVERT)
        assert (first.is_displaced, later.is_displaced) == (True, False)

    run(main())


def test_a_record_that_does_not_count_is_no_warning_at_a_volunteers(caplog: pytest.LogCaptureFixture) -> None:
    """That of an excluded peer stays until it lapses, and everyone reads it every few seconds."""

    def refuse(data: bytes, *, source: str) -> Any:
        raise RemoteError(source, "is excluded from the run")

    async def get(key: str) -> dict[str, bytes]:
        return {"excluded": b"sealed"}

    endpoint: Any = SimpleNamespace(run="run", open_record=refuse)
    directory: Any = SimpleNamespace(get=get)
    clock: Any = None
    with caplog.at_level(logging.INFO):
        assert asyncio.run(Discovery(endpoint, directory, clock).adverts()) == {}
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_peer_that_names_other_addresses_all_the_time_is_dialled_now_and_then() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        here, liar = world.add_peer("a"), world.add_peer("b").peer_id
        endpoint = Endpoint(here.identity, here.transport, run="run", gate=OpenGate())
        discovery = Discovery(endpoint, here.directory, here.clock)
        dialled: dict[PeerID, int] = {}
        for number in range(600):
            for peer in (liar, PeerID("honest")):
                addresses = (f"/ip4/10.0.0.{number % 250}/tcp/{number if peer == liar else 1}",)
                if (peer == liar or number % 100 == 0) and discovery.is_news(peer, addresses):
                    dialled[peer] = dialled.get(peer, 0) + 1
                    await discovery.introduce(peer, addresses)
            await asyncio.sleep(1.0)
        assert dialled[PeerID("honest")] == 6, "all that it has named"
        assert dialled[liar] <= MOVES_AT_ONCE + 600 / MOVE_S

    run(main())
