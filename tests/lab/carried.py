"""Carries what two hosts say to each other over a third, in virtual time: as a relay does, with its own uplink."""

from collections.abc import Mapping, Sequence

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.ports import CallHandler, FrameHandler, Payload, Priority, Transport

_MARK = b"carried"


class _Label(msgspec.Struct, frozen=True, array_like=True):
    source: PeerID
    destination: PeerID
    inside: bytes
    priority: int = 0
    timeout_s: float = 0.0


class CarriedTransport:
    """Implements `Transport`: `transport`, but what goes to a peer of `carriers` goes to its carrier, which passes it
    on. Every host has one, since any may carry. Hosts of a simulation do not lie about who sent something."""

    def __init__(self, transport: Transport, carriers: Mapping[PeerID, PeerID]) -> None:
        self._transport, self._carriers = transport, carriers

    @property
    def peer_id(self) -> PeerID:
        return self._transport.peer_id

    def addresses(self) -> tuple[str, ...]:
        return self._transport.addresses()

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        async def call(source: PeerID, request: bytes) -> bytes:
            if not request.startswith(_MARK):
                return await on_call(source, request)
            label = _unpacked(request)
            if label.destination == self.peer_id:
                return await on_call(label.source, label.inside)
            return await self._transport.call(label.destination, request, timeout_s=label.timeout_s)

        async def frame(source: PeerID, meta: bytes, payload: Payload) -> None:
            if not meta.startswith(_MARK):
                return await on_frame(source, meta, payload)
            label = _unpacked(meta)
            if label.destination == self.peer_id:
                return await on_frame(label.source, label.inside, payload)
            await self._transport.send(label.destination, meta, payload, priority=Priority(label.priority))

        self._transport.serve(on_call=call, on_frame=frame)

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        await self._transport.introduce(peer, addresses)

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        carrier = self._carriers.get(peer)
        if carrier is None:
            return await self._transport.call(peer, request, timeout_s=timeout_s)
        label = _Label(self.peer_id, peer, request, timeout_s=timeout_s)
        return await self._transport.call(carrier, _packed(label), timeout_s=timeout_s)

    async def send(
        self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority, again: bytes | None = None
    ) -> None:
        carrier = self._carriers.get(peer)
        if carrier is None:
            await self._transport.send(peer, meta, payload, priority=priority, again=again)
        else:
            label = _Label(self.peer_id, peer, meta, priority=int(priority))
            await self._transport.send(carrier, _packed(label), payload, priority=priority)

    async def close(self) -> None:
        await self._transport.close()


def _packed(label: _Label) -> bytes:
    return _MARK + msgspec.msgpack.encode(label)


def _unpacked(data: bytes) -> _Label:
    return msgspec.msgpack.decode(data[len(_MARK) :], type=_Label)
