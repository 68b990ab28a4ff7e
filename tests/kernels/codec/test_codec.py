"""What the codecs promise, of each twin; and that the twins are one."""

import pytest
import torch
from blake3 import blake3

from shoal.kernels.codec import FORMATS, reference
from shoal.kernels.codec.formats import SCALE_BYTES, TILE, num_tiles
from twins import DEVICE

KEY = 0xDEADBEEF, 0x80000001
FORMS = [pytest.param(form, id=name) for name, form in FORMATS.items()]
SIZES = [1, TILE, TILE + 1, 1500]


def numbers(numel: int, *, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal ones, with one in a hundred twenty times as large, as activations have them."""
    rng = torch.Generator().manual_seed(seed)
    x_N = torch.randn(numel, generator=rng) * scale
    return torch.where(torch.rand(numel, generator=rng) < 0.01, 20.0 * x_N, x_N).to(DEVICE)


def there_and_back(twin, x_N, form, key=None):
    return twin.decode(twin.encode(x_N, form, key=key), x_N.numel(), form)


def largest_of_tile(x_N):
    padded_N = torch.nn.functional.pad(x_N, (0, -x_N.numel() % TILE))
    return padded_N.view(-1, TILE).abs().amax(1).repeat_interleave(TILE)[: x_N.numel()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numel", SIZES)
def test_a_payload_has_the_bytes_that_its_format_says(form, numel):
    """Of the reference: the twins give the same bytes."""
    payload_B = reference.encode(numbers(numel).cpu(), form)
    assert payload_B.dtype == torch.uint8
    assert payload_B.numel() == form.payload_bytes(numel) == num_tiles(numel) * (SCALE_BYTES + TILE * form.bits // 8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("numel", "key", "scale"), [*((numel, KEY, 1.0) for numel in SIZES), (65, None, 1e-25), (1500, None, 1e30)]
)
def test_the_twins_give_the_same_bytes(twin, form, numel, key, scale):
    x_N = numbers(numel, seed=numel, scale=scale)
    payload_B = reference.encode(x_N.cpu(), form, key=key)
    assert torch.equal(twin.encode(x_N, form, key=key).cpu(), payload_B)
    assert torch.equal(twin.decode(payload_B.to(DEVICE), numel, form).cpu(), reference.decode(payload_B, numel, form))


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("int8", "f3522589b809fffd"),
        ("hadamard6", "a54789776979a85b"),
        ("hadamard5", "de7b7ec3f0d13ef0"),
        ("hadamard4", "6ac13e941a1eae0c"),
        ("hadamard3", "eddf7d9adc36b6c9"),
    ],
)
def test_the_bytes_are_those_of_every_device(twin, name, digest):
    """The numbers are of whole ones, so that they are the same everywhere."""
    x_N = (torch.arange(1000) * 2654435761 % 2**32).to(torch.float32) / 2**31 - 1
    payload_B = twin.encode(x_N.to(DEVICE), FORMATS[name], key=KEY)
    assert blake3(payload_B.cpu().numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e30])
def test_what_comes_back_is_near(form, scale):
    """To the nearest: half a step at most, without rotation; with it, the errors of a tile's elements are mixed.

    Of the reference: the twins give the same bytes.
    """
    x_N = numbers(2000, scale=scale).cpu()
    error_N = (there_and_back(reference, x_N, form) - x_N).abs()
    if form.is_rotated:
        of_all = (error_N.double().square().mean() / x_N.double().square().mean()).sqrt()
        assert of_all < 1.2 / form.levels
    else:
        assert (error_N <= 0.51 / form.levels * largest_of_tile(x_N)).all()


@pytest.mark.parametrize("form", FORMS)
def test_by_chance_the_mean_of_many_is_right(form):
    """Of the reference: the twins give the same bytes."""
    x_N = numbers(TILE * 4, seed=5).cpu()
    many = 400
    sum_N = sum(there_and_back(reference, x_N, form, key=(index, 7 * index)).double() for index in range(many))
    step_N = largest_of_tile(x_N) * (64**0.5 if form.is_rotated else 1.0) / form.levels
    assert ((sum_N / many - x_N).abs() < 5.0 * step_N / many**0.5).all()
    nearest_N = there_and_back(reference, x_N, form).double()
    assert (sum_N / many - x_N).square().mean() < 0.3 * (nearest_N - x_N).square().mean()


@pytest.mark.parametrize("form", FORMS)
def test_chance_is_of_the_key_and_of_the_place(form):
    """Of the reference: the twins give the same bytes."""
    x_N = torch.full((TILE * 40,), 0.1)
    x_N[::TILE] = 1.0
    first_B, again_B, other_B = (reference.encode(x_N, form, key=key) for key in ((1, 2), (1, 2), (2, 1)))
    assert torch.equal(first_B, again_B)
    assert not torch.equal(first_B, other_B)
    tiles_TB = first_B[SCALE_BYTES * 40 :].view(40, -1)
    assert len({bytes(tile.tolist()) for tile in tiles_TB}) > 20, "no two tiles alike, but for chance"


@pytest.mark.parametrize("form", FORMS)
def test_zeros_and_what_is_next_to_them_are_zero(twin, form):
    x_N = torch.zeros(3 * TILE, device=DEVICE)
    x_N[TILE] = 1e-35
    x_N[2 * TILE + 5] = -3.0
    got_N = there_and_back(twin, x_N, form)
    assert not got_N[: 2 * TILE].any()
    assert got_N[2 * TILE + 5] == pytest.approx(-3.0, rel=0.02)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", [float("inf"), -float("inf"), float("nan")])
def test_a_tile_with_what_is_not_finite_comes_back_as_nan_and_the_others_as_they_were(twin, form, what):
    x_N = numbers(3 * TILE)
    clean_N = there_and_back(twin, x_N, form, KEY)
    x_N[TILE + 7] = what
    got_N = there_and_back(twin, x_N, form, KEY)
    assert got_N[TILE : 2 * TILE].isnan().all()
    assert torch.equal(got_N[:TILE], clean_N[:TILE])
    assert torch.equal(got_N[2 * TILE :], clean_N[2 * TILE :])


@pytest.mark.parametrize("form", FORMS)
def test_any_bytes_can_be_read(twin, form):
    rng = torch.Generator().manual_seed(1)
    payload_B = torch.randint(256, (form.payload_bytes(100),), dtype=torch.uint8, generator=rng)
    payload_B[: SCALE_BYTES * 2] = torch.tensor([0x80, 0x3F] * 2, dtype=torch.uint8)  # scales of 1.0
    got_N = twin.decode(payload_B.to(DEVICE), 100, form).cpu()
    assert torch.equal(got_N, reference.decode(payload_B, 100, form))
    assert got_N.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_view_of_any_shape_is_its_numbers_in_order(twin, form):
    x_BTD = numbers(3 * 5 * 7).view(3, 5, 7)
    assert torch.equal(twin.encode(x_BTD, form), twin.encode(x_BTD.reshape(-1), form))


def test_no_numbers_take_no_bytes(twin):
    for form in FORMATS.values():
        payload_B = twin.encode(torch.zeros(0, device=DEVICE), form)
        assert payload_B.numel() == 0
        assert twin.decode(payload_B, 0, form).numel() == 0
