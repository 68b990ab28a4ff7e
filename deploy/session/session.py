"""Takes one process through one run on libp2p: network up, node up, until the run is done or somebody says stop."""

import asyncio
import contextlib
import enum
import itertools
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from blake3 import blake3

from shoal.coordinator.ledger import StepRecord
from shoal.deploy.control.control_socket import ControlServer
from shoal.deploy.control.fresh_invite import PEERS_NAMED, FreshInvite
from shoal.deploy.control.host_verbs import HostVerbs, InviteVerb
from shoal.deploy.control.invite_book import DEFAULT_SEATS, InviteBook
from shoal.deploy.dashboard.address import Address
from shoal.deploy.dashboard.beside import Showing, serving
from shoal.deploy.dashboard.contribution import ContributionMeter, MeteredCompute
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.doctor.split_watch import SplitWatch
from shoal.deploy.manners.device import memory_claim, stand_back, untested
from shoal.deploy.manners.keeper import PAUSED, Keeper, looking_at
from shoal.deploy.manners.limits import Limits
from shoal.deploy.node import Node, NodeListeners, NodePorts, NodeRun
from shoal.deploy.record.recorder import Keeping, Recorder, recording
from shoal.deploy.report import (
    Committed,
    Invites,
    Joined,
    Left,
    Note,
    Obeys,
    Phase,
    Ready,
    Status,
    StepDone,
    Summary,
    Validated,
)
from shoal.deploy.run.renewal import take_kept
from shoal.deploy.run.run_text import find_corpus
from shoal.deploy.run.spec_record import Found, fetch_spec, seal_spec
from shoal.deploy.session.background import in_background
from shoal.deploy.session.heap import freeze_heap, share_heap, trim_heap, trim_heap_forever
from shoal.deploy.session.knock import why_refused
from shoal.deploy.session.network import Network, open_network
from shoal.deploy.session.output import JsonOutput, Output, tell_before_the_run
from shoal.deploy.session.stop import LEAVE_SOON_S, Stop
from shoal.deploy.session.telling_scores import tell_scores
from shoal.deploy.session.trimming import TrimsAfterSteps
from shoal.deploy.ship.import_model import open_copy
from shoal.deploy.state.places import announced, note_folder
from shoal.deploy.state.run_folder import RunFolder
from shoal.deploy.state.standing_note import StandingNote
from shoal.deploy.terminal.joining import FetchWatch, JoiningView
from shoal.deploy.terminal.peer_output import PeerOutput
from shoal.peer.cgroup import processors
from shoal.peer.compute_device import ComputeDevice
from shoal.peer.data.corpus import Corpus
from shoal.peer.initial import InitialWeights
from shoal.peer.model.schedule import rate_of
from shoal.protocol.errors import InviteError, LocalError, RunNotFound, ShoalError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, InviteKey, worth_telling
from shoal.protocol.limits import ADDRESSES_MAX, PROTOCOL_VERSION
from shoal.protocol.live.compute import ThreadCompute
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.live.loop import LoopClock
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.ports import Compute
from shoal.protocol.spec import RunSpec, run_id

logger = logging.getLogger(__name__)

_STATUS_S = 1.0
_INVITE_S = 2.0
_ASKS_EVERY = 5
"""A child that does not coordinate asks for the status at every fifth of these: the coordinator may be none of its
parent's, and any child may die."""
_POLLS_MAX = 20
"""How often all watchers together ask the coordinator in a second: in a larger swarm each asks more rarely."""
NOBODY_YET = "nobody else of the run is up yet: it goes on when enough of them are here (Ctrl-C ends the wait)"
_FIND_RUN_S = 20.0
_FIND_ANYBODY_S = 11.0
"""How long to look once no address has answered: the transport tries them all again after ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The ways to this peer, as multiaddrs without `/p2p/…`."""

    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    """The addresses to tell the others, in place of those that this machine knows of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPaths:
    """Where this machine has the run's text, and the model that its adapters stand beside, if not where the spec
    says."""

    data: str = ""
    tokenizer: str = ""
    """The path of the run's tokenizer.json."""
    base: Path | None = None
    """The folder of the model; None: it may be in the Hugging Face cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChoice:
    """Whether the peer keeps a record of the run (`record/`)."""

    keeps: bool = False
    """Whether the run's folder gets one."""
    wandb: str = ""
    """The project at Weights & Biases that gets the record too; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChoice:
    """What this machine's owner gives, and when."""

    at_start: Limits
    reread: Callable[[], Limits]
    """The limits as they are set now. Raises: LocalError: the settings cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one process takes part."""

    name: str
    folder: Path
    """The folder that this process has claimed, with the identity, plans and snapshots."""
    ways: Ways
    threads: int
    """How many threads torch has."""
    device: torch.device
    reports: bool
    """Speak to a parent process, not to a person."""
    limits: LimitChoice
    dashboard: Address | None = None
    """Where to show the run as a page."""
    text: TextPaths = TextPaths()
    initial: InitialWeights | None = None
    """What the run begins with, if not with its seed. Its host has it, and who has a copy of the model that adapters
    stand beside."""
    first_said: tuple[str, ...] = ()
    """Sentences for a person, once the network is up and before there is a view."""
    records: RecordChoice = RecordChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What this process takes part in."""

    spec: RunSpec
    owner: PeerID
    record: bytes
    """The spec as the owner signed it."""
    corpus: Corpus | None
    """The run's text; None: this machine does not have it."""
    key: InviteKey | None
    """The key of the invite that this peer hands on; None: the run is open to anyone."""
    invites: InviteBook | None = None
    """The invites that the run's host has given out; None on other peers."""

    @property
    def id(self) -> str:
        return run_id(self.spec, self.owner)

    def key_to_give(self, members: Members) -> InviteKey | None:
        """The key by which others may come now. Raises: LocalError: there is none."""
        if self.invites is None:
            if self.key is not None and 0 < self.key.delegation.expires_s < time.time():
                raise LocalError(
                    "the invite by which this peer came has expired: `shoal invite` on the host prints one"
                )
            return self.key
        present = members.planned or frozenset()
        return self.invites.default(seats=_seats(self.spec), taken=lambda key: members.seats_taken(key, present))

    def invite(self, addresses: Sequence[str]) -> Invite:
        return Invite(PROTOCOL_VERSION, self.id, self.owner, tuple(addresses[:ADDRESSES_MAX]), self.key)


def _seats(spec: RunSpec) -> int:
    """How many machines may come by the invite that the host prints: enough for the run to begin."""
    return max(DEFAULT_SEATS, spec.swarm.min_peers)


async def host_run(spec: RunSpec, corpus: Corpus, options: Options) -> None:
    """Start the run `spec` (its data digest filled in), or go on with it, and take part in it.

    Raises: ShoalError: one line for the command line.
    """
    share_heap()  # before there are threads
    stop = Stop()
    identity = Identity.load_or_create(options.folder / "identity.key")
    invites = (
        None if spec.swarm.open else InviteBook(identity, run_id(spec, identity.peer_id), LiveDisk(options.folder))
    )
    run = _Run(
        spec=spec,
        owner=identity.peer_id,
        record=seal_spec(identity, spec),
        corpus=corpus,
        key=invites.default(seats=_seats(spec)) if invites is not None else None,
        invites=invites,
    )
    async with _network(identity, run.invite(()), options) as network:
        newer = await _take_part(network, run, options, stop)
    await _go_over(newer, run, identity, options, stop)


async def join_run(invite: Invite, options: Options) -> None:
    """Find the run and take part in it.

    Raises: ShoalError: one line for the command line.
    """
    share_heap()  # before there are threads
    if invite.key is not None and not invite.key.delegation.may_train:
        raise InviteError(
            "this invite only lets you look on (`shoal status INVITE`): ask the host for one to train with"
        )
    stop = Stop()
    identity = Identity.load_or_create(options.folder / "identity.key")
    with JoiningView(reports=options.reports) as view:
        view.tell("starting the network")
        async with _network(identity, invite, options) as network:
            view.tell("looking for the run")
            patience_s = _FIND_RUN_S if await network.transport.connected() else _FIND_ANYBODY_S
            if reason := await why_refused(network.transport, identity):
                raise InviteError(f"the run {invite.run} does not let this machine in: {reason}")
            known = _known(options.folder, invite)
            try:
                spec, record = await fetch_spec(network.directory, invite, timeout_s=patience_s, known=known)
            except RunNotFound:
                if known is None:
                    raise
                # All of us may have been off, and somebody has to be the first.
                spec, record = known
                options = replace(options, first_said=(*options.first_said, NOBODY_YET))
            view.tell("reading the text")
            corpus = await in_background(  # Ctrl-C does not wait for it: a large text takes minutes
                partial(
                    find_corpus,
                    spec,
                    data=options.text.data,
                    tokenizer=options.text.tokenizer,
                    on_progress=view.reached,
                )
            )
            if spec.adapter is not None:
                initial = await in_background(partial(open_copy, spec, options.text.base))
                options = replace(options, initial=initial, first_said=(*options.first_said, *_of_base(spec, initial)))
            view.close()
            network.gate.members.is_open = spec.swarm.open
            run = _Run(spec=spec, owner=invite.owner, record=record, corpus=corpus, key=invite.key)
            newer = await _take_part(network, run, options, stop)
    await _go_over(newer, run, identity, options, stop, invited=invite.addresses)


def _of_base(spec: RunSpec, copy: InitialWeights | None) -> tuple[str, ...]:
    """What the person at this machine may want to know of where the base comes from."""
    if not spec.initial.digests:
        return ()
    if copy is not None:
        return ("the model is on this machine: nothing of it has to be fetched",)
    return ("the model is not on this machine: the layers of it that this peer works on come from others, once",)


def _known(folder: Path, invite: Invite) -> Found | None:
    """What this peer knows of the run from an earlier time; nothing of a run that was over by then."""
    kept = RunFolder(folder, invite.run)
    return None if kept.is_finished() else kept.record()


async def _go_over(
    newer: Found | None, run: _Run, identity: Identity, options: Options, stop: Stop, *, invited: Sequence[str] = ()
) -> None:
    """Take part by the newer revision of the spec, and whenever there is another, by that; as after a restart."""
    options = replace(options, first_said=())
    while newer is not None and not stop.asked.is_set():
        stop.takes_part = False
        run = replace(run, spec=newer[0], record=newer[1])
        async with _network(identity, run.invite(invited), options) as network:
            newer = await _take_part(network, run, options, stop)


def _network(identity: Identity, invite: Invite, options: Options) -> contextlib.AbstractAsyncContextManager[Network]:
    members = invite.members_for(identity.peer_id)
    take_kept(members, LiveDisk(options.folder), identity.peer_id)
    return open_network(
        identity,
        members,
        folder=options.folder,
        listen=options.ways.listen,
        announce=options.ways.announce,
        rates=options.limits.at_start.rates,
        invited=invite.addresses,
    )


async def _take_part(network: Network, run: _Run, options: Options, stop: Stop) -> Found | None:
    """Take part until the run is done or somebody says stop.

    Returns: a newer revision of the run's spec, if that is why it ended.
    """
    note_folder(options.folder)
    RunFolder(options.folder, network.transport.run).keep_record(run.spec, run.record)
    title, facts = f"shoal {run.spec.name}", RunFacts.of(run.spec)
    async with serving(options.dashboard, facts, title=title, steers=True, folder=options.folder) as showing:
        tell_before_the_run(options.first_said, reports=options.reports)
        output: Output = JsonOutput() if options.reports else PeerOutput(facts, title=title)
        if showing.announcement:
            output.say(Note(text=showing.announcement))  # not on the page: there is a key in it
        async with recording(_keeping(network, run, options), run.spec, showing, output) as (recorder, recorded):
            return await _train(network, run, options, stop, recorded, showing, recorder)


def _keeping(network: Network, run: _Run, options: Options) -> Keeping:
    name = network.transport.run
    return Keeping(
        run=name,
        peer=network.identity.peer_id,
        peer_name=options.name,
        folder=options.folder / name if options.records.keeps else None,
        wandb=options.records.wandb,
    )


def _make_compute(options: Options) -> MeteredCompute:
    # On a CPU shared with others the processor's own seconds say what it could give, and had to; a GPU's are not the
    # thread's.
    is_cpu, share = options.device.type == "cpu", options.limits.at_start.compute_share
    # A probe is over before the quota of a control group bites: it is timed as long as the quota takes to earn it.
    threads, quota = options.threads, processors()
    throttled = max(1.0, share * threads / quota)
    compute = ThreadCompute(
        initializer=lambda: _prepare_thread(options),
        probe_clock=(lambda: throttled * time.thread_time()) if is_cpu else time.perf_counter,
        share=share,
        spent_s=(lambda: time.process_time() / threads) if is_cpu and share < 1.0 else None,
    )
    return MeteredCompute(compute, used_s=(lambda: compute.used_s) if share < 1.0 else None)


def _machine(run: str) -> str:
    """A name that all peers of this machine give it, in this run and in no other."""
    return blake3(f"{run}/{uuid.getnode():012x}".encode()).hexdigest(length=8)


def _make_node(
    network: Network, run: _Run, options: Options, compute: Compute, output: Output, device: ComputeDevice
) -> Node:
    ports = NodePorts(
        transport=network.transport,
        directory=network.directory,
        compute=compute,
        clock=LoopClock(),
        disk=LiveDisk(options.folder),
        rng=random.Random(),  # only jitter and plan seeds: what must be reproducible is drawn from the spec's seed
        device=device,
        memory_bytes=memory_claim(options.limits.at_start, options.device),
        machine=_machine(run.id),
        run_blocking=asyncio.to_thread,
        run_search=in_background,
    )

    def on_plan(signed: SignedPlan) -> None:
        network.transport.want(signed.plan.members)
        output.say(_obeys(signed.plan))

    hears = NodeListeners(
        on_step=lambda step: output.say(_step_done(step, run.spec, network.identity.peer_id)),
        on_commit=lambda report: output.say(Committed(report=report)),
        on_validation=lambda report: output.say(Validated(report=report)),
        on_plan=on_plan,
        on_state=TrimsAfterSteps().stepped,
        say=lambda text: output.say(Note(text=text)),
    )
    return Node(
        NodeRun(spec=run.spec, owner=run.owner, record=run.record, corpus=run.corpus, initial=options.initial),
        ports,
        identity=network.identity,
        gate=network.gate,
        name=options.name,
        hears=hears,
    )


async def _train(
    network: Network,
    run: _Run,
    options: Options,
    stop: Stop,
    output: Output,
    showing: Showing,
    recorder: Recorder | None,
) -> Found | None:
    compute = _make_compute(options)
    device = await asyncio.to_thread(ComputeDevice.of, run.spec, options.device)
    if warning := untested(options.device):
        output.say(Note(text=f"warning: {warning}"))
    node = _make_node(network, run, options, compute, output, device)
    told = worth_telling(network.transport.addresses())
    for place in options.ways.announce:
        if f"{place}/p2p/{node.peer_id}" not in told:
            output.say(Note(text=f"--announce {place} is not in the invite: others would not reach this machine there"))
    invite = run.invite(told).encode()
    control = ControlServer(options.folder)
    keeper = Keeper(
        options.limits.at_start,
        node.peer.pausing,
        say=lambda text: output.say(Note(text=text)),
        look=looking_at(options.device),
        reread=options.limits.reread,
        apply_upload=network.transport.limit_upload,
        kept=options.folder / PAUSED,
    )
    keeper.install(control)
    showing.steer(pause=keeper.pause, resume=keeper.resume)
    control.on("leave", stop.leave)
    inviting = InviteVerb(network.transport, run.invite(()), lambda: run.key_to_give(network.gate.members))
    control.on("invite", inviting.answer)

    async def members() -> list[tuple[PeerID, str]]:
        return [(peer.peer, peer.name) for peer in (await node.status()).peers]

    host = HostVerbs(
        run.invites,
        inviting,
        exclude=node.coordination.exclude,
        excluded=lambda: node.coordination.excluded,
        invite_of=network.gate.members.invite_of,
        members=members,
        guests=network.gate.members.guests,
    )
    host.install(control)
    try:
        await control.try_start()
        here = _for_commands(network, run, told)
        with announced(here, options.folder, name=options.name, run_name=run.spec.name):
            output.say(Phase(name="measuring this machine"))
            await node.start()
            host.apply()
            freeze_heap()
            trim_heap()  # of what reading the text and the probe needed
            stop.takes_part = True
            keeper.start()
            logger.info("this machine gives %.1f GFLOP/s", node.peer.advert().flop_per_s / 1e9)
            if run.owner == node.peer_id:
                output.say(Ready(peer=node.peer_id, run=node.run, invite=invite))
            output.say(Joined(peer=node.peer_id, name=options.name, invite=invite))
            if limits := options.limits.at_start.in_words:
                output.say(Note(text=f"limits that you have set: {', '.join(limits)}"))
            if run.corpus is None:
                output.say(
                    Note(text="this machine does not have the run's text: it will work on any stage but the first")
                )
            meter = ContributionMeter(node, compute, LoopClock(), name=options.name, limits=keeper.report)
            noting = StandingNote.begun(node, options.folder)
            telling = [
                asyncio.create_task(_tell_invites(inviting, node.peer_id, output), name="tell fresh invites"),
                asyncio.create_task(
                    tell_scores(node.run, lambda text: output.say(Note(text=text))), name="tell what shoal eval finds"
                ),
            ]
            try:
                ended = await _until_done(node, network.transport, noting.beside(output), stop, meter, recorder, keeper)
            finally:
                for task in telling:
                    task.cancel()
                await asyncio.gather(*telling, return_exceptions=True)
            noting.end(finished=ended is Ended.DONE)
        if not isinstance(ended, Ended):
            output.say(Note(text=f"the run's owner has continued it: it goes on to step {ended[0].training.steps}"))
            return ended
        finished = ended is Ended.DONE
        output.say(Left(peer=node.peer_id, state_dir=str(options.folder / node.run), finished=finished))
        if recorder is not None and recorder.is_kept:
            output.say(Summary(lines=await asyncio.to_thread(recorder.summary, node.peer.unsaved)))
        if node.peer.unsaved:
            raise LocalError(node.peer.unsaved)
        return None
    finally:
        await keeper.close()
        await node.close()
        compute.close()
        output.close()
        await control.close()


def _for_commands(network: Network, run: _Run, told: Sequence[str]) -> str:
    """An invite for this machine alone: a router, or an address that changed, may keep it from the way others take."""
    here = (f"{where}/p2p/{network.identity.peer_id}" for where in network.transport.daemon.local_addresses)
    return run.invite(tuple(dict.fromkeys((*here, *told)))).encode()


class Ended(enum.Enum):
    """Why a node takes part no more."""

    DONE = enum.auto()
    TOLD = enum.auto()


async def _until_done(
    node: Node,
    transport: LiveTransport,
    output: Output,
    stop: Stop,
    meter: ContributionMeter,
    recorder: Recorder | None,
    keeper: Keeper,
) -> Ended | Found:
    """Wait until the run is done, or we are told to stop, or there is a newer revision of its spec."""
    watching = asyncio.create_task(_watch(node, output, meter, stop), name="watch the swarm")
    split = SplitWatch.of(
        node.endpoint, transport, own_status=node.status, say=lambda text: output.say(Note(text=text))
    )
    looking = asyncio.create_task(split.run(), name="look for another swarm")
    recording = asyncio.create_task(_record(node, recorder), name="record the run")
    trimming = asyncio.create_task(trim_heap_forever(), name="trim the heap")
    done = asyncio.create_task(node.wait_done(), name="wait for the end")
    asked = asyncio.create_task(stop.asked.wait(), name="wait for a signal")
    try:
        await asyncio.wait({done, asked}, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            newer = done.result()
            if newer is not None:
                await node.leave(within_s=LEAVE_SOON_S)
            await _end_record(node, recorder, recording, finished=newer is None)
            return newer or Ended.DONE
        output.say(
            Note(text=f"leaving: what is in flight ends, {stop.within_s:.0f} s at most (Ctrl-C again quits at once)")
        )
        await keeper.close()  # whom its owner's hours pause would not get to the end of its step
        await node.leave(within_s=stop.within_s)
        await _end_record(node, recorder, recording, finished=False)
        return Ended.TOLD
    finally:
        for task in (watching, looking, recording, trimming, done, asked):
            task.cancel()
        await asyncio.gather(watching, looking, recording, trimming, done, asked, return_exceptions=True)


async def _tell_invites(inviting: InviteVerb, me: PeerID, output: Output) -> None:
    """The invite of the start names this machine alone: tell one that names others as soon as they are here."""
    fresh = FreshInvite(me)
    while True:
        await asyncio.sleep(_INVITE_S)
        if fresh.is_due(await inviting.others(), time.monotonic()):
            try:
                invite, named = await inviting.invite(PEERS_NAMED)
            except LocalError as error:
                logger.info("no fresh invite: %s", error)
                continue
            fresh.told(named, time.monotonic())
            output.say(Invites(peer=me, invite=invite, peers=len(named)))


async def _record(node: Node, recorder: Recorder | None) -> None:
    if recorder is not None:
        await recorder.run(node.endpoint, node.past, lambda: _plan_of(node))


async def _end_record(node: Node, recorder: Recorder | None, recording: asyncio.Task[None], *, finished: bool) -> None:
    recording.cancel()
    if recorder is not None:
        await asyncio.gather(recording, return_exceptions=True)
        await recorder.finish(node.endpoint, node.past, _plan_of(node), finished=finished)


def _plan_of(node: Node) -> Plan | None:
    signed = node.coordination.plan
    return signed.plan if signed is not None else None


async def _watch(node: Node, output: Output, meter: ContributionMeter, stop: Stop) -> None:
    fetch, waits_for = FetchWatch(), ""
    for turn in itertools.count():
        await asyncio.sleep(_STATUS_S)
        if node.coordination.plan is None and (now := _before_the_plan(node)) != waits_for:
            waits_for = now
            output.say(Phase(name=now))
        replica = node.peer.replica
        phase = fetch.look(replica.joining.progress if replica is not None else None, time.monotonic())
        if phase is not None:
            output.say(phase)
        output.say(meter.measure())
        plan = node.coordination.plan
        every = max(1, len(plan.plan.members) // _POLLS_MAX) if plan is not None and output.polls else _ASKS_EVERY
        if plan is not None and (node.is_coordinator or turn % every == 0):
            try:
                status = await node.status()
                if stop.asked.is_set():  # that the others wait for a peer that leaves is no news to its owner
                    status = msgspec.structs.replace(status, stands_s=0.0, waits_for="", risks=())
                output.say(Status(status=status))
            except ShoalError as error:
                logger.debug("no status: %s", error)  # between two coordinators there is none


def _before_the_plan(node: Node) -> str:
    """What the run waits for; only the host, who makes the first plan, knows how many are here."""
    if node.coordination.turned_away:
        return f"not let in: {node.coordination.turned_away}"
    return node.coordination.said or f"waiting for peers: the run begins with {node.spec.swarm.min_peers}"


def _step_done(record: StepRecord, spec: RunSpec, coordinator: PeerID) -> StepDone:
    fields = {name: getattr(record, name) for name in StepDone.__struct_fields__ if hasattr(record, name)}
    rate = rate_of(spec, record.step)
    return msgspec.convert(fields | {"coordinator": coordinator, "learning_rate": rate}, StepDone)


def _obeys(plan: Plan) -> Obeys:
    return Obeys(
        term=plan.term,
        sequence=plan.sequence,
        coordinator=plan.coordinator,
        reason=plan.reason,
        peers=len(plan.members),
        stages=len(plan.stages),
        era=plan.era,
        restored=plan.restore_version,
    )


def _prepare_thread(options: Options) -> None:
    stand_back(options.limits.at_start)  # first: torch's own threads begin as this one is
    torch.set_num_threads(options.threads)
