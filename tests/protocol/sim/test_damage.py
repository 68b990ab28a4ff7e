import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.envelope import seal, unseal
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.messages import Ping
from shoal.protocol.ports import Priority
from shoal.protocol.sim.damage import damaged_credit, damaged_data, flip_bits
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import LinkSpec, uniform
from shoal.protocol.sim.paths import Disturbance
from shoal.protocol.sim.phantom import Phantom
from shoal.protocol.sim.trace import Event, Kind
from shoal.protocol.sim.world import World

NEAR = pytest.approx
SOURCE = PeerID("12D3KooWSomebody")
SOAK = Path(__file__).parents[2] / "soak" / "frames.py"
ALWAYS = Disturbance(corruption=1.0)
SEALER = Identity(bytes(32))
SEALED = seal(SEALER, "call", run="run", term=3, sequence=10**15, body=msgspec.msgpack.encode(Ping(pad=b"pad" * 20)))

Speak = Callable[..., Any]


# Flipped bits and the codec -----------------------------------------------------------------------------------------


@given(data=st.binary(min_size=1, max_size=200), seed=st.integers(0, 1000))
def test_one_to_eight_bits_flip_and_nothing_else(data: bytes, seed: int) -> None:
    flipped = bytearray(data)
    flip_bits(flipped, random.Random(seed))
    assert len(flipped) == len(data)
    assert 1 <= sum((one ^ other).bit_count() for one, other in zip(data, flipped, strict=True)) <= 8


@given(meta=st.binary(max_size=100), payload=st.binary(max_size=5000), seed=st.integers(0, 1000))
def test_the_codec_finds_every_damage_of_a_frame(meta: bytes, payload: bytes, seed: int) -> None:
    assert isinstance(damaged_data(meta, payload, source=SOURCE, rng=random.Random(seed)), str)


def test_the_codec_finds_damage_in_every_part() -> None:
    rng = random.Random(1)
    found = Counter(str(damaged_data(b"meta" * 5, bytes(50), source=SOURCE, rng=rng)) for _ in range(500))
    found += Counter(str(damaged_credit(1000, source=SOURCE, rng=rng)) for _ in range(500))
    for part in ("are not a frame", "header that was damaged", "sent frame 1 damaged"):
        assert sum(count for why, count in found.items() if part in why) > 50
    assert isinstance(damaged_data(b"", Phantom(10**6), source=SOURCE, rng=rng), str)


def test_twenty_thousand_damaged_frames_reach_no_handler() -> None:
    """The soak's million, shortened."""
    finished = subprocess.run(
        [sys.executable, str(SOAK), "20000"], capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "damaged=20000, broken=20000" in finished.stdout


# Frames in a world --------------------------------------------------------------------------------------------------


def test_a_damaged_frame_breaks_its_stream_and_the_next_one_opens_another(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        await voice_a.send(voice_b, 0)
        disturbed = world.disturb([a], [b], ALWAYS)
        damaged = asyncio.create_task(voice_a.send(voice_b, 1, bytes(10_000)))
        await asyncio.sleep(0.001)  # it is leaving: what follows is not damaged
        world.calm(disturbed)
        waiting = [asyncio.create_task(voice_a.send(voice_b, nonce, bytes(1_000_000))) for nonce in (2, 3)]
        await damaged
        for task in waiting:
            with pytest.raises(Unreachable, match="damaged"):
                await task
        assert world.now_s() == NEAR(0.01 + 0.05 + 0.05, abs=0.001)
        await voice_a.send(voice_b, 4)
        await asyncio.sleep(1.0)
        assert voice_b.nonces == [0, 4]

    run(main())


def test_what_arrived_before_a_damaged_frame_is_handled_unless_a_new_stream_comes_first() -> None:
    async def main(new_stream: bool) -> list[bytes]:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        handled: list[bytes] = []

        async def slow(source: PeerID, meta: bytes, payload: object) -> None:
            await asyncio.sleep(1.0)
            handled.append(meta)

        async def no_calls(source: PeerID, request: bytes) -> bytes:
            return b""

        b.transport.serve(on_call=no_calls, on_frame=slow)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        for meta in (b"0", b"1"):
            await a.transport.send(b.peer_id, meta, b"", priority=Priority.BULK)
        world.disturb([a], [b], ALWAYS)
        await a.transport.send(b.peer_id, b"damaged", b"", priority=Priority.BULK)
        await asyncio.sleep(0.5)
        world.calm()
        if new_stream:
            await a.transport.send(b.peer_id, b"anew", b"", priority=Priority.BULK)
        await asyncio.sleep(10.0)
        return handled

    assert run(main(False)) == [b"0", b"1"]
    assert run(main(True)) == [b"0", b"anew"]


def test_a_damaged_credit_breaks_the_stream_at_the_sender(speak: Speak) -> None:
    events: list[Event] = []

    async def main() -> None:
        world = World(0, uniform(0.05, 1e6), watch=events.append)
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        world.disturb([b], [a], ALWAYS, one_way=True)
        await voice_a.send(voice_b, 0)
        with pytest.raises(Unreachable, match=r"damaged|not a frame"):
            await voice_a.send(voice_b, 1, bytes(1_000_000))
        assert world.now_s() == NEAR(0.1, abs=0.001)
        await asyncio.sleep(2.0)
        assert voice_b.nonces == [0]

    run(main())
    assert [event.kind for event in events if event.kind >= 50] == [Kind.DISTURBED, Kind.CREDIT_DAMAGED]


def test_a_reset_that_a_cut_swallows_comes_after_the_healing(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6), stall_s=10.0)
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        disturbed = world.disturb([a], [b], ALWAYS)
        await voice_a.send(voice_b, 0)
        world.calm(disturbed)
        await asyncio.sleep(0.07)  # the reset is on its way
        world.partition([a], [b])
        await asyncio.sleep(5.0)
        world.heal()
        with pytest.raises(Unreachable, match="ended the stream"):
            await voice_a.send(voice_b, 1, bytes(1_000_000))
        await voice_a.send(voice_b, 2)
        await asyncio.sleep(1.0)
        assert voice_b.nonces == [2]

    run(main())


# Calls --------------------------------------------------------------------------------------------------------------


def test_a_damaged_request_reaches_the_handler_whose_envelope_check_refuses_it(
    speak: Speak, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        world.disturb([a], [b], ALWAYS, one_way=True)
        for number in range(200):
            with pytest.raises(Unreachable, match="broke"):
                await voice_a.ping(voice_b, b"%d" % number)
        assert voice_b.pings == []
        assert 0 < len([r for r in caplog.records if "refused a call" in r.message]) < 200, "a line now and then"
        assert world.failures == []
        world.calm()
        assert await voice_a.ping(voice_b, b"whole") == b"whole"

    run(main())


def test_the_handler_gets_the_very_bytes_that_came(listen: Callable[..., Any]) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        world.disturb([a], [b], ALWAYS, one_way=True)
        with pytest.raises(Unreachable, match="broke"):
            await a.transport.call(b.peer_id, bytes(100), timeout_s=1.0)
        ((_, request),) = ear.calls
        assert request != bytes(100)
        assert 1 <= sum(byte.bit_count() for byte in request) <= 8
        await a.transport.call(b.peer_id, b"", timeout_s=1.0)  # nothing to flip

    run(main())


def test_a_damaged_reply_is_unreachable_and_no_fault_of_the_peer(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        world.disturb([b], [a], ALWAYS, one_way=True)
        with pytest.raises(Unreachable, match="damaged"):
            await voice_a.ping(voice_b)
        assert world.now_s() == NEAR(0.1)
        assert len(voice_b.pings) == 1

    run(main())


@settings(max_examples=300)
@given(seed=st.integers(0, 10**6))
def test_no_flip_makes_another_envelope_that_holds(seed: int) -> None:
    data = bytearray(SEALED)
    flip_bits(data, random.Random(seed))
    with pytest.raises(RemoteError):
        unseal(bytes(data), "call", run="run", source=SEALER.peer_id)


def test_links_may_damage_from_the_beginning() -> None:
    async def main() -> Counter[Kind]:
        kinds: Counter[Kind] = Counter()
        network = uniform(0.05)
        world = World(0, network, watch=lambda event: kinds.update([event.kind]))
        a, b = world.add_peer("a"), world.add_peer("b")
        world.set_link(a, b, LinkSpec(latency_s=0.05, corruption=0.25))

        async def echo(source: PeerID, request: bytes) -> bytes:
            return request

        async def take(source: PeerID, meta: bytes, payload: object) -> None:
            return None

        b.transport.serve(on_call=echo, on_frame=take)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        for _ in range(400):
            with suppress(Unreachable):
                await a.transport.call(b.peer_id, b"request", timeout_s=1.0)
            await a.transport.send(b.peer_id, b"", b"x", priority=Priority.BULK)
            await asyncio.sleep(0.2)
        return kinds

    kinds = run(main())
    assert kinds == run(main())
    assert 70 < kinds[Kind.FRAME_DAMAGED] < 130
    assert kinds[Kind.FRAME_ARRIVED] == 400 - kinds[Kind.FRAME_DAMAGED]
    assert kinds[Kind.STREAM_BROKEN] == kinds[Kind.FRAME_DAMAGED]
    assert 70 < kinds[Kind.CALL_DAMAGED] < 130
