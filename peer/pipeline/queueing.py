"""How long a message stood in line for a link, of the time that sending it took."""

from collections import defaultdict

from shoal.protocol.identity import PeerID


class LinkQueues:
    """Messages of one size to several peers. The quickest one ever had the link to itself; whatever others took longer,
    they waited. A link that has become slower for good counts as one with a queue: then it is the bottleneck, and a
    window that leaves out the wait still has one message on the link and one behind it.
    """

    def __init__(self) -> None:
        self._quickest_s: dict[PeerID, float] = {}
        self._waited_s: defaultdict[PeerID, float] = defaultdict(float)

    def sent(self, target: PeerID, took_s: float) -> float:
        """Returns: how much of it the message waited."""
        quickest_s = self._quickest_s[target] = min(took_s, self._quickest_s.get(target, took_s))
        self._waited_s[target] = took_s - quickest_s
        return took_s - quickest_s

    def last_waited_s(self, target: PeerID) -> float:
        """What the next one will about wait, as far as we know."""
        return self._waited_s[target]
