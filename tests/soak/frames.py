"""Does a damaged frame ever reach a handler? A million of them in a simulated world; run by `make soak-frames`.

Nine of ten frames between two peers get 1 to 8 bits flipped on the way, anywhere from the first byte of the header to
the end marker, and go through the codec that real peers use. Each must break its stream; none may be handed over, and
all others must arrive as they were sent. The checksum is 64 bits of xxh3, so of a million damaged frames 5e-14 are
expected to pass.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from open_gate import OpenGate

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ProbeChunk
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.paths import Disturbance
from shoal.protocol.sim.trace import Event, Kind
from shoal.protocol.sim.world import World

CORRUPTION = 0.9
PAYLOAD_BYTES_MAX = 4096
BIG_PAYLOAD_BYTES = 1_200_000
"""Hashed in more than one piece."""
BIG_EVERY = 1000
LATENCY_S = 0.001


@dataclass(slots=True)
class Tally:
    damaged: int = 0
    broken: int = 0
    whole: int = 0
    """Sent and not damaged."""
    arrived: int = 0
    wrong: int = 0
    """Handed over with other bytes than those sent."""

    @property
    def holds(self) -> bool:
        return self.wrong == 0 and self.broken == self.damaged and self.arrived == self.whole


async def suffer(num_damaged: int, seed: int) -> Tally:
    """Send until `num_damaged` frames have been damaged."""
    tally = Tally()

    def watch(event: Event) -> None:
        tally.damaged += event.kind is Kind.FRAME_DAMAGED
        tally.broken += event.kind is Kind.STREAM_BROKEN

    world = World(seed, uniform(LATENCY_S), watch=watch)
    peers = [world.add_peer(name) for name in "ab"]
    a, b = (Endpoint(peer.identity, peer.transport, run="soak", gate=OpenGate()) for peer in peers)

    async def on_chunk(source: PeerID, chunk: ProbeChunk, payload: Payload) -> None:
        tally.arrived += 1
        tally.wrong += xxhash.xxh3_64_intdigest(payload) >> 1 != chunk.nonce

    b.on_frame(ProbeChunk, on_chunk)
    await a.transport.introduce(b.peer_id, b.transport.addresses())
    world.disturb(peers[:1], peers[1:], Disturbance(corruption=CORRUPTION), one_way=True)
    rng = world.rng("payloads")
    while tally.damaged < num_damaged:
        before = tally.damaged
        size = BIG_PAYLOAD_BYTES if rng.randrange(BIG_EVERY) == 0 else rng.randrange(PAYLOAD_BYTES_MAX)
        payload = rng.randbytes(size)
        chunk = ProbeChunk(nonce=xxhash.xxh3_64_intdigest(payload) >> 1, echo=False)
        try:
            await a.send(b.peer_id, chunk, payload, priority=Priority.GRADIENT)
        except Unreachable:
            continue
        await asyncio.sleep(3 * LATENCY_S)  # it has arrived, and the stream has broken or not
        tally.whole += tally.damaged == before
    if world.failures:
        raise world.failures[0][1]
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frames", type=int, nargs="?", default=1_000_000, help="damaged frames")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    begun_s = time.monotonic()
    tally = run(suffer(arguments.frames, arguments.seed))
    sys.stdout.write(f"{tally} in {time.monotonic() - begun_s:.1f} s\n")
    return 0 if tally.holds else 1


if __name__ == "__main__":
    sys.exit(main())
