"""Foresees how long a step will take. It puts the objective's parts together as it happens, which is not as is good to
search by. Pure.

**The control has its say.** Plans are searched for as if everything ran ahead that `s_max` admits, with the window's
whole gain. The control (`peer/replica/flow.py`) has less in flight where staleness costs more steps than that saves
seconds. Devices are then busy for a part e(g) of the time in which they work ahead, not e(window):

    r = e(window) / e(g)
    T_compute' = T_compute (1 + x (r - 1)),     x = min(1, idle / work)
    T_chain'(k) = T_chain(k) + (r - 1) T_compute / (k + 1)

**Waiting.** A device that has waited for a version does not get that time back; a line does, since it has the reduction
to carry meanwhile. So it is what devices compute that adds to the chain. Where activations are on the same cards a
commit takes now more and now less, and a device that waits for the longer ones gains nothing from the shorter, unless
it is idle anyway. For stage j, let q be the part that activations take of the card that bounds its commit, T_j what its
devices would take if they waited for nothing, and T_chain'(k, j) its chain. With the 4-norm |a, b|:

    c_j = q T_j / T_flow
    L_j = max(T_compute', T_chain'(k, j))
    T   = max(T_flow, max over j of L_j + c_j / 0.4 (|T_compute', T_chain'(k, j)| - L_j))

The search's norm of T_flow and T_chain says 15 % too much at home GPUs, whose lines bound a step. With this formula in
its place the search finds plans that are slower (simulated: data centre 6.53 s for 6.40, home GPUs 58.9 for 55.8).

Source: ours; e, x, idle and the choice of (k, g) are those of `protocol/running_ahead.py`. Figures are in MEASURED.md.
"""

from collections.abc import Callable, Sequence

from shoal.coordinator.cost.pacing import Tail, joined
from shoal.protocol.running_ahead import Measured, busy, choose
from shoal.protocol.staleness import Price

_CROWDED = 0.4
"""The c at which the norm holds, from the five shipped scenarios, one of them with three seeds and one with two
plans."""


def foreseen_s(
    tails: Callable[[int], Sequence[Tail]],
    *,
    flow_s: float,
    stages_s: Sequence[float],
    round_trip_s: float,
    commit_s: float,
    microbatches: int,
    s_max: int,
    price: Price,
    gain_max: float,
) -> float:
    """The seconds that a step will take.

    Args:
        tails: steps ahead -> what each stage makes others wait for.
        flow_s: T_flow, s a step.
        stages_s: T_compute of each stage, s a step: what its devices would take if they had nothing to wait for.
        round_trip_s: of one microbatch that waits for nothing.
        commit_s: from the last contribution to a step to the next version, of the stage where that takes longest.
        microbatches: M, a step.
        price: of staleness, by which the control chooses.
        gain_max: the window's, >= 1.
    """
    measured = Measured(
        rate_per_s=microbatches / flow_s, round_trip_s=round_trip_s, commit_s=commit_s, microbatches=microbatches
    )
    choice = choose(measured, s_max=s_max, price=price, gain_max=gain_max)
    if choice.steps_ahead == 0:
        return max(tail.chain_s for tail in tails(0))
    longer = busy(gain_max) / busy(choice.gain) - 1.0
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
