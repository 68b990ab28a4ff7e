"""Runs the core's searches where they do not block the event loop, and returns their results."""

import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from shoal.coordinator.allocate.interface import Allocator, Layout, Searching
from shoal.coordinator.coordination_events import Searched
from shoal.coordinator.search_schedule import SearchJob
from shoal.protocol.errors import LocalError

logger = logging.getLogger(__name__)

RunBlocking = Callable[[Callable[[], object]], Awaitable[object]]


async def inline(work: Callable[[], object]) -> object:
    """Run work at once; in virtual time it must take no time."""
    return work()


class Searcher:
    """Runs one search after the other. Args: run_blocking: a thread in a live swarm; inline in virtual time."""

    def __init__(self, allocator: Allocator, run_blocking: RunBlocking, *, tell: Callable[[Searched], object]) -> None:
        self._allocator, self._run_blocking, self._tell = allocator, run_blocking, tell

    async def prepare(self) -> None:
        """Compile the kernels in advance. If that fails, the first search reports why."""
        if isinstance(self._allocator, Searching):
            with contextlib.suppress(ImportError):
                await self._run_blocking(self._allocator.prepare)

    async def run(self, job: SearchJob) -> None:
        """Search. After any error the coordinator continues with repaired layouts."""
        allocator, found = self._allocator, list[tuple[Layout | None, str]]()
        assert isinstance(allocator, Searching), "only a searching allocator is asked to"
        try:
            await self._run_blocking(lambda: found.append(allocator.search(job.snapshot, job.previous, seed=job.seed)))
            ((layout, reason),) = found
            searched = Searched(job=job, layout=layout, reason=reason)
        except LocalError as error:
            searched = Searched(job=job, reason=f"no search: {error}")
        except Exception as error:
            logger.debug("the search that failed", exc_info=True)
            searched = Searched(job=job, reason=_failed(error), is_bug=True)
        self._tell(searched)


def _failed(error: Exception) -> str:
    """Return one line, for a terminal, with the error and its place; the traceback is in the debug log."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"a search for a layout failed, and the plan stays: {what} ({Path(place.filename).name}:{place.lineno})"
