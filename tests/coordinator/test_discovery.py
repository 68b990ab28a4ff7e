"""What a peer finds in the directory under its own name."""

from shoal.coordinator.discovery import Discovery
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.messages import Advert
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.trust import OpenGate
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
