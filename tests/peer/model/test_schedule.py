from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.model.schedule import learning_rate
from shoal.protocol.spec import ContinuedSpec, OptimizerSpec

SPEC = OptimizerSpec(learning_rate=1.0, warmup_steps=9, final_learning_rate_fraction=0.1)


def test_warm_up_is_a_line_from_zero_to_the_peak() -> None:
    assert [learning_rate(SPEC, step, 100) for step in range(10)] == pytest.approx([n / 10 for n in range(1, 11)])


def test_the_last_step_has_the_final_rate_and_it_stays() -> None:
    assert learning_rate(SPEC, 99, 100) == pytest.approx(0.1)
    assert learning_rate(SPEC, 500, 100) == pytest.approx(0.1)


def test_half_way_down_the_cosine_is_the_mean_of_peak_and_end() -> None:
    assert learning_rate(SPEC, 54, 100) == pytest.approx(0.55)


@given(warmup=st.integers(0, 50), extra=st.integers(0, 50), final=st.floats(0, 1))
def test_it_rises_then_falls_and_is_never_zero_before_the_end(warmup: int, extra: int, final: float) -> None:
    spec = OptimizerSpec(learning_rate=2.0, warmup_steps=warmup, final_learning_rate_fraction=final)
    total = max(1, warmup + extra)
    rates = [learning_rate(spec, step, total) for step in range(total)]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(0 < rate <= 2.0 for rate in rates[:-1])


# --- schedules, and runs that are continued ---


def rates_of(spec: OptimizerSpec, steps: int, *continued: ContinuedSpec) -> list[float]:
    return [learning_rate(spec, step, steps, continued) for step in range(steps)]


def of(schedule: Any, *, warmup: int = 9, final: float = 0.1, **fields: Any) -> OptimizerSpec:
    return OptimizerSpec(
        learning_rate=1.0,
        warmup_steps=warmup,
        final_learning_rate_fraction=final,
        schedule=schedule,
        **fields,
    )


def test_a_constant_rate_stays_after_the_warm_up() -> None:
    rates = rates_of(of("constant"), 50)
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[9:] == [1.0] * 41


def test_wsd_is_stable_then_falls_as_one_minus_the_root() -> None:
    """Hägele et al., 2024, arXiv 2405.18392, section 3, ending at the final rate in place of 0."""
    rates = rates_of(of("wsd", decay_steps=16), 100)
    assert rates[9:84] == [1.0] * 75
    assert rates[87] == pytest.approx(0.1 + 0.9 * (1 - (4 / 16) ** 0.5))
    assert rates[99] == pytest.approx(0.1)
    assert rates_of(of("wsd"), 100) == rates_of(of("wsd", decay_steps=20), 100), "a fifth, where nothing is said"


def test_a_decay_that_is_longer_than_the_run_begins_after_the_warm_up() -> None:
    rates = rates_of(of("wsd", decay_steps=1000), 20)
    assert rates[9] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[19] == pytest.approx(0.1)


@given(at=st.integers(0, 100), warmup=st.integers(0, 60), schedule=st.sampled_from(["constant", "wsd"]))
def test_a_run_continued_before_its_rate_falls_has_the_rates_of_one_meant_to_be_so_long(
    at: int, warmup: int, schedule: str
) -> None:
    decay = {"decay_steps": 10} if schedule == "wsd" else {}
    spec = of(schedule, warmup=warmup, **decay)
    at = at if schedule == "constant" else min(at, 90)
    before = ContinuedSpec(at=at, steps=100, schedule=spec.schedule, decay_steps=spec.decay_steps)
    assert rates_of(spec, 200, before) == pytest.approx(rates_of(spec, 200), abs=1e-12)


def test_a_cosine_that_has_ended_warms_up_again_and_falls_again() -> None:
    """Ibrahim et al., 2024, arXiv 2403.08763: re-warming and re-decaying."""
    rates = rates_of(of("cosine"), 200, ContinuedSpec(at=100, steps=100))
    assert rates[:100] == rates_of(of("cosine"), 100), "what was trained was trained with these"
    assert rates[100] == pytest.approx(0.2), "as steep as the warm-up"
    assert rates[108] == pytest.approx(1.0)
    assert rates[108:] == sorted(rates[108:], reverse=True)
    assert rates[199] == pytest.approx(0.1)


def test_who_ends_sooner_gets_no_second_warm_up() -> None:
    rates = rates_of(of("cosine"), 80, ContinuedSpec(at=55, steps=100))
    assert rates[:55] == rates_of(of("cosine"), 100)[:55]
    assert rates[54:] == sorted(rates[54:], reverse=True)
    assert rates[79] == pytest.approx(0.1)


def test_another_schedule_holds_from_where_the_run_was_continued() -> None:
    rates = rates_of(of("constant"), 200, ContinuedSpec(at=100, steps=100, schedule="cosine"))
    assert rates[:100] == rates_of(of("cosine"), 100)
    assert rates[100] == pytest.approx(0.2)
    assert rates[110:] == [1.0] * 90


_SCHEDULES = st.sampled_from(["cosine", "constant", "wsd"])


@given(
    ends=st.lists(st.tuples(st.integers(1, 300), _SCHEDULES, st.floats(0, 1)), min_size=1, max_size=6),
    warmup=st.integers(0, 40),
    final=st.floats(0, 1),
)
def test_no_history_makes_a_rate_jump_up_faster_than_the_warm_up_or_pass_the_peak(
    ends: list[tuple[int, str, float]], warmup: int, final: float
) -> None:
    continued: list[ContinuedSpec] = []
    at = 0
    for steps, schedule, share in ends[:-1]:
        steps = max(steps, at)
        at += int(share * (steps - at))
        continued.append(ContinuedSpec(at=at, steps=max(steps, 1), schedule=schedule))  # type: ignore[arg-type]
    total = max(ends[-1][0], at, 1)
    rates = rates_of(of(ends[-1][1], warmup=warmup, final=final), total, *continued)
    assert all(0 <= rate <= 1.0 + 1e-9 for rate in rates)
    steepest = 1 / (warmup + 1) + 1e-9
    assert all(after - before <= steepest for before, after in pairwise([0.0, *rates]))
