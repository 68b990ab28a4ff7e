"""One lane: a TCP connection between two members' processes, for pieces of one stream's frames.

    dialler                          other end
    stream 16 B, X 32 B       ->
                              <-     Y, signature of the other end    96 B
    signature of the dialler  ->                                      64 B
    records of pieces, from the stream's sender to the stream's receiver, whichever end dialled

Keys (X and Y), signatures and records are those of `secure_channel.py`. The signed statement also names the stream, so
that no other stream can use the lane. `stream` is derived from the stream's two HELLOs, which only the two ends have
read: a caller with an unknown `stream` is rejected before a key is computed. The plaintext of a record is one piece:
its offset in the byte stream that the lanes share (8 B), and its bytes.

A lane that stalls because of packet loss should hold few bytes that other lanes could carry. So its kernel send buffer
is kept little larger than the bytes in flight.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from shoal.protocol.errors import RemoteError
from shoal.protocol.live.carried_stream import agree
from shoal.protocol.live.secure_channel import RECORD_BYTES_MAX, Channel, Handshake
from shoal.protocol.live.tcp_queues import lane_name
from shoal.protocol.live.throttle import Intake, Throttle

STREAM_BYTES: Final = 16
_START: Final = struct.Struct(">Q")
PIECE_BYTES_MAX: Final = RECORD_BYTES_MAX - _START.size
_UNKNOWN_BYTES_MAX: Final = 1024
"""Reading pauses when this many bytes are exceeded before the other end has proved its identity."""


class Lane(asyncio.BufferedProtocol):
    """A TCP connection for pieces of one stream's frames. Its ends agree on keys in raw bytes; from `start` on they
    exchange encrypted records, one for each piece. Args: own: its socket. throttle: counts received bytes."""

    def __init__(self, own: socket.socket, throttle: Throttle) -> None:
        self.is_lost = False
        self.is_free = True
        """True if the lane is open and the kernel has taken everything that was written."""
        (there, port, *_), (_, own_port, *_) = own.getpeername(), own.getsockname()
        self.name = lane_name(there, port, own_port)
        self._socket = own
        self._throttle = throttle
        self._room = memoryview(bytearray(64 * 1024))
        self._received = bytearray()
        self._came = asyncio.Event()
        self._channel: Channel | None = None
        self._intake: Intake | None = None
        self._on_piece: Callable[[int, memoryview], None]
        self._on_free: Callable[[], None] = lambda: None
        self._on_lost: Callable[[Lane, str], None] = lambda lane, why: None
        self._why = "it was closed"
        self._transport: asyncio.Transport

    @classmethod
    async def over(cls, connected: socket.socket, throttle: Throttle, *, accepted: bool) -> "Lane":
        """Turn a connected socket into a lane; the lane owns and closes the socket.

        Args:
            accepted: True if the other end has dialled.
        Raises: OSError: the connection broke; the socket is then closed.
        """
        loop = asyncio.get_running_loop()
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # TCP_NOTSENT_LOWAT: bytes in the send buffer that are not in flight yet. TCP_USER_TIMEOUT: milliseconds
            # without an acknowledgement, longer than a receiver within its rate limits makes a sender wait. It ends a
            # single dead lane; a dead path shows after three seconds on the daemon's own connection.
            for option, value in (("TCP_NOTSENT_LOWAT", 16 * 1024), ("TCP_USER_TIMEOUT", 20_000)):
                if hasattr(socket, option):  # Linux has both
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            if accepted:
                _, lane = await loop.connect_accepted_socket(lambda: cls(connected, throttle), connected)
            else:
                _, lane = await loop.create_connection(lambda: cls(connected, throttle), sock=connected)
        except BaseException:
            connected.close()
            raise
        return lane

    def tcp_info(self) -> bytes:
        """Return the kernel's TCP_INFO of the connection; empty if there is none."""
        try:
            return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except (OSError, AttributeError):
            return b""

    # Key agreement

    async def dial(self, handshake: Handshake, stream: bytes) -> Channel:
        """Name the stream, and agree on keys as the dialler. Raises: RemoteError; EOFError: the lane is refused."""
        self._transport.write(stream)
        return await agree(handshake, self._read, self._transport.write, opens=True)

    async def read_stream(self) -> bytes:
        """Return the name of the stream for which the dialler opens this lane. Raises: EOFError."""
        return await self._read(STREAM_BYTES)

    async def accept(self, handshake: Handshake) -> Channel:
        """Agree on keys as the end that was dialled, after `read_stream`. Raises: RemoteError; EOFError: it broke."""
        return await agree(handshake, self._read, self._transport.write, opens=False)

    async def _read(self, nbytes: int) -> bytes:
        while len(self._received) < nbytes:
            if self.is_lost:
                raise EOFError("it ended before its ends agreed on keys")
            self._came.clear()
            await self._came.wait()
        taken = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return taken

    # Pieces

    def start(
        self,
        channel: Channel,
        *,
        on_piece: Callable[[int, memoryview], None],
        on_lost: Callable[["Lane", str], None],
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        """Send and receive pieces of frames from now on.

        Args:
            on_piece: takes (offset, piece); may raise RemoteError.
            on_lost: called once from the event loop, with the reason, if the lane breaks before `close`.
            on_free: called when the kernel has taken everything that was written.
        """
        self._channel, self._on_piece, self._on_lost, self._on_free = channel, on_piece, on_lost, on_free
        if self.is_lost:
            on_lost(self, "it ended as soon as its ends had agreed on keys")
            return
        if self._throttle.download is not None:
            self._intake = Intake(self._throttle.download, self._transport, lambda: self.is_lost)
        self._open_records()
        if not self.is_lost:
            self._transport.resume_reading()

    def send(self, start: int, piece: memoryview) -> None:
        """Write a piece. The caller may then change the buffer. Args: start: offset in the lanes' byte stream."""
        assert self._channel is not None
        for record in self._channel.seal(b"".join((_START.pack(start), piece))):
            self._transport.write(record)

    def close(self) -> None:
        """Close at once, without calling `on_lost`."""
        self.is_lost, self.is_free = True, False
        self._on_lost = lambda lane, why: None
        self._transport.abort()

    def _open_records(self) -> None:
        assert self._channel is not None
        try:
            for plain in self._channel.open(self._received):
                if len(plain) < _START.size:
                    raise RemoteError(self._channel.peer, "sent a piece of a frame without its offset")
                self._on_piece(_START.unpack_from(plain)[0], memoryview(plain)[_START.size :])
                if self.is_lost:
                    return
        except RemoteError as error:
            self._why = str(error)
            self._transport.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room if self._intake is None else self._room[: self._intake.slice_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_lost:
            return
        self._received += self._room[:nbytes]
        if self._channel is None:
            if len(self._received) > _UNKNOWN_BYTES_MAX:
                self._transport.pause_reading()
            self._came.set()
            return
        self._throttle.received(nbytes)
        if self._intake is not None:
            self._intake.came()
        self._open_records()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._why = f"it broke ({exc})"
        self.is_lost, self.is_free = True, False
        self._came.set()
        if self._intake is not None:
            self._intake.close()
        self._on_lost(self, self._why)

    def pause_writing(self) -> None:
        self.is_free = False

    def resume_writing(self) -> None:
        self.is_free = not self.is_lost
        self._on_free()
