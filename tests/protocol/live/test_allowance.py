"""So much at once, and a little a second."""

from shoal.protocol.limits import ALLOWANCES_MAX
from shoal.protocol.live.allowance import Allowance


def test_an_allowance_is_spent_at_once_or_at_a_rate() -> None:
    allowance = Allowance[str](100, 5.0)
    assert all(allowance.takes("a", 0.0) for _ in range(100))
    assert not allowance.takes("a", 0.0)
    assert allowance.takes("b", 0.0)
    assert sum(allowance.takes("a", 10.0) for _ in range(100)) == 50
    assert sum(allowance.takes("a", 1000.0) for _ in range(200)) == 100


def test_what_is_too_much_at_once_is_not_counted() -> None:
    allowance = Allowance[str](100, 5.0)
    assert not allowance.takes("a", 0.0, 101)
    assert allowance.takes("a", 0.0, 100)


def test_sources_without_number_do_not_fill_the_memory() -> None:
    allowance = Allowance[int](1, 1.0)
    for number in range(ALLOWANCES_MAX + 100):
        allowance.takes(number, 0.0)
    assert len(allowance._spent) == ALLOWANCES_MAX
