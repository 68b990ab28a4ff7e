"""One process's part in one run on libp2p: network up, node up, until the run is done or somebody says stop."""

import asyncio
import contextlib
import itertools
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.coordinator.ledger import StepRecord
from shoal.deploy.background import in_background
from shoal.deploy.control_socket import ControlServer
from shoal.deploy.dashboard.address import Address
from shoal.deploy.dashboard.beside import serving
from shoal.deploy.dashboard.contribution import ContributionMeter, MeteredCompute
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.doctor.split import SplitWatch
from shoal.deploy.heap import trim_heap, trim_heap_forever
from shoal.deploy.invite_verb import InviteVerb
from shoal.deploy.joining_view import FetchWatch, JoiningView
from shoal.deploy.known_peers import KnownPeers, keep, whom_to_try
from shoal.deploy.manners.device import memory_claim, stand_back
from shoal.deploy.manners.keeper import Keeper, looking_at
from shoal.deploy.manners.limits import Limits
from shoal.deploy.node import Node
from shoal.deploy.output import Output, make_output
from shoal.deploy.places import announced
from shoal.deploy.report import Committed, Joined, Left, Note, Obeys, Phase, Ready, Status, StepDone, Validated
from shoal.deploy.run_record import fetch_spec, seal_spec
from shoal.deploy.run_text import find_corpus
from shoal.peer.data.corpus import Corpus
from shoal.peer.initial import InitialWeights
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, make_invite, worth_telling
from shoal.protocol.live.clock import LoopClock
from shoal.protocol.live.compute import ThreadCompute
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.live.throttle import Throttle
from shoal.protocol.live.transport import LiveTransport, dialable
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec, run_id

logger = logging.getLogger(__name__)

_STATUS_S = 1.0
_ASKS_EVERY = 5
"""A child that does not coordinate asks for the status at every fifth of these: the coordinator may be none of its
parent's, and any child may die."""
_POLLS_MAX = 20
"""Of all who watch together, a second: in a larger swarm each asks the coordinator more rarely."""
_FIND_RUN_S = 20.0
_FIND_ANYBODY_S = 11.0
"""Once no address has answered: the transport tries them all again after ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one process takes part."""

    name: str
    folder: Path
    """Claimed by this process; holds the identity, plans and snapshots."""
    listen: tuple[str, ...]
    """Multiaddrs without `/p2p/…`."""
    threads: int
    """Of torch; 0: its own choice."""
    device: torch.device
    reports: bool
    """Speak to a parent process, not to a person."""
    limits: Limits = Limits()  # noqa: RUF009  frozen
    """What this machine's owner gives, and when."""
    dashboard: Address | None = None
    """Where to show the run as a page."""
    data: str = ""
    """Where the run's text is on this machine, if not where the spec says."""
    tokenizer: str = ""
    """Where the run's tokenizer.json is on this machine."""
    initial: InitialWeights | None = None
    """What the run begins with, if not with its seed; only its host has it."""
    announce: tuple[str, ...] = ()
    """Multiaddrs without `/p2p/…` to tell the others, in place of those that this machine knows of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    identity: Identity
    transport: LiveTransport
    directory: LiveDirectory


class Stop:
    """Ctrl-C asks once for a drain; SIGTERM leaves without waiting for work in flight. A second signal is at once, and
    so is one that comes before we take part: the main task is cancelled.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.drains = True
        self.takes_part = False
        main = asyncio.current_task()
        assert main is not None
        self._main = main
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._ask, number)

    def _ask(self, number: signal.Signals) -> None:
        if self.asked.is_set() or not self.takes_part:
            self._main.cancel()
        self.drains = number == signal.SIGINT
        self.asked.set()

    async def leave(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The control socket's `leave`: like Ctrl-C, or like SIGTERM with `drains` false."""
        self._ask(signal.SIGINT if arguments.get("drains", True) else signal.SIGTERM)
        return {}


async def host_run(spec: RunSpec, corpus: Corpus, options: Options) -> None:
    """Start the run `spec` (its data digest filled in) and take part in it.

    Raises: ShoalError: one line for the command line.
    """
    stop = Stop()
    identity = Identity.load_or_create(options.folder / "identity.key")
    run = run_id(spec, identity.peer_id)
    async with _network(identity, run, options, invited=()) as network:
        record = seal_spec(identity, spec)
        await _take_part(network, spec, identity.peer_id, corpus, record, options, stop)


async def join_run(invite: Invite, options: Options) -> None:
    """Find the run and take part in it.

    Raises: ShoalError: one line for the command line.
    """
    stop = Stop()
    identity = Identity.load_or_create(options.folder / "identity.key")
    with JoiningView(reports=options.reports) as view:
        view.tell("starting the network")
        async with _network(identity, invite.run, options, invited=invite.addresses) as network:
            view.tell("looking for the run")
            patience_s = _FIND_RUN_S if await network.transport.connected() else _FIND_ANYBODY_S
            spec, record = await fetch_spec(network.directory, invite, timeout_s=patience_s)
            view.tell("reading the text")
            corpus = await asyncio.to_thread(
                find_corpus, spec, data=options.data, tokenizer=options.tokenizer, on_progress=view.reached
            )
            view.close()
            await _take_part(network, spec, invite.owner, corpus, record, options, stop)


@contextlib.asynccontextmanager
async def _network(identity: Identity, run: str, options: Options, *, invited: Sequence[str]) -> AsyncIterator[Network]:
    """`invited`: an invite's addresses; whoever was met in the run before is tried beside them."""
    async with contextlib.AsyncExitStack() as stack:
        file = KnownPeers(LiveDisk(options.folder), run)
        remembered = await asyncio.to_thread(file.read)
        transport = await LiveTransport.start(
            identity,
            run=run,
            state_dir=options.folder,
            listen=options.listen,
            announce=options.announce,
            initial_peers=dialable(whom_to_try(invited, remembered, me=identity.peer_id)),
            throttle=Throttle(options.limits.rates),
        )
        stack.push_async_callback(transport.close)
        directory = await LiveDirectory.start(transport)
        stack.push_async_callback(directory.close)
        keeping = asyncio.create_task(
            keep(file, transport, LoopClock(), run_blocking=asyncio.to_thread), name="keep the known peers"
        )
        stack.push_async_callback(_cancelled, keeping)
        yield Network(identity=identity, transport=transport, directory=directory)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _take_part(
    network: Network,
    spec: RunSpec,
    owner: PeerID,
    corpus: Corpus | None,
    record: bytes,
    options: Options,
    stop: Stop,
) -> None:
    title = f"shoal {spec.name}"
    async with serving(options.dashboard, RunFacts.of(spec), title=title) as showing:
        output = showing.beside(make_output(reports=options.reports, title=title, steps_total=spec.training.steps))
        if showing.announcement:
            output.say(Note(text=showing.announcement))
        await _train(network, spec, owner, corpus, record, options, stop, output)


async def _train(
    network: Network,
    spec: RunSpec,
    owner: PeerID,
    corpus: Corpus | None,
    record: bytes,
    options: Options,
    stop: Stop,
    output: Output,
) -> None:
    # On a CPU shared with others the thread's own seconds say what it could give; a GPU's are not the thread's.
    probe_clock = time.thread_time if options.device.type == "cpu" else time.perf_counter
    compute = MeteredCompute(
        ThreadCompute(
            initializer=lambda: _prepare_thread(options),
            probe_clock=probe_clock,
            share=options.limits.compute_share,
        )
    )
    node = Node(
        identity=network.identity,
        transport=network.transport,
        directory=network.directory,
        compute=compute,
        clock=LoopClock(),
        spec=spec,
        owner=owner,
        name=options.name,
        device=options.device,
        memory_bytes=memory_claim(options.limits, options.device),
        corpus=corpus,
        initial=options.initial,
        disk=LiveDisk(options.folder),
        rng=random.Random(),  # only jitter and plan seeds: what must be reproducible is drawn from the spec's seed
        spec_record=record,
        run_blocking=asyncio.to_thread,
        run_search=in_background,
        on_step=lambda step: output.say(_step_done(step, network.identity.peer_id)),
        on_commit=lambda report: output.say(Committed(report=report)),
        on_validation=lambda report: output.say(Validated(report=report)),
        on_plan=lambda signed: output.say(_obeys(signed.plan)),
    )
    invite = make_invite(node.run, owner, worth_telling(network.transport.addresses()))
    control = ControlServer(options.folder)
    keeper = Keeper(
        options.limits,
        node.peer.pausing,
        say=lambda text: output.say(Note(text=text)),
        look=looking_at(options.device),
    )
    keeper.install(control)
    control.on("leave", stop.leave)
    control.on("invite", InviteVerb(network.transport, run=node.run, owner=owner).answer)
    try:
        await control.try_start()
        with announced(invite, options.folder):
            output.say(Phase(name="measuring this machine"))
            await node.start()
            trim_heap()  # of what reading the text and the probe needed
            stop.takes_part = True
            keeper.start()
            logger.info("this machine gives %.1f GFLOP/s", node.peer.advert().flop_per_s / 1e9)
            if owner == node.peer_id:
                output.say(Ready(peer=node.peer_id, run=node.run, invite=invite))
            output.say(Joined(peer=node.peer_id, name=options.name, invite=invite))
            if limits := options.limits.in_words:
                output.say(Note(text=f"limits that you have set: {', '.join(limits)}"))
            if corpus is None:
                output.say(Note(text="this machine has not the run's text: it will not be used for the first stage"))
            meter = ContributionMeter(node, compute, LoopClock(), name=options.name, limits=keeper.report)
            finished = await _until_done(node, network.transport, output, stop, meter)
        output.say(Left(peer=node.peer_id, state_dir=str(options.folder / node.run), finished=finished))
    finally:
        await keeper.close()
        await node.close()
        compute.close()
        output.close()
        await control.close()


async def _until_done(
    node: Node, transport: LiveTransport, output: Output, stop: Stop, meter: ContributionMeter
) -> bool:
    """Whether the run was done, rather than we told to stop."""
    watching = asyncio.create_task(_watch(node, output, meter), name="watch the swarm")
    split = SplitWatch.of(
        node.endpoint, transport, own_status=node.status, say=lambda text: output.say(Note(text=text))
    )
    looking = asyncio.create_task(split.run(), name="look for another swarm")
    trimming = asyncio.create_task(trim_heap_forever(), name="trim the heap")
    done = asyncio.create_task(node.wait_done(), name="wait for the end")
    asked = asyncio.create_task(stop.asked.wait(), name="wait for a signal")
    try:
        await asyncio.wait({done, asked}, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            done.result()
            return True
        if stop.drains:
            output.say(Note(text="leaving: finishing what is in flight (Ctrl-C again to quit at once)"))
        await node.leave(drains=stop.drains)
        return False
    finally:
        for task in (watching, looking, trimming, done, asked):
            task.cancel()
        await asyncio.gather(watching, looking, trimming, done, asked, return_exceptions=True)


async def _watch(node: Node, output: Output, meter: ContributionMeter) -> None:
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
        if node.is_coordinator or turn % every == 0:
            try:
                output.say(Status(status=await node.status()))
            except ShoalError as error:
                logger.debug("no status: %s", error)  # between two coordinators there is none


def _before_the_plan(node: Node) -> str:
    """What the run waits for; only the host, who makes the first plan, knows how many are here."""
    return node.coordination.said or f"waiting for peers: the run begins with {node.spec.swarm.min_peers}"


def _step_done(record: StepRecord, coordinator: PeerID) -> StepDone:
    fields = {name: getattr(record, name) for name in StepDone.__struct_fields__ if name != "coordinator"}
    return msgspec.convert(fields | {"coordinator": coordinator}, StepDone)


def _obeys(plan: Plan) -> Obeys:
    return Obeys(
        term=plan.term,
        sequence=plan.sequence,
        coordinator=plan.coordinator,
        reason=plan.reason,
        peers=len(plan.members),
    )


def pick_device(wanted: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises: LocalError: torch sees no such device here."""
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LocalError(f"--device {wanted}: torch sees {torch.cuda.device_count()} CUDA devices on this machine")
    return device


def _prepare_thread(options: Options) -> None:
    stand_back(options.limits)  # first: torch's own threads begin as this one is
    if options.threads:
        torch.set_num_threads(options.threads)
