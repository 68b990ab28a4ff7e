"""Lets one process take part in one run through libp2p, until the run is done or a stop is requested."""

import asyncio
import contextlib
import itertools
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from blake3 import blake3

from shoal.coordinator.ledger import StepRecord
from shoal.deploy.control.control_socket import ControlServer
from shoal.deploy.control.fresh_invite import PEERS_NAMED, FreshInvite
from shoal.deploy.control.host_verbs import HostVerbs
from shoal.deploy.control.invite_book import DEFAULT_SEATS, InviteBook
from shoal.deploy.dashboard.address import Address
from shoal.deploy.dashboard.contribution import ContributionMeter, MeteredCompute
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.doctor.knock import why_refused
from shoal.deploy.doctor.split_watch import SplitWatch
from shoal.deploy.manners.device import memory_claim, stand_back, untested
from shoal.deploy.manners.keeper import PAUSED, Keeper, looking_at
from shoal.deploy.manners.limits import Limits
from shoal.deploy.node.node import Node, NodeListeners, NodePorts, NodeRun
from shoal.deploy.node.renewal import take_kept
from shoal.deploy.record.report import (
    Committed,
    Invites,
    Joined,
    Left,
    Obeys,
    Phase,
    Ready,
    Reporter,
    Status,
    StepDone,
    Summary,
    Validated,
    write_report,
)
from shoal.deploy.run.run_text import find_corpus
from shoal.deploy.session.background import ending, in_background
from shoal.deploy.session.beside import serving
from shoal.deploy.session.heap import TrimsAfterSteps, freeze_heap, share_heap, trim_heap, trim_heap_forever
from shoal.deploy.session.network import SessionNetwork, open_network
from shoal.deploy.session.recorder import Recorder, recording, start_line
from shoal.deploy.session.standing_note import StandingNote
from shoal.deploy.session.stop import LEAVE_SOON_S, Stop
from shoal.deploy.ship.import_model import open_copy
from shoal.deploy.ship.scores import tell_scores
from shoal.deploy.state.places import announced, note_folder
from shoal.deploy.state.run_folder import RunFolder
from shoal.deploy.state.spec_record import FIND_S, Found, fetch_spec, seal_spec
from shoal.deploy.terminal.peer_output import PeerOutput
from shoal.deploy.terminal.plain import say_or_report
from shoal.deploy.terminal.progress import progress_bar
from shoal.peer.compute.cgroup import processors
from shoal.peer.compute.compute_device import ComputeDevice
from shoal.peer.data.corpus import Corpus
from shoal.peer.handoff.initial import InitialWeights
from shoal.peer.model.schedule import rate_of
from shoal.protocol.errors import InviteError, LocalError, RunNotFound, ShoalError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, InviteKey, worth_telling
from shoal.protocol.limits import ADDRESSES_MAX, PROTOCOL_VERSION
from shoal.protocol.live.compute import ThreadCompute
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.live.loop import LoopClock
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.ports import Compute
from shoal.protocol.spec import RunSpec, run_id

if TYPE_CHECKING:
    from shoal.deploy.dashboard.server import Dashboard

logger = logging.getLogger(__name__)

_ASKS_EVERY = 5
"""Seconds between status requests if only a parent process listens. All its peers ask, because any may die."""
_POLLS_MAX = 20
"""About the status requests per second if all N peers show the run: each asks every N // 20 s, or every second."""
_COPY = "the model is on this machine: nothing of it has to be downloaded"
_NO_COPY = "the model is not on this machine: this peer downloads its layers of it from other peers, once"
NOBODY_YET = "no other peer of the run is up yet: it goes on when enough peers are here (Ctrl-C ends the wait)"
_FIND_ANYBODY_S = 11.0
"""Seconds to look for the run while no address answers; after ten seconds the transport dials the addresses again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """This peer's own addresses, as multiaddrs without `/p2p/…`."""

    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    """The addresses to tell other peers. If there are none, this machine's addresses are detected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPaths:
    """The user's paths of the run's text and of the adapters' base model. The spec's paths are the host's."""

    data: str = ""
    tokenizer: str = ""
    base: Path | None = None
    """The base model's folder; None: look in the Hugging Face cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChoice:
    """The records of the run that this peer keeps (`record/`)."""

    keeps: bool = False
    """True: write a record into the run's folder."""
    wandb: str = ""
    """The project at Weights & Biases to which the record is also sent; empty: it is sent to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one process's part in a run."""

    name: str
    folder: Path
    """The folder that this process has locked; it holds identity, plans and snapshots."""
    ways: Ways
    threads: int
    device: torch.device
    reports: bool
    """True: report to a parent process as JSON; false: to a person."""
    limits: Limits
    reread_limits: Callable[[], Limits]
    """Returns the limits as they are set now. Raises: LocalError: the settings cannot be read."""
    dashboard: Address | None = None
    text: TextPaths = TextPaths()
    first_said: tuple[str, ...] = ()
    """Sentences for a person, printed when the network is up and before the view opens."""
    records: RecordChoice = RecordChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run(NodeRun):
    record: bytes
    key: InviteKey | None
    """The key in invites that this peer passes on; None: the run is open to anyone."""
    invites: InviteBook | None = None
    """All invites given out by the run's host; None on other peers."""

    def invite(self, addresses: Sequence[str]) -> Invite:
        return Invite(PROTOCOL_VERSION, self.id, self.owner, tuple(addresses[:ADDRESSES_MAX]), self.key)


def _seats(spec: RunSpec) -> int:
    """Return how many machines may join by the host's first invite: `swarm.min_peers` or more, so the run can begin."""
    return max(DEFAULT_SEATS, spec.swarm.min_peers)


async def host_run(spec: RunSpec, corpus: Corpus, initial: InitialWeights | None, options: Options) -> None:
    """Start or resume the run `spec`, which has the digest of `corpus`, and take part in it.

    Args: initial: the initial weights; None: drawn from the seed. Raises: ShoalError: its sentence is for the user.
    """
    share_heap()  # before there are threads
    stop = Stop()
    identity = Identity.load_or_create(options.folder / "identity.key")
    invites = None
    if not spec.swarm.open:
        invites = InviteBook(identity, run_id(spec, identity.peer_id), LiveDisk(options.folder))
    run = _Run(
        spec=spec,
        owner=identity.peer_id,
        record=seal_spec(identity, spec),
        corpus=corpus,
        initial=initial,
        key=invites.default(seats=_seats(spec)) if invites is not None else None,
        invites=invites,
    )
    async with _network(identity, run.invite(()), options) as network:
        newer = await _take_part(network, run, options, stop)
    await _go_over(newer, run, identity, options, stop)


async def join_run(invite: Invite, options: Options) -> None:
    """Find the run and take part in it. Raises: ShoalError: its sentence is for the user."""
    share_heap()  # before there are threads
    if invite.key is not None and not invite.key.delegation.may_train:
        raise InviteError("this invite only lets you watch (`shoal status INVITE`): ask the host for one to train with")
    stop = Stop()
    identity = Identity.load_or_create(options.folder / "identity.key")
    with contextlib.ExitStack() as until_found:
        bar = until_found.enter_context(progress_bar("", hides=options.reports))

        def tell(phase: str) -> None:
            bar.begin(phase)
            if options.reports:
                write_report(Phase(name=phase))

        tell("starting the network")
        async with _network(identity, invite, options) as network:
            tell("looking for the run")
            patience_s = FIND_S if await network.transport.connected() else _FIND_ANYBODY_S
            if reason := await why_refused(network.transport, identity):
                raise InviteError(f"the run {invite.run} does not let this machine in: {reason}")
            kept = RunFolder(options.folder, invite.run)
            known = None if kept.is_finished() else kept.record()
            try:
                spec, record = await fetch_spec(network.directory, invite, timeout_s=patience_s, known=known)
            except RunNotFound:
                if known is None:
                    raise
                # All peers may have been down: the first one to return finds nobody.
                spec, record = known
                options = replace(options, first_said=(*options.first_said, NOBODY_YET))
            tell("reading the text")
            text, initial = options.text, None
            reading = partial(find_corpus, spec, data=text.data, tokenizer=text.tokenizer, on_progress=bar)
            corpus = await in_background(reading)  # a large text takes minutes; Ctrl-C does not wait
            if spec.adapter is not None:
                initial = await in_background(partial(open_copy, spec, text.base))
            if spec.adapter is not None and spec.initial.digests:
                options = replace(options, first_said=(*options.first_said, _NO_COPY if initial is None else _COPY))
            until_found.close()
            network.gate.members.is_open = spec.swarm.open
            run = _Run(spec=spec, owner=invite.owner, record=record, corpus=corpus, initial=initial, key=invite.key)
            newer = await _take_part(network, run, options, stop)
    await _go_over(newer, run, identity, options, stop, invited=invite.addresses)


async def _go_over(
    newer: Found | None, run: _Run, identity: Identity, options: Options, stop: Stop, *, invited: Sequence[str] = ()
) -> None:
    """Take part under the spec's revision `newer`, then under each still later revision. None: return at once."""
    options = replace(options, first_said=())
    while newer is not None and not stop.asked.is_set():
        stop.takes_part = False
        run = replace(run, spec=newer[0], record=newer[1])
        async with _network(identity, run.invite(invited), options) as network:
            newer = await _take_part(network, run, options, stop)


def _network(
    identity: Identity, invite: Invite, options: Options
) -> contextlib.AbstractAsyncContextManager[SessionNetwork]:
    members = invite.members_for(identity.peer_id)
    take_kept(members, LiveDisk(options.folder), identity.peer_id)
    return open_network(
        identity,
        members,
        folder=options.folder,
        listen=options.ways.listen,
        announce=options.ways.announce,
        rates=options.limits.rates,
        invited=invite.addresses,
    )


async def _take_part(network: SessionNetwork, run: _Run, options: Options, stop: Stop) -> Found | None:
    """Take part until the run is done or a stop is requested.

    Returns: the newer revision of the spec, if one ended this call early; else None.
    """
    note_folder(options.folder)
    RunFolder(options.folder, network.transport.run).keep_record(run.spec, run.record)
    title, facts = f"shoal {run.spec.name}", RunFacts.of(run.spec)
    reports = Reporter()
    async with contextlib.AsyncExitStack() as stack:
        dashboard = await stack.enter_async_context(
            serving(options.dashboard, facts, title=title, steers=True, folder=options.folder)
        )
        reports.polls = lambda: not options.reports or (dashboard is not None and dashboard.is_watched)
        say_or_report(options.first_said, reports=options.reports)
        if options.reports:
            reports.listeners.append(write_report)
        else:
            output = PeerOutput(facts, title=title)
            stack.callback(output.close)
            reports.listeners.append(output.say)
        if dashboard is not None:
            reports.note(dashboard.announcement)  # not on the page: it contains the page's key
            reports.listeners.append(dashboard.take)
        peer = network.identity.peer_id
        start = start_line(run.spec, run=network.transport.run, peer=peer, peer_name=options.name)
        folder = options.folder / network.transport.run if options.records.keeps else None
        recorder = Recorder(start, run.spec, reports, folder=folder, wandb=options.records.wandb)
        await stack.enter_async_context(recording(recorder, dashboard))
        return await _train(network, run, options, stop, reports, dashboard, recorder)


def _make_compute(options: Options) -> MeteredCompute:
    # On a shared CPU, CPU time says what the machine can give; on a GPU it does not measure the work.
    is_cpu, share = options.device.type == "cpu", options.limits.compute_share
    # A probe ends before a control group's quota throttles it; scale its time to the rate that the quota sustains.
    threads, quota = options.threads, processors()
    throttled = max(1.0, share * threads / quota)

    def prepare_thread() -> None:
        stand_back(options.limits)  # first: torch's threads inherit this thread's priority
        torch.set_num_threads(threads)

    compute = ThreadCompute(
        initializer=prepare_thread,
        probe_clock=(lambda: throttled * time.thread_time()) if is_cpu else time.perf_counter,
        share=share,
        spent_s=(lambda: time.process_time() / threads) if is_cpu and share < 1.0 else None,
    )
    return MeteredCompute(compute, used_s=(lambda: compute.used_s) if share < 1.0 else None)


def _make_node(
    network: SessionNetwork, run: _Run, options: Options, compute: Compute, reports: Reporter, device: ComputeDevice
) -> Node:
    ports = NodePorts(
        transport=network.transport,
        directory=network.directory,
        compute=compute,
        clock=LoopClock(),
        disk=LiveDisk(options.folder),
        rng=random.Random(),  # for jitter and plan seeds; reproducible draws use the spec's seed
        device=device,
        memory_bytes=memory_claim(options.limits, options.device),
        # The same for all peers of this machine in one run, and different in every run.
        machine=blake3(f"{run.id}/{uuid.getnode():012x}".encode()).hexdigest(length=8),
        run_blocking=asyncio.to_thread,
        run_search=in_background,
    )

    def on_plan(signed: SignedPlan) -> None:
        network.transport.want(signed.plan.members)
        reports.say(_obeys(signed.plan))

    hears = NodeListeners(
        on_step=lambda step: reports.say(_step_done(step, run.spec, network.identity.peer_id)),
        on_commit=lambda report: reports.say(Committed(report=report)),
        on_validation=lambda report: reports.say(Validated(report=report)),
        on_plan=on_plan,
        on_state=TrimsAfterSteps().stepped,
        say=reports.note,
    )
    return Node(run, ports, identity=network.identity, gate=network.gate, name=options.name, hears=hears)


async def _train(
    network: SessionNetwork,
    run: _Run,
    options: Options,
    stop: Stop,
    reports: Reporter,
    dashboard: "Dashboard | None",
    recorder: Recorder,
) -> Found | None:
    say = reports.note
    compute = _make_compute(options)
    device = await asyncio.to_thread(ComputeDevice.of, run.spec, options.device)
    if warning := untested(options.device):
        say(f"warning: {warning}")
    node = _make_node(network, run, options, compute, reports, device)
    told = worth_telling(network.transport.addresses())
    for place in options.ways.announce:
        if f"{place}/p2p/{node.peer_id}" not in told:
            say(f"--announce {place} is not in the invite: others would not reach this machine there")
    invite = run.invite(told).encode()
    control = ControlServer(options.folder)
    keeper = Keeper(
        options.limits,
        node.peer.pausing,
        say=say,
        look=looking_at(options.device),
        reread=options.reread_limits,
        apply_upload=network.transport.limit_upload,
        kept=options.folder / PAUSED,
    )
    keeper.install(control)
    if dashboard is not None:
        dashboard.steering.hand(pause=keeper.pause, resume=keeper.resume)
    control.on("leave", stop.leave)
    verbs = HostVerbs(node, network.transport, run.invites, invite=run.invite(()), seats=_seats(run.spec))
    verbs.install(control)
    try:
        await control.try_start()
        hosts = run.owner == node.peer_id
        # For commands on this machine local addresses come first: the public one may not work from inside the router.
        here = [f"{where}/p2p/{node.peer_id}" for where in network.transport.daemon.local_addresses]
        for_commands = run.invite(tuple(dict.fromkeys((*here, *told)))).encode()
        with announced(for_commands, options.folder, name=options.name, run_name=run.spec.name, hosts=hosts):
            reports.say(Phase(name="measuring this machine"))
            await node.start()
            verbs.apply()
            freeze_heap()
            trim_heap()  # reading the text and the probe have left free pages
            stop.takes_part = True
            keeper.start()
            logger.info("this machine gives %.1f GFLOP/s", node.peer.advert().flop_per_s / 1e9)
            if hosts:
                reports.say(Ready(peer=node.peer_id, run=node.run, invite=invite))
            reports.say(Joined(peer=node.peer_id, name=options.name, invite=invite))
            if limits := options.limits.in_words:
                say(f"limits that you have set: {', '.join(limits)}")
            if run.corpus is None:
                say("this machine does not have the run's text: it will work on any stage but the first")
            meter = ContributionMeter(node, compute, LoopClock(), name=options.name, limits=keeper.report)
            noting = StandingNote(node, options.folder)
            reports.listeners.append(noting.take)
            async with ending(
                asyncio.create_task(_tell_invites(verbs, node.peer_id, reports), name="tell fresh invites"),
                asyncio.create_task(tell_scores(node.run, say), name="tell what shoal eval finds"),
            ):
                finished, newer = await _until_done(node, network.transport, reports, stop, meter, recorder, keeper)
            noting.end(finished=finished)
        if newer is not None:
            say(f"the run's owner has continued it: it goes on to step {newer[0].training.steps}")
            return newer
        reports.say(Left(peer=node.peer_id, state_dir=str(options.folder / node.run), finished=finished))
        if recorder.folder is not None:
            reports.say(Summary(lines=await asyncio.to_thread(recorder.summary, node.peer.unsaved)))
        if node.peer.unsaved:
            raise LocalError(node.peer.unsaved)
        return None
    finally:
        await keeper.close()
        await node.close()
        compute.close()
        await control.close()


async def _until_done(
    node: Node,
    transport: LiveTransport,
    reports: Reporter,
    stop: Stop,
    meter: ContributionMeter,
    recorder: Recorder,
    keeper: Keeper,
) -> tuple[bool, Found | None]:
    """Wait until the run is done, a stop is requested, or the spec has a newer revision.

    Returns: (True if the run is done, the newer revision or None).
    """
    split = SplitWatch(node.endpoint, transport, own_status=node.status, say=reports.note)
    plan = partial(_plan_of, node)
    recording = asyncio.create_task(recorder.run(node.endpoint, node.past, plan), name="record the run")
    done = asyncio.create_task(node.wait_done(), name="wait for the end")
    asked = asyncio.create_task(stop.asked.wait(), name="wait for a signal")
    async with ending(
        asyncio.create_task(_watch(node, reports, meter, stop), name="watch the swarm"),
        asyncio.create_task(split.run(), name="look for another swarm"),
        asyncio.create_task(trim_heap_forever(), name="trim the heap"),
        recording,
        done,
        asked,
    ):
        await asyncio.wait({done, asked}, return_when=asyncio.FIRST_COMPLETED)
        is_done = done.done()
        newer = done.result() if is_done else None
        if newer is not None:
            await node.leave(within_s=LEAVE_SOON_S)
        elif not is_done:
            what = "leaving: finishing work in flight"
            reports.note(f"{what}, {stop.within_s:.0f} s at most (Ctrl-C again quits at once)")
            await keeper.close()  # a pause by the owner's hours would keep the peer from finishing its step
            await node.leave(within_s=stop.within_s)
        finished = is_done and newer is None
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        await recorder.finish(node.endpoint, node.past, plan(), finished=finished)
        return finished, newer


async def _tell_invites(verbs: HostVerbs, me: PeerID, reports: Reporter) -> None:
    """Report a new invite when other peers can be named in it: the first invite names only this machine."""
    fresh = FreshInvite(me)
    while True:
        await asyncio.sleep(2.0)
        if fresh.is_due(await verbs.others(), time.monotonic()):
            try:
                invite, named = await verbs.invite(PEERS_NAMED)
            except LocalError as error:
                logger.info("no fresh invite: %s", error)
                continue
            fresh.told(named, time.monotonic())
            reports.say(Invites(peer=me, invite=invite, peers=len(named)))


def _plan_of(node: Node) -> Plan | None:
    signed = node.coordination.plan
    return signed.plan if signed is not None else None


async def _watch(node: Node, reports: Reporter, meter: ContributionMeter, stop: Stop) -> None:
    fetched, waits_for = False, ""
    for turn in itertools.count():
        await asyncio.sleep(1.0)
        if node.coordination.plan is None and (now := _before_the_plan(node)) != waits_for:
            waits_for = now
            reports.say(Phase(name=now))
        if (fetch := node.peer.fetch) is not None:
            part = 1.0 - fetch.left_bytes / fetch.total_bytes if fetch.total_bytes else 0.0
            reports.say(Phase(name=f"fetching {fetch.what}", part=part, left_s=fetch.left_s))
        elif fetched:
            reports.say(Phase(name="catching up"))
        fetched = fetch is not None
        reports.say(meter.measure())
        plan = node.coordination.plan
        every = max(1, len(plan.plan.members) // _POLLS_MAX) if plan is not None and reports.polls() else _ASKS_EVERY
        if plan is not None and (node.is_coordinator or turn % every == 0):
            try:
                status = await node.status()
                if stop.asked.is_set():  # while we leave, a standstill is no news to the owner
                    status = msgspec.structs.replace(status, stands_s=0.0, waits_for="", risks=())
                reports.say(Status(status=status))
            except ShoalError as error:
                logger.debug("no status: %s", error)  # between two coordinators nobody answers


def _before_the_plan(node: Node) -> str:
    """Return why there is no plan yet: this peer is refused, or what the run waits for, as far as this peer knows."""
    if node.coordination.turned_away:
        return f"not let in: {node.coordination.turned_away}"
    return node.coordination.said or f"waiting for peers: the run begins with {node.spec.swarm.min_peers}"


def _step_done(record: StepRecord, spec: RunSpec, coordinator: PeerID) -> StepDone:
    fields = {name: getattr(record, name) for name in StepDone.__struct_fields__ if hasattr(record, name)}
    fields |= {"coordinator": coordinator, "learning_rate": rate_of(spec, record.step)}
    return msgspec.convert(fields, StepDone)


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
