"""Turns an operating-system error into one sentence."""

import contextlib
from collections.abc import Iterator

from shoal.protocol.errors import LocalError


@contextlib.contextmanager
def or_say(what: str) -> Iterator[None]:
    """Raise a LocalError in place of an OSError inside the context. Args: what: the beginning of the error's sentence
    (`cannot …`)."""
    try:
        yield
    except OSError as error:
        raise LocalError(f"{what}: {error.strerror or error}") from error
