"""Turns what the system refuses into sentences."""

import contextlib
from collections.abc import Iterator

from shoal.protocol.errors import LocalError


@contextlib.contextmanager
def or_say(what: str) -> Iterator[None]:
    """Say what failed inside the context. Raises: LocalError: an OSError occurred; its sentence begins with `what`."""
    try:
        yield
    except OSError as error:
        raise LocalError(f"{what}: {error.strerror or error}") from error
