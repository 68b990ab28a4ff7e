"""Runs a swarm of real peers on this machine and shows it while it trains (`shoal demo`).

The parent process is small (no torch). It starts `shoal host` and `shoal join` as children, all at once so that their
imports overlap, passes the host's invite to the other peers, and reads all reports.
"""

import asyncio
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from shoal.deploy.base.children import Child, Children, last_line
from shoal.deploy.base.words import number_of_stages
from shoal.deploy.dashboard.address import Address
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.demo.chaos import Chaos, ChaosOptions, kill_a_holder
from shoal.deploy.demo.chronicle import Chronicle
from shoal.deploy.demo.crew import Crew, environment
from shoal.deploy.demo.summary import DemoSummary
from shoal.deploy.record.report import Joined, Obeys, Ready, read_report
from shoal.deploy.run.run_file import write_spec
from shoal.deploy.session.beside import serving
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import DataSpec, RunSpec

_SAMPLER = "sampler"
_END_S = 30.0
"""How long the demo waits at the end until all children have written their last snapshots and left."""
_EVERYWHERE = DataSpec()
"""The default text of a run, Python's own library: every machine has it, so peers need no `--data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    spec: RunSpec
    peers: int
    parts: tuple[float, ...] | None = None
    """Relative shares of the machine's cores for the peers; None: no limits."""
    folder: Path
    seconds_max: float | None = None
    json_path: Path | None = None
    keep: bool = False
    """True: do not delete the peers' own folders at the end."""
    chaos: ChaosOptions | None = None
    kills_holder: bool = False
    """True: kill a holder of the busiest expert half-way through the run, unless `chaos` is set."""
    dashboard: Address | None = None


class Demo:
    """One run of the demo, from start to summary."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._chronicle = Chronicle(
            options.spec,
            console,
            title=f"shoal demo: {options.peers} peers, {number_of_stages(options.spec.swarm.stages)}",
        )
        self._started_s = self._watched_until_s = time.monotonic()
        self._children = Children(on_line=self._on_line, on_exit=self._on_exit)
        data = options.spec.data
        self._crew = Crew(
            self._children,
            folder=options.folder,
            spec_path=options.folder / "run.toml",
            # `shoal join` reads files that the host's spec names only if --data names them, too.
            data=data.source if data.source != _EVERYWHERE.source else "",
            tokenizer=data.tokenizer if data.tokenizer != _EVERYWHERE.tokenizer else "",
            parts=options.parts,
        )
        self._changed = asyncio.Event()
        self._interrupts = 0
        self._sample_line = b""

    async def run(self) -> DemoSummary:
        """Run the demo. Raises: LocalError: the swarm did not start; the text is the failed peer's last line."""
        main = asyncio.current_task()
        assert main is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, main)
        facts = RunFacts.of(self._options.spec)
        async with serving(self._options.dashboard, facts, title=self._chronicle.title) as dashboard:
            self._chronicle.show_on(dashboard)
            return await self._run()

    async def _run(self) -> DemoSummary:
        with self._chronicle.kept(self._options.json_path):
            measuring = asyncio.create_task(self._measure_memory(), name="measure memory")
            try:
                await self._start()
                await self._until_over()
                await self._end()
                snapshot, text = await self._sample()
            finally:
                measuring.cancel()
                await self._children.close()
                await self._crew.tidy()
                await asyncio.gather(measuring, return_exceptions=True)
            summary = self._chronicle.sum_up(
                peers=self._options.peers,
                chaos=self._options.chaos is not None or self._options.kills_holder,
                watched_until_s=self._watched_until_s,
                snapshot=snapshot,
                sample=text,
                folder=self._options.folder,
            )
        if not self._options.keep and summary.finished:
            shutil.rmtree(self._crew.peers_folder)
        return summary

    @property
    def interrupted(self) -> bool:
        return self._interrupts > 0

    # --- the children ---

    async def _start(self) -> None:
        self._options.folder.mkdir(parents=True, exist_ok=True)
        write_spec(self._options.spec, self._options.folder / "run.toml")
        for _ in range(self._options.peers):
            await self._crew.start()
        host, *others = self._crew.members
        await self._wait_for(lambda: bool(self._crew.invite) or not host.is_alive)
        if not self._crew.invite and not self.interrupted:
            raise LocalError(last_line(host.child.log).removeprefix("shoal: ") or f"the host ended: {host.child.log}")
        await self._crew.open_to_all()
        for member in others:
            await self._crew.let_in(member)

    async def _until_over(self) -> None:
        """Wait until the run is done, the time is over, the user interrupts, or no peer is left."""
        seconds_max = self._options.seconds_max
        left_s = None if seconds_max is None else max(0.0, self._started_s + seconds_max - time.monotonic())
        chaos = asyncio.create_task(self._upset(), name="chaos")
        try:
            async with asyncio.timeout(left_s):
                await self._wait_for(lambda: self._chronicle.record.finished or not self._crew.alive)
        except TimeoutError:
            pass
        finally:
            chaos.cancel()
            await asyncio.gather(chaos, return_exceptions=True)
            if not chaos.cancelled():
                chaos.result()
            self._watched_until_s = time.monotonic()

    async def _upset(self) -> None:
        """Cause faults after the first step. If the demo's time is limited, leave time for the last recovery."""
        options = self._options
        if options.chaos is None and not options.kills_holder:
            return
        await self._wait_for(lambda: self._chronicle.record.first is not None)
        if options.chaos is None:
            await kill_a_holder(self._crew, self._chronicle, is_time=self._is_half_over)
            return
        until_s = None
        if options.seconds_max is not None:
            until_s = self._started_s + options.seconds_max - time.monotonic() - options.chaos.kill_every_s
        await Chaos(self._crew, self._chronicle, options.chaos, until_s=until_s).run()

    def _is_half_over(self) -> bool:
        record, seconds_max = self._chronicle.record, self._options.seconds_max
        if seconds_max is not None and record.step_times_s:
            since_s = record.step_times_s[0]
            left_s = self._started_s + seconds_max - since_s
            if time.monotonic() >= since_s + left_s / 2:
                return True
        return 2 * record.steps_seen >= self._options.spec.training.steps

    async def _end(self) -> None:
        """Wait until all children have left. If the run is done, they leave by themselves; else ask them to leave."""
        self._chronicle.doing("leaving")
        # Ask also peers that have not joined, or that were started or resumed in the last 15 s: they would look for a
        # run that has ended.
        record = self._chronicle.record
        since_s = max([self._watched_until_s - 15.0, *record.step_times_s[:1]])
        lost = [m for m in self._crew.alive if not record.finished or not m.obeys or m.awake_since_s > since_s]
        self._crew.terminate(lost)
        if not await self._children.wait(timeout_s=_END_S):
            for member in self._crew.alive:
                self._chronicle.take_failure(member.name, f"did not leave in {_END_S:.0f} s and was killed")
                member.killed = True
        await self._children.close()
        self._chronicle.tell_steps(flush=True)

    async def _sample(self) -> tuple[str, str]:
        """Return (path of the whole model's snapshot, a text that the model generated); ("", "") if there is none."""
        folders = sorted(str(path) for path in self._crew.peers_folder.glob("*/*/snapshots/*"))
        if not folders or self.interrupted:
            return "", ""
        self._chronicle.doing("writing a sample")
        log = self._crew.logs / f"{_SAMPLER}.log"
        into = str(self._options.folder / "snapshot")
        argv = [sys.executable, "-m", "shoal.deploy.ship.sample", into, *folders]
        child = await self._children.start(_SAMPLER, argv, env=environment(), log=log)
        try:
            async with asyncio.timeout(90.0):
                await child.exited.wait()
        except TimeoutError:
            self._chronicle.note("no sample: it took too long")
            return "", ""
        if not self._sample_line:
            self._chronicle.note(f"no sample: {last_line(log)}")
            return "", ""
        sample: dict[str, str] = msgspec.json.decode(self._sample_line)
        return sample["snapshot"], sample["text"]

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.interrupted:
            self._changed.clear()
            await self._changed.wait()

    def _interrupt(self, main: "asyncio.Task[object]") -> None:
        self._interrupts += 1
        self._changed.set()
        if self._interrupts > 1:
            main.cancel()

    async def _measure_memory(self) -> None:
        peak = self._chronicle.record.rss_mb_max
        while True:
            for member in self._crew.alive:
                peak[member.name] = max(peak.get(member.name, 0.0), round(member.child.rss_bytes() / 1e6, 1))
            self._chronicle.tell_steps()  # a step may become overdue without a new report
            await asyncio.sleep(2.0)

    # --- what they say ---

    def _on_line(self, child: Child, line: bytes) -> None:
        if child.name == _SAMPLER:
            self._sample_line = line
            return
        report = read_report(line)
        if report is not None:
            if isinstance(report, Ready | Joined | Obeys):
                self._crew.take(self._crew.member_of(child), report)
            self._chronicle.take(child.name, report)
            self._changed.set()

    def _on_exit(self, child: Child, status: int) -> None:
        if child.name != _SAMPLER:
            member = self._crew.member_of(child)
            # A peer that is stopped before it has joined exits with an error status.
            if status != 0 and not self.interrupted and not member.killed and (member.peer or not member.dismissed):
                self._chronicle.take_failure(child.name, f"ended with status {status}: {last_line(child.log)}")
        self._changed.set()
