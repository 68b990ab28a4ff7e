"""Reports new scores of `shoal eval` for the run that is up here: to terminal, page and record."""

import asyncio
from collections.abc import Callable
from typing import Final

from shoal.deploy.ship.scores import evaluations, in_words

_LOOK_S: Final = 5.0
"""The polling interval: an evaluation takes minutes, so a few seconds more do not matter."""


async def tell_scores(run: str, say: Callable[[str], None], *, every_s: float = _LOOK_S) -> None:
    """Say each new score until cancelled."""
    known = len(await asyncio.to_thread(evaluations, run))
    while True:
        await asyncio.sleep(every_s)
        found = await asyncio.to_thread(evaluations, run)
        for evaluation in found[known:]:
            for score in evaluation.scores:
                say(f"shoal eval, version {evaluation.version}: {in_words(score)}")
        known = len(found)
