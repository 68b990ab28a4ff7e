"""Does a stranger take anything of a run, or stop it? Real peers, a real stranger; run by `make soak-attack`.

Six peers train on this machine, in peace and under attack in turn. The attacker is a stranger who has everything that
can be learnt without an invite's key (addresses, peer IDs, the run's id and spec), and who speaks on the wire itself:
libp2p, frames and envelopes; every other attack is that of a member who has been excluded, with its certificate. All
attacks at once, or with `--only NAME` one alone. One of the six members lies as well while the attack lasts.

Exits with 1 unless the run kept 0.8 of its steps/s (0.9 with `--insiders 0`), no peer's memory or open files grew by
more than 5 %, no process ended, and nobody obeyed a plan that names a stranger. What each attack got back is printed in
any case.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
from blake3 import blake3
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from peer_processes import SPEC, PeerProcess, start_peer
from shoal.deploy.control.control_socket import SOCKET_NAME, ask
from shoal.protocol import messages as m
from shoal.protocol.endpoint import _MESSAGES
from shoal.protocol.envelope import Envelope, seal
from shoal.protocol.frames import FrameAssembler, FrameType, encode_frame
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, parse_invite, split_address
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.live.about import ABOUT_NAME
from shoal.protocol.live.daemon import Daemon
from shoal.protocol.live.handshake import NONCE_BYTES
from shoal.protocol.plan import Member, Plan, Stage, sign_plan

STEPS_KEPT_MIN = 0.9
STEPS_KEPT_BESIDE_INSIDERS_MIN = 0.8
GROWTH_MAX = 1.05
READY_S = 180.0
PATIENCE_S = 5.0
WARM_UP_S = 30.0
SAMPLE_S = 2.0
PEERS = 6
STRANGERS = 3
LAYERS, STAGES, DIM, CONTEXT, BATCH = 3, 3, 64, 64, 4
HELD_STREAMS_MAX = 64
"""Half-open streams that the stranger keeps up at once."""
INSIDER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "lib")!r})
import insider
from shoal.deploy.cli import app
app(prog_name="shoal")
"""
KEPT = ("Ready", "Joined", "Obeys", "Committed", "Summary")


# --- the swarm ---


class Swarm:
    """Six processes with folders of their own. Args: insiders: so many of them lie while the file `lies` is there."""

    def __init__(self, folder: Path, insiders: int) -> None:
        self.folder, self.insiders = folder, insiders
        self.lies = folder / "lies"
        os.environ["LIES_WHILE"] = str(self.lies)
        self.processes: list[PeerProcess] = []
        self.seen: dict[str, list[dict[str, Any]]] = {}
        """Name -> the events of that peer that are kept."""
        self.obeyed: list[dict[str, Any]] = []
        self._committed: dict[int, int] = {}
        (folder / "run.toml").write_text(SPEC.format(name="attacked", layers=LAYERS, stages=STAGES, peers=PEERS))

    def start(self, name: str, *words: str, lies: bool = False) -> None:
        program = ("-c", INSIDER) if lies else ("-m", "shoal.deploy.cli")
        self.processes.append(start_peer(self.folder, name, *words, "--verbose", "--limit", "nice=0", program=program))
        self.seen[name] = []

    def up(self) -> Invite:
        """Start all; wait until they have trained a little. Returns: the invite, of which the stranger gets a part."""
        self.start("host", "host", str(self.folder / "run.toml"))
        self.wait(lambda: any(event["event"] == "Ready" for event in self.seen["host"]))
        text = next(event["invite"] for event in self.seen["host"] if event["event"] == "Ready")
        for number in range(1, PEERS):
            self.start(f"guest-{number}", "join", text, lies=number >= PEERS - self.insiders)
        self.wait(lambda: self.steps() >= 3)
        return parse_invite(text)

    def revoked_certificate(self, member: Identity) -> bytes:
        """Of an invite that the host gave out and has revoked."""
        (control,) = (self.folder / "host").rglob(SOCKET_NAME)
        made = ask(control.parent, "invite-new")
        certificate = parse_invite(made["invite"]).certificate_of(member.peer_id)
        ask(control.parent, "invite-revoke", name=made["name"])
        return certificate

    def addresses(self) -> list[str]:
        """Where everybody listens, as a port scan would find it; and the peer ID that dialling tells."""
        joined = [event for seen in self.seen.values() for event in seen if event["event"] in ("Joined", "Ready")]
        return sorted({address for event in joined for address in parse_invite(event["invite"]).addresses})

    def look(self) -> None:
        for process in self.processes:
            fresh = [event for event in process.fresh() if event["event"] in KEPT]
            self.seen[process.name] += fresh
            for event in fresh:
                if event["event"] == "Committed":
                    stage, step = event["report"]["stage"], event["report"]["step"]
                    self._committed[stage] = max(self._committed.get(stage, 0), step + 1)
                elif event["event"] == "Obeys":
                    self.obeyed.append(event)

    def steps(self) -> int:
        """Committed by every stage."""
        self.look()
        return min(self._committed.values()) if len(self._committed) == STAGES else 0

    @property
    def coordinators(self) -> frozenset[str]:
        """Who has coordinated so far."""
        peers = {
            event["peer"]: name for name, seen in self.seen.items() for event in seen if event["event"] == "Joined"
        }
        return frozenset(peers.get(event["coordinator"], "") for event in self.obeyed)

    def ended(self) -> list[str]:
        return [process.name for process in self.processes if process.has_ended]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + READY_S
        while not condition():
            self.look()
            if time.monotonic() > deadline_s or self.ended():
                raise SystemExit(f"the swarm does not begin: {self.processes[-1].log.read_text()[-2000:]}")
            time.sleep(0.1)

    def weigh(self) -> dict[str, tuple[float, int]]:
        """Name -> (resident MB, open files) of each peer and of its network daemon."""
        found = {}
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(process.popen.pid)
                found[process.name] = (parent.memory_info().rss / 1e6, parent.num_fds())
                for child in parent.children(recursive=True):
                    if "p2pd" in child.name():
                        found[f"{process.name}/net"] = (child.memory_info().rss / 1e6, child.num_fds())
        return found

    def down(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.popen.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a stretch of time was like."""

    steps_per_s: float
    megabytes: dict[str, float]
    """Mean over its last half."""
    files: dict[str, int]
    """At most."""
    coordinators: frozenset[str]
    """Who had coordinated until its end."""


async def watch(swarm: Swarm, seconds: float) -> Window:
    begun_s, before = time.monotonic(), swarm.steps()
    samples: list[dict[str, tuple[float, int]]] = []
    while time.monotonic() < begun_s + seconds:
        await asyncio.sleep(SAMPLE_S)
        samples.append(swarm.weigh())
        if swarm.ended():
            break
    late = samples[len(samples) // 2 :]
    names: set[str] = set.intersection(*(set(sample) for sample in late)) if late else set()
    return Window(
        steps_per_s=(swarm.steps() - before) / (time.monotonic() - begun_s),
        megabytes={name: statistics.mean(sample[name][0] for sample in late) for name in names},
        files={name: max(sample[name][1] for sample in late) for name in names},
        coordinators=swarm.coordinators,
    )


def together(windows: Sequence[Window]) -> Window:
    """Return the last window with the mean speed of all."""
    return replace(windows[-1], steps_per_s=statistics.mean(window.steps_per_s for window in windows))


# --- the stranger ---


class Stranger:
    """A key on libp2p: without a certificate, or with that of an invite which has been revoked since. `told` counts
    what came back."""

    def __init__(self, identity: Identity, folder: Path, run: str, certificate: bytes = b"") -> None:
        self.identity = identity
        self.run = run
        self.certificate = certificate
        self.told: Counter[str] = Counter()
        self.daemon = Daemon(
            identity, folder, listen=("/ip4/127.0.0.1/tcp/0",), announce=(), relays=(), use_relay=False
        )
        self._numbers = itertools.count(int(time.time() * 1e6))
        self._held: list[Any] = []
        # As `LiveTransport` names them; libp2p tells these names to everybody who connects.
        prefix = f"/shoal/{PROTOCOL_VERSION}/{blake3(run.encode()).hexdigest(length=8)}"
        self.call_name, self.frames_name = f"{prefix}/call", f"{prefix}/frames"

    @property
    def me(self) -> PeerID:
        return self.identity.peer_id

    async def start(self, addresses: Sequence[str]) -> None:
        await self.daemon.start()
        self.p2p: Any = await self.daemon.p2p()
        await self.p2p.add_binary_stream_handler(self.frames_name, self._accept)
        for address in addresses:
            where, peer = split_address(address)
            with contextlib.suppress(Exception):
                await self.p2p._client.connect(HivemindPeerID.from_base58(peer), [Multiaddr(where)])

    async def call(self, attack: str, peer: PeerID, message: msgspec.Struct) -> msgspec.Struct | None:
        body = msgspec.msgpack.encode(message)
        return await self.call_raw(attack, peer, self.sealed("call", body))

    def sealed(self, domain: Any, body: bytes) -> bytes:
        number = next(self._numbers)
        shown = self.certificate
        return seal(self.identity, domain, run=self.run, term=1, sequence=number, body=body, certificate=shown)

    async def call_raw(self, attack: str, peer: PeerID, request: bytes) -> msgspec.Struct | None:
        """Returns: the answer, None if there was none, or a refusal."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                target = HivemindPeerID.from_base58(peer)
                raw = await self.p2p._client.call_unary_handler(target, self.call_name, request)
            answer: msgspec.Struct = _MESSAGES.decode(msgspec.msgpack.decode(raw, type=Envelope).body)
        except Exception:
            self.told[f"{attack}: no answer"] += 1
            return None
        self.told[f"{attack}: {type(answer).__name__}"] += 1
        return None if isinstance(answer, m.Refusal) else answer

    def hello(self, to: PeerID) -> bytes:
        body = msgspec.msgpack.encode((PROTOCOL_VERSION, to, [], os.urandom(NONCE_BYTES)))
        shown = self.certificate
        meta = seal(self.identity, "hello", run=self.run, term=0, sequence=0, body=body, certificate=shown)
        return b"".join(encode_frame(FrameType.HELLO, 0, meta, b""))

    async def stream(self, peer: PeerID) -> tuple[Any, Any]:
        target = HivemindPeerID.from_base58(peer)
        async with asyncio.timeout(PATIENCE_S):
            _, reader, writer = await self.p2p.call_binary_stream_handler(target, self.frames_name)
        return reader, writer

    async def frames(self, attack: str, peer: PeerID, frames: Sequence[tuple[msgspec.Struct, bytes]]) -> None:
        """Say hello and send these; what comes back is counted."""
        try:
            reader, writer = await self.stream(peer)
            writer.write(self.hello(peer))
            for sequence, (meta, payload) in enumerate(frames, start=1):
                for piece in encode_frame(FrameType.DATA, sequence, msgspec.msgpack.encode(meta), payload):
                    writer.write(bytes(piece))
            async with asyncio.timeout(PATIENCE_S):
                await writer.drain()
                got = await reader.read(1 << 16)
            self.told[f"{attack}: {'greeted' if got else 'hung up on'}"] += 1
            writer.close()
        except Exception:
            self.told[f"{attack}: no stream"] += 1

    async def hold(self, attack: str, peer: PeerID, first: bytes) -> None:
        """A slow loris: open a stream, begin to say something, and stay."""
        if len(self._held) >= HELD_STREAMS_MAX:
            self._held.pop(0).close()
        try:
            _, writer = await self.stream(peer)
            writer.write(first)
            self._held.append(writer)
            self.told[f"{attack}: opened"] += 1
        except Exception:
            self.told[f"{attack}: no stream"] += 1

    async def _accept(self, info: Any, reader: Any, writer: Any) -> None:
        """Whoever sends us frames, such as gradients, is greeted; they are counted."""
        peer = PeerID(info.peer_id.to_base58())
        assembler = FrameAssembler(peer)
        with contextlib.suppress(Exception):
            writer.write(self.hello(peer))
            while True:
                room = assembler.buffer()
                room[:] = await reader.readexactly(len(room))
                frame = assembler.advance(len(room))
                if frame is not None and frame.type is FrameType.DATA:
                    kind = msgspec.msgpack.decode(frame.meta).get("type", "?")
                    self.told[f"received: {kind} frames"] += 1
                    self.told["received: bytes"] += frame.wire_bytes


@dataclass(slots=True, kw_only=True)
class Known:
    """What the attacks are made of."""

    strangers: list[Stranger]
    victims: list[PeerID]
    owner: PeerID
    run: str
    live: bytes = b""
    """As some peer has told it, if any did."""
    spun: int = 0

    turn: int = 0

    @property
    def stranger(self) -> Stranger:
        """Who attacks now: the first has never had an invite, the second is a member who has been put out."""
        return self.strangers[self.turn % 2]

    def number(self) -> int:
        self.spun += 1
        return self.spun

    def plan(self, *, term: int, stages: int = STAGES) -> bytes:
        """Ours, for ourselves."""
        me = self.stranger.identity
        cuts = [LAYERS * index // stages for index in range(stages + 1)]
        members = [self.strangers[index % len(self.strangers)].me for index in range(stages)]
        layout = tuple(
            Stage(first, last, (Member(members[index] if index < STRANGERS else self.victims[index], 1.0, 1.0),))
            for index, (first, last) in enumerate(itertools.pairwise(cuts))
        )
        plan = Plan(
            run=self.run,
            term=term,
            sequence=self.number() + 10,
            previous="0" * 32,
            coordinator=me.peer_id,
            stages=layout,
            era=1,
        )
        return _link(sign_plan(me, plan))


def _link(signed: Any) -> bytes:
    """As a live plan travels."""
    link: bytes = getattr(signed, "link", signed.envelope)
    return link


# --- the attacks, by the rows of what was once shown ---


async def own_plan(known: Known, victim: PeerID) -> None:
    """1: a plan of our own, which nobody voted for."""
    await known.stranger.call("own_plan", victim, m.PlanLive(plan=known.plan(term=1000 + known.number())))


async def last_term(known: Known, victim: PeerID) -> None:
    """2: the highest term that there is."""
    await known.stranger.call("last_term", victim, m.PlanLive(plan=known.plan(term=2**64 - 1)))


async def end_of_run(known: Known, victim: PeerID) -> None:
    """3: the last step is done, says a heartbeat."""
    report = m.ValidationReport(step=1_000_000, loss=0.1, microbatches=8)
    ends = tuple((victim, bytes(64)) for victim in known.victims)
    beat = _heartbeat(known.stranger, version=1_000_000, end=bytes(64), ends=ends, validations=(report,), stage=0)
    await known.stranger.call("end_of_run", victim, beat)


def _heartbeat(stranger: Stranger, **more: Any) -> m.Heartbeat:
    advert = m.Advert(
        name="stranger",
        device="cpu",
        flop_per_s=more.pop("flop_per_s", 1e9),
        memory_bytes=1 << 40,
        upload_bytes_per_s=1e12,
        download_bytes_per_s=1e12,
        addresses=(),
        has_data=True,
    )
    fields = {"plan_sequence": 0, "plan_digest": "", "stage": None, "version": 0, "synced": True, "draining": False}
    return m.Heartbeat(advert=advert, **(fields | more))


async def questions(known: Known, victim: PeerID) -> None:
    """4: which run, what spec, whose plan, which state?"""
    stranger = known.stranger
    target = HivemindPeerID.from_base58(victim)
    try:
        async with asyncio.timeout(PATIENCE_S):
            about = await stranger.p2p._client.call_unary_handler(target, ABOUT_NAME, b"{}")
        stranger.told[f"questions: about {'names the run' if known.run.encode() in about else 'names no run'}"] += 1
    except Exception:
        stranger.told["questions: about is not told"] += 1
    standing = await stranger.call("questions", victim, m.StandingRequest())
    if isinstance(standing, m.Standing):
        known.live = standing.live
    await stranger.call("questions", victim, m.StatusRequest())
    await stranger.call("questions", victim, m.HistoryRequest(commits_from=(0, 0), validations_from=(0, 0)))
    offer = await stranger.call("questions", victim, m.StateRequest(layers=("layers.0",)))
    if isinstance(offer, m.StateOffer):
        chunk = m.StateChunkRequest(version=offer.version, layer="layers.0", tensor=0, start=0, stop=1000)
        await stranger.call("questions", victim, chunk)


async def directory(known: Known, victim: PeerID) -> None:
    """4, 14: read the spec and the adverts from the directory, and leave rubbish and a head of the chain there."""
    stranger = known.stranger
    stub = super(DHTProtocol, DHTProtocol).get_stub(stranger.p2p, HivemindPeerID.from_base58(victim))
    me = dht_pb2.NodeInfo(node_id=DHTID.generate().to_bytes())
    for kind in ("spec", "peers", "plan"):
        key = DHTID.generate(source=f"shoal/{known.run}/{kind}").to_bytes()
        try:
            async with asyncio.timeout(PATIENCE_S):
                found = await stub.rpc_find(dht_pb2.FindRequest(keys=[key], peer=me))
            told = any(len(result.value) > 2 for result in found.results)
            stranger.told[f"directory: {kind} {'read' if told else 'empty'}"] += 1
            for result in found.results:
                stranger.told["directory: neighbours named"] += len(result.nearest_node_ids)
        except Exception:
            stranger.told[f"directory: {kind} refused"] += 1
        head = m.PlanHead(term=2000, sequence=2000, digest="0" * 32, coordinator=stranger.me, addresses=())
        value = msgspec.msgpack.encode(stranger.sealed("record", msgspec.msgpack.encode(head)))
        subkey = msgspec.msgpack.encode(stranger.me)
        request = dht_pb2.StoreRequest(
            keys=[key],
            subkeys=[subkey],
            values=[value],
            expiration_time=[time.time() + 600],
            in_cache=[False],
            peer=me,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                stored = await stub.rpc_store(request)
            stranger.told[f"directory: {kind} {'stored' if any(stored.store_ok) else 'not stored'}"] += 1
        except Exception:
            stranger.told[f"directory: storing {kind} refused"] += 1


async def other_stages(known: Known, victim: PeerID) -> None:
    """5: a plan with another number of stages than the run has."""
    await known.stranger.call("other_stages", victim, m.PlanLive(plan=known.plan(term=500, stages=2)))


async def false_mate(known: Known, victim: PeerID) -> None:
    """6, 14: ready, open, and a mate; in three names and always begun anew."""
    for stage in range(STAGES):
        stranger = known.strangers[stage % STRANGERS]
        hello = m.PresenceUpdate(
            incarnation=int(time.time() * 1e6) + known.number(),
            plan_sequence=1,
            stage=stage,
            version=known.number() % 1000,
            ready=True,
            is_open=True,
            draining=bool(stage % 2),
        )
        await stranger.call("false_mate", victim, hello)
        progress = m.Progress(
            incarnation=hello.incarnation,
            count=1,
            stage=stage,
            step=known.number(),
            indices=b"\xff",
            leader=stranger.me,
            claimed=b"\xff",
            loss_sum=1.0,
            staleness_sum=0,
        )
        await stranger.call("false_mate", victim, progress)


async def activations(known: Known, victim: PeerID) -> None:
    """7: work that nobody gave us, for gradients."""
    payload = b"\x00" * (BATCH * CONTEXT * (DIM * 2 + 4))
    frames = [
        (m.Activation(stage=stage, incarnation=0, step=known.number(), index=0), payload)
        for stage in range(STAGES)
        for _ in range(2)
    ]
    gradient = m.Gradient(stage=0, step=known.number(), index=0, loss=0.0, waited_s=0.0, commit_s=0.0)
    await known.stranger.frames("activations", victim, [*frames, (gradient, payload)])


async def digests(known: Known, victim: PeerID) -> None:
    """9: a thousand versions' digests, each of a kilobyte."""
    for _ in range(8):
        message = m.Digest(stage=known.spun % STAGES, version=10_000 + known.number(), digest="d" * 1000)
        await known.stranger.call("digests", victim, message)


async def pins(known: Known, victim: PeerID) -> None:
    """10: pin the version that is there, again and again."""
    for key in ("embed", "layers.0", "layers.1", "layers.2", "head"):
        await known.stranger.call("pins", victim, m.StateRequest(layers=(key,)))
    await known.stranger.call("pins", victim, m.ReducedRequest(stage=0, step=known.number()))


async def adverts(known: Known, victim: PeerID) -> None:
    """8, 11: newcomers who are faster than anything and hold the highest version."""
    for stranger in known.strangers:
        await stranger.call("adverts", victim, _heartbeat(stranger, flop_per_s=1e15, version=100_000, stage=0))


async def promises(known: Known, victim: PeerID) -> None:
    """A term that is asked for, a plan that is offered, a role that is handed over, a reset, a good-bye."""
    stranger, live = known.stranger, known.live or known.plan(term=2)
    term = 3000 + known.number()
    await stranger.call("promises", victim, m.TermRequest(term=term, live=live, permit=b"x" * 64))
    offer = m.PlanOffer(term=term, plan=known.plan(term=term), predecessor=live)
    await stranger.call("promises", victim, offer)
    await stranger.call("promises", victim, m.TransferLeadership(plan=live, roster=()))
    await stranger.call("promises", victim, m.Reset(mandate=b"\xc0", live=live, version=0, roster=()))
    await stranger.call("promises", victim, m.Leave())
    await stranger.call("promises", victim, m.Halt(at_once=True))
    await stranger.call("promises", victim, m.Repair(step=known.number(), indices=b"\xff"))


async def replays(known: Known, victim: PeerID) -> None:
    """The same call again, and another's."""
    request = known.stranger.sealed("call", msgspec.msgpack.encode(m.Ping(pad=b"x" * 1000)))
    for _ in range(3):
        await known.stranger.call_raw("replays", victim, request)
    await known.strangers[1].call_raw("replays", victim, request)
    await known.stranger.call_raw("replays", victim, b"\x91" * 500 + os.urandom(500))
    await known.stranger.call_raw("replays", victim, os.urandom(300_000))


async def slow_loris(known: Known, victim: PeerID) -> None:
    """A stream that opens and says half a hello, or announces the largest frame there is and never sends it."""
    hello = known.stranger.hello(victim)
    await known.stranger.hold("slow_loris", victim, hello[: known.number() % len(hello)])
    head = next(iter(encode_frame(FrameType.DATA, 1, b"\x80", bytes(200 << 20)))) if known.spun % 8 == 0 else b""
    await known.stranger.hold("slow_loris", victim, hello + bytes(head))


async def strangers_frames(known: Known, victim: PeerID) -> None:
    """Frames after no hello, or another's, or of no kind."""
    for first in (b"", known.strangers[1].hello(victim), os.urandom(100)):
        await known.stranger.hold("strangers_frames", victim, first + os.urandom(1000))


ATTACKS: dict[str, Callable[[Known, PeerID], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        own_plan,
        last_term,
        end_of_run,
        questions,
        directory,
        other_stages,
        false_mate,
        activations,
        digests,
        pins,
        adverts,
        promises,
        replays,
        slow_loris,
        strangers_frames,
    )
}
PAUSE_S = 2.0
"""Between two rounds of one attack over all victims. The stranger shares this machine's cores with them: what its own
work costs them is no success of the attack."""


async def go_on(attack: Callable[[Known, PeerID], Awaitable[None]], known: Known, until_s: float) -> None:
    while time.monotonic() < until_s:
        for victim in known.victims:
            if time.monotonic() >= until_s:
                return
            known.turn += 1
            try:
                await attack(known, victim)
            except Exception as error:  # an attacker that fails attacks nobody: it must be seen
                known.stranger.told[f"{attack.__name__}: the attack itself failed: {error!r}"[:150]] += 1
        await asyncio.sleep(PAUSE_S)


# --- the verdict ---


def weight_in_peace(name: str, swarm: Swarm, peace: Window) -> float:
    """Megabytes that `name` should have. A coordinator loads the planner at its first search, perhaps terms later,
    so a peer that has ever coordinated is compared with the heaviest of those that had coordinated in peace."""
    heaviest = [peace.megabytes[other] for other in peace.coordinators if other in peace.megabytes]
    return max([peace.megabytes[name], *(heaviest if name in swarm.coordinators else ())])


def flaws(swarm: Swarm, peace: Window, war: Window, strangers: Sequence[Stranger]) -> list[str]:
    found = [f"{name} has ended" for name in swarm.ended()]
    theirs = {stranger.me for stranger in strangers}
    found += [f"a stranger's plan is obeyed: {event}" for event in swarm.obeyed if event["coordinator"] in theirs]
    found += [f"era {event['era']} was begun" for event in swarm.obeyed if event.get("era")][:1]
    kept = war.steps_per_s / peace.steps_per_s if peace.steps_per_s else 0.0
    if kept < (STEPS_KEPT_BESIDE_INSIDERS_MIN if swarm.insiders else STEPS_KEPT_MIN):
        found.append(f"only {kept:.2f} of the steps/s are left")
    for name in (process.name for process in swarm.processes):
        parts = [part for part in (name, f"{name}/net") if part in peace.megabytes and part in war.megabytes]
        before, after = (sum(window.files[part] for part in parts) for window in (peace, war))
        weighed = sum(war.megabytes[part] for part in parts)
        memory = weighed / max(1.0, sum(weight_in_peace(part, swarm, peace) for part in parts))
        if memory > GROWTH_MAX:
            found.append(f"{name} and its network daemon have grown to {memory:.2f} of their memory, {weighed:.0f} MB")
        if after > GROWTH_MAX * before:
            found.append(f"{name} and its network daemon have {after} open files, {before} in peace")
    return found


async def soak(arguments: argparse.Namespace, folder: Path) -> int:
    swarm = Swarm(folder, arguments.insiders)
    strangers: list[Stranger] = []
    try:
        invite = await asyncio.to_thread(swarm.up)
        addresses = swarm.addresses()
        keys = [Identity.generate() for _ in range(STRANGERS)]
        shown = [b"", await asyncio.to_thread(swarm.revoked_certificate, keys[1]), b""]
        strangers += [
            Stranger(key, folder / f"stranger-{n}", invite.run, certificate)
            for n, (key, certificate) in enumerate(zip(keys, shown, strict=True))
        ]
        for stranger in strangers:
            (folder / f"stranger-{strangers.index(stranger)}").mkdir()
            await stranger.start(addresses)
        victims = sorted({PeerID(split_address(address)[1]) for address in addresses})
        print(f"{len(victims)} peers of run {invite.run} are up", flush=True)
        await asyncio.sleep(arguments.warm_up)
        known = Known(strangers=strangers, victims=victims, owner=invite.owner, run=invite.run)
        attacks = [ATTACKS[name] for name in arguments.only or ATTACKS]
        calm: list[Window] = []
        attacked: list[Window] = []
        for _ in range(arguments.rounds):
            calm.append(await watch(swarm, arguments.peace / arguments.rounds))
            until_s = time.monotonic() + arguments.seconds / arguments.rounds
            tasks = [asyncio.create_task(go_on(attack, known, until_s)) for attack in attacks]
            swarm.lies.touch()
            attacked.append(await watch(swarm, arguments.seconds / arguments.rounds))
            swarm.lies.unlink()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            print(f"peace {calm[-1].steps_per_s:.3f}, attack {attacked[-1].steps_per_s:.3f} steps/s", flush=True)
            if swarm.ended():
                break
        # What a peer weighs in peace is taken before the first attack, what it weighs then after the last, when the
        # strangers have hung up: what they hold open meanwhile is bounded, and is theirs.
        for stranger in strangers:
            await stranger.daemon.close()
        await asyncio.sleep(WARM_UP_S)
        after = await watch(swarm, WARM_UP_S)
        peace = replace(calm[0], steps_per_s=together(calm).steps_per_s)
        war = replace(after, steps_per_s=together(attacked).steps_per_s)
        told: Counter[str] = sum((stranger.told for stranger in strangers), Counter())
        for line, count in sorted(told.items()):
            print(f"    {line:60} {count:7}")
        print(f"attack: {war.steps_per_s:.3f} steps/s, {war.steps_per_s / max(peace.steps_per_s, 1e-9):.2f} of peace")
        for name in sorted(peace.megabytes.keys() & war.megabytes.keys()):
            grown = f"{peace.megabytes[name]:6.0f} -> {war.megabytes[name]:6.0f} MB"
            print(f"    {name:14} {grown}, {peace.files[name]} -> {war.files[name]} files")
        found = flaws(swarm, peace, war, strangers)
        for flaw in found:
            print(f"FLAW: {flaw}")
        return int(bool(found))
    finally:
        for stranger in strangers:
            with contextlib.suppress(Exception):
                await stranger.daemon.close()
        swarm.down()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="under attack")
    parser.add_argument("--peace", type=float, default=300.0, help="seconds between attacks")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of peace and attack in turn: the machine may have other work"
    )
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S)
    parser.add_argument("--insiders", type=int, default=1, help="members that lie under attack (tests/lib/insider.py)")
    parser.add_argument("--only", action="append", choices=[*ATTACKS], help="these attacks alone")
    parser.add_argument("--folder", type=Path, default=None, help="keep what the peers have written there")
    arguments = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each stream that a peer has hung up on
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(soak(arguments, folder))


if __name__ == "__main__":
    sys.exit(main())
