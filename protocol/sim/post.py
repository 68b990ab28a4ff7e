"""Carries control messages: the requests and replies of calls.

Control messages are small and multiplexed with frames: they wait for earlier control messages between the same two
peers, not for frames, and do not slow frames down. Jitter and spikes reorder control messages. A message is lost by
chance, by a cut, or if the receiver's process or either end's network daemon ends before it arrives.
"""

import random
from collections.abc import Callable
from typing import Literal

import xxhash

from shoal.protocol.sim.clock import Agenda
from shoal.protocol.sim.damage import flip_bits
from shoal.protocol.sim.paths import Cuts, Paths
from shoal.protocol.sim.stream import NetworkCard, Stream
from shoal.protocol.sim.trace import Kind, Trace

Condition = Literal["whole", "damaged", "repeated"]
"""A message's condition on arrival. "repeated" is a second delivery, with the same bytes as the first."""

Deliver = Callable[[bytes, Condition], object]


class Post:
    """Carries control messages. Args: stream: returns the stream from one card to another, for its random generator and
    for the time at which earlier control messages between the two have left."""

    def __init__(
        self,
        paths: Paths,
        cuts: Cuts,
        agenda: Agenda,
        trace: Trace,
        stream: Callable[[NetworkCard, NetworkCard], Stream],
    ) -> None:
        self._link = paths.link
        self._cuts = cuts
        self._agenda = agenda
        self._trace = trace
        self._stream = stream

    def send(self, source: NetworkCard, destination: NetworkCard, data: bytes, deliver: Deliver) -> None:
        """Call `deliver` when `data` arrives: once, never, or (with duplication) twice."""
        link = self._link(source.place, destination.place)
        stream = self._stream(source, destination)
        if link.loss and stream.rng.random() < link.loss:
            self._record(Kind.CALL_LOST, stream, data)
            return
        rate = min(link.rate_bytes_per_s, stream.up_bytes_per_s, stream.down_bytes_per_s)
        stream.control_free_s = max(self._agenda.now_s(), stream.control_free_s) + len(data) / rate
        jitter_s = stream.rng.uniform(0.0, link.jitter_s) if link.jitter_s else 0.0
        if link.spikes and stream.rng.random() < link.spikes:
            jitter_s += stream.rng.uniform(0.0, link.spike_s)
        condition: Condition = "whole"
        if data and link.corruption and stream.rng.random() < link.corruption:
            data, condition = _damaged(data, stream.rng), "damaged"
            self._record(Kind.CALL_DAMAGED, stream, data)
        arrives_s = stream.control_free_s + link.latency_s + jitter_s + stream.queued_s(self._agenda.now_s())
        connection = -1 if self._cuts.is_cut(source.place, destination.place) else stream.connection
        self._agenda.at(arrives_s, self._arrive, stream, connection, data, condition, deliver)
        if link.duplication and stream.rng.random() < link.duplication:
            again_s = arrives_s + stream.rng.uniform(0.0, link.repeat_s)
            self._agenda.at(again_s, self._arrive, stream, connection, data, "repeated", deliver)

    def _arrive(self, stream: Stream, connection: int, data: bytes, condition: Condition, deliver: Deliver) -> None:
        source, destination = stream.source, stream.destination
        if (
            connection != stream.connection
            or not destination.is_alive
            or self._cuts.is_cut(source.place, destination.place)
        ):
            self._record(Kind.CALL_LOST, stream, data)
            return
        if condition == "repeated":
            self._record(Kind.CALL_REPEATED, stream, data)
        deliver(data, condition)

    def _record(self, kind: Kind, stream: Stream, data: bytes) -> None:
        digest = xxhash.xxh3_64_intdigest(data)
        source, destination = stream.source.number, stream.destination.number
        self._trace.add(self._agenda.now_s(), kind, source, destination, len(data), digest)


def _damaged(data: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(data)
    flip_bits(flipped, rng)
    return bytes(flipped)
