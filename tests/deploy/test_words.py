"""Numbers as people read them."""

import pytest

from shoal.deploy.base.words import counted, digits


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.000314, "0.000314"), (3.14e-7, "0.000000314"), (12.34, "12.3"), (99.96, "100"), (1070.0, "1,070")],
)
def test_digits_are_three_and_no_exponent(value: float, text: str) -> None:
    assert digits(value) == text


def test_one_thing_is_singular_and_no_other_number_is() -> None:
    assert [counted(n, "device") for n in (0, 1, 1200)] == ["0 devices", "1 device", "1,200 devices"]
    assert counted(2, "microbatch", "microbatches") == "2 microbatches"
