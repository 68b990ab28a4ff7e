"""A run of the real drivers on modelled devices: a network, a run spec and a layout in, what happened out.

The nodes are those of `shoal join`; only what they compute with is another (`arithmetic.py`), so that a thousand of
them, with a model that none could hold, fit into one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shoal.coordinator.allocate.interface import Allocator
from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.result import SimResult
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology


class Churn(NamedTuple):
    """`remove` is a power cut, `add` a (re)start; who is added first at a time above 0 is not there at the beginning."""

    at_s: float
    kind: Literal["add", "remove"]
    device: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelledRun:
    """What to simulate. The spec's `swarm.stages` and `swarm.min_peers` follow the placement, if there is one; it never
    validates, and keeps no snapshots.
    """

    topology: Topology
    spec: RunSpec
    """Of the model that is pretended: nothing of it is ever allocated."""
    stages: Placement | Allocator | None = None
    """A placement holds as long as its devices are there; an allocator is asked at every change; None: the live one."""
    seed: int = 0
    churn: Sequence[Churn] = ()
    steps: int | None = None
    """End once every stage has committed so many; None: those of the spec."""
    seconds: float | None = None
    """End then, of virtual time."""
    record_timeline: bool = False
    blocking: bool = False
    """A device computes nothing while an activation or a gradient of its own is on its way out, as with synchronous
    point-to-point calls of a collective library. For baselines."""
    chunk_bytes: int = 8 << 20
    """Gradient sums and states travel in pieces of this size; 1 MiB in life, where a frame costs less than here."""
    introduced: bool = True
    """Everybody knows everybody's address from the beginning; else they learn it from the directory, as in life."""


def run_modelled(run: ModelledRun) -> SimResult:
    """Raises: LocalError: a device of the placement or of the churn does not exist, or the run cannot begin."""
    raise NotImplementedError
