"""Asks the run's peers, before this machine joins, whether they admit it: a refusal has a reason to show the user."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from shoal.protocol.envelope import seal, unseal
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.messages import Message, Ping, Refusal

_ASKED_MAX = 8


async def why_refused(transport: LiveTransport, identity: Identity) -> str:
    """Return why the connected peers refuse this machine; empty if a peer accepts this machine, or no peer answers."""
    peers = sorted(await transport.connected())[:_ASKED_MAX]
    answers: Sequence[msgspec.Struct | None] = await asyncio.gather(
        *(_knock(transport, identity, peer, number) for number, peer in enumerate(peers))
    )
    if any(isinstance(answer, Ping) for answer in answers):
        return ""
    # A peer that has just started refuses Ping to everybody; that refusal does not keep us out.
    return next((answer.reason for answer in answers if isinstance(answer, Refusal) and answer.keeps_out), "")


async def _knock(transport: LiveTransport, identity: Identity, peer: PeerID, number: int) -> msgspec.Struct | None:
    # No Endpoint: a transport serves only one, which is made later. Its sequence numbers must begin above this one.
    members, sequence = transport.members, int(1e6 * time.time()) + number
    request = seal(
        identity,
        "call",
        run=members.run,
        term=0,
        sequence=sequence,
        body=msgspec.msgpack.encode(Ping()),
        certificate=members.certificate,
    )
    try:
        raw = await transport.call(peer, request, timeout_s=5.0)
        reply = unseal(raw, "reply", run=members.run, source=peer)
        answer: msgspec.Struct = msgspec.msgpack.decode(reply.body, type=Message)
    except (Unreachable, RemoteError, msgspec.DecodeError):
        return None
    return answer
