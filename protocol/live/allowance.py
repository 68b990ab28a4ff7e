"""Decides whether something more may come of one source: so much at once, and a little a second. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shoal.protocol.limits import ALLOWANCES_MAX

S = TypeVar("S", bound=Hashable)


@dataclass(slots=True)
class Allowance(Generic[S]):
    """Counts by source. The caller says what time it is.

    Args:
        most: what may come at once.
        per_s: what may come a second in the long run.
    """

    most: float
    per_s: float
    _spent: OrderedDict[S, tuple[float, float]] = field(default_factory=OrderedDict)
    """What time has not made up for, and when that was reckoned; the last source that came is at the end."""

    def __len__(self) -> int:
        """How many sources are remembered."""
        return len(self._spent)

    def takes(self, source: S, now_s: float, number: int = 1) -> bool:
        """Whether `number` more of `source` are within the allowance; they are counted if so."""
        spent, then_s = self._spent.pop(source, (0.0, now_s))
        spent = max(0.0, spent - (now_s - then_s) * self.per_s)
        is_within = spent + number <= self.most
        self._spent[source] = (spent + number if is_within else spent, now_s)
        if len(self._spent) > ALLOWANCES_MAX:
            self._spent.popitem(last=False)
        return is_within
