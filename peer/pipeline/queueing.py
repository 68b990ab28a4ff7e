"""Estimates how long a message waited in the queue of its link while it was sent."""

from collections import defaultdict

from shoal.protocol.identity import PeerID


class LinkQueues:
    """Estimates queueing times of messages of one size, for several peers.

    The quickest message to a peer is assumed to have had the link to itself, and every other message to have waited for
    the time that it took longer. A link that became slower for good therefore looks like a link with a queue, and fewer
    microbatches are kept in flight. This does no harm: even if this link is the bottleneck, a message waits behind the
    one that is being sent.
    """

    def __init__(self) -> None:
        self._quickest_s: dict[PeerID, float] = {}
        self._waited_s: defaultdict[PeerID, float] = defaultdict(float)

    def sent(self, target: PeerID, took_s: float) -> float:
        """Record that a message took `took_s` seconds to be sent. Return an estimate of its seconds in the queue."""
        quickest_s = self._quickest_s[target] = min(took_s, self._quickest_s.get(target, took_s))
        self._waited_s[target] = took_s - quickest_s
        return took_s - quickest_s

    def last_waited_s(self, target: PeerID) -> float:
        """Return the wait of the last message to `target`, in seconds, as an estimate for the next; 0: none."""
        return self._waited_s[target]
