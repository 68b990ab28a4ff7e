"""`shoal simulate`: what a swarm would give, or whether it survives. Heavy imports wait until one is needed."""

import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.deploy.commands.options import EXIT_FAILED, check_writable, examples, scenario_names
from shoal.protocol.errors import LocalError

if TYPE_CHECKING:
    from shoal.deploy.simulate.scenario import Scenario
    from shoal.deploy.simulate.strategies import Options

_CAMPAIGN_STEPS = 45


@examples(
    "shoal simulate --list  # the shipped scenarios",
    "shoal simulate two-universities --html report.html  # ours against other layouts, and a page",
    "shoal simulate home-gpus --strategies ours,random --seed 3  # only these",
    "shoal simulate --campaign 20  # break twenty swarms, each in its own way",
)
def simulate(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            help="SCENARIO.toml, NETWORK.json, or the name of a shipped one.",
            autocompletion=scenario_names,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the shipped scenarios.")] = False,
    strategies: Annotated[str | None, typer.Option(help="Only these, as in `ours,megatron`.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A CSV of comings and goings to live through.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a run. Default: the scenario's.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="End each run then, of virtual time.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of searches and of simulated worlds.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON; of a campaign a line a seed.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with timelines and maps.")] = None,
    campaign: Annotated[int | None, typer.Option(min=1, metavar="SEEDS", help="Try so many seeds of faults.")] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    peers: Annotated[int, typer.Option(min=1, help="Peers of a campaign's swarm.")] = 9,
    experts: Annotated[int, typer.Option(min=0, help="Experts of a campaign's model, placed among its peers.")] = 0,
    fault_seconds: Annotated[float, typer.Option(min=0, help="How long things go wrong in a campaign.")] = 60.0,
    kind: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Only faults of this kind; may be repeated.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to standard error.")] = False,
) -> None:
    """Run whole swarms in virtual time.

    Says what a layout gives beside others; with --campaign breaks swarms on purpose and says whether they survive.
    """
    if list_:
        return _list_shipped()
    if (what is None) == (campaign is None):
        raise LocalError(
            "say what to simulate: a scenario (--list shows those that are shipped), or --campaign SEEDS to break a "
            "swarm in that many ways"
        )
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL, stream=sys.stderr)
    for path in (json, html):
        if path is not None:
            check_writable(path)
    if campaign is not None:
        seeds = range(first_seed, first_seed + campaign)
        sizes = (peers, steps or _CAMPAIGN_STEPS, experts, fault_seconds)
        return _campaign(seeds, *sizes, kind or (), json)
    from shoal.deploy.simulate.scenario import find_scenario
    from shoal.deploy.simulate.strategies import Options

    assert what is not None
    options = Options(seed=seed, steps=steps, seconds=seconds, trace=trace)
    _compare(find_scenario(what), strategies, options, json, html)
    return None


def _list_shipped() -> None:
    from shoal.deploy.simulate.scenario import SHIPPED, read_scenario, shipped_names

    for name in shipped_names():
        typer.echo(f"{name:<18} {read_scenario(SHIPPED / f'{name}.toml').title}")


def _compare(scenario: "Scenario", names: str | None, options: "Options", json: Path | None, html: Path | None) -> None:
    import msgspec
    from rich.console import Console

    from shoal.deploy.progress import progress_bar
    from shoal.deploy.simulate.outcome import row_of
    from shoal.deploy.simulate.strategies import chosen_strategies, churn_of, run_strategy, with_options
    from shoal.deploy.simulate.table import LEGEND, comparison, table_of

    scenario = with_options(scenario, options)
    # Hours with churn are millions of jobs.
    options = replace(options, timeline=html is not None or scenario.trace is None)
    strategies = chosen_strategies(scenario, names)
    churn = churn_of(scenario, options.seed)
    console = Console(highlight=False)
    console.print(scenario.title, markup=False, style="bold")
    outcomes, rows = [], []
    for strategy in strategies:
        with progress_bar(f"simulating {strategy.name}") as tell:
            outcomes.append(run_strategy(scenario, strategy, churn, replace(options, on_progress=tell)))
        rows.append(row_of(outcomes[-1]))
    console.print(table_of(rows))
    console.print(LEGEND, markup=False, style="dim")
    for row in rows:
        for failure in row.failures[:3]:
            console.print(f"{row.strategy}: {failure}", markup=False, soft_wrap=True)
    if json is not None:
        _write(json, msgspec.json.format(msgspec.json.encode(comparison(scenario, options.seed, rows))) + b"\n")
    if html is not None:
        from shoal.deploy.simulate.html_report import render_html

        _write(html, render_html(scenario, options.seed, outcomes, rows).encode())
    if not any(row.tokens_per_s for row in rows):
        raise typer.Exit(EXIT_FAILED)


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror or error}") from error


def _campaign(
    seeds: range,
    peers: int,
    steps: int,
    experts: int,
    fault_seconds: float,
    kinds: Sequence[str],
    json: Path | None,
) -> None:
    from shoal.deploy.simulate.campaign import run_seed
    from shoal.deploy.simulate.report import failure, json_line, one_line, summary
    from shoal.deploy.simulate.trial import CampaignOptions, parse_kinds

    options = CampaignOptions(
        peers=peers, steps=steps, experts=experts, fault_s=fault_seconds, kinds=parse_kinds(kinds)
    )
    verdicts = []
    with json.open("wb") if json else contextlib.nullcontext() as file:
        for seed in seeds:
            verdicts.append(verdict := run_seed(seed, options))
            typer.echo(one_line(verdict))
            if verdict.broken is not None:
                typer.echo(failure(verdict, options))
            if file is not None:
                file.write(json_line(verdict))
    typer.echo(summary(verdicts))
    if any(verdict.broken is not None for verdict in verdicts):
        raise typer.Exit(EXIT_FAILED)
