"""Chunks of state that come as a whole, in parts, twice, or not as they should."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shoal.peer.encoding.vectors import Vectors
from shoal.peer.handoff.inbox import WEIGHTS, ChunkInbox
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StateChunk, StateChunkRequest

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


def wanted(era: int, version: int, start: int, stop: int, *, base: int = -1) -> StateChunkRequest:
    return StateChunkRequest(
        stored_era=era, version=version, layer="layers.0", tensor=0, start=start, stop=stop, base=base
    )


def sent(tensor_N: torch.Tensor, start: int, stop: int) -> tuple[PeerID, StateChunk, bytearray]:
    meta = StateChunk(version=7, layer="layers.0", tensor=0, start=start)
    return HOLDER, meta, bytearray(VECTORS.payload_of(tensor_N[start:stop]))


def receive(*spans: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Returns: what was to come, what has, and which of the two chunks are known to be here."""

    async def main() -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
        wire: Any = Wire()
        inbox = ChunkInbox(wire, compute=wire, vectors=VECTORS)
        source_N, into_N = torch.arange(1.0, SIZE + 1.0), torch.zeros(SIZE)
        with inbox.expecting(HOLDER, wanted(-1, 7, 0, 26), into_N) as events:
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


@contextlib.contextmanager
def expecting_a_difference(base: int) -> Iterator[tuple[Callable[..., Any], torch.Tensor, torch.Tensor, asyncio.Event]]:
    """Yields: (what delivers a frame to an inbox, the weights before, where those after go, whether they are here)."""
    wire: Any = Wire()
    inbox = ChunkInbox(wire, compute=wire, vectors=VECTORS)
    before_N, into_N = torch.arange(26.0).bfloat16(), torch.zeros(26).bfloat16()
    with inbox.expecting(HOLDER, wanted(WEIGHTS, 8, 16, 26, base=base), into_N, before_N=before_N) as (event,):
        yield wire.deliver, before_N, into_N, event


def weights_meta(base: int) -> StateChunk:
    return StateChunk(stored_era=WEIGHTS, version=8, layer="layers.0", tensor=0, start=16, base=base)


def test_a_difference_to_the_version_that_is_here_becomes_the_next_one_however_often_it_comes() -> None:
    async def main() -> None:
        with expecting_a_difference(7) as (deliver, before_N, into_N, event):
            after_C = before_N[16:] * 1.01
            payload = bytearray(VECTORS.difference_payload(before_N[16:], after_C))
            for _ in range(2):
                await deliver(HOLDER, weights_meta(7), payload)
            assert event.is_set()
            assert torch.equal(into_N[16:], after_C)

    asyncio.run(main())


@pytest.mark.parametrize("base", [-1, 6])
def test_a_difference_to_another_version_or_none_at_all_is_let_fall(base: int) -> None:
    async def main() -> None:
        with expecting_a_difference(7) as (deliver, _, into_N, event):
            await deliver(HOLDER, weights_meta(base), bytearray(20))
            assert not event.is_set()
            assert not into_N.any()

    asyncio.run(main())


@pytest.mark.parametrize("payload", [b"", bytes(9), bytes(11), bytes(31), b"\x80" + bytes(9), b"\x80" * 10])
def test_what_is_no_difference_of_a_chunk_is_refused(payload: bytes) -> None:
    async def main() -> None:
        with expecting_a_difference(7) as (deliver, _, into_N, event):
            with pytest.raises(RemoteError, match="difference"):
                await deliver(HOLDER, weights_meta(7), bytearray(payload))
            assert not event.is_set()
            assert not into_N.any()

    asyncio.run(main())


@pytest.mark.parametrize(("era", "num_bytes"), [(-1, 0), (-1, 6), (WEIGHTS, 0), (WEIGHTS, 7)])
def test_bytes_that_are_no_numbers_are_refused(era: int, num_bytes: int) -> None:
    async def main() -> None:
        wire: Any = Wire()
        inbox = ChunkInbox(wire, compute=wire, vectors=VECTORS)
        meta = StateChunk(stored_era=era, version=7, layer="layers.0", tensor=0, start=0)
        with (
            inbox.expecting(HOLDER, wanted(era, 7, 0, 16), torch.zeros(16)),
            pytest.raises(RemoteError, match="as numbers of"),
        ):
            await wire.deliver(HOLDER, meta, bytearray(num_bytes))

    asyncio.run(main())
