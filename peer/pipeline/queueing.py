"""How much of a message's sending time was waiting for its link."""

from collections import defaultdict

from shoal.protocol.identity import PeerID


class LinkQueues:
    """The queueing times of messages of one size to several peers.

    The quickest message ever had the link to itself; each other one waited for the rest of its time. A link that became
    slower for good counts as one with a queue: as the bottleneck it still has one message on it and one behind it.
    """

    def __init__(self) -> None:
        self._quickest_s: dict[PeerID, float] = {}
        self._waited_s: defaultdict[PeerID, float] = defaultdict(float)

    def sent(self, target: PeerID, took_s: float) -> float:
        """Record a message. Returns: how long it waited, in seconds."""
        quickest_s = self._quickest_s[target] = min(took_s, self._quickest_s.get(target, took_s))
        self._waited_s[target] = took_s - quickest_s
        return took_s - quickest_s

    def last_waited_s(self, target: PeerID) -> float:
        """Return an estimate of the next message's wait."""
        return self._waited_s[target]
