import msgspec
import pytest

from shoal.coordinator.cost.workload import Workload
from shoal.protocol.spec import RunSpec, WireSpec


@pytest.mark.parametrize(
    ("wire", "cut_bytes_per_number", "gradient_bytes"),
    [
        (WireSpec(), 2.0, 4.0),
        (WireSpec(activations="fp32"), 4.0, 4.0),
        (WireSpec(gradients="bf16"), 2.0, 2.0),
    ],
)
def test_what_travels_is_as_wide_as_the_wire_says(
    wire: WireSpec, cut_bytes_per_number: float, gradient_bytes: float
) -> None:
    spec = msgspec.structs.replace(RunSpec(), wire=wire)
    workload = Workload.of(spec)
    numbers = spec.training.microbatch_size * spec.model.context * spec.model.dim
    assert workload.cut_bytes == cut_bytes_per_number * numbers
    assert workload.gradient_bytes_per_parameter == gradient_bytes
