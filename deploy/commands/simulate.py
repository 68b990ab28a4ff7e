"""`shoal simulate`: predicts the speed of a swarm. Heavy modules are imported only when they are needed."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy.commands.options import EXIT_FAILED, PriceKwh, ScenarioName, Verbose, check_writable, examples
from shoal.deploy.terminal.plain import say
from shoal.protocol.errors import LocalError


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
        from shoal.deploy.simulate.scenario import SHIPPED, read_scenario, shipped_names

        for name in shipped_names():
            say(f"{name:<18} {read_scenario(SHIPPED / f'{name}.toml').title}")
        return
    if what is None:
        raise LocalError("say what to simulate: a scenario (--list shows those that are shipped)")
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL, stream=sys.stderr)
    for path in (json, html):
        if path is not None:
            check_writable(path)
    from shoal.deploy.commands.simulate_command import compare
    from shoal.deploy.planning.figures import Wishes, parse_tokens
    from shoal.deploy.simulate.scenario import find_scenario
    from shoal.deploy.simulate.strategies import StrategyOptions, parse_dirt

    wishes = Wishes(tokens=None if tokens is None else parse_tokens(tokens), price_kwh=price_kwh)
    options = StrategyOptions(
        seed=seed, steps=steps, seconds=seconds, trace=trace, wishes=wishes, dirt=parse_dirt(dirt)
    )
    if not compare(find_scenario(what), strategies, options, json, html, patience_s=patience):
        raise typer.Exit(EXIT_FAILED)
