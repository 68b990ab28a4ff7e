import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.model.schedule import learning_rate
from shoal.protocol.spec import OptimizerSpec

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
