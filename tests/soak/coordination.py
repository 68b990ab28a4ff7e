"""Do two live plans ever meet? Small swarms of real `Coordination` drivers under everything that can happen to them.

Each seed is one swarm of five to seven peers that only coordinate, in virtual time: its terms last eight heartbeats,
two faults in three seconds begin (crashes with a restart from disk, power cuts, pauses, cuts of both kinds, dead
daemons, lost, repeated and late messages), and now and then a peer falls, or stands still, in the very moment in which
it sends one of the messages that plans are made with. At the end all that ends has ended. Checked:

- no two plans of one (term, sequence) are obeyed by anybody, ever;
- the plans that were obeyed form one chain: each names the hash of the one before it;
- a peer obeys only plans above all it has obeyed, also across restarts;
- once nothing is wrong any more, everyone obeys one plan that everyone is in.

    tests/soak/coordination.py [--seeds 10000] [--first 0] [--jobs 2]      all of them; says what it found
    tests/soak/coordination.py --replay 4711                               one, with what happened in it

`make soak-coordination`; 200 of them are in the suite (`tests/coordinator/test_safety.py`).
"""

import argparse
import asyncio
import contextvars
import itertools
import logging
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from open_gate import OpenGate
from sim_faults import Fault, FaultKind, draw_schedule, play

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.driver import Callbacks, Coordination
from shoal.coordinator.store import PlanStore
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CALL_TIMEOUT_S
from shoal.protocol.messages import (
    Advert,
    Heartbeat,
    Message,
    PlanLive,
    PlanOffer,
    Record,
    Refusal,
    TermRequest,
    TransferLeadership,
)
from shoal.protocol.plan import SignedPlan
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import RunSpec, SwarmSpec, TrainingSpec, run_id

KINDS = (
    FaultKind.CRASH,
    FaultKind.PAUSE,
    FaultKind.DEAD_DAEMON,
    FaultKind.POWER_CUT,
    FaultKind.CUT,
    FaultKind.ONE_WAY_CUT,
    FaultKind.LOSS,
    FaultKind.DUPLICATION,
    FaultKind.SPIKES,
)
DURATION_S = 24.0
"""Of faults; three terms."""
FAULT_S_MAX = 5.0
CALM_S = 60.0
"""A peer may be waited for as long as it was once silent, and an unlucky candidate for another's term."""
FALLS_MEAN = 10
"""Messages about plans between two falls in the middle of one, of one process."""
PLANNING = (TermRequest, PlanOffer, PlanLive, TransferLeadership)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)
_RECORDS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Record)


class PlainEndpoint(Endpoint):
    """Without signatures and without memory of what was said before: half the time, and repeated calls get through."""

    def seal_record(self, record: msgspec.Struct) -> bytes:
        return f"{self.peer_id}\n".encode() + _ENCODER.encode(record)

    def open_record(self, data: bytes, *, source: Any) -> tuple[Any, Any]:
        signer, _, record = data.partition(b"\n")
        return PeerID(signer.decode()), _RECORDS.decode(record)

    async def _handle_call(self, source: Any, request: bytes) -> bytes:
        return _ENCODER.encode(await self._dispatch(source, _DECODER.decode(request)))

    async def ask(self, peer: Any, message: Any, expect: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        if peer == self.peer_id:
            reply = await self._dispatch(peer, message)
        else:
            reply = _DECODER.decode(await self.transport.call(peer, _ENCODER.encode(message), timeout_s=timeout_s))
        if isinstance(reply, Refusal):
            raise Refused(peer, reply.reason)
        assert isinstance(reply, expect)
        return reply


@dataclass(kw_only=True)
class Peer:
    """One process. `falls_in`: messages about plans until it falls while sending one."""

    port: SimPeer
    coordination: Coordination
    falls_in: int
    ready: bool = False
    """It has taken up where its disk ended."""


@dataclass(kw_only=True)
class Verdict:
    """What became of one seed."""

    seed: int
    flaws: list[str] = field(default_factory=list)
    num_plans: int = 0
    num_terms: int = 0
    num_falls: int = 0
    calm_after_s: float = 0.0
    """How long after the last fault everyone obeyed one plan that has everyone in it."""
    trace_hash: str = ""


class Game:
    """One swarm and what happens to it.

    Args:
        peers_max: it has five peers or more.
        tell: called with what happens, for people.
    """

    def __init__(
        self,
        seed: int,
        *,
        duration_s: float = DURATION_S,
        peers_max: int = 7,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.verdict = Verdict(seed=seed)
        self._tell, self._duration_s = tell, duration_s
        self._rng = random.Random(f"coordination/{seed}")
        self._names = [f"p{number}" for number in range(self._rng.randint(5, peers_max))]
        self._world = World(seed, uniform(0.02, jitter_s=0.02))
        self._peers: dict[str, Peer] = {}
        self._plans: dict[tuple[int, int], SignedPlan] = {}
        self._obeyed: dict[str, tuple[int, int]] = {}
        self._began: set[asyncio.Task[None]] = set()
        self._spec = RunSpec(
            training=TrainingSpec(steps=50, validation_interval_steps=0),
            swarm=SwarmSpec(stages=2, min_peers=len(self._names), heartbeat_s=1.0, term_s=8.0),
        )
        self._rough = False

    def play(self) -> Verdict:
        run(self._main())
        return self.verdict

    async def _main(self) -> None:
        for name in self._names:
            self._begin(name)
        await self._until(self._is_calm, within_s=20.0, what="no first plan")
        schedule = draw_schedule(
            self._rng,
            self._names,
            duration_s=self._duration_s,
            mean_gap_s=1.5,
            kinds=KINDS,
            down_at_once_max=3,
            recovers_s=0.0,
        )
        schedule = tuple(replace(fault, lasts_s=min(fault.lasts_s or 0.0, FAULT_S_MAX)) for fault in schedule)
        self._rough = True
        await play(self._world, schedule, on_return=self._begin, on_fault=self._hear_of)
        self._rough = False
        for name, peer in self._peers.items():  # whom no schedule knows to have fallen
            if not peer.port.is_alive:
                self._begin(name)
        self._say("nothing is wrong any more")
        self.verdict.calm_after_s = await self._until(self._is_calm, within_s=CALM_S, what="no plan for everyone")
        self._check()
        self.verdict.trace_hash = self._world.trace_hash()

    # --- peers ---

    def _begin(self, name: str) -> None:
        port = self._world.add_peer(name)
        owner = self._world.peers[self._names[0]] if self._peers else port
        endpoint = PlainEndpoint(port.identity, port.transport, run=run_id(self._spec, owner.peer_id), gate=OpenGate())
        advert = Advert(
            name=name,
            device="cpu",
            flop_per_s=1e12,
            memory_bytes=1 << 30,
            upload_bytes_per_s=1e7,
            download_bytes_per_s=1e8,
            addresses=port.transport.addresses(),
            has_data=True,
        )

        coordination = Coordination(
            endpoint=endpoint,
            directory=port.directory,
            clock=port.clock,
            spec=self._spec,
            owner=owner.peer_id,
            allocator=GreedyAllocator(),
            store=PlanStore(port.disk),
            heartbeat=lambda: self._beat(port, coordination.plan, advert),
            callbacks=Callbacks(on_plan=lambda signed: self._obeys(name, signed)),
            rng=self._world.rng(f"coordination/{name}"),
        )
        self._tamper(name, coordination)
        falls_in = 1 + int(self._rng.expovariate(1.0 / FALLS_MEAN))
        peer = self._peers[name] = Peer(port=port, coordination=coordination, falls_in=falls_in)
        self._let_it_fall(peer, endpoint)
        task = port.spawn(self._start(peer))
        self._began.add(task)
        self._say(f"{name} begins")

    def _beat(self, port: SimPeer, live: SignedPlan | None, advert: Advert) -> Heartbeat:
        """What a peer says of itself: it holds whatever a plan gives it."""
        stage = live.plan.stage_of(port.peer_id) if live else None
        return Heartbeat(
            advert=advert,
            plan_sequence=live.plan.sequence if live else 0,
            plan_digest=live.digest if live else "",
            era=live.plan.era if live else 0,
            stage=stage,
            version=0,
            synced=stage is not None,
            draining=False,
        )

    def _tamper(self, name: str, coordination: Coordination) -> None:
        """Make a liar of a peer, in games that have one."""

    async def _start(self, peer: Peer) -> None:
        try:
            await peer.coordination.start()
            peer.ready = True
        except LocalError as error:
            self.verdict.flaws.append(f"{peer.port.name} cannot start: {error}")

    def _let_it_fall(self, peer: Peer, endpoint: PlainEndpoint) -> None:
        """In the middle of its n-th message about a plan, before or after that has left; for good or for a while."""
        ask = endpoint.ask
        mode = self._rng.choice(("crash", "crash", "pause"))
        before, lasts_s = self._rng.random() < 0.5, self._rng.uniform(0.3, 6.0)

        async def falling(whom: Any, message: Any, expect: Any, **how: Any) -> Any:
            if not isinstance(message, PLANNING) or not self._rough:
                return await ask(whom, message, expect, **how)
            peer.falls_in -= 1
            if peer.falls_in == 0:
                if before:
                    self._fall(peer, mode, lasts_s, type(message).__name__)
                else:
                    asyncio.get_running_loop().call_soon(self._fall, peer, mode, lasts_s, type(message).__name__)
            if peer.falls_in == 0 and before:
                await asyncio.sleep(0)  # here it stands still
            return await ask(whom, message, expect, **how)

        endpoint.ask = falling  # type: ignore[method-assign]

    def _fall(self, peer: Peer, mode: str, lasts_s: float, where: str) -> None:
        if not peer.port.is_alive:
            return
        self.verdict.num_falls += 1
        self._say(f"{peer.port.name} falls ({mode}) at a {where}")
        world, name = self._world, peer.port.name
        if mode == "crash":
            world.crash(peer.port)
            self._later(lasts_s, lambda: None if world.peers[name].is_alive else self._begin(name))
        else:
            world.pause(peer.port)
            self._later(lasts_s, lambda: world.resume(peer.port) if peer.port.is_alive else None)

    def _later(self, in_s: float, do: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(in_s, do, context=contextvars.Context())

    # --- what is checked ---

    def _obeys(self, name: str, signed: SignedPlan) -> None:
        order = signed.plan.order
        self._say(f"{name} obeys {order}: {signed.plan.reason}")
        first = self._plans.setdefault(order, signed)
        if first.digest != signed.digest:
            self.verdict.flaws.append(f"two live plans of {order}")
        before = self._obeyed.get(name, (0, 0))
        if order < before or (order == before and self._peers[name].ready):
            self.verdict.flaws.append(f"{name} obeyed {before} and then {order}")
        self._obeyed[name] = order

    def _check(self) -> None:
        plans = [self._plans[order] for order in sorted(self._plans)]
        for base, plan in itertools.pairwise(plans):
            if plan.plan.previous != base.digest:
                self.verdict.flaws.append(f"{plan.plan.order} does not follow {base.plan.order}")
        self.verdict.num_plans = len(plans)
        self.verdict.num_terms = len({plan.plan.term for plan in plans})
        self.verdict.flaws += [f"{name}: {error!r}" for name, error in self._world.failures]

    def _is_calm(self) -> bool:
        """Everyone obeys one plan that everyone is in, and one of them coordinates."""
        lives = [peer.coordination.plan for peer in self._peers.values() if peer.port.is_alive]
        if len(lives) < len(self._names) or any(live is None for live in lives):
            return False
        plans = {live.digest: live.plan for live in lives if live is not None}
        (first, *more) = plans.values()
        return not more and {peer.port.peer_id for peer in self._peers.values()} <= set(first.members)

    async def _until(self, condition: Callable[[], bool], *, within_s: float, what: str) -> float:
        begun_s = self._world.now_s()
        while not condition():
            if self._world.now_s() > begun_s + within_s:
                self.verdict.flaws.append(f"{what} within {within_s:g} s")
                break
            await asyncio.sleep(0.1)
        return self._world.now_s() - begun_s

    # --- for people ---

    def _hear_of(self, fault: Fault) -> None:
        self._say(str(fault))

    def _say(self, text: str) -> None:
        self._tell(f"{self._world.now_s():8.3f} {text}")


def judge(seed: int) -> Verdict:
    """One seed, whatever comes out of it."""
    game = Game(seed)
    try:
        return game.play()
    except Exception as error:  # what a driver lets out is a flaw, too
        game.verdict.flaws.append(repr(error))
        return game.verdict


def judge_all(seeds: Iterable[int], jobs: int) -> Iterator[Verdict]:
    """In the order of the seeds."""
    if jobs == 1:
        yield from map(judge, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(judge, seeds, chunksize=8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--replay", type=int, default=None)
    asked = parser.parse_args()
    if asked.replay is not None:
        logging.basicConfig(level=logging.INFO, format="         %(name)s: %(message)s", stream=sys.stdout)
        verdict = Game(asked.replay, tell=lambda text: sys.stdout.write(f"{text}\n")).play()
        sys.stdout.write(f"{verdict}\n")
        return int(bool(verdict.flaws))
    logging.disable(logging.CRITICAL)
    begun_s = time.monotonic()
    verdicts: list[Verdict] = []
    for verdict in judge_all(range(asked.first, asked.first + asked.seeds), asked.jobs):
        verdicts.append(verdict)
        if verdict.flaws:
            sys.stdout.write(f"seed {verdict.seed}: {'; '.join(verdict.flaws)}\n")
        if len(verdicts) % 500 == 0:
            sys.stdout.write(f"{len(verdicts)} seeds, {time.monotonic() - begun_s:.0f} s\n")
        sys.stdout.flush()
    calm_s = sorted(verdict.calm_after_s for verdict in verdicts)
    flawed = [verdict.seed for verdict in verdicts if verdict.flaws]
    sys.stdout.write(
        f"{len(verdicts)} seeds from {asked.first}: {sum(v.num_plans for v in verdicts)} live plans, "
        f"{sum(v.num_terms for v in verdicts)} terms, {sum(v.num_falls for v in verdicts)} falls at a message; "
        f"calm {calm_s[len(calm_s) // 2]:.1f} s after the last fault (median), {calm_s[len(calm_s) * 99 // 100]:.1f} s "
        f"(p99), {calm_s[-1]:.1f} s (most); {len(flawed)} flawed{f': {flawed}' if flawed else ''}\n"
    )
    return int(bool(flawed))


if __name__ == "__main__":
    sys.exit(main())
