"""Errors, by the side at fault. Pure.

`LocalError`: our process or its user; the message says what to do. `RemoteError`: a peer broke the protocol; it names
that peer, so that the driver can stop talking to it. `Unreachable`: nobody's fault yet, since networks fail.
"""


class ShoalError(Exception):
    """Base class. `str(error)` is one line fit for the command line."""


class LocalError(ShoalError):
    """This process, its configuration or its user is at fault."""


class SpecError(LocalError):
    """A run spec (TOML) is malformed or impossible."""


class InviteError(LocalError):
    """An invite cannot be read, or is for another protocol version."""


class RunNotFound(LocalError):
    """No reachable peer has the run of an invite."""


class DataError(LocalError):
    """The training text is missing, empty, or not the run's."""


class TransportError(LocalError):
    """Our own network stack could not start or died: port in use, daemon missing."""


class RemoteError(ShoalError):
    """`peer_id` sent something that no honest peer of this protocol version sends."""

    def __init__(self, peer_id: str, what: str) -> None:
        super().__init__(f"peer {peer_id[-8:]} {what}")
        self.peer_id = peer_id


class Unreachable(ShoalError):
    """`peer_id` did not answer in time, or its connection broke. `is_silence`: nothing came back; it may still run."""

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
    """Return the first line of an error's text, for a sentence of at most 120 letters; its repr if it has none."""
    return (str(error).splitlines() or [""])[0][:120] or repr(error)
