"""Plans which nodes hold replicas of experts, and computes which node failures lose no expert (`shoal plan --experts
FILE.json`)."""

from collections import Counter
from pathlib import Path

import msgspec
from rich.table import Table

from shoal.coordinator.experts.placement import (
    FAILURE_PROBABILITY_ASSUMED,
    attainable_min_replicas,
    busiest_replica_load_ratio,
    place,
    replica_counts,
)
from shoal.coordinator.experts.recovery import holder_masks, loss_probability, recovery_by_failures
from shoal.coordinator.experts.token_shares import busiest_node_load_ratio, token_shares
from shoal.deploy.base.disk_error import or_say
from shoal.deploy.terminal.plain import say_json
from shoal.deploy.terminal.screen import open_console
from shoal.protocol.complaint import complaint
from shoal.protocol.errors import LocalError

NODES_MAX = 10_000
EXPERTS_MAX = 10_000
SLOTS_MAX = 100_000
"""The most slots (each for one replica of an expert) of all nodes; more would take minutes, and is likely a typo."""


class ExpertsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slots: tuple[int, ...]
    """The number of slots of each node; a slot has room for one replica of an expert."""
    loads: tuple[float, ...]
    """The load of each expert, in any unit: only the ratios count."""
    failure_probability: tuple[float, ...] | None = None
    """Each node's probability of failure; null: the same for all nodes."""
    min_replicas: int = 2
    """Each expert is on at least this many different nodes, so fewer node failures than this lose no expert."""


class ExpertsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of the experts with its figures, as `--json` prints it."""

    replicas: tuple[int, ...]
    """The number of replicas of each expert."""
    placement: tuple[tuple[int, ...], ...]
    """The expert in each slot of each node. If two slots of a node have the same expert, the node stores it once, and
    does two shares of its work."""
    recovery_probability: float
    """The probability that no expert loses all its nodes, exactly or as a lower bound. If the file gives no
    probabilities, each node fails with `FAILURE_PROBABILITY_ASSUMED`."""
    recovery_probability_is_exact: bool
    loss_probability: float
    """1 - `recovery_probability`, without the rounding error of this subtraction."""
    recovery_by_failures: tuple[float, ...] | None
    """Entry k: the probability that the failure of k random nodes loses no expert; null: too many cases to count."""
    busiest_replica_load_ratio: float
    """The largest load of a replica, divided by the mean load of all slots."""
    busiest_node_load_ratio: float
    """The busiest node's load per slot, divided by the mean load per slot, if replicas share tokens in the best way."""


def show_experts(path: Path, *, seed: int, as_json: bool) -> None:
    """Place the experts that the file `path` describes, and print the placement and its figures.
    Raises: LocalError: the file cannot be read, or asks for something impossible."""
    asked = read_experts(path)
    report = plan_experts(asked, seed=seed)
    if as_json:
        say_json(report)
        return
    console = open_console()
    console.print(_placement_table(asked, report))
    console.print()
    console.print(_figures_table(asked, report))


def read_experts(path: Path) -> ExpertsFile:
    with or_say(f"cannot read {path}"):
        data = path.read_bytes()
    try:
        asked = msgspec.json.decode(data, type=ExpertsFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LocalError(f"{path} is no description of experts: {complaint(error, ExpertsFile)}") from error
    if why := _wrong(asked):
        raise LocalError(f"{path}: {why}")
    return asked


def _wrong(asked: ExpertsFile) -> str:
    """Return what is wrong with the contents of a file; empty: nothing. `replica_counts` checks the loads."""
    chances = asked.failure_probability
    if not 0 < len(asked.slots) <= NODES_MAX:
        return f"slots: between 1 and {NODES_MAX} nodes, each with its number of slots"
    if min(asked.slots) < 0 or sum(asked.slots) > SLOTS_MAX:
        return f"slots: not negative, and at most {SLOTS_MAX} together"
    if len(asked.loads) > EXPERTS_MAX:
        return f"loads: at most {EXPERTS_MAX} experts"
    if chances is not None and len(chances) != len(asked.slots):
        return f"failure_probability: one for each of the {len(asked.slots)} nodes, or null"
    if chances is not None and not all(0.0 <= chance <= 1.0 for chance in chances):
        return "failure_probability: each between 0 and 1"
    if asked.loads and asked.min_replicas > (most := attainable_min_replicas(asked.slots, len(asked.loads))):
        return f"min_replicas: at most {most} different nodes for each of {len(asked.loads)} experts with these slots"
    return ""


def plan_experts(asked: ExpertsFile, *, seed: int) -> ExpertsReport:
    chances = asked.failure_probability
    replicas = replica_counts(asked.loads, num_slots=sum(asked.slots), min_replicas=asked.min_replicas)
    placement = place(replicas, asked.slots, failure_probability=chances, min_replicas=asked.min_replicas, seed=seed)
    masks = holder_masks(placement, len(replicas))
    loss = loss_probability(masks, chances or [FAILURE_PROBABILITY_ASSUMED] * len(asked.slots))
    speeds = [max(count, 1e-9) for count in asked.slots]
    shares = token_shares(placement, asked.loads, speeds)
    return ExpertsReport(
        replicas=replicas,
        placement=placement,
        recovery_probability=1.0 - loss.probability,
        recovery_probability_is_exact=loss.is_exact,
        loss_probability=loss.probability,
        recovery_by_failures=recovery_by_failures(placement, len(replicas)),
        busiest_replica_load_ratio=busiest_replica_load_ratio(asked.loads, replicas),
        busiest_node_load_ratio=busiest_node_load_ratio(placement, asked.loads, speeds, shares),
    )


# --- for people ---


def _placement_table(asked: ExpertsFile, report: ExpertsReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("node", justify="right")
    if asked.failure_probability is not None:
        table.add_column("fails", justify="right")
    table.add_column("experts", overflow="fold")
    for node, experts in enumerate(report.placement):
        fails = [] if asked.failure_probability is None else [f"{asked.failure_probability[node]:.3g}"]
        held = " ".join(f"{expert}x{count}" if count > 1 else f"{expert}" for expert, count in Counter(experts).items())
        table.add_row(str(node), *fails, held)
    return table


def _figures_table(asked: ExpertsFile, report: ExpertsReport) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("replicas", " ".join(map(str, report.replicas)))
    about = "" if report.recovery_probability_is_exact else "at most "
    assumed = f" (if each node fails with {FAILURE_PROBABILITY_ASSUMED:g})" if asked.failure_probability is None else ""
    table.add_row("loss of an expert", f"{about}{report.loss_probability:.3g}{assumed}")
    if report.recovery_by_failures is not None and len(report.placement) <= 32:
        table.add_row("survives k failures", " ".join(f"{chance:.3f}" for chance in report.recovery_by_failures))
    table.add_row("busiest replica", f"{report.busiest_replica_load_ratio:.3f} times the ideal load")
    table.add_row("busiest node", f"{report.busiest_node_load_ratio:.3f} times the ideal load")
    return table
