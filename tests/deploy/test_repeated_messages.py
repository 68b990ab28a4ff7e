"""What one member may send again and again, for ten virtual minutes, while the run trains: it costs a tenth of the
steps at most, and a bounded number of snapshots on the disks of the others."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import msgspec
import pytest
from sim_swarm import SimSwarm

from shoal.deploy.node.node import Node
from shoal.peer.data.corpus import load_corpus
from shoal.peer.disk.archive import Archive
from shoal.peer.model.state import StageState
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import group_keys
from shoal.protocol.limits import KEEPING_AT_ONCE_S, KEEPING_S_MIN, KEEPING_SHARE, SAVES_OF_ONE_MAX
from shoal.protocol.messages import Done, Halt, Halted, Keep, Repair, Reset, Save, Saved, TransferLeadership
from shoal.protocol.plan import Mandate, sign_mandate
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec

pytestmark = pytest.mark.sim

MINUTES = 10
NAMES = ["host", "a", "b", "liar"]
AGAIN_S = 0.2
Message = Callable[[Node, int], tuple[msgspec.Struct, type[msgspec.Struct]]]


def halt(liar: Node, number: int) -> tuple[msgspec.Struct, type[msgspec.Struct]]:
    return Halt(at_once=True), Halted


def save(liar: Node, number: int) -> tuple[msgspec.Struct, type[msgspec.Struct]]:
    assert liar.peer.replica is not None
    return Save(version=liar.peer.replica.version + 1), Saved


def keep(liar: Node, number: int) -> tuple[msgspec.Struct, type[msgspec.Struct]]:
    replica = liar.peer.replica
    assert replica is not None
    plan = replica.core.plan
    return Keep(version=replica.version, layers=group_keys(liar.spec.model, plan, replica.stage)), Saved


def hand_over(liar: Node, number: int) -> tuple[msgspec.Struct, type[msgspec.Struct]]:
    assert liar.coordination.plan is not None
    advert = msgspec.structs.replace(liar.peer.advert(), addresses=(f"/ip4/10.0.0.1/tcp/{number}",))
    roster = ((PeerID(f"ghost{number}"), advert),)
    return TransferLeadership(plan=liar.coordination.plan.link, roster=roster), Done


def reset(liar: Node, number: int) -> tuple[msgspec.Struct, type[msgspec.Struct]]:
    live = liar.coordination.plan
    assert live is not None
    mandate = Mandate(override_epoch=1 + number, term=10**6, coordinator=live.plan.coordinator, previous=live.digest)
    signed = sign_mandate(liar.endpoint.identity, mandate, run=liar.endpoint.run)
    return Reset(mandate=signed, live=live.link, version=10**6, roster=()), Done


def repair(liar: Node, number: int) -> tuple[msgspec.Struct, type[msgspec.Struct]]:
    replica = liar.peer.replica
    assert replica is not None
    return Repair(step=max(0, replica.version - number % 2), indices=b"\x0f"), Done


async def repeat(swarm: SimSwarm, make: Message) -> None:
    """Send it to everybody, five times a second."""
    liar = swarm.nodes["liar"]
    others = [node.endpoint.peer_id for name, node in swarm.nodes.items() if name != "liar"]
    asked: set[asyncio.Task[object]] = set()

    async def ask(peer: PeerID, message: msgspec.Struct, expect: type[msgspec.Struct]) -> None:
        with contextlib.suppress(Refused, RemoteError, Unreachable):
            await liar.endpoint.ask(peer, message, expect)

    for number in itertools.count():
        replica = liar.peer.replica
        if replica is not None and replica.is_ready and replica.state is not None:
            if make is keep:
                await liar.peer.server.pin(replica.state)  # so that others can fetch it
            message, expect = make(liar, number)
            for peer in others:
                task = asyncio.create_task(ask(peer, message, expect))
                asked.add(task)
                task.add_done_callback(asked.discard)
        await asyncio.sleep(AGAIN_S)


@dataclass(frozen=True)
class Seen:
    """What has been done in ten minutes."""

    steps: int
    snapshots: int
    """Written by all together."""


@pytest.fixture(scope="module")
def seen_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Message | None], Seen]:
    """What the run does in ten minutes with a member that repeats a message; None: in peace."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"the {i % 7}th fish swims {i * i % 31} miles\n" for i in range(3000)))
    spec = msgspec.convert(
        {
            "seed": 3,
            "model": {"dim": 32, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64, "context": 32},
            "data": {"source": str(path)},
            "training": {"steps": 10**6, "microbatches_per_step": 4, "microbatch_size": 2},
            "swarm": {"stages": 3, "min_peers": len(NAMES)},
            "wire": {"activations": "fp32"},
        },
        RunSpec,
    )

    @cache
    def seen(make: Message | None) -> Seen:
        written: list[int] = []
        honest = Archive.write

        async def write(archive: Archive, state: StageState, *, era: int) -> bool:
            written.append(state.version)
            return await honest(archive, state, era=era)

        async def main() -> int:
            corpus = load_corpus(spec.data, context=spec.model.context)
            network = uniform(latency_s=0.02, rate_bytes_per_s=1e6)
            swarm = SimSwarm(spec, corpus, seed=1, network=network, device_flop_per_s=4e6)
            for name in NAMES:
                swarm.launch(name)
            await swarm.until(lambda: max(swarm.steps, default=-1) >= 3)
            assert swarm.stage_of("liar") == 2, "stage 0 does not hear from it whether it leaves"
            began = max(swarm.steps)
            attack: asyncio.Future[None] | None = None
            if make is not None:
                attack = swarm.world.peers["liar"].spawn(repeat(swarm, make))
            await asyncio.sleep(60.0 * MINUTES)
            swarm.raise_failures()
            assert sorted(swarm.running) == sorted(NAMES)
            assert max(node.coordination.plan.plan.override_epoch for node in swarm.nodes.values()) == 0
            made = max(swarm.steps) - began
            if attack is not None:
                assert not attack.done()
                attack.cancel()
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Archive, "write", write)
            steps = run(main())
        return Seen(steps, len(written))

    return seen


@pytest.mark.parametrize("make", [halt, save, keep, hand_over, reset, repair], ids=lambda make: make.__name__)
def test_a_member_that_repeats_it_for_ten_minutes_costs_a_tenth_of_the_steps_at_most(
    seen_with: Callable[[Message | None], Seen], make: Message
) -> None:
    assert seen_with(make).steps >= 0.9 * seen_with(None).steps


def test_who_asks_for_each_version_to_be_saved_gets_a_few(seen_with: Callable[[Message | None], Seen]) -> None:
    """Of each version a member of each stage writes a snapshot, and so do the two that keep a copy of it."""
    extra = seen_with(save).snapshots - seen_with(None).snapshots
    assert extra <= SAVES_OF_ONE_MAX * (len(NAMES) + 2 * 3)


def test_who_has_others_keep_copies_all_the_time_gets_its_share(seen_with: Callable[[Message | None], Seen]) -> None:
    of_each = (60.0 * MINUTES * KEEPING_SHARE + KEEPING_AT_ONCE_S) / KEEPING_S_MIN
    extra = seen_with(keep).snapshots - seen_with(None).snapshots
    assert extra <= (len(NAMES) - 1) * of_each
