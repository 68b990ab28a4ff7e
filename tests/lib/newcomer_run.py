"""A newcomer on a slow line, to a stage that is far larger than what its line carries in minutes: real drivers in
virtual time.

Three devices on 1 Gbit/s hold all 1.03 G parameters, and make a step in some three minutes. A fourth comes, on
100 Mbit/s each way.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.peer.membership import learner
from shoal.peer.membership.replica_driver import Replica
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec, WireSpec
from shoal.protocol.topology import make_topology

COMES_S = 300.0
NEWCOMER = 3
LAYERS = 20
SPEC = RunSpec(
    model=ModelSpec(dim=2048, num_layers=LAYERS, num_heads=16, num_kv_heads=16, ffn_dim=5632, context=1024),
    training=TrainingSpec(
        steps=100_000, microbatches_per_step=64, microbatch_size=2, keep="recompute", s_max=1, synchronous_steps=0
    ),
    optimizer=OptimizerSpec(warmup_steps=0),
    swarm=SwarmSpec(stages=1, min_peers=3, term_s=600.0),
    wire=WireSpec(gradients="hadamard4"),
)


@dataclass
class Moments:
    """Seconds since the newcomer came."""

    weights_s: list[float] = field(default_factory=list)
    """When it had the weights of each version that it computed with."""
    whole_s: list[float] = field(default_factory=list)
    """When it took over a whole state."""


@contextmanager
def _watched(moments: Moments, *, may_be_learner: bool) -> Iterator[None]:
    take, load = Replica._take_weights, Replica._load

    def since_s() -> float:
        return asyncio.get_running_loop().time() - COMES_S

    def taken(replica: Replica, weights: object) -> None:
        moments.weights_s.append(since_s())
        take(replica, weights)  # type: ignore[arg-type]

    def loaded(replica: Replica, state: object) -> None:
        if since_s() > 0.0:
            moments.whole_s.append(since_s())
        load(replica, state)  # type: ignore[arg-type]

    small = learner._SMALL_BYTES if may_be_learner else 1 << 60
    with (
        mock.patch.object(Replica, "_take_weights", taken),
        mock.patch.object(Replica, "_load", loaded),
        mock.patch.object(learner, "_SMALL_BYTES", small),
    ):
        yield


def play(*, seconds: float, may_be_learner: bool = True, seed: int = 0) -> tuple[SimResult, Moments]:
    """Args: seconds: of virtual time, from the beginning. may_be_light: False: as it was before there were light
    members."""
    between, workload = 1.0 - np.eye(4), Workload.of(SPEC)
    topology = make_topology(
        0.02 * between,
        1.25e8 * between,
        flop_per_s=1.5e12,
        memory_bytes=4.0 * workload.resident_bytes(0, LAYERS, members=1),
        up_bytes_per_s=[1.25e8, 1.25e8, 1.25e8, 1.25e7],
        down_bytes_per_s=[1.25e8, 1.25e8, 1.25e8, 1.25e7],
    )
    run = ModelledRun(
        topology=topology,
        spec=SPEC,
        stages=Placement(stages=((0, 1, 2, 3),), bounds=(0, LAYERS)),
        seed=seed,
        churn=[Churn(COMES_S, "add", NEWCOMER)],
        limits=RunLimits(seconds=seconds),
        record_timeline=True,
    )
    moments = Moments()
    with _watched(moments, may_be_learner=may_be_learner):
        return run_modelled(run), moments


def first_microbatch_s(result: SimResult) -> float | None:
    """When the newcomer began its first microbatch, in seconds since it came; None: it made none."""
    begun_s = [job.started_s - COMES_S for job in result.timeline[NEWCOMER] if job.kind == "forward"]
    return min(begun_s, default=None)
