"""Other systems' habits: what a device may not do at once, and what one step then takes."""

import asyncio
import dataclasses

import pytest
from baselines.blocking import BlockingDevice, FixedWindow, Lockstep, PairedRouter, Until

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.workload import layer_costs
from shoal.deploy.simulate.modelled import ModelledRun, run_modelled
from shoal.deploy.simulate.modelled_swarm import ModelledSwarm
from shoal.peer.model.layout import layer_layout
from shoal.protocol.frames import wire_bytes
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec
from shoal.protocol.topology import make_topology

SQUARE = Placement(stages=((0, 2), (1, 3)), bounds=(0, 2, 4))


def test_pipelines_are_the_ith_members_of_all_stages() -> None:
    lockstep = Lockstep.of("exchanges", SQUARE)
    assert lockstep == Lockstep(until="arrived", pipelines=((0, 1), (2, 3)), in_flight=2)
    assert lockstep is not None
    assert [lockstep.next_of(device) for device in range(5)] == [1, None, 3, None, None]


def test_uneven_stages_and_what_is_planned_live_have_no_pipelines() -> None:
    uneven = Placement(stages=((0, 2, 4), (1, 3)), bounds=(0, 2, 4))
    for placement in (uneven, None):
        lockstep = Lockstep.of("sends", placement)
        assert lockstep.pipelines is None
        assert lockstep.traffic(0, {}, microbatches=6) is None


def test_a_router_knows_its_partner_only() -> None:
    router = PairedRouter(partner=PeerID("b"))
    router.set_shares({PeerID("a"): 9.0, PeerID("b"): 1.0})
    router.set_ready(PeerID("a"), True)
    assert router.pick(now_s=0.0) is None
    router.set_ready(PeerID("b"), True)
    assert [router.pick(now_s=0.0) for _ in range(3)] == ["b", "b", "b"]


def test_a_window_asks_for_its_part_of_the_step_and_lets_few_of_it_fly() -> None:
    window = FixedWindow(num_stages=4, in_flight_max=2, held=10)
    assert window.size + 1 - window.in_flight == 10
    for key in range(2):
        assert window.has_room
        window.sent(key, now_s=float(key))
    assert not window.has_room
    for key in range(2):
        window.returned(key, now_s=5.0, waited_s=0.0)
    assert window.has_room
    assert window.size == 9


@pytest.mark.parametrize(
    ("until", "priority", "job_starts_s"),
    [
        ("left", Priority.ACTIVATION, 2.0),
        ("arrived", Priority.ACTIVATION, 2.5),
        ("arrived", Priority.GRADIENT, 2.5),
        ("arrived", Priority.BULK, 2.0),
    ],
)
def test_a_device_that_sends_computes_when_its_message_is_gone(
    until: Until, priority: Priority, job_starts_s: float
) -> None:
    """200 bytes at 100 bytes/s, half a second away."""
    kept: list[tuple[float, float]] = []

    async def main() -> float:
        world = World(0, uniform(latency_s=0.5, rate_bytes_per_s=100.0), modelled=True)
        a, b = world.add_peer("a"), world.add_peer("b")
        await a.transport.introduce(b.peer_id, b.transport.addresses())

        async def on_call(source: PeerID, request: bytes) -> bytes:
            return b""

        async def on_frame(source: PeerID, meta: bytes, payload: Payload) -> None: ...

        b.transport.serve(on_call=on_call, on_frame=on_frame)
        device = BlockingDevice(
            a.transport,
            a.compute,
            a.clock,
            until=until,
            latency_s=lambda peer: 0.5,
            sent=lambda began_s, ended_s: kept.append((began_s, ended_s)),
        )
        message = asyncio.create_task(device.transport.send(b.peer_id, b"", bytes(_payload(200)), priority=priority))
        await asyncio.sleep(0)
        timed = await device.compute.run("forward", lambda: None, flop=1e12)
        await message
        return timed.started_s

    assert run(main()) == pytest.approx(job_starts_s)
    assert kept == [(0.0, pytest.approx(job_starts_s))]


def _payload(frame_bytes: int) -> int:
    """How much payload makes a frame of so many bytes."""
    return frame_bytes - wire_bytes(0, 0)


SPEC = RunSpec(
    model=ModelSpec(vocab_size=8, dim=256, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=512, context=256),
    training=TrainingSpec(steps=3, microbatches_per_step=64, microbatch_size=1, s_max=0),
    optimizer=OptimizerSpec(warmup_steps=0),
    swarm=SwarmSpec(stages=2, min_peers=4),
)


@pytest.mark.sim
def test_what_a_microbatch_costs_a_device_that_blocks_is_compute_plus_messages() -> None:
    """Two pipelines of two stages, 32 microbatches each: the first stage computes and sends an activation, the second
    computes and sends a gradient. When messages overlap with compute a microbatch costs the larger of the two."""
    activation_bytes = 2 * 256 * 256
    topology = make_topology(
        [[0.001] * 4] * 4, [[activation_bytes / 0.05] * 4] * 4, flop_per_s=_stage_flop() / 0.1, memory_bytes=1e12
    )
    ours = ModelledRun(topology=topology, spec=SPEC, stages=SQUARE)
    step_s = {}
    for name, make_swarm in (("ours", ModelledSwarm), ("sends", Lockstep.of("sends", SQUARE).swarm())):
        result = run_modelled(dataclasses.replace(ours, make_swarm=make_swarm))
        assert result.failures == ()
        step_s[name] = result.steps[2].committed_at_s - result.steps[1].committed_at_s
    parameters = sum(layer_layout(SPEC.model, f"layers.{layer}").numel for layer in (0, 1))
    reduce_s = 4 * parameters * 0.05 / activation_bytes
    assert step_s["ours"] == pytest.approx(33 * 0.1 + reduce_s, rel=0.1)
    assert step_s["sends"] == pytest.approx(33 * (0.1 + 0.05) + reduce_s, rel=0.1)


def _stage_flop() -> float:
    """Forward and backward of one of the two stages."""
    return 3.0 * 256 * sum(layer_costs(SPEC.model)[:2])
