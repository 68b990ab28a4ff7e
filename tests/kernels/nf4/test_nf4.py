"""Four bits a number: the nearest of 16 levels of a tile's largest magnitude, and the same bytes everywhere."""

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels.nf4 import decode, encode, payload_bytes, reference
from shoal.kernels.nf4.reference import LEVELS
from twins import DEVICE


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@given(numel=st.integers(1, 300), seed=st.integers(0, 99))
def test_each_number_becomes_the_nearest_level(numel: int, seed: int) -> None:
    x_N = normal(numel, seed)
    found_N = decode(encode(x_N), numel)
    for start in range(0, numel, 64):
        tile, found = x_N[start : start + 64], found_N[start : start + 64]
        largest = tile.abs().max()
        nearest = (tile[:, None] - torch.tensor(LEVELS) * largest).abs().amin(1)
        # A scale in bfloat16 is at most 2^-7 larger than the largest magnitude.
        assert ((found - tile).abs() <= nearest + largest * 2**-7).all()


def test_the_levels_themselves_come_back() -> None:
    x_N = torch.tensor(LEVELS * 4) * 0.5
    assert torch.equal(decode(encode(x_N), 64), x_N)


def test_zeros_are_zeros_and_odd_sizes_fit() -> None:
    assert torch.equal(decode(encode(torch.zeros(65)), 65), torch.zeros(65))
    assert len(encode(torch.zeros(65))) == payload_bytes(65) == 2 * 34


def test_the_bytes_are_these() -> None:
    """A change of one bit would make every run's base foreign to its members."""
    payload = encode(torch.linspace(-1.0, 2.0, 64))
    assert payload[:2].view(torch.bfloat16).item() == 2.0
    assert payload[2:].tolist()[:8] == [162, 162, 179, 179, 179, 179, 195, 196]  # -1 is code 2, and 0.52 code 10 of 2


def test_error_of_normal_numbers_is_that_of_the_paper_s_format() -> None:
    x_N = normal(1 << 16)
    error = (decode(encode(x_N), x_N.numel()) - x_N).square().mean().sqrt()
    assert 0.07 < error < 0.11  # bitsandbytes' NF4 with blocks of 64: 0.096 of the deviation


@pytest.mark.parametrize("worst", [3.4e38, 1e-38])
def test_extreme_numbers_stay_finite(worst: float) -> None:
    x_N = torch.full((64,), worst)
    assert decode(encode(x_N), 64).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 64, 65, 3000])
@pytest.mark.parametrize("scale", [1.0, 3e-39, 1e38])
def test_the_twins_read_the_same_bits(twin: ModuleType, dtype: torch.dtype, numel: int, scale: float) -> None:
    payload_B = encode(normal(numel, seed=numel) * scale)
    found_N = twin.decode(payload_B.to(DEVICE), numel, dtype)
    assert found_N.dtype == dtype
    assert torch.equal(found_N.cpu(), reference.decode(payload_B, numel).to(dtype))
