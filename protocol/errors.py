"""Error classes, by the side at fault. Pure.

`LocalError`: our process or its user is at fault; the message says what to do. `RemoteError`: a peer broke the
protocol; the error names the peer, so that the caller can stop talking to it. `Unreachable`: nobody is at fault yet,
since networks fail.
"""


class ShoalError(Exception):
    """Base class. `str(error)` is one line that the command line can print."""


class LocalError(ShoalError):
    """This process, its configuration or its user is at fault."""


class SpecError(LocalError):
    """A run spec (TOML) is malformed or impossible."""


class InviteError(LocalError):
    """An invite cannot be read, or is for another protocol version."""


class RunNotFound(LocalError):
    """No reachable peer has the run of an invite."""


class DataError(LocalError):
    """The training text is missing, is empty, or does not match the run's digest."""


class TransportError(LocalError):
    """Our own network stack could not start, or died: for example, the port is in use or the daemon is missing."""


class RemoteError(ShoalError):
    """`peer_id` sent something that no honest peer of this protocol version sends."""

    def __init__(self, peer_id: str, what: str) -> None:
        super().__init__(f"peer {peer_id[-8:]} {what}")
        self.peer_id = peer_id


class Unreachable(ShoalError):
    """`peer_id` did not answer in time, or its connection broke. `is_silence`: True if nothing came back at all."""

    def __init__(self, peer_id: str, why: str, *, is_silence: bool = False) -> None:
        super().__init__(f"peer {peer_id[-8:]} is unreachable: {why}")
        self.peer_id = peer_id
        self.why = why
        self.is_silence = is_silence


class Refused(ShoalError):
    """`peer_id` understood the call and declined; `reason` is its explanation."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(f"peer {peer_id[-8:]} refused: {reason}")
        self.peer_id = peer_id
        self.reason = reason


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, cut to 120 letters; if there is no text, the error's repr."""
    return (str(error).splitlines() or [""])[0][:120] or repr(error)
