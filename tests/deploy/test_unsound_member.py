"""A member whose contributions its group refuses loses its place, and the others go on."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from sim_swarm import SimSwarm

from shoal.deploy.node.node import Node
from shoal.peer.data.corpus import load_corpus
from shoal.peer.group.reduce import Outgoing
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.messages import Done, GatherPart, ReducePart, RoundStart
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec

pytestmark = pytest.mark.sim

NAMES = ["host", "a", "b", "liar"]
PATIENCE_S = 120.0
AGAIN_S = 0.2


async def sends_nan(liar: Node) -> None:
    """Its pieces of each reduction are full of NaN."""
    replica = liar.peer.replica
    assert replica is not None
    pieces = replica._pieces
    honest = pieces.send

    def send(outgoing: Iterable[Outgoing], start: RoundStart, kind: type[ReducePart] | type[GatherPart]) -> None:
        def nothing(piece: Outgoing) -> Outgoing:
            nan = torch.full((piece.values_C.numel(),), torch.nan)
            return replace(piece, payload=pieces._vectors.payload_of(nan))

        honest(map(nothing, outgoing), start, kind)

    pieces.send = send  # type: ignore[method-assign]
    await asyncio.Event().wait()


async def restarts(liar: Node) -> None:
    """It only says so, in each `Progress`, five times a second."""
    for number in itertools.count(1):
        replica = liar.peer.replica
        if replica is not None and replica.is_ready:
            word = replica.core.group._progress(replica.version)
            word = msgspec.structs.replace(word, incarnation=word.incarnation + number)
            for peer in replica.core.group.group_peers:
                with contextlib.suppress(Refused, RemoteError, Unreachable):
                    await liar.endpoint.ask(peer, word, Done)
        await asyncio.sleep(AGAIN_S)


@pytest.mark.parametrize("lies", [sends_nan, restarts], ids=lambda lies: lies.__name__)
def test_a_member_that_its_whole_group_refuses_stands_by(
    tmp_path: Path, lies: Callable[[Node], Awaitable[None]]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {i % 7}th fish swims {i * i % 31} miles\n" for i in range(3000)))
    spec = msgspec.convert(
        {
            "seed": 3,
            "model": {"dim": 32, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64, "context": 32},
            "data": {"source": str(text)},
            "training": {"steps": 10**6, "microbatches_per_step": 8, "microbatch_size": 2},
            "swarm": {"stages": 1, "min_peers": len(NAMES)},
        },
        RunSpec,
    )

    async def main() -> None:
        corpus = load_corpus(spec.data, context=spec.model.context)
        network = uniform(latency_s=0.02, rate_bytes_per_s=1e7)
        swarm = SimSwarm(spec, corpus, seed=1, network=network, device_flop_per_s=2e7)
        for name in NAMES:
            swarm.launch(name)
        await swarm.until(lambda: max(swarm.steps, default=-1) >= 3)

        def stands_by() -> bool:
            plan = swarm.nodes["host"].coordination.plan.plan
            liar = swarm.nodes["liar"].endpoint.peer_id
            return liar in plan.spares

        attack = swarm.world.peers["liar"].spawn(lies(swarm.nodes["liar"]))
        await swarm.until(stands_by, timeout_s=PATIENCE_S)
        began = max(swarm.steps)
        await swarm.until(lambda: max(swarm.steps) >= began + 10, timeout_s=PATIENCE_S)
        assert stands_by()
        for name in NAMES[:-1]:
            replica = swarm.nodes[name].peer.replica
            assert replica is not None
            assert replica.state is not None
            assert all(layer.param_N.isfinite().all() for layer in replica.state.layers.values())
        attack.cancel()

    run(main())
