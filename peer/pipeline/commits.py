"""How long commits take: from a replica's last contribution to a step until it has the next version.

That is waiting for mates, the reduction, the step. Each stage measures its own, and tells the stage before with every
gradient the longest of its own and of all that come after it; so stage 0 knows how long a version takes to come,
wherever it takes longest.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

STEPS = 6
"""That the median is taken over: a death now and then must not count for all steps."""
TOLD = 32
"""Microbatches after which a replica that answers no more is forgotten."""


@dataclass(slots=True)
class CommitTimes:
    """Of one replica and the stages after it."""

    _contributed_s: dict[int, float] = field(default_factory=dict)
    """Step -> when our last microbatch of it was done."""
    _stepped_s: float | None = None
    """When a step of our own has brought the version that is current; None: none has."""
    _own_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _told_s: deque[float] = field(default_factory=lambda: deque(maxlen=TOLD))

    @property
    def longest_s(self) -> float:
        """Here or later; 0: not known yet."""
        return max(median(self._own_s) if self._own_s else 0.0, max(self._told_s, default=0.0))

    def contributed(self, step: int, *, now_s: float) -> None:
        self._contributed_s[step] = now_s

    def told(self, longest_s: float) -> None:
        """By a replica of the next stage."""
        self._told_s.append(longest_s)

    def stepped(self, version: int, *, now_s: float) -> None:
        """A step of ours has brought `version`."""
        contributed_s = self._contributed_s.get(version - 1)
        if contributed_s is not None and self._stepped_s is not None:
            # Where whole steps go ahead, one may be done before the round before it is.
            self._own_s.append(now_s - max(contributed_s, self._stepped_s))
        self.loaded(version)
        self._stepped_s = now_s

    def loaded(self, version: int) -> None:
        """A state of `version` has come from elsewhere."""
        self._stepped_s = None
        self._contributed_s = {step: at_s for step, at_s in self._contributed_s.items() if step >= version}
