"""Paths that get worse for a while: slow, lossy, repeating, spiky."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import LocalError, Unreachable
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import LinkSpec, uniform
from shoal.protocol.sim.paths import Disturbance, Paths
from shoal.protocol.sim.trace import Event, Kind
from shoal.protocol.sim.world import World

NEAR = pytest.approx

Speak = Callable[..., Any]


# What a path is like ------------------------------------------------------------------------------------------------


def test_disturbances_add_up_and_the_path_is_as_before_when_the_last_has_ended() -> None:
    base = LinkSpec(latency_s=0.1, rate_bytes_per_s=1000.0, loss=0.5, spikes=0.1, spike_s=0.2)
    paths = Paths(uniform(0.1, 1000.0))
    paths.set(0, 1, base)
    first = paths.disturb([0], [1, 2], Disturbance(slowness=4.0, loss=0.5, spike_s=3.0), one_way=False)
    second = paths.disturb([1], [0], Disturbance(slowness=2.0, delay_s=1.0, corruption=0.25), one_way=True)
    assert paths.link(0, 1) == LinkSpec(
        latency_s=0.1, rate_bytes_per_s=250.0, loss=0.75, spikes=0.1, spike_s=3.0
    )  # the network of this test is exact in binary
    assert paths.link(1, 0) == LinkSpec(latency_s=1.1, rate_bytes_per_s=250.0, loss=0.5, corruption=0.25, spike_s=3.0)
    assert paths.link(2, 0).rate_bytes_per_s == 250.0
    assert paths.link(1, 2) == LinkSpec(latency_s=0.1, rate_bytes_per_s=1000.0)
    paths.calm(first)
    assert paths.link(0, 1) == base
    assert paths.link(1, 0).rate_bytes_per_s == 500.0
    paths.calm(first)  # again does nothing
    paths.calm(None)
    assert paths.link(1, 0) == LinkSpec(latency_s=0.1, rate_bytes_per_s=1000.0)
    paths.calm(second)


def test_a_link_set_under_a_disturbance_stays_disturbed() -> None:
    paths = Paths(uniform(0.1, 1000.0))
    disturbed = paths.disturb([0], [1], Disturbance(slowness=10.0), one_way=False)
    paths.set(0, 1, LinkSpec(latency_s=0.2, rate_bytes_per_s=50.0))
    assert paths.link(0, 1).rate_bytes_per_s == 5.0
    paths.calm(disturbed)
    assert paths.link(0, 1) == LinkSpec(latency_s=0.2, rate_bytes_per_s=50.0)


probability = st.floats(0.0, 0.99)


@given(loss=probability, spikes=probability, corruption=probability, duplication=probability)
def test_chances_are_independent_and_nothing_is_exactly_nothing(
    loss: float, spikes: float, corruption: float, duplication: float
) -> None:
    spec = LinkSpec(latency_s=0.0, loss=loss, spikes=spikes, corruption=corruption, duplication=duplication)
    assert Disturbance(spike_s=spec.spike_s).on(spec) == spec
    half = Disturbance(loss=0.5, spikes=0.5, corruption=0.5, duplication=0.5).on(spec)
    for name in ("loss", "spikes", "corruption", "duplication"):
        assert 1.0 - getattr(half, name) == NEAR(0.5 * (1.0 - getattr(spec, name)))


@pytest.mark.parametrize(
    "impossible",
    [
        {"slowness": 0.5},
        {"slowness": math.nan},
        {"delay_s": -1.0},
        {"loss": 1.0},
        {"corruption": 1.5},
        {"spikes": -0.1},
    ],
)
def test_impossible_disturbances_are_refused_and_change_nothing(impossible: dict[str, float]) -> None:
    paths = Paths(uniform(0.1))
    with pytest.raises(LocalError):
        paths.disturb([0], [1], Disturbance(**impossible), one_way=False)
    assert paths.link(0, 1) == LinkSpec(latency_s=0.1)


def test_a_disturbance_says_what_it_is() -> None:
    assert str(Disturbance(slowness=3.0, loss=0.25)) == "slowness 3, loss 0.25"


# Slow and lossy paths -----------------------------------------------------------------------------------------------


def test_a_slow_path_slows_frames_and_calls_until_it_is_calm(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)

        async def takes_s() -> float:
            began_s = world.now_s()
            await voice_a.send(voice_b, 0, bytes(1_000_000))
            return world.now_s() - began_s

        assert await takes_s() == NEAR(1.0, rel=1e-3)
        disturbed = world.disturb([a], [b], Disturbance(slowness=100.0, delay_s=2.0), one_way=True)
        assert await takes_s() == NEAR(100.0, rel=1e-3)
        began_s = world.now_s()
        await voice_a.ping(voice_b)
        assert world.now_s() - began_s == NEAR(2.1, abs=0.03)
        world.calm(disturbed)
        assert await takes_s() == NEAR(1.0, rel=1e-3)

    run(main())


@pytest.mark.parametrize("down_bytes_per_s", [math.inf, 1e9, 2e4])
def test_what_began_on_a_slow_path_goes_on_at_full_speed_when_it_is_calm(down_bytes_per_s: float, speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.1, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b", down_bytes_per_s=down_bytes_per_s)
        voice_a, voice_b = await speak(world)
        disturbed = world.disturb([a], [b], Disturbance(slowness=100.0))
        sends = [asyncio.create_task(voice_a.send(voice_b, nonce, bytes(100_000))) for nonce in range(3)]
        await asyncio.sleep(2.0)  # a fifth of the first has left, at 10 kB/s
        assert not sends[0].done()
        world.calm(disturbed)
        await sends[0]
        assert world.now_s() == NEAR(2.08, abs=0.001)
        await asyncio.gather(*sends)
        assert world.now_s() == NEAR(2.28, abs=0.001)
        await asyncio.sleep(60.0)
        took_s = 100_000 / down_bytes_per_s
        expected = [2.18, 2.28, 2.38] if took_s < 0.1 else [0.1 + took_s * number for number in (1, 2, 3)]
        assert [at_s for at_s, _, _ in voice_b.chunks] == NEAR(expected, abs=0.02)
        assert voice_b.nonces == [0, 1, 2]

    run(main())


def test_a_path_that_gets_slow_slows_what_is_leaving_and_lets_nothing_overtake(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(1.0, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        world.disturb([a], [b], Disturbance(spikes=0.5, spike_s=5.0))
        for moment in range(20):
            sends = asyncio.gather(*(voice_a.send(voice_b, 2 * moment + i, bytes(100_000)) for i in range(2)))
            await asyncio.sleep(0.05)
            slow = world.disturb([a], [b], Disturbance(slowness=10.0))
            await asyncio.sleep(0.1)
            world.calm(slow)
            await sends
            assert world.now_s() == NEAR((moment + 1) * (0.2 + 0.1 * 0.9), abs=0.01)
        await asyncio.sleep(10.0)
        assert voice_b.nonces == list(range(40))

    run(main())


def test_loss_swallows_calls_and_delays_frames_while_it_lasts(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        world.disturb([a], [b], Disturbance(loss=0.5), one_way=True)
        lost = 0
        for nonce in range(100):
            try:
                await voice_a.ping(voice_b, timeout_s=0.5)
            except Unreachable:
                lost += 1
            await voice_a.send(voice_b, nonce)
        world.calm()
        await asyncio.sleep(5.0)
        assert 35 < lost < 65
        assert len(voice_b.pings) == 100 - lost
        assert voice_b.nonces == list(range(100))

    run(main())


# Duplication --------------------------------------------------------------------------------------------------------

TWICE = Disturbance(duplication=1.0)


def test_a_repeated_call_reaches_the_raw_handler_twice(listen: Callable[..., Any]) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        world.disturb([a], [b], TWICE)
        assert await a.transport.call(b.peer_id, b"?", timeout_s=1.0) == b"?"
        assert world.now_s() == NEAR(0.1)
        await asyncio.sleep(2.0)
        assert [request for _, request in ear.calls] == [b"?", b"?"]
        assert 0.05 < ear.calls[1][0] < 1.05

    run(main())


def test_the_endpoint_answers_a_repeated_call_once(speak: Speak) -> None:
    kinds: Counter[Kind] = Counter()

    async def main() -> None:
        world = World(0, uniform(0.05), watch=lambda event: kinds.update([event.kind]))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        voice_b.answers_in_s = 2.0  # the second delivery comes while the first is being handled
        world.disturb([a], [b], TWICE)
        for number in range(20):
            assert await voice_a.ping(voice_b, b"%d" % number) == b"%d" % number
        await asyncio.sleep(5.0)
        assert [pad for _, pad in voice_b.pings] == [b"%d" % number for number in range(20)]
        assert world.failures == []

    run(main())
    assert kinds[Kind.CALL_REPEATED] == 40  # requests and replies
    assert kinds[Kind.CALL_ARRIVED] == 40


def test_a_repeated_frame_is_handled_twice_with_the_same_bytes_and_costs_one_credit(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        world.disturb([a], [b], TWICE)
        for nonce in range(3):
            await voice_a.send(voice_b, nonce, b"tensor %d" % nonce)
            await asyncio.sleep(2.0)
        assert [(nonce, payload) for _, nonce, payload in voice_b.chunks] == [
            (nonce, b"tensor %d" % nonce) for nonce in (0, 0, 1, 1, 2, 2)
        ]
        assert world.failures == []
        began_s = world.now_s()
        await a.transport.close()  # waits for every credit that is owed
        assert world.now_s() == began_s

    run(main())


def test_a_frame_repeats_through_a_broken_stream_but_not_through_a_cut_or_into_the_next_process(speak: Speak) -> None:
    async def main(fault: str) -> list[int]:
        world = World(1, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        disturbed = world.disturb([a], [b], TWICE)
        await voice_a.send(voice_b, 0)
        await asyncio.sleep(0.06)
        world.calm(disturbed)
        match fault:
            case "daemon":
                world.kill_daemon(b, restarts_in_s=0.01)
            case "cut":
                world.partition([a], [b])
            case "crash":
                world.crash(b)
                (voice,) = await speak(world, world.add_peer("b").name)
                voice.chunks = voice_b.chunks
        await asyncio.sleep(2.0)
        return list(voice_b.nonces)

    assert run(main("none")) == [0, 0]
    assert run(main("daemon")) == [0, 0]
    assert run(main("cut")) == [0]
    assert run(main("crash")) == [0]


# Spikes: delay, and calls in another order --------------------------------------------------------------------------


def test_spikes_let_calls_overtake_each_other_and_hold_up_frames_in_order(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        world.disturb([a], [b], Disturbance(spikes=0.5, spike_s=2.0), one_way=True)
        for nonce in range(50):
            await voice_a.send(voice_b, nonce)
        frames_began_s = world.now_s()
        await asyncio.gather(*(voice_a.ping(voice_b, b"%d" % number) for number in range(50)))
        await asyncio.sleep(5.0)
        assert voice_b.nonces == list(range(50))
        late = [at_s - frames_began_s for at_s, _, _ in voice_b.chunks]
        assert late == sorted(late)
        assert 1.5 < late[-1] < 2.05
        pads = [int(pad) for _, pad in voice_b.pings]
        assert sorted(pads) == list(range(50))
        assert pads != sorted(pads)
        in_time = sum(at_s - frames_began_s < 0.06 for at_s, _ in voice_b.pings)
        assert 15 < in_time < 35

    run(main())


# All of it ----------------------------------------------------------------------------------------------------------


def test_all_faults_of_paths_come_from_the_seed_and_are_in_the_trace(speak: Speak) -> None:
    async def main(seed: int, everything: Disturbance) -> tuple[str, Counter[Kind]]:
        events: list[Event] = []
        world = World(seed, uniform(0.05, 1e6, jitter_s=0.01), watch=events.append)
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        world.disturb([a], [b], everything)
        for nonce in range(100):
            await asyncio.gather(
                voice_a.ping(voice_b, timeout_s=1.0),
                voice_b.ping(voice_a, timeout_s=1.0),
                voice_a.send(voice_b, nonce),
                return_exceptions=True,
            )
        return world.trace_hash(), Counter(event.kind for event in events)

    everything = Disturbance(loss=0.1, corruption=0.1, duplication=0.1, spikes=0.1, spike_s=0.5)
    first_hash, kinds = run(main(1, everything))
    assert run(main(1, everything)) == (first_hash, kinds)
    assert run(main(2, everything))[0] != first_hash
    assert {
        Kind.DISTURBED,
        Kind.CALL_LOST,
        Kind.CALL_DAMAGED,
        Kind.CALL_REPEATED,
        Kind.FRAME_DAMAGED,
        Kind.FRAME_REPEATED,
        Kind.CREDIT_DAMAGED,
    } <= kinds.keys()
    assert run(main(1, Disturbance()))[1][Kind.CALL_LOST] == 0
