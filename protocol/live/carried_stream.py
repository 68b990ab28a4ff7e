"""One end of a stream that a third peer carries: an asyncio transport that encrypts its bytes (`secure_channel.py`).

For `Link` this transport works like the daemon's own stream: reading can be paused, writing reports when the kernel has
everything, and the asyncio protocol that receives the bytes can be replaced.

One end's connection to the carrier may break unnoticed by the other end. So each end sends an empty record every
second, and an end that receives nothing for some seconds closes the stream, since another carrier may be available.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from shoal.protocol.envelope import SIGNATURE_BYTES
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.secure_channel import KEY_BYTES, Channel, Handshake, Purpose
from shoal.protocol.ports import Payload

_SAYS_S: Final = 1.0
_SILENT_S: Final = 4.0
"""Seconds of silence after which a stream is given up. Even a carrier at its limits passes bytes more often."""


class _Inner(asyncio.Protocol):
    """Receives what the carrier forwards: first handshake messages of fixed length, then encrypted records."""

    def __init__(self) -> None:
        self.outer: CarriedTransport | None = None
        self.received = bytearray()
        self.is_lost = False
        self._came = asyncio.Event()

    async def read(self, nbytes: int) -> bytes:
        """Wait for the next `nbytes` bytes and return them. Raises: EOFError: the stream ended earlier."""
        while len(self.received) < nbytes:
            if self.is_lost:
                raise EOFError("it ended before its ends agreed on keys")
            self._came.clear()
            await self._came.wait()
        taken = bytes(self.received[:nbytes])
        del self.received[:nbytes]
        return taken

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._came.set()
        if self.outer is not None:
            self.outer.came()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._came.set()
        if self.outer is not None:
            self.outer.ended(exc)

    def pause_writing(self) -> None:
        if self.outer is not None:
            self.outer.get_protocol().pause_writing()

    def resume_writing(self) -> None:
        if self.outer is not None:
            self.outer.get_protocol().resume_writing()


async def secure(
    writer: asyncio.StreamWriter, identity: Identity, peer: PeerID, *, run: str, purpose: Purpose, opens: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Agree on keys with `peer` over a stream that a carrier has connected, and take that stream over.

    No bytes can be left in the stream's old reader: the opener sends nothing before the carrier has confirmed the
    stream, and the other end sends nothing before the opener does.

    Args:
        opens: True at the end that has asked for the stream.
    Returns: a reader and a writer of the decrypted bytes.
    Raises: RemoteError: `peer` is not at the other end. EOFError, OSError: the stream broke.
    """
    transport: Any = writer.transport
    if transport.is_closing():
        raise EOFError("the stream ended")
    inner = _Inner()
    transport.set_protocol(inner)
    transport.resume_reading()
    try:
        handshake = Handshake(identity, peer, run=run, purpose=purpose, opens=opens)
        channel = await agree(handshake, inner.read, transport.write, opens=opens)
    except BaseException:
        transport.abort()
        raise
    outer = CarriedTransport(transport, inner, channel, keeps=writer)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    outer.set_protocol(protocol)
    protocol.connection_made(outer)
    outer.came()
    if inner.is_lost:
        outer.ended(None)
    return reader, asyncio.StreamWriter(outer, protocol, reader, asyncio.get_running_loop())


async def agree(
    handshake: Handshake,
    read: Callable[[int], Awaitable[bytes]],
    write: Callable[[bytes], object],
    *,
    opens: bool,
) -> Channel:
    """Exchange keys and signatures with the other end. Raises: RemoteError: these are invalid; errors of `read`."""
    if opens:
        write(handshake.key)
    other = await read(KEY_BYTES)
    if not opens:
        write(handshake.key + handshake.sign(other))
    channel = handshake.finish(other, await read(SIGNATURE_BYTES))
    if opens:
        write(handshake.sign(other))
    return channel


class CarriedTransport(asyncio.Transport):
    """The decrypted side of a carried stream. Args: keeps: the encrypted side's writer; freeing it ends the stream."""

    def __init__(self, below: Any, inner: _Inner, channel: Channel, *, keeps: asyncio.StreamWriter) -> None:
        super().__init__()
        self._below, self._inner, self._channel, self._keeps = below, inner, channel, keeps
        self._protocol: asyncio.BaseProtocol
        self._plain = bytearray()
        self._is_paused = self._is_delivering = self._is_over = False
        self._why: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._said_s = self._loop.time()
        self._timer = self._loop.call_later(_SAYS_S, self._beat)
        inner.outer = self

    # Calls from the layer below

    def came(self) -> None:
        """Decrypt the records that have arrived, and deliver their bytes to the protocol, unless reading is paused."""
        self._heard_s = self._loop.time()
        if self._is_delivering or self._is_over:
            return
        self._is_delivering = True
        try:
            self._deliver()
            for plain in () if self._is_paused else self._channel.open(self._inner.received):
                self._plain += plain
                self._deliver()
                if self._is_paused or self._is_over:
                    break
        except RemoteError as error:
            self._give_up(ConnectionError(str(error)))
        finally:
            self._is_delivering = False

    def ended(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._timer.cancel()
            self._protocol.connection_lost(self._why or error)

    def _deliver(self) -> None:
        while self._plain and not self._is_paused and not self._is_over:
            protocol: Any = self._protocol
            if isinstance(protocol, asyncio.BufferedProtocol):
                room = memoryview(protocol.get_buffer(len(self._plain)))
                count = min(len(room), len(self._plain))
                room[:count] = self._plain[:count]
                del self._plain[:count]
                protocol.buffer_updated(count)
            else:
                plain = bytes(self._plain)
                self._plain.clear()
                protocol.data_received(plain)

    def _beat(self) -> None:
        now_s = self._loop.time()
        if not self._is_paused and now_s > self._heard_s + _SILENT_S:
            self._give_up(TimeoutError("nothing has come over its carrier for some seconds"))
            return
        if now_s >= self._said_s + _SAYS_S and not self._below.get_write_buffer_size():
            self.write(b"")
        self._timer = self._loop.call_later(_SAYS_S, self._beat)

    def _give_up(self, why: Exception) -> None:
        self._why = why
        self._timer.cancel()
        self._below.abort()

    # asyncio.Transport

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._below.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return bool(self._below.is_closing())

    def pause_reading(self) -> None:
        if not self._is_paused and not self._is_over:
            self._is_paused = True
            self._below.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and not self._is_over:
            self._is_paused = False
            self._below.resume_reading()
            self._loop.call_soon(self.came)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        return int(self._below.get_write_buffer_size())

    def write(self, data: Payload) -> None:
        if not self._is_over and not self._below.is_closing():
            self._said_s = self._loop.time()
            for record in self._channel.seal(data):
                self._below.write(record)  # asyncio's `writelines` of Python 3.12 and 3.13 never says that it is full

    def close(self) -> None:
        self._timer.cancel()
        self._below.close()

    def abort(self) -> None:
        self._timer.cancel()
        self._below.abort()
