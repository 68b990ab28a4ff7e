"""Predicts how long a step will take. The formula is close to reality but a bad search objective. Pure.

**Control.** Searches assume that everything runs ahead that `s_max` admits, with the window's whole gain. The control
(`peer/replica/flow.py`) admits less where staleness costs more steps than it saves seconds. Devices are then busy for a
part e(g) of the time in which they work ahead, not e(window):

    r = e(window) / e(g)
    T_compute' = T_compute (1 + x (r - 1)),     x = min(1, idle / work)
    T_chain'(k) = T_chain(k) + (r - 1) T_compute / (k + 1)

**Waiting.** A device that has waited for a version cannot recover that time; a line can, because it carries the
reduction meanwhile. So compute time adds to the chain. If activations share the card, the duration of commits varies,
and a device that waits for the long ones gains nothing from the short ones unless it is idle anyway. For stage j, let q
be the share of the card bounding its commit that activations take, T_j the time of its devices without waiting, and
T_chain'(k, j) its chain. With the 4-norm |a, b|:

    c_j = q T_j / T_flow
    L_j = max(T_compute', T_chain'(k, j))
    T   = max(T_flow, max over j of L_j + c_j / 0.4 (|T_compute', T_chain'(k, j)| - L_j))

The search objective's norm of T_flow and T_chain is 15 % too high for home GPUs, where lines bound a step. Still, a
search with this formula finds slower plans (simulated: data centre 6.53 s for 6.40, home GPUs 58.9 for 55.8).

Source: ours; e, x, idle and the choice of (k, g) are those of `protocol/running_ahead.py`. Figures are in MEASURED.md.
"""

from collections.abc import Callable, Sequence

from shoal.coordinator.cost.pacing import Tail, joined
from shoal.protocol.running_ahead import Measured, busy, choose
from shoal.protocol.staleness import Price

WINDOW_GAIN = 1.5
"""Equal to `Window.gain` of `peer/replica/flow.py`."""
_CROWDED = 0.4
"""The c at which the full norm applies; fitted to the five shipped scenarios."""


def predicted_step_s(
    tails: Callable[[int], Sequence[Tail]],
    *,
    flow_s: float,
    stages_s: Sequence[float],
    round_trip_s: float,
    commit_s: float,
    microbatches: int,
    s_max: int,
    price: Price,
) -> float:
    """Return the seconds that a step will take.

    Args:
        tails: steps ahead -> tail of each stage.
        flow_s: T_flow, s a step.
        stages_s: T_compute of each stage, s a step: the time of its devices without waiting.
        round_trip_s: of one microbatch without waiting.
        commit_s: from the last contribution to a step to the next version, at the slowest stage.
        microbatches: M, a step.
        price: the price of staleness, by which the control chooses.
    """
    measured = Measured(
        rate_per_s=microbatches / flow_s, round_trip_s=round_trip_s, commit_s=commit_s, microbatches=microbatches
    )
    choice = choose(measured, s_max=s_max, price=price, gain_max=WINDOW_GAIN)
    if choice.steps_ahead == 0:
        return max(tail.chain_s for tail in tails(0))
    longer = busy(WINDOW_GAIN) / busy(choice.gain) - 1.0
    ahead = min(1.0, measured.idle_s / measured.work_s)
    compute_s = max(stages_s)
    works_s = compute_s * (1.0 + ahead * longer)
    step_s = flow_s
    for stage_s, tail in zip(stages_s, tails(choice.steps_ahead), strict=True):
        follows_s = tail.chain_s + longer * compute_s / (choice.steps_ahead + 1.0)
        least_s = max(works_s, follows_s)
        scatters = tail.crowded * stage_s / flow_s / _CROWDED
        step_s = max(step_s, least_s + scatters * (joined(works_s, follows_s) - least_s))
    return step_s
