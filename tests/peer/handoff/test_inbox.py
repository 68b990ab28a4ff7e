"""Chunks of state that come as a whole, in parts, twice, or not as they should."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.vectors import Vectors
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StateChunk

VECTORS = Vectors(torch.device("cpu"), chunk_bytes=64)
"""16 elements, 4 in each part."""
HOLDER = PeerID("holder")
SIZE = 26
"""A whole chunk, and one of two parts and a half."""


class Wire:
    """What the inbox asks of an endpoint and a device."""

    deliver: Callable[..., Any]

    def on_frame(self, kind: type, handler: Callable[..., Any]) -> None:
        self.deliver = handler

    async def run_on_host(self, work: Callable[[], None]) -> None:
        work()


def sent(tensor_N: torch.Tensor, start: int, stop: int) -> tuple[PeerID, StateChunk, bytearray]:
    meta = StateChunk(version=7, layer="layers.0", tensor=0, start=start)
    return HOLDER, meta, bytearray(VECTORS.payload_of(tensor_N[start:stop]))


def receive(*spans: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Returns: what was to come, what has, and which of the two chunks are known to be here."""

    async def main() -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
        wire: Any = Wire()
        inbox = ChunkInbox(wire, compute=wire, vectors=VECTORS)
        source_N, into_N = torch.arange(1.0, SIZE + 1.0), torch.zeros(SIZE)
        events = [inbox.expect(HOLDER, -1, 7, "layers.0", 0, start, into_N) for start in (0, 16)]
        for span in spans:
            await wire.deliver(*sent(source_N, *span))
        return source_N, into_N, [event.is_set() for event in events]

    return asyncio.run(main())


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 16), (16, 26)],
        [(4, 8), (0, 4), (12, 16), (8, 12), (24, 26), (16, 20), (20, 24)],
        [(0, 4), (0, 4), (0, 16), (16, 20), (16, 26)],
    ],
    ids=["whole", "in parts, in any order", "some of it twice"],
)
def test_a_chunk_is_here_once_all_of_it_is(spans: list[tuple[int, int]]) -> None:
    source_N, into_N, are_here = receive(*spans)
    assert are_here == [True, True]
    assert torch.equal(source_N, into_N)


def test_a_part_that_comes_twice_is_one_part() -> None:
    _, _, are_here = receive((0, 4), (4, 8), (8, 12), (0, 4), (16, 20), (20, 24))
    assert are_here == [False, False]


@pytest.mark.parametrize("span", [(0, 3), (2, 6), (4, 12), (12, 20), (16, 24), (24, 25)])
def test_what_is_neither_a_chunk_nor_a_part_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(RemoteError, match="numbers at"):
        receive(span)
