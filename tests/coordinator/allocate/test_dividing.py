"""What another division into stages is reckoned to cost."""

import pytest

from shoal.coordinator.allocate.dividing import FOLLOWED_PART, left_s
from shoal.coordinator.cost.workload import STATE_BYTES_PER_PARAMETER, Workload
from shoal.protocol.spec import ModelSpec, RunSpec, WireSpec


def workload(gradients: str) -> Workload:
    return Workload.of(RunSpec(model=ModelSpec(), wire=WireSpec(gradients=gradients)))


@pytest.mark.parametrize(("gradients", "part"), [("fp32", 1 / 3), ("bf16", 1 / 6)])
def test_the_gradient_of_a_step_is_left_for_the_standstill_where_steps_are_long(gradients: str, part: float) -> None:
    assert workload(gradients).gradient_bytes_per_parameter / STATE_BYTES_PER_PARAMETER == pytest.approx(part)
    assert left_s(workload(gradients), 60.0, step_s=1000.0) == pytest.approx(part * 60.0)


def test_what_travels_faster_than_a_step_is_followed_and_the_rest_comes_whole() -> None:
    gradients_s = 20.0
    half = left_s(workload("fp32"), 60.0, step_s=0.5 * gradients_s / FOLLOWED_PART)
    assert half == pytest.approx(0.5 * gradients_s + 0.5 * 60.0)
    assert left_s(workload("fp32"), 60.0, step_s=1e-3) == pytest.approx(60.0, rel=1e-3)


def test_nothing_is_left_of_nothing() -> None:
    assert left_s(workload("fp32"), 0.0, step_s=1.0) == 0.0
