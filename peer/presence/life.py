"""Whether this peer works, pauses or leaves, and how often it has begun anew."""

from shoal.protocol.endpoint import Endpoint


class Life:
    """The life of one peer's process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.is_draining = False
        """It finishes its work, and leaves."""
        self.is_closed = False
        """It ends now."""
        self.is_paused = False
        """Its owner uses the device."""
        self.is_away = False
        """The pause is so long that others get its places."""
        self._num_begun = 0

    @property
    def is_leaving(self) -> bool:
        """True if it takes no new place."""
        return self.is_draining or self.is_away

    @property
    def is_ending(self) -> bool:
        """True if it leaves the run, or ends."""
        return self.is_draining or self.is_closed

    @property
    def incarnation(self) -> int:
        """Number of our present replica. Each replica begins without state, as each process does."""
        return self._endpoint.incarnation + self._num_begun

    def begin_anew(self) -> int:
        """Return the incarnation of a new replica."""
        self._num_begun += 1
        return self.incarnation
