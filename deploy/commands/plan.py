"""`shoal plan`: who should hold which layers, or which experts."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy.commands.options import examples, scenario_names
from shoal.protocol.errors import LocalError


@examples(
    "shoal plan home-gpus  # the layout of a shipped scenario, and its cost in parts",
    "shoal plan home-gpus --compare  # ours beside random, greedy and others",
    "shoal plan network.json --stages 4 --json  # of your own network, for a script",
    "shoal plan --experts experts.json  # replicas of experts on nodes, and what they survive",
)
def plan(
    network: Annotated[
        str | None,
        typer.Argument(metavar="NETWORK.json", help="A network file, or a scenario.", autocompletion=scenario_names),
    ] = None,
    experts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Slots and loads: say who should hold which experts instead."),
    ] = None,
    objective: Annotated[str, typer.Option(help="throughput, or dtfm for the DT-FM paper's.")] = "throughput",
    seconds: Annotated[float, typer.Option(min=0.001, help="How long to search, of one core.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same plan.")] = 0,
    stages: Annotated[int | None, typer.Option(min=1, help="Default: the file's, else what is best.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="All layouts, in a table.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Say who should hold which layers, and what that costs.

    With --experts: who should hold which experts, and what that survives.
    """
    if (network is None) == (experts is None):
        raise LocalError("say what to plan for: either NETWORK.json or --experts FILE.json")
    if experts is not None:
        from shoal.deploy.planning.experts import show_experts

        show_experts(experts, seed=seed, as_json=json)
    elif network is not None:
        from shoal.deploy.planning.command import show_plan

        show_plan(network, objective, seconds=seconds, seed=seed, stages=stages, compare=compare, as_json=json)
