"""Turns an operating-system error into an error with one sentence for the user."""

import contextlib
from collections.abc import Iterator

from shoal.protocol.errors import LocalError


@contextlib.contextmanager
def or_say(what: str) -> Iterator[None]:
    """Raise a LocalError for an OSError inside the context. Args: what: the start of its sentence, `cannot …`."""
    try:
        yield
    except OSError as error:
        raise LocalError(f"{what}: {error.strerror or error}") from error
