"""Tells what `shoal eval` finds on this machine of the run that is up here: on terminal, page and record."""

import asyncio
from collections.abc import Callable
from typing import Final

from shoal.deploy.ship.scores import evaluations, in_words

_LOOK_S: Final = 5.0
"""How often it is looked for: somebody has waited minutes for a score."""


async def tell_scores(run: str, say: Callable[[str], None], *, every_s: float = _LOOK_S) -> None:
    """Say each score that comes from now on, until this is cancelled."""
    known = len(await asyncio.to_thread(evaluations, run))
    while True:
        await asyncio.sleep(every_s)
        found = await asyncio.to_thread(evaluations, run)
        for evaluation in found[known:]:
            for score in evaluation.scores:
                say(f"shoal eval, version {evaluation.version}: {in_words(score)}")
        known = len(found)
