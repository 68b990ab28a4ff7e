"""Compares the predicted throughput of the live layout with the measured one, and learns the difference. Pure.

Theory of operation. A plan contains the throughput that its coordinator predicted (`Plan.foreseen`). The measured
throughput is the median over the last points (marks) of the run's curve of tokens (`token_rate`). Steps count from the
time when all members have their state, except the first `WARM_UP_STEPS`. Every few heartbeats the coordinator predicts
the throughput of the same layout again, from current figures. This separates two differences:

- Between the plan's prediction and the current one: a figure has changed, for instance a device has become slower.
- Between the current prediction and the measurement: the error of the cost model (the objective) in this swarm. It is
  learned for each number of stages, smoothed over `LEARN_STEPS`, and corrects predictions for other numbers of stages
  in part (`cost/forecast_bias.py`).

The first steps of a run are synchronous: no member runs ahead (`RunSpec.synchronous_steps`). Plans are made for
synchronous steps while these fill most of a layout's expected life (`ClusterView.runs_ahead`), and otherwise for the
later steps. In the second case a rate measured in synchronous steps corrects the objective, but searches do not use it.

`forecast_error` is the error of past predictions; the gain that a search predicts is discounted by it. A predicted gain
that has not been measured yet counts as an error. Otherwise each search would believe the figures that misled the last
one.

The median shows a change three marks late: minutes, if a slow device makes steps long. If both the current
prediction and the newest step are far below the median, the current prediction replaces it. A leadership transfer
includes what was learned; after a crash the successor starts the comparison anew."""

import math
from collections import deque
from statistics import fmean

from shoal.coordinator.allocate.interface import FORECAST_ERROR, NOT_CHOSEN, Chosen, Place, places_of
from shoal.coordinator.cost.forecast_bias import ForecastBias
from shoal.coordinator.token_rate import TokenRate
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STAGES_MAX, VERSION_MAX
from shoal.protocol.messages import Comparison, LayoutCalibration
from shoal.protocol.plan import Bound, Foreseen, Plan

WARM_UP_STEPS = 4
"""The first steps of a layout are not compared: its pipeline fills, and new members compile their kernels."""
LEARN_STEPS = 64
FACTOR_MAX = 8.0
"""The largest learned factor (and its inverse the least): a larger error means that something is broken."""
OFF_STEPS = 4
"""The measured rate counts only after this many measured steps."""
SLOW = 0.75
KEPT = 8
"""The errors of the last `KEPT` layouts, and correction factors for the last `KEPT` numbers of stages, are kept."""
_WORDS: dict[Bound, str] = {
    "compute": "stage {0} bounds it (its devices compute)",
    "card": "stage {0} bounds it (its network cards carry activations)",
    "paths": "the paths beside stage {0} bound it",
    "reduction": "stage {0} bounds it (its members reduce gradients)",
    "round trip": "the round trip of a microbatch from stage {0} to the end bounds it",
    "commit": "stage {0} bounds it (its commit takes long)",
}


class Calibration:
    """Compares the live layout's predicted and measured throughput.
    Args: synchronous_steps: how many of the run's first steps are synchronous; 0 if all are, or none."""

    def __init__(self, *, synchronous_steps: int = 0) -> None:
        self._synchronous_steps = synchronous_steps
        self._runs_ahead = True
        self._is_for_later_steps = False
        """The run is in its synchronous steps, but plans are made for later steps, which have another throughput."""
        self._layout: tuple[int, tuple[Place, ...]] | None = None
        self._peers: frozenset[PeerID] = frozenset()
        """The members and the spares of the live plan."""
        self._foreseen: Foreseen | None = None
        self._today: Foreseen | None = None
        """The objective's current prediction for the live layout's present steps, without the learned factor."""
        self._steady_from: int | None = None
        self._seen = 0.0, 0
        """(measured tokens/s of the live layout; steps measured)."""
        self._seen_before = 0.0
        """Tokens/s measured before the last members came. They count until the layout is measured with its new members,
        which make it no slower. 0: unknown, or the layout is another one."""
        self._newest = 0.0
        """Tokens/s between the last two marks of the curve; 0: unknown."""
        self._learned: dict[int, tuple[float, int]] = {}
        """Number of stages -> (mean log(measured / predicted tokens/s), steps measured), the latest entry last."""
        self._factor_then = 1.0
        """The value of `factor` when we first obeyed a plan with the present prediction, which contains this factor."""
        self._learned_to = 0
        """The version up to which measured steps have gone into the learned factor."""
        self.chosen = NOT_CHOSEN
        """The figures when the live layout began. For a first layout the tokens/s come once it was measured."""
        self._promised_tokens_per_s = 0.0
        """Tokens/s that the plan predicted as its layout began; 0: unknown, the run's first, or other kind of step."""
        self._promised_gain = 0.0
        """log(tokens/s predicted for the live layout / for the one before), at least 0; 0: unknown, or other peers."""
        self.rejected = ""
        """Why the last search kept the live layout; empty: it found a better one, or there was no search."""
        self._off: deque[float] = deque(maxlen=KEPT)
        """log(measured / first predicted tokens/s) of each of the last layouts before the live one, if measured."""

    @property
    def bias(self) -> ForecastBias:
        return ForecastBias(tuple((num_stages, *learned) for num_stages, learned in self._learned.items()))

    @property
    def factor(self) -> float:
        """The learned ratio of measured to predicted throughput, for layouts with as many stages as the live one."""
        return self.bias.factor(self._num_stages)

    @property
    def _num_stages(self) -> int:
        return len(self._layout[1]) if self._layout is not None else 1

    @property
    def seen_tokens_per_s(self) -> float:
        """Tokens/s of the live layout, measured or, if that is out of date, predicted; 0: too few measured steps, or
        plans are made for another kind of step."""
        if self._is_for_later_steps:
            return 0.0
        return self._rate if self._seen[1] >= OFF_STEPS else self._seen_before

    @property
    def _rate(self) -> float:
        """The measured rate, or the current prediction if the measurement is out of date."""
        return self._believed if self._is_out_of_date else self._seen[0]

    @property
    def _believed(self) -> float:
        """Tokens/s of the live layout by the current prediction, times the learned factor; 0: no prediction."""
        return self.factor * self._today.tokens_per_s if self._today is not None else 0.0

    @property
    def _is_out_of_date(self) -> bool:
        """True if the measured rate (a median) predates a slowdown: prediction and newest step are far lower now."""
        both = self._believed, self._newest
        return min(both) > 0.0 and max(both) < SLOW * self._seen[0]

    @property
    def is_unexplained(self) -> bool:
        """True if the layout or its newest step is far slower than current figures predict: some are out of date."""
        if self._seen[1] < OFF_STEPS:
            return False
        return 0.0 < min(self._seen[0], self._newest or math.inf) < SLOW * self._believed

    @property
    def forecast_error(self) -> float:
        """Root mean square of the logarithmic errors of predictions. While the live layout is not measured yet, its
        predicted gain counts as an error if that raises the mean."""
        off_now = self._off_now()
        squares = [FORECAST_ERROR**2, *(off**2 for off in (*self._off, off_now) if off is not None)]
        mean = fmean(squares)
        if off_now is None:
            mean = max(mean, fmean([*squares, self._promised_gain**2]))
        return math.sqrt(mean)

    def expected(self, foreseen: Foreseen | None, num_stages: int) -> Foreseen | None:
        """Return `foreseen`, the cost model's prediction for `num_stages` stages, times the learned factor."""
        return _times(self.bias.factor(num_stages), foreseen)

    # --- what happens ---

    def obey(self, plan: Plan) -> None:
        """Record a live plan. The comparison continues if the layout is the same, for instance in a new term."""
        places, spares = places_of(plan)
        layout, peers = (plan.era, places), frozenset(spares).union(*(peers for _, _, peers in places))
        if layout != self._layout:
            if (off := self._off_now()) is not None:
                self._off.append(off)
            # The prediction for a run's first layout is no evidence: nothing has been learned yet.
            promised = plan.foreseen if self._layout is not None else None
            self._promised_tokens_per_s = promised.tokens_per_s if promised is not None else 0.0
            self._promised_gain = self._gain_of(plan) if peers == self._peers else 0.0
            era, before = self._layout if self._layout is not None else (-1, ())
            same = [place[:2] for place in before] == [place[:2] for place in places]
            is_larger = same and all(set(old[2]) <= set(new[2]) for old, new in zip(before, places, strict=True))
            self._seen_before = self.seen_tokens_per_s if is_larger and era == plan.era else 0.0
            if not (same and self._peers - peers):  # else it is a repair, which no search has chosen
                self.chosen = Chosen(self._promised_tokens_per_s, len(peers))
            self._layout, self._today, self._steady_from = layout, None, None
            self._seen, self._newest = (0.0, 0), 0.0
            self.rejected = ""
        if plan.foreseen != self._foreseen:
            self._foreseen, self._factor_then = plan.foreseen, self.factor
        self._peers = peers

    def synchronous_left(self, version: int) -> int:
        """Return the number of synchronous steps that are still to come after `version`."""
        return max(0, self._synchronous_steps - version)

    def predict_step_time(self, today: Foreseen | None, *, runs_ahead: bool = True) -> None:
        """Record `today`, the cost model's current prediction for the live layout in the present kind of step.
        Args: runs_ahead: True if plans are made for steps that run ahead. When this changes, the live plan's prediction
        no longer counts."""
        if runs_ahead != self._runs_ahead:
            self._runs_ahead, self._promised_tokens_per_s, self._promised_gain = runs_ahead, 0.0, 0.0
        self._today = today

    def look(self, pace: TokenRate, now_s: float, *, version: int, is_whole: bool) -> None:
        """Compare measured with predicted throughput, and learn from the difference.
        Args: version: the highest committed version in the era. is_whole: True if every member has its stage's state.
        """
        if self._layout is None or (self._steady_from is None and not is_whole):
            return
        if self._steady_from is None:
            self._steady_from = self._learned_to = version + WARM_UP_STEPS
        if self._steady_from < self._synchronous_steps <= version:
            # Earlier measurements, and perhaps the current prediction, are of synchronous steps.
            self._steady_from, self._today = self._synchronous_steps + 1, None
            self._learned_to = max(self._learned_to, self._steady_from)
        self._is_for_later_steps = self._runs_ahead and self.synchronous_left(version) > 0
        self._seen = pace.seen(self._layout[0], self._steady_from)
        self._newest = pace.newest(now_s) if self._seen[1] else 0.0
        if self._seen[1] >= OFF_STEPS and not self.chosen.tokens_per_s and not self._is_for_later_steps:
            self.chosen = Chosen(self._believed, self.chosen.peers)
        if self._seen[1] and self._today is not None and version > self._learned_to:
            if not self._is_out_of_date:
                self._learn(_log(self._seen[0], self._today.tokens_per_s), version - self._learned_to)
            self._learned_to = version

    def _off_now(self) -> float | None:
        """Return log(measured / throughput that the plan predicted); None: unknown. The current prediction is not used:
        if devices slow each other down, that prediction falls together with the measurement and hides the error."""
        if self._promised_tokens_per_s <= 0.0 or self._seen[1] < OFF_STEPS or self._is_for_later_steps:
            return None
        return _log(self._seen[0], self._promised_tokens_per_s)

    def _gain_of(self, plan: Plan) -> float:
        """Return log(tokens/s that `plan` predicts / that the previous plan predicted), at least 0; 0 if unknown."""
        before, after = self._foreseen, plan.foreseen
        if self._layout is None or before is None or after is None:
            return 0.0
        return max(0.0, _log(after.tokens_per_s, before.tokens_per_s))

    def _learn(self, log: float, num_steps: int) -> None:
        num_steps = min(num_steps, LEARN_STEPS)
        before, steps = self._learned.pop(self._num_stages, (0.0, 0))
        steps = min(steps + num_steps, LEARN_STEPS)
        self._learned[self._num_stages] = before + (log - before) * num_steps / steps, steps
        if len(self._learned) > KEPT:
            del self._learned[next(iter(self._learned))]

    # --- to others, and from them ---

    def tell(self) -> LayoutCalibration | None:
        """Return what the next coordinator needs to continue the comparison; None: nothing has been compared."""
        if self._layout is None:
            return None
        steady_from = -1 if self._steady_from is None else self._steady_from
        return LayoutCalibration(
            learned=self.bias.seen,
            era=self._layout[0],
            steady_from=steady_from,
            factor_then=self._factor_then,
            off=tuple(self._off),
            chosen=self.chosen.tokens_per_s,
            chosen_peers=self.chosen.peers,
            seen_before=self._seen_before,
        )

    def take_over(self, told: LayoutCalibration | None) -> None:
        """Continue another coordinator's comparison of the live layout; its learned corrections apply to any layout."""
        if told is None or not (
            len(told.learned) <= KEPT
            and all(_is_possible(*learned) for learned in told.learned)
            and 1.0 / FACTOR_MAX <= told.factor_then <= FACTOR_MAX
            and 0.0 <= told.chosen < math.inf
            and told.chosen_peers >= 0
            and 0.0 <= told.seen_before < math.inf
            and -1 <= told.steady_from <= VERSION_MAX
            and all(abs(off) <= math.log(FACTOR_MAX) for off in told.off)
        ):
            return
        self._learned = {num_stages: (log, steps) for num_stages, log, steps in told.learned}
        self._off = deque(told.off, maxlen=KEPT)
        if self._layout is not None and told.era == self._layout[0]:
            self.chosen, self._seen_before = Chosen(told.chosen, told.chosen_peers), told.seen_before
            if told.steady_from >= 0:
                self._steady_from, self._factor_then = told.steady_from, told.factor_then
                self._learned_to = max(self._learned_to, told.steady_from)

    # --- for people ---

    def comparison(self) -> Comparison | None:
        """The comparison of the live layout, for people; None: no prediction exists."""
        foreseen, today = self._foreseen, _times(self._factor_then, self._today)
        if foreseen is None:
            return None
        believed = today or foreseen
        return Comparison(
            foreseen_tokens_per_s=foreseen.tokens_per_s,
            sentence=self._sentence(believed),
            seen_tokens_per_s=self._seen[0],
            steps=self._seen[1],
            today_tokens_per_s=believed.tokens_per_s,
            bound=believed.bound,
            stage=believed.stage,
        )

    def _sentence(self, believed: Foreseen) -> str:
        seen = f", seen {self._seen[0]:,.0f} over {self._seen[1]} steps" if self._seen[1] else ""
        reason = _WORDS[believed.bound].format(believed.stage)
        rejected = f"; {self.rejected}" if self.rejected else ""
        return f"foreseen {believed.tokens_per_s:,.0f} tokens/s{seen}; {reason}{rejected}"


def _is_possible(num_stages: int, log: float, steps: int) -> bool:
    return 1 <= num_stages <= STAGES_MAX and abs(log) <= math.log(FACTOR_MAX) and 1 <= steps <= LEARN_STEPS


def _log(rate: float, other: float) -> float:
    """Return log(rate / other), with the ratio bounded by `FACTOR_MAX`, since a rate may be 0."""
    return math.log(min(max(rate / other, 1.0 / FACTOR_MAX), FACTOR_MAX))


def _times(factor: float, foreseen: Foreseen | None) -> Foreseen | None:
    if foreseen is None:
        return None
    return Foreseen(foreseen.tokens_per_s * factor, foreseen.bound, foreseen.stage)
