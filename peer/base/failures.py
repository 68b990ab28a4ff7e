"""The error after which this peer cannot go on."""

import asyncio
import logging

logger = logging.getLogger(__name__)


class Failures:
    """The errors of one peer's tasks, which nothing awaits."""

    def __init__(self) -> None:
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an exception when this peer cannot go on."""

    def add(self, error: BaseException) -> None:
        logger.error("this peer cannot go on: %r", error)
        if not self.first.done():
            self.first.set_exception(error)

    def add_from(self, task: "asyncio.Task[None]") -> None:
        """Add the error of a task that has ended, if it has one."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.add(error)
