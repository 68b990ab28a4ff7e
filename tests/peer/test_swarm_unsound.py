"""A member of two that sends NaN instead of gradients: the other one learns on, and names it."""

import logging
from statistics import mean

import msgspec
import pytest
import torch

from shoal.protocol.messages import GatherPart, ReducePart
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 24
KINDS = {"contributions": (ReducePart,), "means": (GatherPart,), "both": (ReducePart, GatherPart)}


def lie(driver, kinds, value, to=None):
    """From now on the pieces of `kinds` that this peer sends are full of `value`; all of them, or those to one peer."""
    pieces = driver.replica._pieces
    honest = pieces.send

    def send(outgoing, start, kind):
        if kind not in kinds:
            return honest(outgoing, start, kind)
        wrong = [
            instead_of(piece, pieces._vectors.payload_of(torch.full((piece.values_C.numel(),), value)))
            if to in (None, piece.target)
            else piece
            for piece in outgoing
        ]
        return honest(wrong, start, kind)

    pieces.send = send


def instead_of(piece, payload):
    return type(piece)(piece.target, piece.start, piece.values_C, piece.form, piece.key, payload)


@pytest.mark.sim
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38], ids=["nan", "infinity", "huge"])
@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("liar", ["0.0", "0.1"], ids=["the first by rank", "the second"])
def test_the_honest_one_of_two_learns_on_and_names_the_liar(make_swarm, tiny_spec, caplog, what, value, liar):
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": STEPS + 1, "validation_interval_steps": 0}
    builtins["swarm"] |= {"stages": 1, "min_peers": 2}
    spec = msgspec.convert(builtins, type(tiny_spec))
    honest = "0.1" if liar == "0.0" else "0.0"
    losses = []

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.02, rate_bytes_per_s=1e7))
        for name in ("0.0", "0.1"):
            await swarm.add(name)
        swarm.obey([["0.0", "0.1"]], not_started=True)
        await swarm.until_step(1)
        before = swarm.drivers[honest].replica.state.layers["head"].param_N.clone()
        lie(swarm.drivers[liar], KINDS[what], value)
        await swarm.until(lambda: swarm.drivers[honest].replica.version >= STEPS, timeout_s=600.0)
        losses.extend(swarm.losses[:STEPS])
        state = swarm.drivers[honest].replica.state
        assert not torch.equal(state.layers["head"].param_N, before)
        assert all(layer.param_N.isfinite().all() for layer in state.layers.values())
        told = swarm.drivers[honest].heartbeat().unsound
        assert told == (swarm.peer(liar).peer_id,)
        await swarm.close()

    with caplog.at_level(logging.ERROR):
        run(main())
    assert mean(losses[-3:]) < mean(losses[:3]) - 0.5
    named = [record for record in caplog.records if "a gradient with NaN, infinity" in record.getMessage()]
    assert named


@pytest.mark.sim
@pytest.mark.parametrize("liar", ["0.0", "0.2"], ids=["the first by rank", "the last"])
def test_who_alone_gets_no_mean_of_a_mate_has_it_from_another(make_swarm, tiny_spec, liar):
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": STEPS + 1, "validation_interval_steps": 0}
    builtins["swarm"] |= {"stages": 1, "min_peers": 3}
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.02, rate_bytes_per_s=1e7))
        for name in ("0.0", "0.1", "0.2"):
            await swarm.add(name)
        swarm.obey([["0.0", "0.1", "0.2"]], not_started=True)
        await swarm.until_step(1)
        victim = swarm.drivers["0.1"]
        lie(swarm.drivers[liar], (GatherPart,), torch.nan, to=swarm.peer("0.1").peer_id)
        began_s = swarm.world.now_s()
        await swarm.until(lambda: victim.replica.version >= STEPS // 2, timeout_s=600.0)
        assert swarm.world.now_s() < began_s + 4.0 * (STEPS // 2)
        assert victim.heartbeat().unsound == (swarm.peer(liar).peer_id,)
        assert {report.dissenting for report in swarm.commits[0].values()} == {0}
        await swarm.close()

    run(main())
