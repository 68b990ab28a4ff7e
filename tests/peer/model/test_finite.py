"""What is not finite, found and zeroed, without a look at the device's numbers."""

import pytest
import torch

from shoal.peer.model.finite import finite, zero_unless


def test_what_is_finite_is_so_even_if_its_sum_is_not() -> None:
    large = torch.full((4,), 3e38)
    assert finite(large)
    assert finite(torch.zeros(0))
    for value in (torch.inf, -torch.inf, torch.nan):
        assert not finite(torch.tensor([1.0, value, -torch.inf, 2.0]))
        assert not finite(torch.tensor([value]))


@pytest.mark.parametrize("keep", [True, False])
def test_it_is_zeroed_in_place(keep: bool) -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf])
    assert zero_unless(torch.tensor(keep), values) is values
    assert values.isnan().any().item() is keep
    assert values.sum().isfinite().item() is not keep


def test_on_a_device_nobody_looks() -> None:
    """A tensor of torch's `meta` device has no numbers: `bool` of it raises."""
    values = torch.ones(5, device="meta")
    kept = finite(values)
    assert kept.device.type == "meta"
    assert zero_unless(kept, values) is values
    with pytest.raises(RuntimeError, match="meta"):
        bool(finite(values))
