"""Handles our end of streams over a carrier (a third peer): requests streams, and accepts those that carriers bring."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from shoal.protocol.errors import RemoteError, TransportError, first_line
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import CARRIED_ARRIVING_OF_ONE_MAX
from shoal.protocol.live.carriage import CarriageAnswer, Carried, Carry, Streams, check_member, encode, read
from shoal.protocol.live.carried_stream import secure
from shoal.protocol.live.doorway import Doorway
from shoal.protocol.live.routes import NotCarried
from shoal.protocol.live.secure_channel import Purpose
from shoal.protocol.membership import Members

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S: Final = 8.0
"""Seconds for each end to open a carried stream; the carrier gives the other end five of these to accept it."""

Take = Callable[[PeerID, PeerID, Purpose, Streams], Awaitable[None]]
"""(source, carrier, purpose, stream) -> None; uses the stream that `source` opened, and returns when it ends."""


class CarriedStreams:
    """Opens and accepts carried streams (streams over a third peer, the carrier).

    Args:
        open_stream: opens a stream to a peer that may be a carrier.
        seen: called with the addresses from which the other end is connected to the carrier, once that end has proved
            its identity.
        take: uses a stream that another peer has opened to us over a carrier.
    """

    def __init__(
        self,
        identity: Identity,
        members: Members,
        *,
        open_stream: Callable[[PeerID], Awaitable[Streams]],
        seen: Callable[[PeerID, Sequence[str]], None],
        take: Take,
    ) -> None:
        self._identity, self._members = identity, members
        self._open_stream, self._seen, self._take = open_stream, seen, take
        self._doorway = Doorway(of_one_max=CARRIED_ARRIVING_OF_ONE_MAX)

    async def ask(self, carrier: PeerID, peer: PeerID, purpose: Purpose) -> Streams:
        """Get a stream to `peer` over `carrier`, and agree on keys with `peer`. Raises: NotCarried: that failed."""
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                reader, writer = await self._open_stream(carrier)
                try:
                    writer.write(encode(Carry(peer, purpose, self._members.certificate)))
                    answer = await read(reader, CarriageAnswer, carrier)
                    if answer.refusal:
                        raise NotCarried(repr(answer.refusal)[1:-1])
                    check_member(self._members, carrier, answer.certificate)
                    streams = await secure(
                        writer, self._identity, peer, run=self._members.run, purpose=purpose, opens=True
                    )
                    self._seen(peer, answer.seen_at)
                    return streams
                except BaseException:
                    writer.transport.abort()
                    raise
        except RemoteError as error:
            logger.warning("a stream over %s failed: %s", carrier[-8:], error)
            raise NotCarried(str(error)) from error
        except TimeoutError as error:
            raise NotCarried(f"no answer in {_ASK_TIMEOUT_S:g} s") from error
        except (TransportError, P2PDaemonError, OSError, EOFError, ValueError) as error:
            reason = "it is no carrier" if "protocols not supported" in str(error) else first_line(error)
            raise NotCarried(reason) from error

    async def arrive(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a stream that a carrier brings; return when the stream ends. Never raises on network input."""
        carrier = PeerID(info.peer_id.to_base58())
        try:
            with self._doorway.waits(carrier, writer.transport.abort):
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    said = await read(reader, Carried, carrier)
                    source = PeerID(said.source)
                    check_member(self._members, source, said.certificate)
                    if source in (self._identity.peer_id, carrier):
                        raise RemoteError(carrier, "brought a stream of a peer that needs no carrier")
                    writer.write(encode(CarriageAnswer("", self._members.certificate)))
                    streams = await secure(
                        writer, self._identity, source, run=self._members.run, purpose=said.purpose, opens=False
                    )
        except RemoteError as error:
            logger.warning("refused a stream that %s carries: %s", carrier[-8:], error)
            writer.transport.abort()
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("a stream that %s carries did not open: %r", carrier[-8:], error)
            writer.transport.abort()
        else:
            self._seen(source, said.seen_at)
            await self._take(source, carrier, said.purpose, streams)
