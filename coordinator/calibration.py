"""Compares how fast the live layout should be with how fast it is, and learns the difference. Pure.

Theory of operation. A plan says how many tokens a second its coordinator foresaw (`Plan.foreseen`). What comes is taken
from the run's curve of tokens over time (`token_rate`), from `WARM_UP_STEPS` after all members had their state on: the
median over the last marks, so that one standstill is no slowness, unless it lasts.

With the figures of today the coordinator foresees the same layout anew, every now and then. Two differences are told
apart that way:

- From the plan's figure to today's: something was measured since, as that a device is slower now.
- From today's figure to what is seen: that is what the objective does not know of this swarm. It is learned for each
  number of stages, smoothed over `LEARN_STEPS`, and says something of the other numbers (`cost/forecast_bias.py`).
  Later plans foresee with it, and searches compare by it.

The first steps of a run are synchronous (`RunSpec.synchronous_steps`), and plans are made for the time after them. The
objective foresees the live layout both ways, and what is seen of a synchronous step is divided by the ratio of the two
before it is compared. (Lost: comparing it as it is. A pipeline with many stages loses most where nothing runs ahead,
and searches in the first minute divided it into fewer.)

By how much promises have erred, from one layout to the next (`forecast_error`), says what a gain is worth that a search
promises. A gain that a search has promised and nobody has seen yet is taken for one that will not come: otherwise each
search would believe the figures that deceived the last one, and where steps are slow the run would change its layout
again and again before any of them has been seen.

Both differences are reasons for a search, and so is what nobody has measured: `is_off` says so when seen over foreseen
falls below `SLOW`, or has changed by `CHANGED` since the last search. It says so once: a search that finds nothing
better makes the ratio the usual one.

The median sees a change late: after two steps, and where a slow device makes steps of minutes that is after minutes. So
where today's figure is far below what is seen, and the last step or the one under way is as late as that
(`TokenRate.newest`), two witnesses agree: what is seen is of before the change, and today's figure counts.

Successors get what was learned and the rest in a hand-over. A successor of a coordinator that died begins to compare
anew.
"""

import math
from collections import deque
from statistics import fmean

from shoal.coordinator.allocate.interface import FORECAST_ERROR
from shoal.coordinator.cost.forecast_bias import ForecastBias
from shoal.coordinator.plan_layout import Places, places_of
from shoal.coordinator.token_rate import TokenRate
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STAGES_MAX, VERSION_MAX
from shoal.protocol.messages import Calibrated, Comparison
from shoal.protocol.plan import Bound, Foreseen, Plan

WARM_UP_STEPS = 4
"""The first steps of a layout are not compared: its pipeline fills, and new members compile their kernels."""
LEARN_STEPS = 64
FACTOR_MAX = 8.0
"""The objective is no further off, whatever happens: then something is broken, and it is told as slowness."""
OFF_STEPS = 4
"""Fewer steps are no reason for a search."""
SLOW = 0.75
CHANGED = 1.25
UNSEEN_ERROR = 0.3
"""The least `forecast_error` from the moment when a search's layout goes live until its pace has been seen. Figures of
devices and links are a few seconds old at that time. With this error a further change has to promise 63 % more."""
LAYOUTS_KEPT = 8
NUMBERS_KEPT = 8
"""What was seen is remembered of so many numbers of stages, those that the run had last."""
_WORDS: dict[Bound, str] = {
    "compute": "stage {0} bounds it (its devices compute)",
    "card": "stage {0} bounds it (its network cards carry activations)",
    "paths": "the paths beside stage {0} bound it",
    "reduction": "stage {0} bounds it (its members reduce gradients)",
    "round trip": "the way of a microbatch from stage {0} to the end and back bounds it",
    "commit": "stage {0} bounds it (its commit takes long)",
}


class Calibration:
    """The comparison of the live layout, and what was learned from all that this peer knows of.

    Args: synchronous_steps: how many of the run's first steps are synchronous; 0 where all are, or none is.
    """

    def __init__(self, *, synchronous_steps: int = 0) -> None:
        self._synchronous_steps = synchronous_steps
        self._synchronous_share = 1.0
        """The tokens/s of synchronous steps over those of others, by the objective and of the live layout."""
        self._layout: tuple[int, Places] | None = None
        """(era, places) of the live plan."""
        self._foreseen: Foreseen | None = None
        self._today: Foreseen | None = None
        """Today's figure as the objective says it, without the factor."""
        self._steady_from: int | None = None
        self._seen = 0.0, 0
        """What `TokenRate.seen` says: (tokens/s, over how many steps)."""
        self._shown_tokens_per_s = 0.0
        """What people are told: the tokens/s that were committed, in synchronous steps too."""
        self._newest = 0.0
        """What `TokenRate.newest` says. In synchronous steps this and `_seen` are divided by `_synchronous_share`."""
        self._noted = 0.0
        """Seen over foreseen when the last search began, or when it could first be told; 0: neither has been."""
        self._learned: dict[int, tuple[float, int]] = {}
        """Number of stages -> (log(seen / today's figure), the steps behind it), the latest last."""
        self._factor_then = 1.0
        """The factor with which the live plan foresees."""
        self._learned_to = 0
        """The version up to which steps have been learned from."""
        self._promised_tokens_per_s = 0.0
        """How fast the live layout was foreseen to be when it began; 0: nobody said, or there was none before it."""
        self._promised_gain = 0.0
        """log(that / what the plan before foresaw of its own layout), where the peers are the same; 0 if it is less."""
        self._off: deque[float] = deque(maxlen=LAYOUTS_KEPT)
        """log(seen tokens/s / tokens/s that its first plan promised), of each layout before the live one."""

    @property
    def bias(self) -> ForecastBias:
        """The ratio of seen to foreseen throughput in this run, estimated for each number of stages."""
        return ForecastBias(tuple((num_stages, *learned) for num_stages, learned in self._learned.items()))

    @property
    def factor(self) -> float:
        """What is seen over what the objective says, for layouts with as many stages as the live one."""
        return self.bias.factor(self._num_stages)

    @property
    def _num_stages(self) -> int:
        return len(self._layout[1][0]) if self._layout is not None else 1

    @property
    def ratio(self) -> float:
        """The tokens/s of the live layout divided by the foreseen ones; 0: too few steps are known."""
        return self._rate / self._foreseen.tokens_per_s if self._foreseen is not None else 0.0

    @property
    def seen_tokens_per_s(self) -> float:
        """How fast the live layout is; 0: it has made too few steps to say."""
        return self._rate if self._seen[1] >= OFF_STEPS else 0.0

    @property
    def _rate(self) -> float:
        """What is seen; what today's figures say, if that is of before they changed."""
        return self._believed if self._is_out_of_date else self._seen[0]

    @property
    def _believed(self) -> float:
        """What today's figures say, with what is learned; 0: they say nothing."""
        return self.factor * self._today.tokens_per_s if self._today is not None else 0.0

    @property
    def _is_out_of_date(self) -> bool:
        """Whether what is seen is of before something became slower, as figures and the newest step both say."""
        both = self._believed, self._newest
        return min(both) > 0.0 and CHANGED * max(both) < self._seen[0]

    @property
    def is_off(self) -> bool:
        """Whether the layout is slower than foreseen, or its pace has changed, and no search has begun since."""
        ratio, noted = self.ratio, self._noted
        if ratio <= 0.0 or self._seen[1] < OFF_STEPS:
            return False
        return (ratio < SLOW and not 0.0 < noted < SLOW) or (noted > 0.0 and _apart(ratio, noted) >= CHANGED)

    @property
    def is_unexplained(self) -> bool:
        """Whether the layout is far slower than today's figures say, beyond what is usual here: one of them is out of
        date."""
        if self._seen[1] < OFF_STEPS:
            return False
        return 0.0 < min(self._seen[0], self._newest or math.inf) < SLOW * self._believed

    @property
    def forecast_error(self) -> float:
        """The logarithm by which promises of plans err, in the quadratic mean. With the learned factor a promise is
        relative to what was seen of the layout before. Where the live layout has yet to be seen, its gain is taken for
        one that will not come, unless that would make promises look better than they have been, and the error is no
        less than `UNSEEN_ERROR`."""
        off_now = self._off_now()
        squares = [FORECAST_ERROR**2, *(off**2 for off in (*self._off, off_now) if off is not None)]
        mean = fmean(squares)
        if off_now is None:
            mean = max(mean, fmean([*squares, self._promised_gain**2]))
            if self._promised_gain:
                mean = max(mean, UNSEEN_ERROR**2)
        return math.sqrt(mean)

    def expected(self, foreseen: Foreseen | None, num_stages: int) -> Foreseen | None:
        """What the objective says of a layout with so many stages, times what its word has been worth."""
        return _times(self.bias.factor(num_stages), foreseen)

    # --- what happens ---

    def obey(self, plan: Plan) -> None:
        """A plan is live. A layout that goes on, as under the plan of a new term, is compared on."""
        layout = plan.era, places_of(plan)
        if layout != self._layout:
            if (off := self._off_now()) is not None:
                self._off.append(off)
            # What is foreseen of a run's first layout says little: nothing has been learned yet.
            promised = plan.foreseen if self._layout is not None else None
            self._promised_tokens_per_s = promised.tokens_per_s if promised is not None else 0.0
            self._promised_gain = self._gain_of(plan)
            self._layout, self._today, self._steady_from = layout, None, None
            self._seen, self._newest, self._noted = (0.0, 0), 0.0, 0.0
            self._shown_tokens_per_s = 0.0
        if plan.foreseen != self._foreseen:
            self._foreseen, self._factor_then = plan.foreseen, self.factor

    def is_synchronous(self, version: int) -> bool:
        """Whether the step from `version` is one of the synchronous steps that a run begins with."""
        return version < self._synchronous_steps

    def foresee(self, today: Foreseen | None, *, synchronous: Foreseen | None = None) -> None:
        """Note what the objective says of the live layout with the figures of today.

        Args: synchronous: the same for synchronous steps; None: those are over.
        """
        self._today = today
        self._synchronous_share = 1.0
        if today is not None and synchronous is not None:
            self._synchronous_share = min(1.0, synchronous.tokens_per_s / today.tokens_per_s)

    def look(self, pace: TokenRate, now_s: float, *, version: int, is_whole: bool) -> None:
        """Compare what there is by now, and learn from it.

        Args:
            version: the highest of the era.
            is_whole: every member has the state that the plan gives it.
        """
        if self._layout is None or (self._steady_from is None and not is_whole):
            return
        if self._steady_from is None:
            self._steady_from = self._learned_to = version + WARM_UP_STEPS
        if self._steady_from < self._synchronous_steps <= version:
            self._steady_from = self._synchronous_steps + 1  # what was seen before is of other steps
            self._learned_to = max(self._learned_to, self._steady_from)
        share = self._synchronous_share if self.is_synchronous(version) else 1.0
        rate, num_steps = pace.seen(self._layout[0], self._steady_from, now_s)
        self._seen, self._shown_tokens_per_s = (rate / share, num_steps), rate
        self._newest = pace.newest(now_s) / share if num_steps else 0.0
        if self.ratio >= SLOW and self._seen[1] >= OFF_STEPS and not self._noted:
            self._noted = self.ratio
        if self._seen[1] and self._today is not None and version > self._learned_to:
            if not self._is_out_of_date:
                self._learn(_log(self._seen[0], self._today.tokens_per_s), version - self._learned_to)
            self._learned_to = version

    def searched(self) -> None:
        """A search for a better layout begins: it knows what we know."""
        self._noted = self.ratio

    def _off_now(self) -> float | None:
        """What is seen of the live layout over what its plan promised, in the logarithm; None: that is not known.

        Today's figures would not do: those of devices that stand in each other's way fall with what is seen, and then
        nothing seems to be wrong."""
        if self._promised_tokens_per_s <= 0.0 or self._seen[1] < OFF_STEPS:
            return None
        return _log(self._seen[0], self._promised_tokens_per_s)

    def _gain_of(self, plan: Plan) -> float:
        """The gain, in the logarithm, that a plan with another layout promises to the peers of the plan before; 0 if it
        promises none, or has other peers: with them the work changes, and not only its division."""
        before, after = self._foreseen, plan.foreseen
        if (
            self._layout is None
            or before is None
            or after is None
            or _peers(self._layout[1]) != _peers(places_of(plan))
        ):
            return 0.0
        return max(0.0, _log(after.tokens_per_s, before.tokens_per_s))

    def _learn(self, log: float, num_steps: int) -> None:
        num_steps = min(num_steps, LEARN_STEPS)
        before, steps = self._learned.pop(self._num_stages, (0.0, 0))
        steps = min(steps + num_steps, LEARN_STEPS)
        self._learned[self._num_stages] = before + (log - before) * num_steps / steps, steps
        if len(self._learned) > NUMBERS_KEPT:
            del self._learned[next(iter(self._learned))]

    # --- to others, and from them ---

    def tell(self) -> Calibrated | None:
        """What the next coordinator needs to go on comparing; None: nothing has been compared."""
        if self._layout is None:
            return None
        steady_from = -1 if self._steady_from is None else self._steady_from
        era, off = self._layout[0], tuple(self._off)
        return Calibrated(self.bias.seen, era, steady_from, self._noted, self._factor_then, off)

    def take_over(self, told: Calibrated | None) -> None:
        """Go on from what another coordinator has learned, of the layout that is live."""
        if told is None or not (
            len(told.learned) <= NUMBERS_KEPT
            and all(_is_possible(*learned) for learned in told.learned)
            and 1.0 / FACTOR_MAX <= told.factor_then <= FACTOR_MAX
            and 0.0 <= told.noted < math.inf
            and -1 <= told.steady_from <= VERSION_MAX
            and all(abs(off) <= math.log(FACTOR_MAX) for off in told.off)
        ):
            return
        self._learned = {num_stages: (log, steps) for num_stages, log, steps in told.learned}
        self._off = deque(told.off, maxlen=LAYOUTS_KEPT)
        if self._layout is not None and told.era == self._layout[0] and told.steady_from >= 0:
            self._steady_from, self._noted, self._factor_then = told.steady_from, told.noted, told.factor_then
            self._learned_to = max(self._learned_to, told.steady_from)

    # --- for people ---

    def comparison(self) -> Comparison | None:
        """The comparison of the live layout; None: nobody could say how fast it should be."""
        foreseen, today = self._foreseen, _times(self._factor_then, self._today)
        if foreseen is None:
            return None
        believed = today or foreseen
        now_tokens_per_s = self._synchronous_share * believed.tokens_per_s
        return Comparison(
            foreseen_tokens_per_s=foreseen.tokens_per_s,
            sentence=self._sentence(now_tokens_per_s, believed),
            seen_tokens_per_s=self._shown_tokens_per_s,
            steps=self._seen[1],
            today_tokens_per_s=now_tokens_per_s,
            bound=believed.bound,
            stage=believed.stage,
        )

    def _sentence(self, foreseen_tokens_per_s: float, believed: Foreseen) -> str:
        """One figure to hold beside what is seen, and one reason why it is no higher."""
        seen = f", seen {self._shown_tokens_per_s:,.0f} over {self._seen[1]} steps" if self._seen[1] else ""
        reason = _WORDS[believed.bound].format(believed.stage)
        if self._synchronous_share < 1.0:
            reason = f"nothing runs ahead in the first {self._synchronous_steps} steps"
        return f"foreseen {foreseen_tokens_per_s:,.0f} tokens/s{seen}; {reason}"


def _peers(places: Places) -> frozenset[PeerID]:
    """The members and the spares."""
    stages, spares = places
    return frozenset(spares).union(*(peers for _, _, peers in stages))


def _is_possible(num_stages: int, log: float, steps: int) -> bool:
    """Whether a coordinator can have learned this."""
    return 1 <= num_stages <= STAGES_MAX and abs(log) <= math.log(FACTOR_MAX) and 1 <= steps <= LEARN_STEPS


def _log(rate: float, other: float) -> float:
    """The logarithm of `rate` / `other`, where the ratio is taken to be within `FACTOR_MAX`: a rate may be 0."""
    return math.log(min(max(rate / other, 1.0 / FACTOR_MAX), FACTOR_MAX))


def _times(factor: float, foreseen: Foreseen | None) -> Foreseen | None:
    if foreseen is None:
        return None
    return Foreseen(foreseen.tokens_per_s * factor, foreseen.bound, foreseen.stage)


def _apart(a: float, b: float) -> float:
    return max(a / b, b / a)
