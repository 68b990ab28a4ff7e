"""What another division into stages costs: how long a run stands still, and the pace of its steps while state travels.

Four modelled peers on links of 1 Gbit/s, virtual time, real drivers; a search divides the model otherwise, once.
`small` has 1 GB of state, of which 3 stages become 2; `large` has 25 GB, and every peer is to hold what another holds.
"""

import argparse
import asyncio
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from tiny_run import tiny_spec

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout, SwarmSnapshot
from shoal.deploy.simulate.modelled import ModelledRun, RunLimits, run_modelled
from shoal.peer.membership.joining import Joining
from shoal.peer.membership.learner import Learner
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import make_topology

BYTES_PER_S = 125e6
LATENCY_S = 0.01


@dataclass(frozen=True)
class Case:
    dim: int
    layers: int
    flop_per_s: float
    before: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(first layer, last layer, peers) of each stage."""
    after: tuple[tuple[int, int, tuple[int, ...]], ...]
    seconds: float
    not_before_s: float = 0.0
    """When a search may divide the model: there must have been steps before."""


CASES = {
    "small": Case(
        768, 12, 2.5e12, ((0, 4, (0,)), (4, 8, (1,)), (8, 12, (2, 3))), ((0, 6, (0, 1)), (6, 12, (2, 3))), 150.0
    ),
    "large": Case(
        4096,
        12,
        3e12,
        ((0, 3, (0,)), (3, 6, (1,)), (6, 9, (2,)), (9, 12, (3,))),
        ((0, 2, (3,)), (2, 6, (2,)), (6, 10, (1,)), (10, 12, (0,))),
        1800.0,
        300.0,
    ),
}


@dataclass
class OneDivision(GreedyAllocator):
    """Implements `Searching`: the first plan is the case's `before`, and the first search finds its `after`."""

    case: Case = CASES["small"]
    divided: bool = False
    order: list[PeerID] = field(default_factory=list)

    def prepare(self) -> None:
        """Nothing is compiled."""

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        if previous is not None:
            return super().allocate(snapshot, previous, seed=seed)
        self.order = [peer.peer for peer in snapshot.peers]
        return self._layout(self.case.before, "the first layout")

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        if previous is None:
            return self.allocate(snapshot, previous, seed=seed), ""
        if self.divided or not self.order or asyncio.get_running_loop().time() < self.case.not_before_s:
            return None, ""
        self.divided = True
        return self._layout(self.case.after, "divides"), "divides"

    def _layout(self, stages: tuple[tuple[int, int, tuple[int, ...]], ...], reason: str) -> Layout:
        return Layout(
            stages=tuple(
                Stage(first, last, tuple(Member(self.order[p], 1.0 / len(peers), 1.0) for p in peers))
                for first, last, peers in stages
            ),
            spares=(),
            reason=reason,
        )


def spec_of(case: Case, gradients: Literal["fp32", "bf16"]) -> RunSpec:
    spec = tiny_spec(steps=100_000, peers=4, s_max=0, microbatches=16, term_s=150.0, snapshot_interval_steps=0)
    heads = case.dim // 64
    model = {"dim": case.dim, "num_layers": case.layers, "num_heads": heads, "num_kv_heads": heads, "context": 256}
    model["ffn_dim"] = 8 * case.dim // 3
    return msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(spec.model, **model),
        training=msgspec.structs.replace(spec.training, microbatch_size=4),
        wire=msgspec.structs.replace(spec.wire, activations="bf16", gradients=gradients),
        swarm=msgspec.structs.replace(spec.swarm, heartbeat_s=2.0),
    )


def measure(case: Case, gradients: Literal["fp32", "bf16"]) -> dict[str, object]:
    """Play the case once. Seconds are virtual."""
    spec = spec_of(case, gradients)
    joined_s: list[float] = []
    run = Joining.run

    async def noted(joining: Joining, plan: Plan, learner: Learner | None = None) -> None:
        await run(joining, plan, learner)
        if plan.era == 1:
            joined_s.append(asyncio.get_running_loop().time())

    Joining.run = noted  # type: ignore[method-assign]
    off = ~np.eye(4, dtype=bool)
    topology = make_topology(
        LATENCY_S * off,
        BYTES_PER_S * off,
        flop_per_s=np.full(4, case.flop_per_s),
        memory_bytes=np.full(4, 64e9),
        up_bytes_per_s=np.full(4, BYTES_PER_S),
        down_bytes_per_s=np.full(4, BYTES_PER_S),
    )
    try:
        result = run_modelled(
            ModelledRun(
                topology=topology,
                spec=spec,
                stages=OneDivision(case=case),
                chunk_bytes=1 << 20,
                limits=RunLimits(seconds=case.seconds),
            )
        )
    finally:
        Joining.run = run  # type: ignore[method-assign]
    events = [(event.at_s, event.change, event.text) for event in result.events if event.change in ("plan", "division")]
    at_s = [step.committed_at_s for step in result.steps]
    import os

    if os.environ.get("DBG"):
        print(events, len(result.steps), result.failures, result.ending)
    divided_s = next(at for at, change, _ in events if change == "division")
    announced_s = next(at for at, _, text in events if "divides" in text)
    alone = [b - a for a, b in itertools.pairwise(at_s) if b < announced_s][1:]
    meanwhile = [b - a for a, b in itertools.pairwise(at_s) if a >= announced_s and b < divided_s]
    last_s, first_s = max(at for at in at_s if at < divided_s), min(at for at in at_s if at > divided_s)
    later = [b - a for a, b in itertools.pairwise(at_s) if a >= first_s]
    return {
        "step before": round(median(alone), 2),
        "step meanwhile": round(sum(meanwhile) / max(1, len(meanwhile)), 2),
        "slowest step meanwhile": round(max(meanwhile, default=0.0), 2),
        "step after": round(median(later), 2) if later else None,
        "from announcement to end": round(last_s - announced_s, 1),
        "last commit to first commit": round(first_s - last_s, 2),
        "of that, until the plan": round(divided_s - last_s, 2),
        "until everybody has its state": round(max(joined_s) - divided_s, 2),
        "until the first commit": round(first_s - max(joined_s), 2),
        "GB sent in all": round(float(result.traffic_bytes.sum()) / 1e9, 1),
        "failures": list(result.failures),
        "wall": round(result.ending.wall_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=sorted(CASES), default="small")
    parser.add_argument("--gradients", choices=("fp32", "bf16"), default="fp32", help="on the wire")
    options = parser.parse_args()
    sys.stdout.write(json.dumps(measure(CASES[options.case], options.gradients), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
