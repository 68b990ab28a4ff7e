"""Errors of this peer's tasks: the first error ends the peer's work."""

import asyncio
import logging

logger = logging.getLogger(__name__)


class Failures:
    """Collects the errors of one peer's tasks, which no other task awaits."""

    def __init__(self) -> None:
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future that fails with the first error of a task; the peer's owner waits for it."""

    def add(self, error: BaseException) -> None:
        logger.error("this peer cannot go on: %r", error)
        if not self.first.done():
            self.first.set_exception(error)

    def add_from(self, task: "asyncio.Task[None]") -> None:
        """Add the error with which a task has ended, if any."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.add(error)
