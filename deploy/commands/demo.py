"""`shoal demo`: trains with a swarm of real peers on this machine."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy.commands.options import (
    EXIT_INTERRUPTED,
    Dashboard,
    check_writable,
    data_source,
    examples,
    said_parts,
    said_stages,
)
from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.run.run_file import DEMO_SPEC, MOE_SPEC, with_changes
from shoal.deploy.state import places
from shoal.deploy.terminal.screen import open_console, tell
from shoal.protocol.errors import LocalError
from shoal.protocol.toml.spec_file import load_spec


@examples(
    "shoal demo  # six peers, three stages, until the run is done",
    "shoal demo --peers 4 --stages 2 --steps 50  # smaller and faster",
    "shoal demo --chaos --seconds 300  # kill a peer every 15 s and watch the swarm recover",
    "shoal demo --moe  # eight experts a layer on six peers, of which one with the busiest expert is killed",
    "shoal demo --stages auto --parts 1,1,2,2,4,4  # unequal devices, among which the coordinator divides the layers",
    "shoal demo --dashboard  # and open http://127.0.0.1:8640/ to see it",
    "shoal demo --data ~/notes --json demo.jsonl  # your own text, and a line a step to a file",
)
def demo(
    peers: Annotated[
        int | None, typer.Option(min=1, help="Number of peer processes. Default: 6; with --chaos: 8.")
    ] = None,
    stages: Annotated[
        str,
        typer.Option(
            metavar="N|auto", help="Largest number of pipeline stages. Default: the run spec's; 3 in the demo's own."
        ),
    ] = "",
    parts: Annotated[
        str,
        typer.Option(
            metavar="A,B,…", help="Divide the cores among the peers in these shares. Default: the system divides them."
        ),
    ] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps. Default: the run spec's.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after this many seconds, finished or not.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write a line for each step and a final summary to this file, as JSON.")
    ] = None,
    data: Annotated[str, typer.Option(help="Train on this text file or folder, not on Python's own library.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Determines the initial weights and the order of the data.")] = 0,
    spec: Annotated[Path | None, typer.Option(help="Use this run spec, not the demo's own.")] = None,
    keep: Annotated[bool, typer.Option(help="Keep the peers' folders, not just the final snapshot and logs.")] = False,
    moe: Annotated[
        bool,
        typer.Option("--moe", help="Train a mixture of experts, and half-way kill a peer that holds the busiest one."),
    ] = False,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill, replace and suspend peers while they train.")] = False,
    chaos_seed: Annotated[
        int, typer.Option(min=0, help="Determines the faults, their times and the peers they hit.")
    ] = 0,
    kill_every: Annotated[float, typer.Option(min=0.1, help="Seconds between one killed peer and the next.")] = 15.0,
    suspend_for: Annotated[float, typer.Option(min=0.1, help="Seconds for which a peer is stopped.")] = 20.0,
    dashboard: Dashboard = None,
) -> None:
    """Train with a swarm of real peers on this machine, and show it."""
    from shoal.deploy.demo.chaos import ChaosOptions
    from shoal.deploy.demo.driver import Demo, DemoOptions
    from shoal.deploy.demo.summary import summary_lines
    from shoal.deploy.session.open_files import allow_open_files

    peers = peers or (8 if chaos else 6)
    changes: dict[str, object] = {"seed": seed, "swarm.min_peers": peers}
    base = load_spec(spec or (MOE_SPEC if moe else DEMO_SPEC))
    if moe and not base.swarm.expert_slots:
        raise LocalError(f"--moe needs a run with swarm.expert_slots; {spec} has none")
    if stages:
        changes["swarm.stages"] = said_stages(stages)
    if steps is not None:
        changes["training.steps"] = steps
        changes["optimizer.warmup_steps"] = min(base.optimizer.warmup_steps, steps)
    if data:
        changes["data.source"] = data_source(data)
    if json is not None:
        check_writable(json)
    allow_open_files()
    folder = places.state_root() / "demo" / time.strftime("%Y-%m-%d-%H%M%S")
    chosen = DemoOptions(
        spec=with_changes(base, changes),
        peers=peers,
        parts=said_parts(parts) if parts else None,
        folder=places.claim_folder(folder).path,
        seconds_max=seconds,
        json_path=json,
        keep=keep,
        dashboard=parse_address(dashboard) if dashboard else None,
        kills_holder=moe,
        chaos=ChaosOptions(seed=chaos_seed, kill_every_s=kill_every, suspend_s=suspend_for) if chaos else None,
    )
    console = open_console()

    async def run() -> bool:
        swarm = Demo(chosen, console)
        unit = "byte" if base.data.tokenizer == "bytes" else "token"
        for label, text in summary_lines(await swarm.run(), unit=unit):
            tell(console, f"{label:<12} {text}" if label else text)
        return swarm.interrupted

    if asyncio.run(run()):
        raise typer.Exit(EXIT_INTERRUPTED)
