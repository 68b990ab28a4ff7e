"""Trains a base and fine-tunes it, each with a swarm of real peers, and evaluates both.

All steps between the two swarms are ordinary commands, run as children of this small process: `shoal export`, `import`,
`eval`. The base learns the sources of Python's library, the adapters its documentation in English; both are evaluated
on held-out parts of both texts.

Run by `make demo-tune`: a base of a million parameters, about ten minutes on two idle cores; with `ARGS=--long` one of
24 million, an hour and forty minutes. All files stay in the state folder, below `demo/`.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from shoal.deploy.base.children import CLI, Children, last_line
from shoal.deploy.commands.options import EXIT_INTERRUPTED, EXIT_USER_ERROR, check_writable, said_stages
from shoal.deploy.demo.crew import environment
from shoal.deploy.demo.driver import Demo, DemoOptions
from shoal.deploy.demo.summary import DemoSummary
from shoal.deploy.run.run_file import DEMO_SPEC, with_changes
from shoal.deploy.session.open_files import allow_open_files
from shoal.deploy.state import places
from shoal.deploy.terminal.screen import open_console, tell
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.layers import all_layer_keys
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import num_elements, state_elements
from shoal.protocol.toml.spec_file import load_spec
from two_corpora import TwoCorpora, write_two_corpora

LONG_SPEC: Final = Path(__file__).with_name("long.toml")
RANK: Final = 8
_STEPS_SHARE: Final = 2
"""The ratio of the base's steps to the adapters'."""


class TextLosses(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of one model on the two texts, in nats a byte."""

    code: float
    prose: float


class TuneSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The `--json` output."""

    parameters: int
    """Parameters of the base."""
    trained: int
    """Parameters of the adapters."""
    steps: int
    tune_steps: int
    before: TextLosses
    after: TextLosses
    base_seconds: float
    tune_seconds: float
    seconds: float
    model: str
    """The base as a folder for transformers."""
    adapters: str
    """A folder for peft."""
    snapshot: str


class Tuning:
    """Runs the whole demonstration. Args: options: of the base's demo; its text is replaced."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._folder = options.folder
        self._console = console
        self._lines: list[bytes] = []
        self._children = Children(on_line=lambda _, line: self._lines.append(line), on_exit=lambda *_: None)
        self._is_stopped = False

    async def run(self) -> TuneSummary | None:
        """Train the base, tune it, and evaluate both.

        Returns: losses and the models' folders; None: the user interrupted.
        Raises: LocalError: a command failed, with its own line, or a swarm ended before its last step.
        """
        try:
            return await self._run()
        except _Stopped:
            return None
        finally:
            await self._children.close()

    async def _run(self) -> TuneSummary:
        began_s = time.monotonic()
        corpora = await asyncio.to_thread(write_two_corpora, self._folder / "texts")
        spec = self._options.spec
        data = msgspec.structs.replace(spec.data, source=str(corpora.code), digest="")
        spec = msgspec.structs.replace(spec, data=data)
        numel = sum(sum(num_elements(spec.model, key)) for key in all_layer_keys(spec.model))
        self._say(f"1  a base of {numel:,} parameters learns Python's library, in {spec.training.steps} steps")
        base = await self._train(spec, self._folder / "base")

        model, toml, tuned = self._folder / "model", self._folder / "tune.toml", self._folder / "tune"
        await self._shoal("export", base.snapshot, model)
        wanted = self._folder / "wanted.toml"
        wanted.write_text(_wanted(spec))
        await self._shoal("import", model, toml, "--data", corpora.prose, "--lora", RANK, "--spec", wanted)
        adapted = load_spec(toml)
        trained = sum(state_elements(adapted, key) for key in all_layer_keys(adapted.model))
        steps = adapted.training.steps
        self._say(f"2  beside it {trained:,} parameters of adapters learn Python's documentation, in {steps} steps")
        tune = await self._train(adapted, tuned)

        self._say("3  both are evaluated, by `shoal eval`")
        adapters = self._folder / "adapters"
        await self._shoal("export", tune.snapshot, adapters)
        before, after = [await self._losses(where, corpora) for where in (str(model), tune.snapshot)]
        return TuneSummary(
            parameters=numel,
            trained=trained,
            steps=base.steps,
            tune_steps=tune.steps,
            before=before,
            after=after,
            base_seconds=round(base.seconds, 1),
            tune_seconds=round(tune.seconds, 1),
            seconds=round(time.monotonic() - began_s, 1),
            model=str(model),
            adapters=str(adapters),
            snapshot=tune.snapshot,
        )

    async def _train(self, spec: RunSpec, folder: Path) -> DemoSummary:
        demo = Demo(replace(self._options, spec=spec, folder=folder, json_path=None), self._console)
        summary = await demo.run()
        if demo.interrupted:
            raise _Stopped
        if not summary.finished or not summary.snapshot:
            raise LocalError(f"the swarm ended before its last step: look into {folder}/logs")
        return summary

    async def _losses(self, where: str, corpora: TwoCorpora) -> TextLosses:
        texts = [part for path in corpora.held_out for part in ("--text", path)]
        said = await self._shoal("eval", where, *texts, "--device", "cpu")
        code, prose = (score["loss"] for score in said["scores"])
        return TextLosses(code=code, prose=prose)

    async def _shoal(self, command: str, *arguments: object) -> dict[str, Any]:
        """Return the output of `shoal COMMAND … --json`. Raises: LocalError: it failed, with its own line."""
        for number in (signal.SIGINT, signal.SIGTERM):  # a demo in between has removed the handlers
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        self._lines.clear()
        log = self._folder / "logs" / f"{command}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = [*CLI, command, *map(str, arguments), "--json"]
        child = await self._children.start(command, argv, env=environment(), log=log)
        await child.exited.wait()
        if self._is_stopped:
            raise _Stopped
        if child.process.returncode != 0 or not self._lines:
            raise LocalError(last_line(log).removeprefix("shoal: ") or f"`shoal {command}` failed: look into {log}")
        said: dict[str, Any] = msgspec.json.decode(self._lines[-1])
        return said

    def _stop(self) -> None:
        self._is_stopped = True
        self._children.terminate()

    def _say(self, text: str) -> None:
        tell(self._console, f"\n{text}", style="bold")


class _Stopped(Exception):
    pass


def _wanted(spec: RunSpec) -> str:
    """Return the settings of the second run: like the first, but shorter. The learning rate follows from the length."""
    training, swarm = spec.training, spec.swarm
    stages = f'"{swarm.stages}"' if isinstance(swarm.stages, str) else swarm.stages
    lines = [
        f'name = "{spec.name[:50]}-tuned"',
        f"seed = {spec.seed}",
        "[model]",
        f"num_layers = {spec.model.num_layers}",
        "[optimizer]",
        'name = "adamw"',
        "weight_decay = 0.0",
        "[training]",
        f"steps = {max(1, training.steps // _STEPS_SHARE)}",
        f"microbatches_per_step = {training.microbatches_per_step}",
        f"microbatch_size = {training.microbatch_size}",
        f"s_max = {training.s_max}",
        f"validation_interval_steps = {training.validation_interval_steps}",
        f"validation_microbatches = {training.validation_microbatches}",
        "[swarm]",
        f"stages = {stages}",
        f"min_peers = {swarm.min_peers}",
        f"heartbeat_s = {swarm.heartbeat_s}",
        f"term_s = {swarm.term_s}",
        f"snapshot_interval_steps = {swarm.snapshot_interval_steps}",
    ]
    return "\n".join(lines) + "\n"


def tune_lines(summary: TuneSummary) -> Sequence[str]:
    """Return lines about losses before and after, and the models' folders."""
    before, after = summary.before, summary.after
    rows = [("nats a byte", "base", "fine-tuned")]
    for text, first, second in (
        ("library sources", before.code, after.code),
        ("documentation", before.prose, after.prose),
    ):
        rows.append((text, f"{first:.3f}", f"{second:.3f}"))
    return [
        *(f"{text:<16} {first:>10} {second:>12}" for text, first, second in rows),
        "",
        f"{summary.base_seconds:.0f} s for the base, {summary.tune_seconds:.0f} s for the adapters, "
        f"{summary.seconds:.0f} s in all",
        f"base      {summary.model}  # a folder for transformers",
        f"adapters  {summary.adapters}  # a folder for peft",
    ]


def options_of(asked: argparse.Namespace) -> DemoOptions:
    """Return the options of the base's demo. Raises: LocalError."""
    if asked.json is not None:
        check_writable(asked.json)
    base = load_spec(asked.spec or (LONG_SPEC if asked.long else DEMO_SPEC))
    changes: dict[str, object] = {"seed": asked.seed, "swarm.min_peers": asked.peers}
    if asked.stages:
        changes["swarm.stages"] = said_stages(asked.stages)
    if asked.steps:
        changes["training.steps"] = asked.steps
        changes["optimizer.warmup_steps"] = min(base.optimizer.warmup_steps, asked.steps)
    folder = places.state_root() / "demo" / time.strftime("%Y-%m-%d-%H%M%S")
    return DemoOptions(spec=with_changes(base, changes), peers=asked.peers, folder=places.claim_folder(folder).path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="a base of 24 million parameters")
    parser.add_argument("--spec", type=Path, help="the base's run spec")
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--stages", default="", metavar="N|auto")
    parser.add_argument("--steps", type=int, help="of the base; the adapters take half as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    asked = parser.parse_args()
    allow_open_files()
    console = open_console()
    try:
        options = options_of(asked)
        summary = asyncio.run(Tuning(options, console).run())
    except ShoalError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    if summary is None:
        tell(console, f"stopped; all files so far are in {options.folder}")
        return EXIT_INTERRUPTED
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.encode(summary) + b"\n")
    for line in tune_lines(summary):
        tell(console, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
