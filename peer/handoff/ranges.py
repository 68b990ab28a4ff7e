"""Gets one range of a tensor from one peer; the chunks arrive as frames."""

import asyncio

from torch import Tensor

from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.vectors import Vectors
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done, StateChunkRequest

RANGE_CHUNKS = 4
"""What a chunk request asks for at most: 4 MiB, so that a round trip is small against the transfer."""
RANGE_TIMEOUT_S = 60.0


def ranges(size: int, vectors: Vectors) -> list[tuple[int, int]]:
    """Cut a tensor into what one request may ask for, (start, stop) each."""
    width = RANGE_CHUNKS * vectors.chunk
    return [(start, min(start + width, size)) for start in range(0, size, width)]


async def fetch_range(
    peer: PeerID,
    request: StateChunkRequest,
    into_N: Tensor,
    *,
    endpoint: Endpoint,
    inbox: ChunkInbox,
    vectors: Vectors,
    first: int = 0,
    before_N: Tensor | None = None,
    patience_s: float = RANGE_TIMEOUT_S,
) -> None:
    """Fill elements [start, stop) of a tensor with what `request` asks of `peer`.

    Args:
        into_N: the tensor, or what of it begins with element `first`.
        before_N: the same tensor at the version `request.base`, to which the difference is asked for.
    Raises: Unreachable, Refused, RemoteError.
    """
    what = (peer, request.stored_era, request.version, request.layer, request.tensor)
    starts = range(request.start, request.stop, vectors.chunk)
    events = [inbox.expect(*what, start, into_N, first=first, before_N=before_N, base=request.base) for start in starts]
    try:
        async with asyncio.timeout(patience_s):
            await endpoint.ask(peer, request, Done, timeout_s=patience_s)
            for event in events:
                await event.wait()
    except TimeoutError as error:
        raise Unreachable(peer, "state did not arrive in time") from error
    finally:
        for start, event in zip(starts, events, strict=True):
            inbox.forget(*what, start, event)
