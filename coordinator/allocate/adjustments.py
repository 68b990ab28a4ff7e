"""Improves a placement from a search in two respects that the search ignores. Pure.

- `filled` adds devices that the search left out. The objective uses means, so one more member shortens a step only in
  the slowest stage. But microbatches arrive unevenly, and a stage with spare time catches up after a wait. The search
  also ignores that the run goes back to a snapshot if a stage's only holder fails.
- `backed` gives a stage that one machine holds alone a second one, from another stage.
- `with_fewest_moves` exchanges the places of devices that are equal for the objective, so that fewer bytes of state
  travel: a device that has layers should keep them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from shoal.coordinator.allocate.at_once import GAIN_MIN
from shoal.coordinator.allocate.objective import SoleHolders
from shoal.coordinator.allocate.throughput_search import assignment_of, stages_of
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.protocol.topology import Floats, Topology

TRIED = 8
"""Only this many devices without a stage are tried in the stages. Each costs up to one evaluation for each stage."""
EXCHANGES_TRIED = 64
"""`with_fewest_moves` tries at most this many exchanges, those that save most bytes: each costs an evaluation."""
AS_GOOD = 1.0 + GAIN_MIN
"""Exchanges together, or a device that joins, may lengthen a step by this factor: measured devices are never equal."""


def filled(throughput: ThroughputObjective, losses: SoleHolders, placement: Placement) -> Placement:
    """Add left-out devices to `placement` where it pays.

    They are tried fastest first, each in the stages with a sole holder first, then in those that compute longest. A
    device joins a stage only if the step, plus the cost of failures of sole holders, gets no longer."""
    topology, workload = throughput.topology, throughput.workload

    def computes_s(k: int) -> float:
        flop = workload.job_flop(placement.bounds[k], placement.bounds[k + 1])
        return flop / float(topology.flop_per_s[list(placement.stages[k])].sum())

    step_s = losses.step_s(throughput, placement)
    left_out = sorted(placement.spares(topology.num_devices), key=lambda d: (-topology.flop_per_s[d], d))
    for device in left_out[:TRIED]:
        stages = placement.stages
        for k in sorted(range(len(stages)), key=lambda k: (min(2, _num_machines(topology, stages[k])), -computes_s(k))):
            joined = placement.with_moves({device: k})
            if (joined_s := losses.step_s(throughput, joined)) <= AS_GOOD * step_s and math.isfinite(joined_s):
                placement, step_s = joined, joined_s
                break
    return placement


def backed(throughput: ThroughputObjective, losses: SoleHolders, placement: Placement) -> Placement:
    """Return `placement` with a second machine in stages that one machine held alone. A device of another stage joins
    the stage, or changes places with its holder, if the step plus the cost of sole holders' failures gets shorter."""
    step_s = losses.step_s(throughput, placement)
    for k in range(len(placement.stages)):
        stages = placement.stages
        if _num_machines(throughput.topology, stages[k]) > 1:
            continue
        others = [(device, other) for device, other in placement.stage_of().items() if other != k]
        moves = [placement.with_moves({device: k}) for device, _ in others]
        moves += [placement.with_moves({device: k, stages[k][0]: other}) for device, other in others]
        seconds = [losses.step_s(throughput, option) for option in moves]
        if seconds and min(seconds) < step_s:
            step_s = min(seconds)
            placement = moves[seconds.index(step_s)]
    return placement


def _num_machines(topology: Topology, stage: Sequence[int]) -> int:
    return len(set(topology.card[list(stage)].tolist()))  # peers of one machine share its network card


def with_fewest_moves(objective: ThroughputObjective, current: Placement, found: Placement) -> Placement:
    """Return `found` with devices (spares too) exchanged in pairs, so that fewer bytes of state must travel.
    The bounds stay; steps take at most `AS_GOOD` times as long."""
    lacks = _lacking_bytes(objective, current, found)
    limit_s = AS_GOOD * objective.step_s(found)
    at = assignment_of(objective.topology.num_devices, found)
    refused: set[tuple[int, int]] = set()
    for _ in range(EXCHANGES_TRIED):
        here = lacks[np.arange(len(at)), at]
        there = lacks[:, at]  # [i, j]: the bytes that device i would lack in the place of device j
        saves = np.triu(here[:, None] + here[None, :] - there - there.T, 1)
        for pair in refused:
            saves[pair] = 0.0
        a, b = (int(device) for device in np.unravel_index(int(saves.argmax()), saves.shape))
        if saves[a, b] <= 0.0:
            break
        at[a], at[b] = at[b], at[a]
        exchanged = replace(found, stages=stages_of(at, len(found.stages)))
        if objective.step_s(exchanged) <= limit_s:
            found, refused = exchanged, set()
        else:
            at[a], at[b] = at[b], at[a]
            refused.add((a, b))
    return found


def _lacking_bytes(objective: ThroughputObjective, current: Placement, found: Placement) -> Floats:
    """Return float [N, K + 1]: the bytes of state that each device would have to fetch for each stage of `found`. The
    last column, for a device without a stage, is 0."""
    layer_bytes: Floats = np.array(objective.workload.layer_state_bytes)
    held = np.zeros((objective.topology.num_devices, len(layer_bytes)))
    for stage, (first, last) in zip(current.stages, pairwise(current.bounds), strict=True):
        held[list(stage), first:last] = 1.0
    wanted = np.zeros((len(found.stages) + 1, len(layer_bytes)))
    for index, (first, last) in enumerate(pairwise(found.bounds)):
        wanted[index, first:last] = 1.0
    lacking: Floats = (1.0 - held) @ (wanted * layer_bytes).T
    return lacking
