"""The `shoal` command: each command is a thin function, heavy imports wait until one needs them.

`shoal status`, `--version` and the parent of `shoal demo` never import torch.
"""

import asyncio
import importlib.metadata
import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from shoal.deploy import places
from shoal.deploy.simulate.command import simulate
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.invite import Invite, parse_invite
from shoal.protocol.spec import load_spec

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
DEMO_PEERS = 6
CHAOS_PEERS = 8
_DEFAULT_LISTEN = "0.0.0.0:0"


class _Group(TyperGroup):
    """Ends every command that fails for a reason we know with one line and no traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except ShoalError as error:
            typer.echo(f"shoal: {error}", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from error
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Strangers lend spare GPUs to one training run.",
)

Listen = Annotated[str, typer.Option(help="HOST:PORT, :PORT or a multiaddr; port 0 lets the system choose.")]
StateDir = Annotated[
    Path | None, typer.Option(help="Where identity, plans and snapshots are kept. Default: below the user's state.")
]
Threads = Annotated[int, typer.Option(min=0, help="Torch's threads; 0: its own choice.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto is the first GPU, or the CPU without one.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to standard error.")]
Reports = Annotated[bool, typer.Option("--reports", hidden=True, help="Report to a parent process as JSON lines.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {importlib.metadata.version('shoal')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    peers: Annotated[int | None, typer.Option(min=1, help="Peer processes. Default: 6; with --chaos 8.")] = None,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 3,
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
) -> None:
    """Train with a swarm of real peers on this machine, and show it."""
    from shoal.deploy.chaos import ChaosOptions
    from shoal.deploy.demo import Demo, DemoOptions
    from shoal.deploy.run_file import DEMO_SPEC, with_changes

    peers = peers or (CHAOS_PEERS if chaos else DEMO_PEERS)
    changes: dict[str, object] = {"seed": seed, "swarm.stages": stages, "swarm.min_peers": peers}
    base = load_spec(spec or DEMO_SPEC)
    if steps is not None:
        changes["training.steps"] = steps
        changes["optimizer.warmup_steps"] = min(base.optimizer.warmup_steps, steps)
    if data:
        changes["data.source"] = data = str(Path(data).expanduser().resolve())
    folder = places.state_root() / "demo" / time.strftime("%Y-%m-%d-%H%M%S")
    chosen = DemoOptions(
        spec=with_changes(base, changes),
        peers=peers,
        folder=places.claim_folder(folder).path,
        seconds_max=seconds,
        json_path=json,
        data=data,
        keep=keep,
        chaos=ChaosOptions(seed=chaos_seed, kill_every_s=kill_every, suspend_s=suspend_for) if chaos else None,
    )
    console = Console(highlight=False)

    async def run() -> bool:
        swarm = Demo(chosen, console)
        _print_summary(console, await swarm.run())
        return swarm.interrupted

    if asyncio.run(run()):
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def host(
    run_toml: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run spec (protocol/spec.py).")],
    name: Annotated[str, typer.Option(help="What others see.")] = "host",
    listen: Listen = _DEFAULT_LISTEN,
    state_dir: StateDir = None,
    threads: Threads = 0,
    device: Device = "auto",
    verbose: Verbose = False,
    reports: Reports = False,
) -> None:
    """Start a run: print an invite, and take part."""
    spec = load_spec(run_toml)
    _start_logging(verbose or reports)
    from shoal.deploy.session import Options, host_run, listen_addresses, load_own_corpus, pick_device
    from shoal.protocol.live.run import run

    spec, corpus = load_own_corpus(spec)
    folder = places.claim_folder(state_dir or places.state_root() / "hosts" / _file_name(spec.name))
    chosen = Options(
        name=name,
        folder=folder.path,
        listen=listen_addresses(listen),
        threads=threads,
        device=pick_device(device),
        reports=reports,
    )
    run(host_run(spec, corpus, chosen))


@app.command()
def join(
    invite: Annotated[str, typer.Argument(help="What the host printed; - reads it from standard input.")],
    name: Annotated[str, typer.Option(help="What others see.")] = "volunteer",
    listen: Listen = _DEFAULT_LISTEN,
    state_dir: StateDir = None,
    data: Annotated[str, typer.Option(help="Where the run's text is on this machine.")] = "",
    threads: Threads = 0,
    device: Device = "auto",
    verbose: Verbose = False,
    reports: Reports = False,
) -> None:
    """Take part in a run."""
    found = parse_invite(invite) if invite != "-" else None
    _start_logging(verbose or reports)
    from shoal.deploy.session import Options, join_run, listen_addresses, pick_device
    from shoal.protocol.live.run import run

    if found is None:  # after the imports: a parent starts us before it has the invite
        found = parse_invite(sys.stdin.readline())
    addresses = listen_addresses(listen)
    parent = places.state_root() / "runs" / found.run
    folder = places.claim_folder(state_dir) if state_dir else places.claim_first_free(parent, "peer")
    chosen = Options(
        name=name,
        folder=folder.path,
        listen=addresses,
        threads=threads,
        device=pick_device(device),
        reports=reports,
        data=data,
    )
    run(join_run(found, chosen))


app.command()(simulate)


@app.command()
def plan(
    network: Annotated[str, typer.Argument(metavar="NETWORK.json", help="A network file, or a scenario.")],
    objective: Annotated[str, typer.Option(help="throughput, or dtfm for the DT-FM paper's.")] = "throughput",
    seconds: Annotated[float, typer.Option(min=0.001, help="How long to search, of one core.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same plan.")] = 0,
    stages: Annotated[int | None, typer.Option(min=1, help="Default: the file's, else what is best.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="All layouts, in a table.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Say who should hold which layers, and what that costs."""
    from shoal.deploy.plan_command import show_plan

    show_plan(network, objective, seconds=seconds, seed=seed, stages=stages, compare=compare, as_json=json)


@app.command()
def status(
    invite: Annotated[str | None, typer.Argument(help="Default: the run that was last started here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Show who holds what, how fast, and with what loss."""
    found = parse_invite(invite) if invite else _running_invite()
    _start_logging(verbose)
    from shoal.deploy.live_view import stage_table, status_lines
    from shoal.deploy.status_client import ask_swarm
    from shoal.protocol.live.run import run

    seen = run(ask_swarm(found))
    if json:
        import msgspec

        typer.echo(msgspec.json.encode(seen).decode())
        return
    console = Console(highlight=False)
    for line in status_lines(seen):
        console.print(line, markup=False)
    console.print(stage_table(seen))


@app.command()
def recover(
    invite: Annotated[str | None, typer.Argument(help="Default: the run that was last started here.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="The host's folder, where the owner's key is.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Say what was found and done as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Let a run go on that has lost half of its peers or more for good. Needs the key of the run's owner."""
    found = parse_invite(invite) if invite else _running_invite()
    _start_logging(verbose)
    from shoal.deploy.recover import find_owner, recovery
    from shoal.deploy.recover_view import WARNING, as_json, headline, outcome, situation_table
    from shoal.protocol.live.run import run

    hosts = [state_dir] if state_dir else sorted((places.state_root() / "hosts").glob("*"))
    owner, folder = find_owner(found, hosts)

    async def look() -> Any:
        async with recovery(found) as session:
            return await session.look()

    async def reset() -> Any:
        async with recovery(found) as session:
            now = await session.look()  # it may have changed while the user thought about it
            return now, await session.reset(now, owner, folder)

    situation = run(look())
    console = Console(highlight=False, stderr=json)
    console.print(headline(situation), markup=False)
    console.print(situation_table(situation))
    if not yes:
        console.print(WARNING, markup=False)
        typer.confirm("Go on without them?", abort=True, err=json)
    situation, recovered = run(reset())
    if json:
        import msgspec

        typer.echo(msgspec.json.encode(as_json(situation, recovered)).decode())
        return
    console.print(outcome(recovered, situation), markup=False, soft_wrap=True)


def _running_invite() -> Invite:
    note = places.last_running()
    if note is None:
        raise LocalError("no run is up on this machine: give its invite, as in `shoal status INVITE`")
    return parse_invite(note.invite)


def _print_summary(console: Console, summary: Any) -> None:
    from shoal.deploy.live_view import printable

    def say(label: str, text: str) -> None:
        console.print(f"{label:<12} {text}", markup=False, soft_wrap=True)

    def loss(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    say("steps", f"{summary.steps} in {summary.seconds:.0f} s, {summary.tokens_per_s:,.0f} tokens/s")
    say("loss", f"{loss(summary.loss_first)} -> {loss(summary.loss_last)} nats a byte, val {loss(summary.val_loss)}")
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


def _start_logging(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text)


def main() -> None:
    """The console script."""
    app(prog_name="shoal")


if __name__ == "__main__":
    main()
