"""Sockets with somebody in between, for what is carried: whatever one end writes passes through a function."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected() -> tuple[Streams, Streams]:
    """Two ends of one connection."""
    a, b = socket.socketpair()
    return await asyncio.open_connection(sock=a), await asyncio.open_connection(sock=b)


@dataclass
class Middle:
    """Passes on what it reads, through `there` and `back`; None from one of them: nothing any more, and nobody is
    told."""

    ends: tuple[Streams, Streams]
    there: Callable[[bytes], bytes | None] = lambda data: data
    back: Callable[[bytes], bytes | None] = lambda data: data
    passed_bytes: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def begin(self) -> None:
        (a, to_a), (b, to_b) = self.ends
        self._tasks = [
            asyncio.create_task(self._pass(a, to_b, lambda data: self.there(data))),
            asyncio.create_task(self._pass(b, to_a, lambda data: self.back(data))),
        ]

    async def _pass(self, reader, writer, change) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                changed = change(data)
                if changed is not None:
                    self.passed_bytes += len(changed)
                    writer.write(changed)
                    await writer.drain()
        self.cut()

    def cut(self) -> None:
        for _, writer in self.ends:
            writer.transport.abort()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()


@asynccontextmanager
async def carried_pair() -> AsyncIterator[tuple[Streams, Streams, Middle]]:
    """Two ends, and whoever carries between them."""
    here, left = await connected()
    right, there = await connected()
    middle = Middle((left, right))
    middle.begin()
    try:
        yield here, there, middle
    finally:
        await middle.end()
        for _, writer in (here, there):
            writer.transport.abort()
