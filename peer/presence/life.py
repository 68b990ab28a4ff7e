"""The state of this peer's life: it works, pauses or leaves. Counts how many replicas it has begun."""

from shoal.protocol.endpoint import Endpoint


class Life:
    """The life of one peer's process."""

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
        """True if the peer takes no new place."""
        return self.is_draining or self.is_away

    @property
    def is_ending(self) -> bool:
        """True if the peer leaves the run, or its process ends."""
        return self.is_draining or self.is_closed

    @property
    def incarnation(self) -> int:
        """Number of our present replica, by which others tell it from earlier ones. Each replica begins without state,
        as each process does."""
        return self._endpoint.incarnation + self._num_begun

    def begin_anew(self) -> int:
        """Return the incarnation of a new replica."""
        self._num_begun += 1
        return self.incarnation
