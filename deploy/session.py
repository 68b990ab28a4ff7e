"""One process's part in one run on libp2p: network up, node up, until the run is done or somebody says stop."""

import asyncio
import contextlib
import functools
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
from shoal.deploy.doctor.problem import Problem
from shoal.deploy.doctor.split import SplitWatch
from shoal.deploy.heap import trim_heap, trim_heap_forever
from shoal.deploy.known_peers import KnownPeers, keep, whom_to_name, whom_to_try
from shoal.deploy.node import Node
from shoal.deploy.output import Output, make_output
from shoal.deploy.places import announced
from shoal.deploy.report import Committed, Joined, Left, Note, Obeys, Ready, Status, StepDone, Validated
from shoal.deploy.run_record import fetch_spec, seal_spec
from shoal.peer.data.corpus import PYTHON_LIBRARY, Corpus, load_corpus
from shoal.protocol.errors import DataError, LocalError, ShoalError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, make_invite, split_address, worth_telling
from shoal.protocol.live.clock import LoopClock
from shoal.protocol.live.compute import ThreadCompute
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.live.transport import LiveTransport, dialable
from shoal.protocol.messages import StatusRequest, SwarmStatus
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec, run_id

logger = logging.getLogger(__name__)

_STATUS_S = 1.0
_ASKS_EVERY = 5
"""A child that does not coordinate asks for the status at every fifth of these: the coordinator may be none of its
parent's, and any child may die."""
_FIND_RUN_S = 20.0


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
    data: str = ""
    """Where the run's text is on this machine, if not where the spec says."""
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
    async with _network(identity, invite.run, options, invited=invite.addresses) as network:
        spec, record = await fetch_spec(network.directory, invite, timeout_s=_FIND_RUN_S)
        corpus = await asyncio.to_thread(_find_corpus, spec, options)
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
    output = make_output(reports=options.reports, title=f"shoal {spec.name}", steps_total=spec.training.steps)
    # On a CPU shared with others the thread's own seconds say what it could give; a GPU's are not the thread's.
    probe_clock = time.thread_time if options.device.type == "cpu" else time.perf_counter
    compute = ThreadCompute(initializer=lambda: _prepare_thread(options.threads), probe_clock=probe_clock)
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
        corpus=corpus,
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
    control.on("leave", stop.leave)
    control.on("invite", functools.partial(_invite, network.transport, node.run, owner))
    try:
        await _start_control(control)
        with announced(invite, options.folder):
            await node.start()
            trim_heap()  # of what reading the text and the probe needed
            stop.takes_part = True
            logger.info("this machine gives %.1f GFLOP/s", node.peer.advert().flop_per_s / 1e9)
            if owner == node.peer_id:
                output.say(Ready(peer=node.peer_id, run=node.run, invite=invite))
            output.say(Joined(peer=node.peer_id, name=options.name, invite=invite))
            if corpus is None:
                output.say(Note(text="this machine has not the run's text: it will not be used for the first stage"))
            finished = await _until_done(node, network.transport, output, stop)
        output.say(Left(peer=node.peer_id, state_dir=str(options.folder / node.run), finished=finished))
    finally:
        await node.close()
        compute.close()
        output.close()
        await control.close()


async def _invite(transport: LiveTransport, run: str, owner: PeerID, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The control socket's `invite`: who is there now, and where. `peers`: how many to name, us included."""
    connected, known = await transport.connected(), transport.known()
    others = {peer: dialable(known[peer]) for peer in connected if peer in known}
    addresses = whom_to_name(transport.addresses(), others, num_peers=int(arguments.get("peers", 1)))
    peers = {split_address(address)[1] for address in addresses}
    return {"invite": make_invite(run, owner, addresses), "run": run, "peers": len(peers)}


async def _start_control(control: ControlServer) -> None:
    """A file system without sockets keeps nobody from taking part."""
    try:
        await control.start()
    except LocalError as error:
        logger.warning("%s: `shoal leave` and the like will not reach this peer", error)


async def _until_done(node: Node, transport: LiveTransport, output: Output, stop: Stop) -> bool:
    """Whether the run was done, rather than we told to stop."""
    watching = asyncio.create_task(_watch(node, output), name="watch the swarm")
    looking = asyncio.create_task(_split_watch(node, transport, output).run(), name="look for another swarm")
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


def _split_watch(node: Node, transport: LiveTransport, output: Output) -> SplitWatch:
    def say(problem: Problem) -> None:
        logger.warning("%s; %s", problem.sentence, problem.remedy)
        output.say(Note(text=f"{problem.sentence}; {problem.remedy}"))

    return SplitWatch(
        around=transport,
        own_status=node.status,
        ask=lambda peer: node.endpoint.ask(peer, StatusRequest(), SwarmStatus),
        me=node.peer_id,
        say=say,
    )


async def _watch(node: Node, output: Output) -> None:
    for turn in itertools.count():
        await asyncio.sleep(_STATUS_S)
        if output.polls or node.is_coordinator or turn % _ASKS_EVERY == 0:
            try:
                output.say(Status(status=await node.status()))
            except ShoalError as error:
                logger.debug("no status: %s", error)  # between two coordinators there is none


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


def _find_corpus(spec: RunSpec, options: Options) -> Corpus | None:
    """The run's text, or None if this machine has another.

    A path in the spec means a file of the host's; on this machine a stranger would have chosen what we read.

    Raises: DataError: the user named a text, and it is missing or not the run's.
    """
    if not options.data and spec.data.source != PYTHON_LIBRARY:
        return None
    source = options.data or spec.data.source
    try:
        corpus = load_corpus(msgspec.structs.replace(spec.data, source=source), context=spec.model.context)
    except DataError:
        if options.data:
            raise
        return None
    if corpus.digest == spec.data.digest:
        return corpus
    if options.data:
        raise DataError(f"{options.data} is not the text that this run trains on")
    return None


def pick_device(wanted: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises: LocalError: torch knows no such device, or has none here."""
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise LocalError(f"--device {wanted} is no device: say cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise LocalError(f"--device {wanted}: shoal computes on cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LocalError(f"--device {wanted}: torch sees {torch.cuda.device_count()} CUDA devices on this machine")
    return device


def _prepare_thread(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def load_own_corpus(spec: RunSpec) -> tuple[RunSpec, Corpus]:
    """The host's text, and the spec that names it.

    Raises: DataError.
    """
    corpus = load_corpus(spec.data, context=spec.model.context)
    if spec.data.digest not in ("", corpus.digest):
        raise DataError(
            f"{spec.data.source} has not the digest that the run spec names: remove `digest`, or restore it"
        )
    data = msgspec.structs.replace(spec.data, digest=corpus.digest)
    return msgspec.structs.replace(spec, data=data), corpus
