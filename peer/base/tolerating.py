"""Lets code go on after another peer has failed to answer a request."""

from collections.abc import Callable

from shoal.protocol.errors import Refused, RemoteError, Unreachable


class Tolerating:
    """A `with` block that ends early, without an error, if a peer is unreachable, refuses, or breaks the protocol. The
    line "`what`: the error" is then passed to `log`."""

    def __init__(self, log: Callable[[str], None], what: str) -> None:
        self._log, self._what = log, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        is_tolerated = isinstance(error, (Unreachable, Refused, RemoteError))
        if is_tolerated:
            self._log(f"{self._what}: {error}")
        return is_tolerated
