"""What volunteers would use instead: shoal, hivemind's Optimizer and one machine alone, one after the other on the same
emulated internet, with the same model, text and tokens a step, from the moment when everybody has an invitation.

    peers.py                                  # six homes of a quarter of a core each, 18 M parameters, ten minutes each
    peers.py --model 1m --seconds 300         # 1.17 M parameters and four times the tokens a step
    peers.py --cores 0                        # no quotas: the six share what this machine has
    peers.py --only shoal alone --pin 3       # shoal with three stages that never change
    peers.py --joining                        # hivemind's peers fetch the weights from the first, as people's would

Root only: the homes are those of `tests/lab/scenarios/homes-18m.toml`, network namespaces with a control group each.
All programs have read the text and imported what they need before the invitation. hivemind's peers begin at the same
moment with equal weights, its best case: the first one waits for the others.

tokens/s     steps that everybody counts, by the tokens of a step and the time from the invitation on
first step   of the swarm; below, of each member: the first step for which it has computed
standstills  gaps of more than three times the median one, the time until the end among them, and their seconds
loss         of the last step, in nats a token. hivemind's: of its members' last steps, each with its own samples
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
import real
from cpu_groups import NoQuota
from figures import Step, kept
from internet.emulator import Refused, why_not
from scenario import Scenario, find_scenario, with_pin
from shoal.deploy.base.children import Child, Children, last_line
from shoal.deploy.demo.crew import environment
from shoal.deploy.run.run_file import write_spec
from shoal.protocol.errors import LocalError

CONTENDERS = ("shoal", "hivemind", "alone")
TRAINER = Path(__file__).with_name("hivemind_trainer.py")
_STILL_TIMES = 3.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one of them did. Seconds are those since the invitation."""

    contender: str
    seconds: float
    tokens_per_step: int
    step_at_s: tuple[float, ...]
    first_step_s: dict[str, float | None]
    """By host; None: it has made none."""
    loss: float | None
    machine_busy: float
    """The part of this machine's processor time that was used, whoever used it."""
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return len(self.step_at_s) * self.tokens_per_step / self.seconds

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.step_at_s, self.step_at_s[1:], strict=False)]

    @property
    def standstills_s(self) -> list[float]:
        """The gaps in which it stood still, the last one until the end."""
        if not self.gaps_s:
            return []
        most_s = _STILL_TIMES * statistics.median(self.gaps_s)
        return [gap_s for gap_s in (*self.gaps_s, self.seconds - self.step_at_s[-1]) if gap_s > most_s]


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each, then one for the members of each."""
    columns: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
        ("", lambda o: o.contender),
        ("tokens/s", lambda o: f"{o.tokens_per_s:.0f}"),
        ("steps", lambda o: f"{len(o.step_at_s)}"),
        ("first step", lambda o: _shown(next(iter(o.step_at_s), None), " s")),
        ("median step", lambda o: _shown(statistics.median(o.gaps_s) if o.gaps_s else None, " s")),
        ("standstills", lambda o: f"{len(o.standstills_s)}, {sum(o.standstills_s):.0f} s"),
        ("loss", lambda o: "-" if o.loss is None else f"{o.loss:.3f}"),
        ("machine busy", lambda o: f"{100 * o.machine_busy:.0f} %"),
    )
    lines = ["".join(f"{name:<10}" if not name else f"{name:>14}" for name, _ in columns)]
    for outcome in outcomes:
        cells = [value(outcome) for _, value in columns]
        lines.append("".join(f"{cell:<10}" if not at else f"{cell:>14}" for at, cell in enumerate(cells)))
    lines.append("first step of each member")
    for outcome in outcomes:
        firsts = ", ".join(f"{host} {_shown(at_s, ' s')}" for host, at_s in outcome.first_step_s.items())
        lines.append(f"{outcome.contender:<10}  {firsts}")
    first, *others = outcomes
    lines += [
        f"{first.contender} / {other.contender}: {first.tokens_per_s / other.tokens_per_s:.2f}"
        for other in others
        if first.contender == CONTENDERS[0] and other.tokens_per_s
    ]
    lines += [f"{outcome.contender}: {what}" for outcome in outcomes for what in (*outcome.notes, *outcome.problems)]
    return "\n".join(lines)


def _shown(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.1f}{unit}"


# --- shoal ---


async def play_shoal(scenario: Scenario, seconds: float, folder: Path) -> Outcome:
    async with real.live_swarm(scenario, folder) as swarm:
        began_s = time.monotonic()
        try:
            await real.until_host_is_up(swarm)
        except real.NoSwarm as error:
            swarm.problems.append(str(error))
        used = real.MachineTime()
        if not swarm.problems:
            began_s = time.monotonic()
            for host in scenario.hosts[1:]:
                await swarm.let_in(swarm.peers[host.name])
            await asyncio.sleep(seconds)
            swarm.tell_steps(time.monotonic())
        steps = [step for step in kept(swarm.steps) if step.at_s <= began_s + seconds]
        outcome = Outcome(
            contender="shoal",
            seconds=seconds,
            tokens_per_step=scenario.spec.tokens_per_step,
            step_at_s=tuple(step.at_s - began_s for step in steps),
            first_step_s={
                name: None if peer.stepped_s is None else peer.stepped_s - began_s for name, peer in swarm.peers.items()
            },
            loss=next((step.loss for step in reversed(steps) if step.loss is not None), None),
            machine_busy=used.share(),
            notes=tuple(f"layout {layout}" for layout in swarm.layouts),
            problems=(*swarm.problems, *swarm.false_deaths),
        )
        await swarm.end()
    return outcome


# --- hivemind, and one machine alone ---


@dataclass(slots=True, kw_only=True, eq=False)
class _Trainer:
    child: Child
    is_up: bool = False
    address: str = ""
    steps: list[tuple[int, Step, int]] = field(default_factory=list)
    """(number of the step, when and with what loss, members)."""
    fetched_s: list[float] = field(default_factory=list)
    """How long each loading of somebody's state took."""


class _Trainers:
    """The trainers of one scenario, and what they say."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.all: dict[str, _Trainer] = {}
        self.problems: list[str] = []
        self.children = Children(on_line=self._on_line, on_exit=self._on_exit)
        self._scenario, self._folder = scenario, folder
        self._changed = asyncio.Event()
        self._closes = False
        write_spec(scenario.spec, folder / "run.toml")

    async def start(self, host: str, inside: Sequence[str], words: Sequence[str]) -> None:
        argv = [*inside, sys.executable, str(TRAINER), "--run", str(self._folder / "run.toml"), *words]
        child = await self.children.start(host, argv, env=environment(), log=self._folder / f"{host}.log")
        self.all[host] = _Trainer(child=child)

    async def say(self, host: str, line: str = "") -> None:
        stdin = self.all[host].child.process.stdin
        assert stdin is not None
        with contextlib.suppress(ConnectionError):  # `_on_exit` says it
            stdin.write(f"{line}\n".encode())
            await stdin.drain()

    async def until(self, condition: Callable[[_Trainer], object], *hosts: str, what: str, patience_s: float) -> None:
        """Wait until that is so of these hosts. Raises: real.NoSwarm."""
        try:
            async with asyncio.timeout(patience_s):
                while not all(condition(self.all[host]) for host in hosts):
                    if self.problems:
                        raise real.NoSwarm(what)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise real.NoSwarm(f"{what} after {patience_s:.0f} s") from None

    async def close(self) -> None:
        """End them by their ids, with all that they started, and remove their sockets."""
        self._closes = True
        sockets = await asyncio.to_thread(self._sockets)
        await self.children.close()
        for socket in sockets:
            socket.unlink(missing_ok=True)

    def _sockets(self) -> set[Path]:
        """The files in the temporary folder on which somebody in a namespace of the trainers' listens."""
        found = set[str]()
        for trainer in self.all.values():
            with contextlib.suppress(OSError):
                process = Path(f"/proc/{trainer.child.process.pid}")
                if (process / "ns/net").readlink() != Path("/proc/self/ns/net").readlink():
                    found |= {*(process / "net/unix").read_text().split()}
        return {Path(word) for word in found if Path(word).name.startswith("hivemind-p2p")}

    def _on_line(self, child: Child, line: bytes) -> None:
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:
            return  # a library printed something
        trainer = self.all[child.name]
        match said["event"]:
            case "up":
                trainer.is_up = True
            case "here":
                trainer.address = said["address"]
            case "step":
                step = Step(said["step"], time.monotonic(), said["loss"])
                trainer.steps.append((said["step"], step, said["members"]))
            case "fetched":
                trainer.fetched_s.append(said["seconds"])
        self._changed.set()

    def _on_exit(self, child: Child, status: int) -> None:
        if self._closes:
            return
        self.problems.append(f"{child.name} ended with status {status}: {last_line(child.log)}")
        self._changed.set()


async def play_alone(scenario: Scenario, seconds: float, folder: Path) -> Outcome:
    """On the machine of the run's host."""
    name, trainers = scenario.hosts[0].name, _Trainers(scenario, folder)
    async with real.world_of(scenario) as (internet, groups):
        try:
            await trainers.start(name, [*groups.inside(name), *internet.inside(name)], ["--alone"])
            used, began_s = real.MachineTime(), time.monotonic()
            try:
                await trainers.until(lambda one: one.is_up, name, what="it is not up", patience_s=scenario.file.waits_s)
                used, began_s = real.MachineTime(), time.monotonic()
                await trainers.say(name)
                await asyncio.sleep(seconds)
            except real.NoSwarm as error:
                trainers.problems.append(str(error))
            return _outcome("alone", trainers, scenario, seconds, began_s, used)
        finally:
            await trainers.close()


async def play_hivemind(scenario: Scenario, seconds: float, folder: Path, *, joining: bool) -> Outcome:
    names, trainers = [host.name for host in scenario.hosts], _Trainers(scenario, folder)
    first, *others = names
    async with real.world_of(scenario) as (internet, groups):
        try:
            for number, name in enumerate(names):
                inside = [*groups.inside(name), *internet.inside(name)]
                how = [] if joining else ["--together"]
                await trainers.start(name, inside, ["--member", str(number), *how])
            used, began_s = real.MachineTime(), time.monotonic()
            patience_s = scenario.file.waits_s
            try:
                await trainers.until(lambda one: one.is_up, *names, what="not everybody is up", patience_s=patience_s)
                await trainers.say(first)
                await trainers.until(lambda one: one.address, first, what="the first is not up", patience_s=patience_s)
                used, began_s = real.MachineTime(), time.monotonic()
                for name in others:
                    await trainers.say(name, trainers.all[first].address)
                if not joining:
                    await trainers.until(
                        lambda one: one.address, *others, what="not everybody is here", patience_s=seconds
                    )
                    for name in names:
                        await trainers.say(name)
                await asyncio.sleep(began_s + seconds - time.monotonic())
            except real.NoSwarm as error:
                trainers.problems.append(str(error))
            return _outcome("hivemind", trainers, scenario, seconds, began_s, used)
        finally:
            await trainers.close()


def _outcome(
    contender: str, trainers: _Trainers, scenario: Scenario, seconds: float, began_s: float, used: real.MachineTime
) -> Outcome:
    """A step counts once, when the first member says that it has made it."""
    steps: dict[int, float] = {}
    members: dict[int, int] = {}
    for trainer in trainers.all.values():
        for number, step, num_members in trainer.steps:
            at_s = step.at_s - began_s
            if at_s <= seconds:
                steps[number] = min(at_s, steps.get(number, at_s))
                members[number] = max(num_members, members.get(number, 1))
    last = [trainer.steps[-1][1].loss for trainer in trainers.all.values() if trainer.steps]
    losses = [loss for loss in last if loss is not None]
    notes = []
    if contender == "hivemind":
        shown = ", ".join(f"{members[number]}" for number in sorted(members))
        notes.append(f"members whose gradients were averaged, by step: {shown or 'none'}")
        notes += [
            f"{name} loaded somebody's state {len(trainer.fetched_s)} times, {sum(trainer.fetched_s):.0f} s"
            for name, trainer in trainers.all.items()
            if trainer.fetched_s
        ]
    return Outcome(
        contender=contender,
        seconds=seconds,
        tokens_per_step=scenario.spec.tokens_per_step,
        step_at_s=tuple(sorted(steps.values())),
        first_step_s={
            name: trainer.steps[0][1].at_s - began_s if trainer.steps else None
            for name, trainer in trainers.all.items()
        },
        loss=statistics.mean(losses) if losses else None,
        machine_busy=used.share(),
        notes=tuple(notes),
        problems=tuple(trainers.problems),
    )


# --- all of them ---


async def play(contender: str, scenario: Scenario, seconds: float, *, joining: bool, keep: Path | None) -> Outcome:
    """Args: keep: the folder to which logs go. Raises: Refused, NoQuota, OSError: there can be no such homes here."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="shoal-peers-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            if contender == "shoal":
                return await play_shoal(scenario, seconds, folder)
            if contender == "hivemind":
                return await play_hivemind(scenario, seconds, folder, joining=joining)
            return await play_alone(scenario, seconds, folder)
        finally:
            await asyncio.to_thread(_keep, folder, contender, keep)


def _keep(folder: Path, contender: str, keep: Path | None) -> None:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            shutil.copy(log, keep / f"{contender}-{log.name}")


def homes(model: str, cores: float) -> Scenario:
    """The six homes. Args: model: as `--model`; cores: of each home, 0: no quota."""
    scenario = find_scenario(f"homes-{model}")
    hosts = tuple(msgspec.structs.replace(host, cores=cores or None) for host in scenario.hosts)
    return msgspec.structs.replace(scenario, file=msgspec.structs.replace(scenario.file, hosts=hosts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each, from the invitation on")
    parser.add_argument("--model", choices=("1m", "18m"), default="18m")
    parser.add_argument("--cores", type=float, default=0.25, help="of each home; 0: no quota")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--pin", type=int, metavar="STAGES", help="shoal's first layout stays, with so many stages")
    parser.add_argument("--joining", action="store_true", help="hivemind's peers fetch the weights from the first")
    parser.add_argument("--json", type=Path, help="append a line for each of them to this file")
    parser.add_argument("--logs", type=Path, help="keep their logs in this folder")
    options = parser.parse_args()
    if why := why_not():
        parser.error(why)
    scenario = homes(options.model, options.cores)
    try:
        pinned = scenario if options.pin is None else with_pin(scenario, options.pin)
    except LocalError as error:
        parser.error(str(error))
    tokens = scenario.spec.tokens_per_step
    limit = f"{options.cores:g} of a core each" if options.cores else "no quota"
    print(f"six homes, {limit}: {tokens:,} tokens a step, {options.seconds:g} s from the invitation on", flush=True)
    outcomes = []
    for contender in (name for name in CONTENDERS if name in options.only):
        played = pinned if contender == "shoal" else scenario
        try:
            outcome = asyncio.run(play(contender, played, options.seconds, joining=options.joining, keep=options.logs))
        except (NoQuota, Refused) as error:
            raise SystemExit(str(error)) from error
        outcomes.append(outcome)
        if options.json is not None:
            with options.json.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
