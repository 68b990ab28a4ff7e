"""`shoal plan`: plans which peers hold which layers or experts."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy.commands.options import PlanOptions, ScenarioName, examples, grouped
from shoal.protocol.errors import LocalError


@examples(
    "shoal plan home-gpus  # a layout, its speed and costs, and why some machines are left out",
    "shoal plan home-gpus --tokens 20B --price-kwh 0.35  # days and price to 20 billion tokens",
    "shoal plan home-gpus --run run.toml  # the same machines under your own run, and how long its steps take",
    "shoal plan home-gpus --compare  # ours beside random, greedy and others",
    "shoal plan network.json --stages 4 --json  # of your own network, for a script",
    "shoal plan --cards  # which cards hold how much of models of 1, 8 and 30 billion parameters",
    "shoal plan --cards --run run.toml  # ... of the model of a run",
    "shoal plan --experts experts.json  # replicas of experts on nodes, and what they survive",
)
@grouped
def plan(
    network: ScenarioName = None,
    experts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Say which node should hold which experts, from this file of slots and loads."
        ),
    ] = None,
    cards: Annotated[
        bool, typer.Option("--cards", help="Say how much of a model each kind of GPU holds, and how fast it is.")
    ] = False,
    *,
    asked: PlanOptions,
) -> None:
    """Plan which machines hold which layers, and how fast that is.

    It also explains why some machines are left out, and what would help them. The figures are arithmetic on the
    scenario: nothing is run, and no machine comes or goes. With --experts it plans which nodes hold which experts, and
    which failures that survives.
    """
    if cards:
        if network is not None or experts is not None or asked.compare:
            raise LocalError("--cards is about no scenario: say it alone, or with --run RUN.toml")
        from shoal.deploy.planning.cards import show_cards

        show_cards(asked.run, as_json=asked.json)
        return
    if (network is None) == (experts is None):
        raise LocalError("say what to plan for: either NETWORK.json or --experts FILE.json, or --cards")
    if experts is not None:
        from shoal.deploy.planning.expert_plan import show_experts

        show_experts(experts, seed=asked.seed, as_json=asked.json)
    elif network is not None:
        from shoal.deploy.commands.plan_command import show_plan

        show_plan(network, asked)
