"""Fetch one range of a tensor from one peer; the chunks arrive as frames."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from torch import Tensor

from shoal.peer.encoding.vectors import Vectors
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done, StateChunkRequest

RANGE_CHUNKS = 4
"""Maximum length of a range: 4 MiB, so that a round trip is short against the transfer."""
RANGE_TIMEOUT_S = 60.0
"""A peer with more patience repeats the request after this time, since a request or chunk may be lost. A holder that is
still sending the range does not send it twice."""


def ranges(size: int, vectors: Vectors) -> list[tuple[int, int]]:
    """Cut a tensor into ranges (start, stop)."""
    width = RANGE_CHUNKS * vectors.chunk
    return [(start, min(start + width, size)) for start in range(0, size, width)]


async def fetch_range(
    peer: PeerID,
    request: StateChunkRequest,
    into_N: Tensor,
    *,
    inbox: ChunkInbox,
    vectors: Vectors,
    first: int = 0,
    before_N: Tensor | None = None,
    patience_s: float = RANGE_TIMEOUT_S,
) -> None:
    """Fill elements [start, stop) of a tensor with what `request` asks of `peer`.

    Args:
        into_N: the tensor, from element `first` on.
        before_N: the same tensor at version `request.base`, to which the difference is asked for.
    Raises: Unreachable, Refused, RemoteError.
    """
    what = (peer, request.stored_era, request.version, request.layer, request.tensor)
    starts = range(request.start, request.stop, vectors.chunk)
    events = [inbox.expect(*what, start, into_N, first=first, before_N=before_N, base=request.base) for start in starts]
    try:
        async with asyncio.timeout(patience_s):
            await _ask_until_here(lambda: inbox.endpoint.ask(peer, request, Done, timeout_s=patience_s), events)
    except TimeoutError as error:
        raise Unreachable(peer, "state did not arrive in time") from error
    finally:
        for start, event in zip(starts, events, strict=True):
            inbox.forget(*what, start, event)


async def _ask_until_here(ask: Callable[[], Awaitable[Done]], events: Sequence[asyncio.Event]) -> None:
    """Ask, and again after a while, until all events are set. Earlier requests stay open: cancelling a request stops
    its transfer. Raises what `ask` raises."""
    loop, asking = asyncio.get_running_loop(), set[asyncio.Future[Done]]()
    here = asyncio.gather(*(event.wait() for event in events))
    try:
        while not here.done():
            asking.add(asyncio.ensure_future(ask()))
            again_s = loop.time() + RANGE_TIMEOUT_S
            while not here.done() and (left_s := again_s - loop.time()) > 0.0:
                waited: set[asyncio.Future[Any]] = {here, *asking}
                await asyncio.wait(waited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for answered in [each for each in asking if each.done()]:
                    asking.remove(answered)
                    answered.result()
    finally:
        here.cancel()
        for each in asking:
            each.cancel()
        await asyncio.gather(here, *asking, return_exceptions=True)
