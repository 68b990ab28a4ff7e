"""The comparison of a layout's measured rate with the predicted one, and what the coordinator learns from it."""

import math

import msgspec
import pytest

from shoal.coordinator.allocate.interface import FORECAST_ERROR
from shoal.coordinator.calibration import (
    FACTOR_MAX,
    LEARN_STEPS,
    OFF_STEPS,
    SLOW,
    WARM_UP_STEPS,
    Calibration,
)
from shoal.coordinator.token_rate import TokenRate
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import LayoutCalibration
from shoal.protocol.plan import Foreseen

STEP_S, TOKENS = 10.0, 1000
USUAL = TOKENS / STEP_S


class Run:
    """A run that commits steps, and the calibration of whoever coordinates it."""

    def __init__(self, plan, foreseen: float = USUAL, today: float | None = None) -> None:
        self.pace = TokenRate(tokens_per_step=TOKENS)
        self.calibration = Calibration()
        self.version, self.now_s = 0, 0.0
        self.plan = msgspec.structs.replace(plan, foreseen=Foreseen(foreseen, "compute", 1))
        self.today = Foreseen(foreseen if today is None else today, "compute", 1)
        self.synchronous: Foreseen | None = None
        self.calibration.obey(self.plan)

    def steps(self, num_steps: int, *, step_s: float = STEP_S, is_whole: bool = True) -> None:
        """Commit steps."""
        for _ in range(num_steps):
            self.now_s += step_s
            self.pace.committed(self.plan.era, self.version, TOKENS, self.now_s)
            self.version += 1
            is_synchronous = self.calibration.synchronous_left(self.version) > 0
            self.calibration.predict_step_time(self.synchronous if is_synchronous else self.today)
            self.calibration.look(self.pace, self.now_s, version=self.version, is_whole=is_whole)


@pytest.fixture
def plan(make_plan):
    return make_plan([["a", "b"], ["c"]], coordinator="a", not_started=False).plan


def test_what_comes_as_foreseen_is_told(plan):
    run = Run(plan)
    run.steps(100)
    assert run.calibration.factor == pytest.approx(1.0)
    told = run.calibration.comparison()
    assert told.sentence == "foreseen 100 tokens/s, seen 100 over 5 steps; stage 1 bounds it (its devices compute)"
    assert (told.foreseen_tokens_per_s, told.seen_tokens_per_s) == (100.0, pytest.approx(100.0))


def test_nothing_is_compared_before_all_have_their_state_and_the_pipeline_is_full(plan):
    run = Run(plan)
    run.steps(20, step_s=90.0, is_whole=False)
    assert run.calibration.comparison().seen_tokens_per_s == 0.0
    run.steps(WARM_UP_STEPS + 1, step_s=90.0)
    assert run.calibration.comparison().seen_tokens_per_s == 0.0
    run.steps(20)
    assert run.calibration.seen_tokens_per_s == pytest.approx(USUAL)


def test_a_run_that_becomes_slower_or_faster_is_seen_within_four_marks(plan):
    for step_s in (4 * STEP_S, STEP_S / 2):
        run = Run(plan)
        run.steps(40)
        run.steps(max(4, round(5 * 8.0 / step_s)), step_s=step_s)
        assert run.calibration.seen_tokens_per_s == pytest.approx(TOKENS / step_s)


def test_a_standstill_is_no_slowness(plan):
    run = Run(plan)
    run.steps(20)
    run.now_s += 300.0
    run.steps(20)
    assert run.calibration.seen_tokens_per_s == pytest.approx(USUAL)


def test_a_late_step_is_enough_where_todays_figure_says_why(plan):
    """A device became four times slower: what is seen of steps before that is no reason to stay."""
    run = Run(plan)
    run.steps(40)
    run.calibration.predict_step_time(Foreseen(USUAL / 4.0, "compute", 1))

    def look(after_s: float) -> None:
        run.calibration.look(run.pace, run.now_s + after_s, version=run.version, is_whole=True)

    look(1.2 * STEP_S)
    assert run.calibration.seen_tokens_per_s == pytest.approx(USUAL)
    look(1.6 * STEP_S)
    assert run.calibration.seen_tokens_per_s == pytest.approx(USUAL / 4.0)
    assert not run.calibration.is_unexplained


def test_a_late_step_that_nothing_explains_is_doubted(plan):
    run = Run(plan)
    run.steps(40)
    for after, is_unexplained in ((1.2, False), (1.6, True)):
        run.calibration.look(run.pace, run.now_s + after * STEP_S, version=run.version, is_whole=True)
        assert run.calibration.is_unexplained == is_unexplained
        assert run.calibration.seen_tokens_per_s == pytest.approx(USUAL)


def test_the_factor_is_what_the_objective_does_not_know_and_later_plans_foresee_with_it(plan):
    run = Run(plan, foreseen=2 * USUAL)
    run.steps(4 * LEARN_STEPS)
    assert run.calibration.factor == pytest.approx(0.5, rel=0.01)
    expected = 300.0 * run.calibration.factor
    assert run.calibration.expected(Foreseen(300.0, "commit", 0), 2) == Foreseen(pytest.approx(expected), "commit", 0)
    assert run.calibration.tell().learned == ((2, pytest.approx(math.log(0.5)), LEARN_STEPS),)
    assert run.calibration.expected(None, 2) is None


def test_what_was_measured_since_is_told_and_not_learned(plan):
    """A device became slower: today's figures say so, and the objective is as good as before."""
    run = Run(plan, foreseen=2 * USUAL, today=USUAL)
    run.steps(50)
    assert run.calibration.factor == pytest.approx(1.0)
    told = run.calibration.comparison()
    assert told.sentence.startswith("foreseen 100 tokens/s, seen 100 over "), "the plan's 200 is history"
    assert (told.foreseen_tokens_per_s, told.today_tokens_per_s) == (200.0, 100.0)


def test_the_factor_is_bounded_whatever_happens(plan):
    run = Run(plan, foreseen=1e9 * USUAL)
    run.steps(500)
    assert run.calibration.tell().learned == ((2, pytest.approx(-math.log(FACTOR_MAX)), LEARN_STEPS),)
    assert run.calibration.factor >= 1.0 / FACTOR_MAX


def test_another_layout_is_compared_anew_and_another_term_is_not(plan, make_plan):
    run = Run(plan)
    run.steps(30)
    run.calibration.obey(msgspec.structs.replace(run.plan, term=2, sequence=2))
    assert run.calibration.seen_tokens_per_s == pytest.approx(USUAL)
    run.calibration.obey(
        msgspec.structs.replace(run.plan, stages=make_plan([["a"], ["b", "c"]], coordinator="a").plan.stages)
    )
    assert run.calibration.seen_tokens_per_s == 0.0


def test_a_layout_that_gets_a_member_counts_as_fast_as_before_until_it_is_measured(plan, make_plan):
    run = Run(plan)
    run.steps(30)
    larger = make_plan([["a", "b"], ["c", "d"]], coordinator="a").plan.stages
    run.plan = msgspec.structs.replace(run.plan, stages=larger)
    run.calibration.obey(run.plan)
    run.steps(10, step_s=2 * STEP_S, is_whole=False)
    assert run.calibration.seen_tokens_per_s == pytest.approx(USUAL)
    heir = Calibration()
    heir.obey(run.plan)
    heir.take_over(run.calibration.tell())
    assert heir.seen_tokens_per_s == pytest.approx(USUAL)
    run.steps(WARM_UP_STEPS + 2 * OFF_STEPS, step_s=2 * STEP_S)
    assert run.calibration.seen_tokens_per_s == pytest.approx(USUAL / 2)
    run.calibration.obey(msgspec.structs.replace(run.plan, stages=plan.stages))
    assert run.calibration.seen_tokens_per_s == 0.0, "a member is gone"


def test_a_successor_goes_on_where_the_coordinator_was(plan):
    before, heir = Run(plan, foreseen=2 * USUAL), Run(plan, foreseen=2 * USUAL)
    before.steps(100)
    heir.pace, heir.version, heir.now_s = before.pace, before.version, before.now_s
    heir.calibration.take_over(before.calibration.tell())
    heir.steps(1)
    assert heir.calibration.seen_tokens_per_s == pytest.approx(before.calibration.seen_tokens_per_s)
    assert heir.calibration.factor == pytest.approx(before.calibration.factor)


def test_forecasts_are_believed_less_once_one_of_them_has_failed(plan, make_plan):
    run = Run(plan, foreseen=2 * USUAL)
    run.steps(30)
    assert run.calibration.forecast_error == FORECAST_ERROR, "what errs alike for all layouts errs in none of them"
    stages = make_plan([["a"], ["b", "c"]], coordinator="a").plan.stages
    promised = run.calibration.expected(Foreseen(2 * USUAL, "compute", 1), 2)
    run.calibration.obey(msgspec.structs.replace(run.plan, stages=stages, foreseen=promised))
    run.today = Foreseen(2 * USUAL / 1.5, "compute", 1)  # its devices are slower, as they stand in each other's way
    run.steps(30, step_s=1.5 * STEP_S)
    off = math.log(USUAL / 1.5 / promised.tokens_per_s)
    assert off == pytest.approx(-math.log(1.5), abs=0.02), (
        "what was seen with so many stages is nearly what is promised"
    )
    assert run.calibration.forecast_error == pytest.approx(math.sqrt((FORECAST_ERROR**2 + off**2) / 2))
    run.calibration.obey(msgspec.structs.replace(run.plan, foreseen=promised))
    assert run.calibration.tell().off == (pytest.approx(off),)
    heir = Run(plan)
    heir.calibration.take_over(run.calibration.tell())
    assert heir.calibration.forecast_error == run.calibration.forecast_error > FORECAST_ERROR


def test_a_promised_gain_counts_as_not_kept_until_it_is_seen(plan, make_plan):
    run = Run(plan)
    run.steps(30)
    stages = make_plan([["a"], ["b", "c"]], coordinator="a").plan.stages
    divided = msgspec.structs.replace(run.plan, stages=stages, foreseen=Foreseen(1.4 * USUAL, "compute", 1))
    follower = Calibration()  # of another peer, which has seen plans and no pace
    for calibration in (run.calibration, follower):
        calibration.obey(run.plan)
        calibration.obey(divided)
    unkept = math.sqrt((FORECAST_ERROR**2 + math.log(1.4) ** 2) / 2)
    run.steps(WARM_UP_STEPS + OFF_STEPS - 1, step_s=STEP_S / 1.4)
    assert run.calibration.forecast_error == pytest.approx(unkept), "too few steps to say what the new layout makes"
    heir = Run(plan)
    follower.take_over(run.calibration.tell())
    assert follower.forecast_error == pytest.approx(unkept), "so says who coordinates next"
    run.steps(2, step_s=STEP_S / 1.4)
    assert run.calibration.forecast_error < FORECAST_ERROR, "the promise is kept"

    grown = make_plan([["a", "d"], ["b", "c"]], coordinator="a").plan.stages
    run.calibration.obey(msgspec.structs.replace(divided, stages=grown, foreseen=Foreseen(3 * USUAL, "compute", 1)))
    assert run.calibration.forecast_error < FORECAST_ERROR, "what a newcomer adds is no promise of a search"
    heir.calibration.obey(msgspec.structs.replace(divided, foreseen=Foreseen(0.9 * USUAL, "compute", 1)))
    assert heir.calibration.forecast_error == FORECAST_ERROR, "no gain was promised"


def test_a_large_gain_that_is_promised_and_not_seen_counts_as_much_as_it_is(plan, make_plan):
    run = Run(plan)
    run.steps(30)
    stages = make_plan([["a"], ["b", "c"]], coordinator="a").plan.stages
    run.calibration.obey(msgspec.structs.replace(run.plan, stages=stages, foreseen=Foreseen(3 * USUAL, "compute", 1)))
    assert run.calibration.forecast_error == pytest.approx(math.sqrt((FORECAST_ERROR**2 + math.log(3) ** 2) / 2))


def test_each_number_of_stages_is_remembered_as_it_was_seen(plan, make_plan):
    run = Run(plan, foreseen=2 * USUAL)
    run.steps(3 * LEARN_STEPS)
    alone = make_plan([["a", "b", "c"]], coordinator="a").plan.stages
    assert 0.5 < run.calibration.bias.factor(1) < 0.75, "half of what was seen with two stages is expected with one"
    run.calibration.obey(msgspec.structs.replace(run.plan, stages=alone))
    run.steps(3 * LEARN_STEPS, step_s=STEP_S / 2)
    assert run.calibration.bias.factor(1) == pytest.approx(1.0, rel=0.02)
    assert run.calibration.bias.factor(2) == pytest.approx(0.5, rel=0.02)
    heir = Run(plan)
    heir.calibration.take_over(run.calibration.tell())
    assert heir.calibration.bias == run.calibration.bias


@pytest.mark.parametrize(
    "told",
    [
        None,
        LayoutCalibration(((2, math.nan, 1),), 0, 5),
        LayoutCalibration(((2, 21.0, 1),), 0, 5),
        LayoutCalibration(((2, 0.1, 0),), 0, 5),
        LayoutCalibration(((2, 0.1, -1),), 0, 5),
        LayoutCalibration(((0, 0.1, 1),), 0, 5),
        LayoutCalibration(tuple((k, 0.1, 1) for k in range(1, 100)), 0, 5),
        LayoutCalibration((), 0, -2),
        LayoutCalibration((), 0, 1 << 63),
        LayoutCalibration((), 0, 5, math.inf),
        LayoutCalibration((), 0, 5, math.nan),
        LayoutCalibration((), 0, 5, off=(math.nan,)),
        LayoutCalibration((), 0, 5, chosen_peers=-1),
        LayoutCalibration((), 0, 5, seen_before=math.inf),
    ],
)
def test_what_no_coordinator_can_have_learned_is_not_taken_over(plan, told):
    run = Run(plan)
    run.calibration.take_over(told)
    assert run.calibration.tell() == LayoutCalibration((), 0, -1, chosen_peers=3)


def test_what_was_learned_of_another_era_leaves_the_factor_alone(plan):
    run = Run(plan)
    run.calibration.take_over(LayoutCalibration(((2, -0.5, 10),), 7, 3))
    assert run.calibration.tell() == LayoutCalibration(((2, -0.5, 10),), 0, -1, chosen_peers=3)


def test_a_plan_that_foresees_nothing_is_compared_with_nothing(plan):
    run = Run(plan)
    run.calibration.obey(msgspec.structs.replace(plan, foreseen=None))
    run.steps(30)
    assert run.calibration.comparison() is None


def test_slowness_that_nobody_has_measured_is_not_told_as_measured(plan):
    run = Run(plan)
    run.steps(30)
    run.steps(30, step_s=4 * STEP_S)
    assert run.calibration.factor < SLOW
    assert "measured" not in run.calibration.comparison().sentence


def test_a_run_that_is_far_slower_than_todays_figures_say_is_unexplained_until_that_is_usual(plan):
    run = Run(plan)
    run.steps(40)
    assert not run.calibration.is_unexplained
    run.steps(3, step_s=4.0 * STEP_S)
    assert run.calibration.is_unexplained
    run.steps(3 * LEARN_STEPS, step_s=4.0 * STEP_S)
    assert not run.calibration.is_unexplained, "the objective is always so far off here"
    run = Run(plan)
    run.steps(40)
    run.today = Foreseen(USUAL / 4.0, "compute", 1)
    run.steps(8, step_s=4.0 * STEP_S)
    assert not run.calibration.is_unexplained, "a device was measured, and is slower now"


@pytest.fixture
def beginning(plan):
    """A run whose first 40 steps are synchronous, and foreseen to take twice as long as the others."""
    run = Run(plan)
    run.calibration = Calibration(synchronous_steps=40)
    run.calibration.obey(run.plan)
    run.synchronous = Foreseen(USUAL / 2, "round trip", 0)
    return run


def test_synchronous_steps_are_compared_with_their_own_forecast(beginning):
    beginning.steps(39, step_s=2 * STEP_S)
    assert beginning.calibration.seen_tokens_per_s == 0.0, "plans are made for later steps"
    assert beginning.calibration.factor == pytest.approx(1.0)
    told = beginning.calibration.comparison()
    assert told.seen_tokens_per_s == pytest.approx(USUAL / 2), "people are told what there is"
    assert told.sentence.startswith("foreseen 50 tokens/s, seen 50 over 5 steps; the round trip of a microbatch")
    assert told.today_tokens_per_s == pytest.approx(USUAL / 2)
    beginning.steps(1, step_s=2 * STEP_S)
    beginning.steps(60)
    assert beginning.calibration.factor == pytest.approx(1.0)
    assert beginning.calibration.seen_tokens_per_s == pytest.approx(USUAL)


def test_a_first_layout_was_chosen_by_probes_so_it_counts_as_chosen_once_it_was_measured(plan):
    run = Run(plan, foreseen=5.0 * USUAL, today=USUAL)
    run.steps(WARM_UP_STEPS)
    assert run.calibration.chosen.tokens_per_s == 0.0
    run.steps(2 * OFF_STEPS)
    assert run.calibration.chosen.tokens_per_s == pytest.approx(USUAL, rel=0.05)
    heir = Calibration()
    heir.obey(run.plan)
    heir.take_over(run.calibration.tell())
    assert heir.chosen.tokens_per_s == run.calibration.chosen.tokens_per_s


def test_a_layout_counts_the_peers_that_were_there_when_it_began_and_is_still_the_same_with_another_spare(plan):
    run = Run(plan)
    run.steps(WARM_UP_STEPS + 2 * OFF_STEPS)
    seen = run.calibration.seen_tokens_per_s
    run.calibration.obey(msgspec.structs.replace(plan, sequence=2, spares=(PeerID("d"), PeerID("e"))))
    assert run.calibration.chosen.peers == 3
    assert run.calibration.seen_tokens_per_s == seen > 0.0
    heir = Calibration()
    heir.obey(plan)
    heir.take_over(run.calibration.tell())
    assert heir.chosen.peers == 3
    run.calibration.obey(msgspec.structs.replace(plan, era=1, spares=(PeerID("d"), PeerID("e"))))
    assert run.calibration.chosen.peers == 5


def test_a_layout_that_lost_a_member_is_still_the_one_that_was_chosen(plan):
    run = Run(plan)
    run.calibration.obey(msgspec.structs.replace(plan, era=1, foreseen=Foreseen(3.0 * USUAL, "compute", 1)))
    first = msgspec.structs.replace(plan.stages[0], members=plan.stages[0].members[:1])
    stages, foreseen = (first, plan.stages[1]), Foreseen(0.1 * USUAL, "compute", 1)
    run.calibration.obey(msgspec.structs.replace(plan, era=1, sequence=2, stages=stages, foreseen=foreseen))
    assert run.calibration.chosen == (3.0 * USUAL, 3)


def test_a_later_layout_was_chosen_by_what_its_plan_predicts(plan):
    run = Run(plan)
    run.calibration.obey(msgspec.structs.replace(plan, era=1, foreseen=Foreseen(3.0 * USUAL, "compute", 1)))
    assert run.calibration.chosen.tokens_per_s == 3.0 * USUAL
