"""Limits how many events each source may cause at once, and per second in the long run. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shoal.protocol.limits import ALLOWANCES_MAX

S = TypeVar("S", bound=Hashable)


@dataclass(slots=True)
class Allowance(Generic[S]):
    """A token bucket for each source. Args: most: events at once; per_s: events per second in the long run."""

    most: float
    per_s: float
    _spent: OrderedDict[S, tuple[float, float]] = field(default_factory=OrderedDict)
    """Source -> (tokens spent, time at which that number was counted), least recently used source first."""

    def takes(self, source: S, now_s: float, number: int = 1) -> bool:
        """Return True, and count the events, if the allowance of `source` permits `number` more events."""
        spent, then_s = self._spent.pop(source, (0.0, now_s))
        spent = max(0.0, spent - (now_s - then_s) * self.per_s)
        is_within = spent + number <= self.most
        self._spent[source] = (spent + number if is_within else spent, now_s)
        if len(self._spent) > ALLOWANCES_MAX:
            self._spent.popitem(last=False)
        return is_within
