"""`shoal simulate` predicts the pace of a swarm. Heavy imports are late."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.base.words import counted
from shoal.deploy.commands.options import EXIT_FAILED, PriceKwh, ScenarioName, Verbose, check_writable, examples
from shoal.deploy.terminal.plain import say
from shoal.deploy.terminal.screen import open_console, tell
from shoal.protocol.errors import LocalError

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.deploy.planning.rows import Rows
    from shoal.deploy.simulate.outcome import Outcome, OutcomeRow
    from shoal.deploy.simulate.scenario import Scenario
    from shoal.deploy.simulate.strategies import StrategyOptions
    from shoal.deploy.simulate.strategy import Strategy


@examples(
    "shoal simulate --list  # the shipped scenarios",
    "shoal simulate two-universities --html report.html  # ours against other layouts, and a page",
    "shoal simulate home-gpus --strategies ours,random --seed 3  # only these",
    "shoal simulate home-gpus --steps 4 --tokens 20B  # the shortest with a warm-up, and days to 20 billion tokens",
)
def simulate(
    what: ScenarioName = None,
    list_: Annotated[bool, typer.Option("--list", help="List the shipped scenarios.")] = False,
    strategies: Annotated[str | None, typer.Option(help="Simulate only these strategies, as in `ours,random`.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Let peers come and go as this CSV file says.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Number of steps, at least 2; the first two warm up. Default: the scenario's."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help="End each run after this many seconds of virtual time.")
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="Cut a strategy off after this many real seconds, or after 3 times as long as the first one took.",
        ),
    ] = 60.0,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER", help="Say how long this many tokens take, as in 20B or 1.5T. Default: 20 a parameter."
        ),
    ] = None,
    price_kwh: PriceKwh = None,
    seed: Annotated[
        int, typer.Option(min=0, help="The same seed gives the same searches and the same simulated worlds.")
    ] = 0,
    dirt: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=NUMBER,...",
            help="What devices and lines do beside what they promise, as in "
            "compute_sd=0.3,wander_sd=0.2 (SCENARIOS.md).",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with timelines and maps to this file.")] = None,
    verbose: Verbose = False,
) -> None:
    """Run whole swarms in virtual time.

    It compares strategies, a row for each as soon as it is done, and cuts off one that is far slower than the first.
    """
    if list_:
        return _list_shipped()
    if what is None:
        raise LocalError("say what to simulate: a scenario (--list shows those that are shipped)")
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL, stream=sys.stderr)
    for path in (json, html):
        if path is not None:
            check_writable(path)
    from shoal.deploy.planning.figures import Wishes, parse_tokens
    from shoal.deploy.simulate.scenario import find_scenario
    from shoal.deploy.simulate.strategies import StrategyOptions, parse_dirt

    wishes = Wishes(tokens=None if tokens is None else parse_tokens(tokens), price_kwh=price_kwh)
    options = StrategyOptions(
        seed=seed, steps=steps, seconds=seconds, trace=trace, wishes=wishes, dirt=parse_dirt(dirt)
    )
    _compare(find_scenario(what), strategies, options, json, html, patience_s=patience)
    return None


def _list_shipped() -> None:
    from shoal.deploy.simulate.scenario import SHIPPED, read_scenario, shipped_names

    for name in shipped_names():
        say(f"{name:<18} {read_scenario(SHIPPED / f'{name}.toml').title}")


def _compare(
    scenario: "Scenario",
    names: str | None,
    options: "StrategyOptions",
    json: Path | None,
    html: Path | None,
    *,
    patience_s: float,
) -> None:
    from shoal.deploy.commands.plan_command import print_notes
    from shoal.deploy.planning.rows import Rows
    from shoal.deploy.simulate import strategies
    from shoal.deploy.simulate.outcome import row_of
    from shoal.deploy.simulate.reached import reached, said_of
    from shoal.deploy.simulate.table import COLUMNS, LAST, LEGEND, cells, comparison
    from shoal.deploy.terminal.progress import progress_bar, sign_of_life

    scenario = strategies.with_options(scenario, options)
    # Hours with churn are millions of jobs.
    options = replace(options, timeline=html is not None or scenario.trace is None)
    chosen = strategies.chosen_strategies(scenario, names)
    churn = strategies.churn_of(scenario, options.seed)
    console = open_console()
    tell(console, scenario.title, style="bold")
    print_notes(console, scenario)
    table = Rows(console, COLUMNS, last=LAST)
    _show_arithmetic(table, scenario, chosen, options)
    outcomes: list[Outcome] = []
    rows: list[OutcomeRow] = []
    ran: dict[object, Outcome] = {}
    for strategy in chosen:
        with sign_of_life(f"planning {strategy.name} (the first search on a machine compiles for half a minute)"):
            prepared = strategies.prepare(scenario, strategy, churn, options)
        twin = ran.get(prepared.run) if prepared.run is not None else None
        if twin is not None:
            outcomes.append(replace(twin, strategy=strategy, planned_s=prepared.planned_s, same_as=twin.strategy.name))
            rows.append(row_of(outcomes[-1]))
            continue
        patience = strategies.StrategyPatience.beside(outcomes[0], patience_s) if outcomes else None
        with progress_bar(f"simulating {strategy.name}") as on_share:
            outcome = strategies.play(scenario, prepared, replace(options, on_progress=on_share), patience=patience)
        if prepared.run is not None:
            ran[prepared.run] = outcome
        outcomes.append(outcome)
        rows.append(row_of(outcome))
        *figures, why = cells(rows[-1])
        table.row(*figures, last=why)
        for failure in rows[-1].failures[1:3]:
            tell(console, f"    {failure}")
    console.print()
    for row in rows:
        if row.same_as:
            tell(console, f"{row.strategy}: the same run as {row.same_as}")
    found = reached(outcomes)
    if found is not None:
        tell(console, said_of(found))
    tell(console, LEGEND, style="dim")
    _show_figures(console, rows)
    if json is not None:
        compared = msgspec.json.encode(comparison(scenario, options.seed, rows, found))
        with or_say(f"cannot write {json}"):
            json.write_bytes(msgspec.json.format(compared) + b"\n")
    if html is not None:
        from shoal.deploy.simulate.html_report import render_html

        page = render_html(scenario, options.seed, outcomes, rows).encode()
        with or_say(f"cannot write {html}"):
            html.write_bytes(page)
    if not any(row.tokens_per_s for row in rows):
        raise typer.Exit(EXIT_FAILED)


def _show_arithmetic(
    table: "Rows", scenario: "Scenario", chosen: "Sequence[Strategy]", options: "StrategyOptions"
) -> None:
    """Print our rule's estimate, which takes a second where a first search takes half a minute."""
    from shoal.deploy.simulate.strategies import at_once
    from shoal.deploy.simulate.table import arithmetic_cells

    ours = next((strategy for strategy in chosen if strategy.layout == "ours"), None)
    if ours is None or scenario.trace is not None:
        return
    found = at_once(scenario, ours, options)
    if found is None:
        return
    placement, cost = found
    devices = sum(len(stage) for stage in placement.stages)
    said = f"arithmetic, before any search: {counted(devices, 'device')} in {counted(len(placement.stages), 'stage')}"
    table.row(*arithmetic_cells(cost.parts["tokens_per_s"]), last=said)


def _show_figures(console: "Console", rows: "Sequence[OutcomeRow]") -> None:
    from shoal.deploy.planning.plan_view import figures_view

    row = next((row for row in rows if row.figures is not None), None)
    if row is None or row.figures is None:
        return
    said = f"\nFigures of {row.strategy} at its simulated pace, if no peer leaves:\n"
    tell(console, said, style="bold")
    console.print(figures_view(row.figures))
