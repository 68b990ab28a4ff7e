"""A real swarm in virtual time, and messages of every kind that come in at its doors.

Four nodes train. `Session` sends them calls and tensor frames that are made from the message types, each in the name
of a member whose key has been stolen, or of a stranger, and in between lets the swarm go on. A message is a finding if
a handler raises what is not its sender's fault, if a node ends with an error, or if a moment of the swarm takes long.

What a thief with a member's key may do by right (say good-bye, coordinate, end the run) is no finding: the swarm is
then made anew. A stranger may do nothing at all: in a session of strangers the plan chain must be the members' own, and
the run must go on.
"""

import asyncio
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from fuzz_choices import Choices
from fuzz_targets import make_plan, members_of
from fuzz_values import Known, make

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from sim_swarm import SimSwarm
from tiny_run import tiny_corpus, tiny_spec

from shoal.protocol import messages
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.plan import Mandate, Plan, PlanProof, SignedPlan, sign_mandate, sign_plan, vote_body
from shoal.protocol.ports import Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer
from shoal.protocol.statement import sign_statement

NAMES = ("host", "b", "c", "d")
_LATENCY_S = 0.01
_BATCH = 100
"""Messages that are sent at once, before the swarm goes on for a while."""
_PATIENCE_S = 5.0
_BYTES_OF_ONE = 400
"""Of choices for one message; what it lacks then is the first option everywhere."""
_LIES = 0.3
"""Share of the answers that the corrupted member makes up."""
_LAYERS = 2
_BEGUN_S = 200.0
_GOES_ON_S = 120.0


class Finding(AssertionError):
    """What must not be."""


@dataclass(slots=True, kw_only=True)
class Told:
    """What a session has done."""

    executions: int = 0
    answered: int = 0
    """Calls that a handler answered with something else than a refusal."""
    restarts: int = 0


class Session:
    """Messages from one seed; the same seed makes the same session.

    Args:
        strangers: all senders are strangers; else they are members, and now and then a stranger.
    """

    def __init__(self, seed: int, *, strangers: bool, experts: bool = False) -> None:
        self.told = Told()
        self._rng = random.Random(f"fuzz swarm/{seed}/{strangers}")
        self._seed = seed
        self._strangers = strangers
        self._experts = experts
        self._kinds = members_of(messages.Message)
        self._metas = members_of(messages.FrameMeta)

    def play(self, executions: int) -> Told:
        """Raises: Finding."""
        while self.told.executions < executions:
            run(self._one_swarm(executions))
            self.told.restarts += 1
        return self.told

    async def _one_swarm(self, executions: int) -> None:
        spec = tiny_spec(
            steps=100_000, peers=len(NAMES), stages=_LAYERS, microbatches=4, experts=4 if self._experts else 0
        )
        swarm = SimSwarm(
            spec,
            tiny_corpus(),
            seed=self._rng.randrange(1 << 30),
            network=uniform(_LATENCY_S),
            device_flop_per_s=5e7,
            is_open=False,
        )
        for name in NAMES:
            swarm.launch(name)
        await swarm.until(lambda: len(swarm.steps) > 1, timeout_s=_BEGUN_S)
        stranger = swarm.world.add_peer("stranger")
        stranger.transport.serve(on_call=_deaf, on_frame=_blind)
        for name in NAMES:
            node = swarm.world.peers[name]
            await stranger.transport.introduce(node.peer_id, node.transport.addresses())
        if not self._strangers:
            self._corrupt(swarm, self._rng.choice(NAMES))
        while self.told.executions < executions:
            await self._batch(swarm, stranger)
            self._look(swarm)
            if set(swarm.nodes) != set(NAMES) or swarm.ended:
                return  # a thief has ended it for somebody, by right
        if self._strangers:
            await self._goes_on(swarm)

    async def _batch(self, swarm: SimSwarm, stranger: SimPeer) -> None:
        known = _known(swarm, self._rng)
        sending = []
        for _ in range(_BATCH):
            name = self._rng.choice(NAMES)
            others = [other for other in NAMES if other != name]
            thief = "stranger" if self._strangers or self._rng.random() < 0.1 else self._rng.choice(others)
            choices = Choices(self._rng.randbytes(_BYTES_OF_ONE))
            work = self._send(swarm, thief, swarm.world.peers[name].peer_id, choices, known)
            sending.append(swarm.world.peers[thief].spawn(work, name="attack"))
            self.told.executions += 1
        await asyncio.wait(sending, timeout=0.2 + 0.3 * self._rng.random())

    def _corrupt(self, swarm: SimSwarm, name: str) -> None:
        """From now on some of the answers of `name` are made up, too, mostly of the right type."""
        endpoint = swarm.nodes[name].endpoint
        honest = endpoint._dispatch

        async def answer(source: PeerID, message: msgspec.Struct) -> msgspec.Struct:
            reply = await honest(source, message)
            if self._rng.random() > _LIES or name not in swarm.nodes:
                return reply
            self.told.executions += 1
            choices = Choices(self._rng.randbytes(_BYTES_OF_ONE))
            kind = choices.pick(self._kinds) if choices.chance(8) else type(reply)
            made = make(choices, kind, _known(swarm, self._rng))
            try:
                lie: msgspec.Struct = msgspec.msgpack.decode(made, type=messages.Message)
                return lie
            except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, TypeError):
                return reply

        endpoint._dispatch = answer  # type: ignore[method-assign]

    async def _send(self, swarm: SimSwarm, thief: str, victim: PeerID, choices: Choices, known: Known) -> None:
        peer = swarm.world.peers[thief]
        is_frame = choices.chance(4)
        kind = choices.pick(self._metas if is_frame else self._kinds)
        union = messages.FrameMeta if is_frame else messages.Message
        try:
            message = msgspec.msgpack.decode(make(choices, kind, known), type=union)
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, TypeError, RecursionError):
            return
        try:
            if is_frame:
                payload = self._payload(choices, message)
                await peer.transport.send(victim, msgspec.msgpack.encode(message), payload, priority=Priority.BULK)
                return
            reply = await peer.transport.call(victim, self._sealed(swarm, thief, message), timeout_s=_PATIENCE_S)
        except (Unreachable, ValueError, OverflowError):
            return
        self.told.answered += b"Refusal" not in reply

    def _sealed(self, swarm: SimSwarm, thief: str, message: msgspec.Struct) -> bytes:
        if thief in swarm.nodes:
            endpoint = swarm.nodes[thief].endpoint
            return endpoint._seal("call", message, endpoint.members.certificate)
        node = next(iter(swarm.nodes.values()))
        return node.endpoint.seals.seal(
            swarm.world.peers[thief].identity,
            "call",
            run=node.run,
            term=1,
            sequence=1_000_000 + self.told.executions,
            body=msgspec.msgpack.encode(message),
        )

    def _payload(self, choices: Choices, message: msgspec.Struct) -> bytes:
        """Of the size that is right for a plain activation, or of another."""
        activation = 2 * 32 * 32 * 4
        sizes = (activation, activation + 2 * 32 * 4, 0, 1, 4, 4096, 32 * 4, activation // 2)
        size = choices.pick(sizes)
        return bytes(size) if choices.below(2) else b"\xff" * size

    def _look(self, swarm: SimSwarm) -> None:
        """Raises: Finding."""
        for name, error in swarm.world.failures:
            if not isinstance(error, RemoteError):
                raise Finding(f"seed {self._seed}: {name} failed: {error!r}") from error
        swarm.world.failures.clear()
        for name, node in swarm.nodes.items():
            if node.peer.failure.done():
                raise Finding(f"seed {self._seed}: {name} cannot go on: {node.peer.failure.exception()!r}")
            live = node.coordination.plan
            members = {peer.peer_id for peer in swarm.world.peers.values() if peer.name in NAMES}
            if live is not None and live.plan.coordinator not in members:
                raise Finding(f"seed {self._seed}: {name} obeys a stranger")

    async def _goes_on(self, swarm: SimSwarm) -> None:
        steps = len(swarm.steps)
        try:
            await swarm.until(lambda: len(swarm.steps) > steps + 2, timeout_s=_GOES_ON_S)
        except TimeoutError as error:
            raise Finding(f"seed {self._seed}: strangers have stopped the run at step {steps}") from error


async def _deaf(source: PeerID, request: bytes) -> bytes:
    raise RemoteError(source, "is not answered")


async def _blind(source: PeerID, meta: bytes, payload: object) -> None:
    raise RemoteError(source, "is not heard")


def _known(swarm: SimSwarm, rng: random.Random) -> Known:
    """What the members' own messages say now."""
    nodes = list(swarm.nodes.values())
    live = [n.coordination.plan for n in nodes]
    plans = [signed for signed in live if signed is not None]
    top = max(plans, key=lambda signed: signed.plan.height)
    newest = top.plan
    peers = [peer.peer_id for peer in swarm.world.peers.values()]
    steps = max(swarm.steps, default=0)
    near = [steps, steps + 1, steps - 1, max(0, steps - 2), steps + 2]
    envelopes = [signed.link for signed in plans] + list(_made_plans(swarm, top, peers, rng))
    replicas = [node.peer.replica for node in nodes if node.peer.replica]
    return {
        "run": [newest.run],
        "peer": peers,
        "coordinator": peers,
        "leader": [*peers, ""],
        "term": [newest.term, newest.term + 1],
        "sequence": [newest.sequence, newest.sequence + 1],
        "plan_sequence": [newest.sequence],
        "plan_digest": [signed.digest for signed in plans],
        "digest": [replica.state.digest() for replica in replicas if replica.state] or [""],
        "stage": [0, 1],
        "version": near,
        "step": near,
        "index": [0, 1, 2, 3],
        "era": [newest.era],
        "revision": [0],
        "stored_era": [-1, newest.era],
        "incarnation": [node.peer.services.life.incarnation for node in nodes],
        "plan": envelopes,
        "live": [*envelopes, b""],
        "accepted": [*envelopes, b""],
        "predecessor": [*envelopes, b""],
        "mandate": [b"", _mandate(swarm, peers, top)],
        "layer": ["embed", "layers.0", "layers.1", "head"],
        "indices": [b"\x0f", b"\x01", b"\x00"],
        "claimed": [b"\x0f", b"\x00"],
        "ready": [True],
        "pad": [b"", b"x" * 100],
        "finished": [False],
    }


def _mandate(swarm: SimSwarm, peers: Sequence[PeerID], newest: SignedPlan) -> bytes:
    plan = newest.plan
    mandate = Mandate(
        override_epoch=plan.override_epoch + 1, term=plan.term + 1, coordinator=peers[0], previous=newest.digest
    )
    return sign_mandate(swarm.world.identity("host"), mandate, run=plan.run)


def _made_plans(swarm: SimSwarm, newest: SignedPlan, peers: Sequence[PeerID], rng: random.Random) -> Iterator[bytes]:
    """Plans that thieves and strangers have signed, which often could be the next one. One has the votes of all: what
    passes every check must be possible to obey."""
    for name, voters in ((rng.choice(NAMES), NAMES), (rng.choice(NAMES), ()), ("stranger", ("stranger",))):
        identity: Identity = swarm.world.identity(name)
        choices = Choices(rng.randbytes(_BYTES_OF_ONE))
        base = newest.plan
        seen: Known = {
            "run": [base.run],
            "coordinator": [identity.peer_id],
            "override_epoch": [base.override_epoch],
            "term": [base.term, base.term + 1, base.term + 2],
            "sequence": [base.sequence + 1, base.sequence + 2],
            "era": [base.era, base.era, base.era + 1],
            "previous": [newest.digest],
            "peer": peers,
            "restore_version": [0],
        }
        try:
            raw = make_plan(choices, seen, layers=_LAYERS, peers=peers, stages=_LAYERS)
            signed = sign_plan(identity, msgspec.msgpack.decode(raw, type=Plan))
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
            continue
        body = vote_body(signed.plan.term, signed.digest)
        votes = [
            (base.electors.index(voter.peer_id), sign_statement(voter, "vote", run=base.run, body=body))
            for voter in map(swarm.world.identity, voters)
            if voter.peer_id in base.electors
        ]
        yield msgspec.structs.replace(signed, proof=PlanProof(signed.plan.term, tuple(votes))).link


def quiet() -> None:
    """One thread is quicker than two for matrices this small, and a refusal is a line of the log: thousands here."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
