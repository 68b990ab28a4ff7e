"""Simulates the strategies of a scenario, and prints a row for each as soon as it is done (`shoal simulate`)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.base.words import counted
from shoal.deploy.planning.plan_view import figures_view, print_notes
from shoal.deploy.planning.rows import Rows
from shoal.deploy.simulate import strategies
from shoal.deploy.simulate.html_report import render_html
from shoal.deploy.simulate.outcome import Outcome, OutcomeRow, row_of
from shoal.deploy.simulate.reached import reached, said_of
from shoal.deploy.simulate.scenario import Scenario
from shoal.deploy.simulate.strategies import StrategyOptions
from shoal.deploy.simulate.strategy import Strategy
from shoal.deploy.simulate.table import COLUMNS, LAST, LEGEND, arithmetic_cells, cells, comparison
from shoal.deploy.terminal.progress import progress_bar, sign_of_life
from shoal.deploy.terminal.screen import open_console, tell


def compare(
    scenario: Scenario,
    names: str | None,
    options: StrategyOptions,
    json: Path | None,
    html: Path | None,
    *,
    patience_s: float,
) -> bool:
    """Simulate and print the strategies `names` of a scenario. Returns: True if at least one has a rate in tokens/s."""
    scenario = strategies.with_options(scenario, options)
    # Without a page, keep no timeline of a swarm with churn: hours of it are millions of jobs.
    options = replace(options, timeline=html is not None or scenario.trace is None)
    chosen = strategies.chosen_strategies(scenario, names)
    churn = strategies.churn_of(scenario, options.seed)
    console = open_console()
    tell(console, scenario.title, style="bold")
    print_notes(console, scenario.notes)
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
        page = render_html(scenario, options.seed, outcomes, rows).encode()
        with or_say(f"cannot write {html}"):
            html.write_bytes(page)
    return any(row.tokens_per_s for row in rows)


def _show_arithmetic(table: Rows, scenario: Scenario, chosen: Sequence[Strategy], options: StrategyOptions) -> None:
    """Print the predicted speed of the layout that our planner's rule makes in a second. (Its search takes 30 s.)"""
    ours = next((strategy for strategy in chosen if strategy.layout == "ours"), None)
    if ours is None or scenario.trace is not None:
        return
    found = strategies.at_once(scenario, ours, options)
    if found is None:
        return
    placement, cost = found
    devices = sum(len(stage) for stage in placement.stages)
    said = f"arithmetic, before any search: {counted(devices, 'device')} in {counted(len(placement.stages), 'stage')}"
    table.row(*arithmetic_cells(cost.parts["tokens_per_s"]), last=said)


def _show_figures(console: Console, rows: Sequence[OutcomeRow]) -> None:
    row = next((row for row in rows if row.figures is not None), None)
    if row is None or row.figures is None:
        return
    said = f"\nFigures of {row.strategy} at its simulated pace, if no peer leaves:\n"
    tell(console, said, style="bold")
    console.print(figures_view(row.figures))
