"""Records whether this peer works, pauses or leaves the run, and numbers the replicas that it begins."""

from shoal.protocol.endpoint import Endpoint


class Life:
    """The state of one peer's process: whether it works, pauses or leaves."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.is_draining = False
        """The peer finishes its work, and leaves the run."""
        self.is_closed = False
        """The peer's process ends now."""
        self.is_paused = False
        """The peer's owner uses the device."""
        self.is_away = False
        """The pause has lasted so long that plans give the peer's places to others."""
        self._num_begun = 0

    @property
    def is_leaving(self) -> bool:
        """True if the peer takes no new place in a stage or a group of experts."""
        return self.is_draining or self.is_away

    @property
    def is_ending(self) -> bool:
        """True if the peer leaves the run, or its process ends."""
        return self.is_draining or self.is_closed

    @property
    def incarnation(self) -> int:
        """Number of our present replica, by which other peers tell this replica from our earlier ones. Each replica,
        like each process, begins without state."""
        return self._endpoint.incarnation + self._num_begun

    def begin_anew(self) -> int:
        """Begin a new incarnation, for a new replica, and return its number."""
        self._num_begun += 1
        return self.incarnation
