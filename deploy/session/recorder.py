"""Keeps the record of a run while a peer takes part: asks members for their commits and writes these to the record.

The recorder puts reports of commits, from this peer's past and other members' answers, into a `Book`. Complete steps go
to the record, TensorBoard's file and Weights & Biases, and to displays. Without a folder only displays get them.
"""

import asyncio
import contextlib
import importlib.metadata
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from shoal.deploy.base.words import counted
from shoal.deploy.dashboard.census import Census, clean
from shoal.deploy.record.book import AGO_S_MAX, Book, Key
from shoal.deploy.record.exports import EventsFile, WandbRun
from shoal.deploy.record.lines import (
    RECORD,
    EndLine,
    Line,
    NoteLine,
    PeerLine,
    PlanLine,
    StartLine,
    StepLine,
    ValidationLine,
    perplexity,
)
from shoal.deploy.record.past import Past
from shoal.deploy.record.reading import Record, read_record
from shoal.deploy.record.report import Joined, Note, Obeys, Recorded, Report, Reporter, Status
from shoal.deploy.record.summary import in_words
from shoal.deploy.record.writing import RecordFile
from shoal.peer.model.layout import num_trained
from shoal.peer.model.schedule import rate_of
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import HISTORY_PER_REPLY_MAX, PEER_NAME_CHARS_MAX
from shoal.protocol.messages import History, HistoryRequest, PlanNote, SwarmStatus
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec

if TYPE_CHECKING:
    from shoal.deploy.dashboard.server import Dashboard

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
GROUPS_A_SECOND: Final = 8
"""The most groups asked for their commits in a second. If the run has more, each is asked more rarely."""
MISSING_S: Final = 3.0
"""Seconds between requests to a group for a report that is missing, while later steps wait for it."""
VALIDATIONS_S: Final = 20.0
"""Seconds between requests to several first-stage members: only the member that led a validation knows it."""
ASKED_AT_ONCE: Final = 8
LAST_WORDS_S: Final = 3.0
"""Seconds in which `finish` asks for reports of the last steps; the last request may end later."""


class Recorder:
    """Keeps one record, from `open` to `close`; before `open` it sends no requests.

    Args:
        start: the record's first line, about the run and this peer.
        spec: the run's spec.
        reports: carries this peer's reports to their listeners.
        folder: the run's folder inside the peer's; None: nothing is written.
        wandb: the project at Weights & Biases to which the record is also sent; empty: none.
    """

    def __init__(
        self, start: StartLine, spec: RunSpec, reports: Reporter, *, folder: Path | None, wandb: str = ""
    ) -> None:
        self.folder, self._is_open = folder, False
        self._start, self._spec, self._reports, self._project = start, spec, reports, wandb
        self._waiting: list[Line] = []
        self._troubles: list[str] = []
        self._file: RecordFile | None = None
        self._exports: list[EventsFile | WandbRun] = []
        self._book = self._new_book(None)
        self._status_era = -1
        self._foreseen: tuple[Key, float | None] = (0, 0), None
        """((era, step) at which we first saw the newest prediction of the run's speed, predicted tokens/s or None)."""
        self._step = 0
        self._validated: set[Key] = set()
        self._plans: set[tuple[int, int]] = set()
        self._census = Census()
        self._turn = 0
        self._missing_at_s = self._validations_at_s = 0.0
        self._lock = asyncio.Lock()

    def open(self) -> Record:
        """Start writing. Returns: the record so far. Raises: LocalError: Weights & Biases does not start."""
        self._reports.listeners.append(self.take)
        self._is_open = True
        folder, record = self.folder, Record()
        if folder is None:
            return record
        try:
            record = read_record(folder)
        except LocalError as error:
            logger.debug("a new record: %s", error)
        self._book = self._new_book(record.reached if record.starts or record.steps else None)
        self._validated = {(line.era, line.step) for line in record.validations}
        self._plans = {(line.term, line.sequence) for line in record.plans}
        self._file = RecordFile(folder / RECORD, say=self._troubles.append, now_s=time.monotonic)
        self._waiting.append(self._start)
        if self._project:
            self._exports.append(WandbRun(self._project, self._start, folder))
        try:
            self._exports.append(EventsFile(folder, record))
        except OSError as error:
            self._troubles.append(_trouble(EventsFile, error))
        return record

    def summary(self, unsaved: str = "") -> tuple[str, ...]:
        """Return a summary for the terminal, after `finish`. Args: unsaved: a sentence on steps that no disk has."""
        if self.folder is None:
            return ()
        try:
            lines = in_words(read_record(self.folder), self.folder / RECORD, unsaved)
            return (*lines, f"  look back    shoal report {self._start.run}")
        except LocalError as error:
            return (str(error),)

    def take(self, report: Report) -> None:
        match report:
            case Joined() if report.name:
                self._census.name(report.peer, report.name)
            case Obeys():
                self._take_plan(report)
            case Status():
                self._take_status(report.status)
            case Note():
                self._waiting.append(NoteLine(time=_ms(time.time()), text=clean(report.text)))

    # --- while the run goes on ---

    async def run(self, endpoint: Endpoint, past: Past, plan: Callable[[], Plan | None]) -> None:
        """Keep the record until cancelled. No error here stops training."""
        while self._is_open:
            live = plan()
            await asyncio.sleep(max(PERIOD_S, _num_groups(live) / GROUPS_A_SECOND))
            try:
                await self._gather(endpoint, past, plan())
                await self._tell(self._book.due(time.monotonic()))
            except Exception:
                logger.exception("the record goes on without the lines that were to be written now")

    async def finish(self, endpoint: Endpoint, past: Past, plan: Plan | None, *, finished: bool) -> None:
        """Ask for reports of the last steps, and write these steps and the end line."""
        if not self._is_open:
            return
        step = self._spec.training.steps if finished else self._step
        until_s = time.monotonic() + LAST_WORDS_S
        while True:
            await self._gather(endpoint, past, plan)
            await self._tell(self._book.due(time.monotonic()))
            if self._book.is_complete and self._book.reached[1] >= step:
                break
            if time.monotonic() >= until_s:
                logger.info("the record ends with step %d, the run is at %d", self._book.reached[1], step)
                break
            await asyncio.sleep(PERIOD_S / 4)
        await self._tell(self._book.due(time.monotonic(), flush=True))
        end = EndLine(
            time=_ms(time.time()), step=max(step, self._book.reached[1]), finished=finished, lost=self._book.lost
        )
        self._waiting.append(end)
        await self._keep(())

    # --- what others know ---

    async def _gather(self, endpoint: Endpoint, past: Past, plan: Plan | None) -> None:
        me = endpoint.peer_id
        now_s = time.monotonic()
        if plan is not None:
            self._book.begins(plan.era, plan.restore_version, len(plan.stages))
        self._hear(past.since(HistoryRequest(self._book.wanted(range(_num_groups(plan))), self._validations_from)))
        if plan is None:
            return
        self._turn += 1
        asks: dict[PeerID, Key] = {}
        for group in range(_num_groups(plan)):
            peers = _members(plan, group)
            if peers and me not in peers:
                peer = peers[self._turn % len(peers)]
                asks[peer] = min(self._book.wanted([group]), asks.get(peer, (1 << 60, 0)))
        if now_s >= self._validations_at_s:  # only the peer that led a validation knows it: ask more than one
            self._validations_at_s = now_s + VALIDATIONS_S
            for peer in [peer for peer in _members(plan, 0) if peer != me][:ASKED_AT_ONCE]:
                asks.setdefault(peer, self._book.wanted([0]))
        missing = self._book.missing()
        if missing is not None and now_s >= self._missing_at_s:
            self._missing_at_s = now_s + MISSING_S
            step, groups = missing
            for group in groups:
                others = [peer for peer in _members(plan, group) if peer != me]
                for offset in range(min(2, len(others))):
                    asks[others[(2 * self._turn + offset) % len(others)]] = step
        waiting = iter(asks.items())

        async def ask_some() -> None:
            for peer, wanted in waiting:
                await self._ask(endpoint, peer, wanted)

        await asyncio.gather(*(ask_some() for _ in range(min(ASKED_AT_ONCE, len(asks)))))

    async def _ask(self, endpoint: Endpoint, peer: PeerID, wanted: Key) -> None:
        while True:
            request = HistoryRequest(wanted, self._validations_from)
            try:
                said = await endpoint.ask(peer, request, History, timeout_s=3.0)
            except ShoalError as error:
                logger.debug("%s does not say what it has committed: %s", peer[-8:], error)
                return
            self._hear(said)
            if len(said.commits) < HISTORY_PER_REPLY_MAX:
                return
            last = said.commits[-1].report
            after = last.era, last.step + 1
            if after <= wanted:
                return  # not an answer to the request
            wanted = after

    def _hear(self, said: History) -> None:
        now_s = time.monotonic()
        for commit in said.commits:
            self._book.note(commit.report, now_s - commit.seconds_ago, now_s)
        for validation in said.validations:
            report = validation.report
            if 0.0 <= validation.seconds_ago < AGO_S_MAX:
                key = report.era, report.step
                self._take_validation(key, report.loss, report.microbatches, time.time() - validation.seconds_ago)

    @property
    def _validations_from(self) -> Key:
        """(era, version) from which to request validations: two intervals before the newest, as some arrive late."""
        era, version = max(self._validated, default=(0, -1))
        return era, max(0, version - 2 * self._spec.training.validation_interval_steps)

    # --- what this peer reports anyway ---

    def _take_plan(self, plan: Obeys) -> None:
        self._book.begins(plan.era, plan.restored, plan.stages)
        self._add_plan(plan, time.time(), era=plan.era, restored=plan.restored, peers=plan.peers, stages=plan.stages)

    def _add_plan(self, plan: Obeys | PlanNote, at_s: float, **known: int) -> None:
        order = plan.term, plan.sequence
        if order in self._plans:
            return
        self._plans.add(order)
        self._waiting.append(
            PlanLine(
                time=_ms(at_s),
                term=plan.term,
                sequence=plan.sequence,
                coordinator=plan.coordinator,
                reason=clean(plan.reason),
                **known,
            )
        )

    def _take_status(self, status: SwarmStatus) -> None:
        now_s = time.time()
        self._step = max(self._step, status.step) if status.era == self._status_era else status.step
        self._status_era = status.era
        foreseen = status.comparison.foreseen_tokens_per_s if status.comparison is not None else None
        if foreseen != self._foreseen[1]:
            self._foreseen = (status.era, status.step), foreseen
        for note in status.plans:
            self._add_plan(note, now_s - max(0.0, note.seconds_ago), era=status.era)
        if status.validation_loss is not None and status.validation_step is not None:
            microbatches = self._spec.training.validation_microbatches
            self._take_validation((status.era, status.validation_step), status.validation_loss, microbatches, now_s)
        joined, moved, gone = self._census.take(status, now_s)
        for change, peers in (("joined", joined), ("moved", moved)):
            for peer in peers:
                device = clean(peer.device, PEER_NAME_CHARS_MAX)
                self._add_peer(peer.peer, change, now_s, device=device, stage=peer.stage)
        for departure in gone:
            self._add_peer(departure.peer, "left", now_s)

    def _add_peer(self, peer: PeerID, change: str, now_s: float, *, device: str = "", stage: int | None = None) -> None:
        name = self._census.name_of(peer)
        line = PeerLine(time=_ms(now_s), peer=peer, name=name, device=device, change=change, stage=stage)
        self._waiting.append(line)

    def _take_validation(self, key: Key, loss: float, microbatches: int, at_s: float) -> None:
        value = perplexity(loss)
        if key in self._validated or value is None or not 0 <= key[1] <= self._spec.training.steps:
            return
        self._validated.add(key)
        line = ValidationLine(
            time=_ms(at_s), step=key[1], era=key[0], loss=loss, perplexity=value, microbatches=microbatches
        )
        self._waiting.append(line)

    # --- writing ---

    async def _tell(self, steps: Iterable[StepLine]) -> None:
        """Pass `steps` to `_keep`, with times in seconds since 1970 and the tokens/s that the plan predicted."""
        ahead_s = time.time() - time.monotonic()
        since, foreseen = self._foreseen
        await self._keep(
            tuple(
                msgspec.structs.replace(
                    step,
                    time=_ms(step.time + ahead_s),
                    foreseen_tokens_per_s=foreseen if (step.era, step.step) > since else None,
                )
                for step in steps
            )
        )

    async def _keep(self, steps: tuple[StepLine, ...]) -> None:
        """Write the waiting lines and `steps`, in another thread as a disk may be slow, and pass them to displays."""
        async with self._lock:
            lines, self._waiting = [*self._waiting, *steps], []
            if not lines:
                return
            await asyncio.to_thread(self._write, lines)
            for trouble in self._troubles:
                self._reports.note(trouble)
            self._troubles.clear()
        validations = tuple(line for line in lines if isinstance(line, ValidationLine))
        if steps or validations:
            self._reports.say(Recorded(steps=steps, validations=validations))

    def _write(self, lines: list[Line]) -> None:
        if self._file is None:
            return
        self._file.append(lines)
        told = [line for line in lines if isinstance(line, StepLine | ValidationLine)]
        for export in tuple(self._exports) if told else ():
            try:
                export.add(told)
            except Exception as error:  # wandb raises several kinds
                self._troubles.append(_trouble(type(export), error))
                self._exports.remove(export)

    def close(self) -> None:
        """Write the waiting lines and close the files. This call blocks."""
        if self._file is not None:
            self._file.append(self._waiting)
            self._file.close()
        for export in self._exports:
            try:
                export.close()
            except OSError as error:
                logger.warning("%s", _trouble(type(export), error))

    # --- the run ---

    def _new_book(self, reached: Key | None) -> Book:
        return Book(
            num_experts=self._spec.model.num_experts if self._spec.swarm.expert_slots else 0,
            lead_steps=self._spec.training.s_max + 1,
            tokens_per_step=self._spec.tokens_per_step,
            learning_rate=partial(rate_of, self._spec),
            reached=reached,
        )


@contextlib.asynccontextmanager
async def recording(recorder: Recorder, dashboard: "Dashboard | None") -> AsyncIterator[None]:
    """Keep the record inside the context, if `recorder` has a folder or there is a dashboard to show it.

    Raises: LocalError: Weights & Biases does not start.
    """
    if recorder.folder is None and dashboard is None:
        yield
        return
    before = await asyncio.to_thread(recorder.open)
    if dashboard is not None:
        dashboard.feed.restore(before)
    try:
        yield
    finally:
        await asyncio.to_thread(recorder.close)


def start_line(spec: RunSpec, *, run: str, peer: PeerID, peer_name: str) -> StartLine:
    """Return a record's first line, about the run `run` and the peer that keeps the record."""
    return StartLine(
        time=_ms(time.time()),
        run=run,
        name=spec.name,
        peer=peer,
        peer_name=peer_name,
        steps=spec.training.steps,
        tokens_per_step=spec.tokens_per_step,
        num_parameters=num_trained(spec),
        num_layers=spec.model.num_layers,
        optimizer=spec.optimizer.name,
        version=importlib.metadata.version("shoal"),
        fields={
            "width": str(spec.model.dim),
            **({"adapter": f"{spec.adapter.kind} of rank {spec.adapter.rank}"} if spec.adapter else {}),
            "context": str(spec.model.context),
            "stages": str(spec.swarm.stages),
            "learning rate": f"{spec.optimizer.learning_rate:g}, {spec.optimizer.schedule}",
            "samples a step": f"{spec.training.microbatches_per_step * spec.training.microbatch_size:,}",
            "staleness": f"{counted(spec.training.s_max, 'step')} at most",
        },
    )


def _trouble(export: type[EventsFile | WandbRun], error: Exception) -> str:
    return export.trouble.format(getattr(error, "strerror", None) or error)


def _num_groups(plan: Plan | None) -> int:
    """Return the number of groups that commit each step under `plan`: stages, and groups of expert holders."""
    return len(plan.stages) + len(plan.experts) if plan is not None else 0


def _members(plan: Plan, group: int) -> tuple[PeerID, ...]:
    if group >= _num_groups(plan):
        return ()  # an earlier plan had more groups
    return tuple(member.peer for member in plan.group_members(group))


def _ms(time_s: float) -> float:
    return round(time_s, 3)
