"""`shoal demo`: a swarm of real peers on this machine, shown while it trains.

The parent process is light (no torch): it starts `shoal host` and `shoal join` as children, all at once so that their
imports overlap, hands the host's invite to the others when it is there, and reads what they report.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from shoal.deploy.live_view import Board, plain_line, render, short
from shoal.deploy.report import Joined, Left, Note, Ready, Report, Status, StepDone, read_report
from shoal.deploy.run_file import write_spec
from shoal.deploy.summary import Record, StepLine, Summary
from shoal.deploy.swarm import Child, Swarm
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import RunSpec

_HOST = "peer-1"
_SAMPLER = "sampler"
_FRAMES_PER_S = 2.0
_RSS_S = 2.0
_RECENT_STEPS = 17
"""Over which the tokens/s of a step are measured."""
_END_S = 30.0
"""For the children to write their last snapshot and leave, once the first has."""
_SAMPLE_S = 90.0
_CLI = (sys.executable, "-m", "shoal.deploy.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    spec: RunSpec
    peers: int
    folder: Path
    """Logs, peers' state and the snapshot go here."""
    seconds_max: float | None = None
    json_path: Path | None = None
    data: str = ""
    keep: bool = False
    """Keep the peers' own folders too."""


class Demo:
    """One run of the demo, from start to summary."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._started_s = time.monotonic()
        self._board = Board(
            title=f"shoal demo: {options.peers} peers, {options.spec.swarm.stages} stages",
            started_s=self._started_s,
            steps_total=options.spec.training.steps,
        )
        self._record = Record()
        self._swarm = Swarm(on_line=self._on_line, on_exit=self._on_exit)
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        self._changed = asyncio.Event()
        self._left: dict[str, Left] = {}
        self._ended: dict[str, int] = {}
        self._interrupts = 0
        self._sample_line = b""
        self._live: Live | None = None
        self._json: IO[bytes] | None = None

    async def run(self) -> Summary:
        """Raises: LocalError: the swarm did not come up; the sentence is the peer's own."""
        main = asyncio.current_task()
        assert main is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, main)
        with contextlib.ExitStack() as stack:
            if self._options.json_path is not None:
                self._json = stack.enter_context(_open_json(self._options.json_path))
            if self._console.is_terminal:
                self._live = stack.enter_context(
                    Live(get_renderable=self._draw, console=self._console, refresh_per_second=_FRAMES_PER_S)
                )
            measuring = asyncio.create_task(self._measure_memory(), name="measure memory")
            try:
                await self._start()
                await self._until_over()
                await self._end()
                snapshot, text = await self._sample()
            finally:
                measuring.cancel()
                await self._swarm.close()
                await asyncio.gather(measuring, return_exceptions=True)
            summary = self._summarise(snapshot, text)
            self._write_json(summary)
        if not self._options.keep and summary.finished:
            shutil.rmtree(self._peers_folder)
        return summary

    @property
    def interrupted(self) -> bool:
        return self._interrupts > 0

    @property
    def _peers_folder(self) -> Path:
        return self._options.folder / "peers"

    # --- the children ---

    async def _start(self) -> None:
        options = self._options
        logs = options.folder / "logs"
        for folder in (self._peers_folder, logs):
            folder.mkdir(parents=True, exist_ok=True)
        spec_path = options.folder / "run.toml"
        write_spec(options.spec, spec_path)
        for number in range(1, options.peers + 1):
            name = f"peer-{number}"
            common = ["--name", name, "--state-dir", str(self._peers_folder / name), "--listen", "127.0.0.1:0"]
            what = ["host", str(spec_path)] if name == _HOST else ["join", "-"]
            if options.data and name != _HOST:
                common += ["--data", options.data]
            argv = [*_CLI, *what, *common, "--threads", "1", "--device", "cpu", "--reports"]
            await self._swarm.start(name, argv, env=_environment(), log=logs / f"{name}.log")
        await self._wait_for(lambda: bool(self._record.invite))
        for name, child in self._swarm.children.items():
            if name != _HOST:
                await self._swarm.tell(child, self._record.invite + "\n")

    async def _until_over(self) -> None:
        """Until a peer says that the run is done, the time is over, we are interrupted, or nobody is left."""
        seconds_max = self._options.seconds_max
        left_s = None if seconds_max is None else max(0.0, self._started_s + seconds_max - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._wait_for(lambda: self._record.finished or len(self._ended) == self._options.peers)

    async def _end(self) -> None:
        """Let the children leave by themselves if the run is done, else ask them to."""
        self._board.phase = "leaving"
        if not self._record.finished:
            self._swarm.terminate()
        if not await self._swarm.wait(timeout_s=_END_S):
            names = [name for name in self._swarm.children if name not in self._ended]
            self._note(f"killed what did not leave in {_END_S:.0f} s: {', '.join(names)}")
        await self._swarm.close()

    async def _sample(self) -> tuple[str, str]:
        """(the whole model's snapshot, a text by it), empty where there is none."""
        folders = sorted(str(path) for path in self._peers_folder.glob("*/*/snapshots/*"))
        if not folders or self.interrupted:
            return "", ""
        self._board.phase = "writing a sample"
        log = self._options.folder / "logs" / f"{_SAMPLER}.log"
        argv = [sys.executable, "-m", "shoal.deploy.sample", "--into", str(self._options.folder / "snapshot"), *folders]
        child = await self._swarm.start(_SAMPLER, argv, env=_environment(), log=log)
        try:
            async with asyncio.timeout(_SAMPLE_S):
                await child.exited.wait()
        except TimeoutError:
            self._note("no sample: it took too long")
            return "", ""
        if not self._sample_line:
            self._note(f"no sample: {_last_line(log)}")
            return "", ""
        sample: dict[str, str] = msgspec.json.decode(self._sample_line)
        return sample["snapshot"], sample["text"]

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Raises: LocalError: the host ended before it was up."""
        while not condition() and not self.interrupted:
            if _HOST in self._ended and not self._record.invite:
                log = self._swarm.children[_HOST].log
                raise LocalError(_last_line(log).removeprefix("shoal: ") or f"the host ended: see {log}")
            self._changed.clear()
            await self._changed.wait()

    def _interrupt(self, main: "asyncio.Task[object]") -> None:
        self._interrupts += 1
        self._changed.set()
        if self._interrupts > 1:
            main.cancel()

    async def _measure_memory(self) -> None:
        peak = self._record.rss_mb_max
        while True:
            for name, child in self._swarm.children.items():
                if name != _SAMPLER:
                    peak[name] = max(peak.get(name, 0.0), round(child.rss_bytes() / 1e6, 1))
            await asyncio.sleep(_RSS_S)

    # --- what they say ---

    def _on_line(self, child: Child, line: bytes) -> None:
        if child.name == _SAMPLER:
            self._sample_line = line
            return
        report = read_report(line)
        if report is not None:
            self._take(child, report)
            self._changed.set()

    def _on_exit(self, child: Child, status: int) -> None:
        self._ended[child.name] = status
        if status != 0 and not self.interrupted and child.name != _SAMPLER:
            self._note(f"{child.name} ended with status {status}: {_last_line(child.log)}")
        self._changed.set()

    def _take(self, child: Child, report: Report) -> None:
        match report:
            case Ready():
                self._record.run, self._record.invite = report.run, report.invite
                self._board.phase = "waiting for the others"
                self._print("a peer on another terminal or machine joins with:")
                self._print(f"shoal join {report.invite}")
            case Joined():
                self._note(f"{report.name} is there ({short(report.peer)})")
            case StepDone():
                self._take_step(report)
            case Status():
                self._record.see(report.status)
                self._take_status(report)
            case Note():
                self._note(f"{child.name}: {report.text}")
            case Left():
                self._left[child.name] = report
                self._record.finished |= report.finished

    def _take_step(self, step: StepDone) -> None:
        if self._board.step is not None and step.step <= self._board.step.step:
            return  # told by two coordinators at a change of term
        now_s = time.monotonic()
        step = msgspec.structs.replace(step, tokens_per_s=self._recent_tokens_per_s(step, now_s))
        self._record.add(step, now_s)
        self._board.add_step(step, now_s)
        self._write_json(
            StepLine(
                step=step.step,
                loss=step.loss,
                val_loss=step.validation_loss,
                tokens_per_s=round(step.tokens_per_s, 1),
                staleness_mean=step.staleness_mean,
                duplicates=step.duplicates,
                given_up=step.given_up,
                term=step.term,
                coordinator=step.coordinator,
                peers=step.peers,
                seconds=round(now_s - self._started_s, 3),
            )
        )
        if self._live is None:
            self._print(plain_line(self._board))

    def _recent_tokens_per_s(self, step: StepDone, now_s: float) -> float:
        """Ours, since a new coordinator has to begin its own measurement anew."""
        self._recent.append((now_s, step.step))
        since_s, since = self._recent[0]
        tokens = (step.step - since) * self._options.spec.tokens_per_step
        return tokens / (now_s - since_s) if now_s > since_s else 0.0

    def _take_status(self, report: Status) -> None:
        before = self._board.status
        self._board.status = report.status
        if before is not None and before.term != report.status.term:
            self._note(f"term {report.status.term}: the coordinator's role moved to {short(report.status.coordinator)}")
        if before is None or before.plan_sequence != report.status.plan_sequence:
            self._note(f"plan {report.status.plan_sequence}: {report.status.plan_reason}")

    # --- what we say ---

    def _draw(self) -> RenderableType:
        return render(self._board, time.monotonic())

    def _note(self, text: str) -> None:
        self._board.notes.append(text)
        if self._live is None:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _write_json(self, line: msgspec.Struct) -> None:
        if self._json is not None:
            self._json.write(msgspec.json.encode(line) + b"\n")
            self._json.flush()

    def _summarise(self, snapshot: str, text: str) -> Summary:
        record, spec = self._record, self._options.spec
        first_step_s = record.first_s - self._started_s if record.first else None
        return Summary(
            steps=spec.training.steps if record.finished else record.steps_seen,
            finished=record.finished,
            loss_first=record.first.loss if record.first else None,
            loss_last=record.last.loss if record.last else None,
            val_loss=record.val_loss,
            tokens_per_s=round(record.tokens_per_s(spec.tokens_per_step), 1),
            staleness_mean=record.staleness_sum / record.num_steps if record.num_steps else 0.0,
            coordinator_terms=len(record.terms),
            peers=self._options.peers,
            duplicates=record.duplicates,
            given_up=record.given_up,
            seconds=round(time.monotonic() - self._started_s, 1),
            first_step_s=None if first_step_s is None else round(first_step_s, 1),
            rss_mb_max=dict(record.rss_mb_max),
            run=record.run,
            snapshot=snapshot,
            sample=text,
            folder=str(self._options.folder),
        )


def _environment() -> Mapping[str, str]:
    """Six peers share the cores: one thread each, and one heap (glibc keeps several, each as large as its peak)."""
    return {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", **os.environ}


def _open_json(path: Path) -> IO[bytes]:
    """Raises: LocalError."""
    try:
        return path.open("wb")
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror}") from error


def _last_line(log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
