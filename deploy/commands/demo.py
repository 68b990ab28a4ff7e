"""`shoal demo`: a swarm of real peers on this machine."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.deploy import places
from shoal.deploy.commands.options import EXIT_INTERRUPTED, Dashboard, examples
from shoal.deploy.dashboard.address import parse_address
from shoal.protocol.spec import load_spec

DEMO_PEERS = 6
CHAOS_PEERS = 8


@examples(
    "shoal demo  # six peers, three stages, until the run is done",
    "shoal demo --peers 4 --stages 2 --steps 50  # smaller and sooner",
    "shoal demo --chaos --seconds 300  # kill a peer every 15 s and watch it mend",
    "shoal demo --dashboard  # and open http://127.0.0.1:8640/ to see it",
    "shoal demo --data ~/notes --json demo.jsonl  # your own text, and a line a step to a file",
)
def demo(
    peers: Annotated[int | None, typer.Option(min=1, help="Peer processes. Default: 6; with --chaos 8.")] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages. Default: the spec's, 3 of the demo.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the run. Default: the demo's.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after this long, finished or not.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write a line a step and a final summary, as JSON.")] = None,
    data: Annotated[str, typer.Option(help="A text file or folder instead of Python's own library.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Decides initial weights and the order of the data.")] = 0,
    spec: Annotated[Path | None, typer.Option(help="A run spec instead of the demo's own.")] = None,
    keep: Annotated[bool, typer.Option(help="Keep the peers' folders, not only the final snapshot and logs.")] = False,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill, replace and suspend peers while they train.")] = False,
    chaos_seed: Annotated[int, typer.Option(min=0, help="Decides when which fault comes, and whom it meets.")] = 0,
    kill_every: Annotated[float, typer.Option(min=0.1, help="Seconds from one killed peer to the next.")] = 15.0,
    suspend_for: Annotated[float, typer.Option(min=0.1, help="Seconds that one peer is stopped for.")] = 20.0,
    dashboard: Dashboard = None,
) -> None:
    """Train with a swarm of real peers on this machine, and show it."""
    from shoal.deploy.demo.chaos import ChaosOptions
    from shoal.deploy.demo.driver import Demo, DemoOptions
    from shoal.deploy.run_file import DEMO_SPEC, with_changes

    peers = peers or (CHAOS_PEERS if chaos else DEMO_PEERS)
    changes: dict[str, object] = {"seed": seed, "swarm.min_peers": peers}
    base = load_spec(spec or DEMO_SPEC)
    if stages is not None:
        changes["swarm.stages"] = stages
    if steps is not None:
        changes["training.steps"] = steps
        changes["optimizer.warmup_steps"] = min(base.optimizer.warmup_steps, steps)
    if data:
        changes["data.source"] = data if data.startswith("hf:") else str(Path(data).expanduser().resolve())
    folder = places.state_root() / "demo" / time.strftime("%Y-%m-%d-%H%M%S")
    chosen = DemoOptions(
        spec=with_changes(base, changes),
        peers=peers,
        folder=places.claim_folder(folder).path,
        seconds_max=seconds,
        json_path=json,
        keep=keep,
        dashboard=parse_address(dashboard) if dashboard else None,
        chaos=ChaosOptions(seed=chaos_seed, kill_every_s=kill_every, suspend_s=suspend_for) if chaos else None,
    )
    console = Console(highlight=False)

    async def run() -> bool:
        swarm = Demo(chosen, console)
        _print_summary(console, await swarm.run(), unit="byte" if base.data.tokenizer == "bytes" else "token")
        return swarm.interrupted

    if asyncio.run(run()):
        raise typer.Exit(EXIT_INTERRUPTED)


def _print_summary(console: Console, summary: Any, *, unit: str) -> None:
    from shoal.deploy.live_view import printable

    def say(label: str, text: str) -> None:
        console.print(f"{label:<12} {text}", markup=False, soft_wrap=True)

    def loss(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    say("steps", f"{summary.steps} in {summary.seconds:.0f} s, {summary.tokens_per_s:,.0f} tokens/s")
    say("loss", f"{loss(summary.loss_first)} -> {loss(summary.loss_last)} nats a {unit}, val {loss(summary.val_loss)}")
    say("staleness", f"{summary.staleness_mean:.2f} steps, {summary.coordinator_terms} coordinator terms")
    say(
        "ledger",
        f"{summary.duplicates} microbatches twice ({summary.duplicates_share:.2%}), {summary.given_up} given up, "
        f"{summary.dissenting} members dissented; longest wait for a step {summary.stall_s_max:.1f} s",
    )
    if summary.eras:
        say("snapshots", f"the run went back to one {summary.eras} times")
    if summary.chaos:
        chaos = summary.chaos
        median = "-" if chaos.recovery_s_median is None else f"{chaos.recovery_s_median:.1f} s"
        say(
            "chaos",
            f"{chaos.kills} peers killed, {chaos.coordinator_kills} coordinating, {chaos.suspensions} suspended; "
            f"full pace again after {median} (median of {len(chaos.recovery_s)}, never after {chaos.unrecovered})",
        )
    if summary.failed:
        say("failed", f"{summary.failed} peers came to a bad end by themselves")
    if summary.rss_mb_max:
        say("memory", f"at most {max(summary.rss_mb_max.values()):.0f} MB a peer")
    if summary.snapshot:
        say("snapshot", summary.snapshot)
        say("sample", "")
        for line in summary.sample.splitlines():  # an untrained model writes any byte, the terminal's commands too
            console.print(printable(line), markup=False, soft_wrap=True)
    say("logs", f"{summary.folder}/logs")
