"""Frames in flight, from the first byte sent to the last byte received; `links.py` explains the timing.

If a path's rate changes, the unsent bytes of a frame are sent at the new rate. Otherwise a frame that began on a slow
path would block the path for minutes after the path has recovered.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from shoal.protocol.sim.clock import Agenda
from shoal.protocol.sim.network import LinkSpec
from shoal.protocol.sim.stream import SimFrame, Stream


@dataclass(slots=True, eq=False)
class _Flight:
    """A frame in flight. If the path's rate changes before its last byte has left, its arrival moves."""

    frame: SimFrame
    rate_bytes_per_s: float
    leaves_s: float
    delay_s: float
    """Seconds from a frame's last byte sent to that byte's arrival, if the receiver's downlink is free."""
    left: asyncio.TimerHandle
    arrival: asyncio.TimerHandle | None = None
    """Timer of the frame's arrival; None until its first byte has reached the downlink."""
    through_card_s: float = 0.0
    arrived_before_s: float = 0.0


class Flights:
    """The frames in flight of all streams.

    Args:
        link: returns the present path between two places.
        left, arrived: called when a frame's last byte leaves, or reaches the receiver, unless the stream broke before.
    """

    def __init__(
        self,
        link: Callable[[int, int], LinkSpec],
        agenda: Agenda,
        *,
        left: Callable[[Stream, SimFrame], object],
        arrived: Callable[[Stream, SimFrame], object],
    ) -> None:
        self._link = link
        self._agenda = agenda
        self._on_left = left
        self._on_arrived = arrived
        self._leaving: dict[Stream, _Flight] = {}

    def start(self, stream: Stream, frame: SimFrame, now_s: float) -> None:
        source, destination = stream.source, stream.destination
        link = self._link(source.place, destination.place)
        rate = min(link.rate_bytes_per_s, stream.up_bytes_per_s)
        leaves_s = now_s + frame.nbytes / rate
        if stream.up_bytes_per_s < math.inf:
            source.plug.up_free_s = now_s + frame.nbytes / stream.up_bytes_per_s
            if stream.up_dirt is not None:
                source.plug.up_free_s = now_s + stream.up_dirt.takes_s(now_s, frame.nbytes / stream.up_bytes_per_s)
                leaves_s = max(now_s + frame.nbytes / link.rate_bytes_per_s, source.plug.up_free_s)
                rate = frame.nbytes / (leaves_s - now_s)
        stream.leaving = frame
        left = self._agenda.at(leaves_s, self._left, stream, frame)
        delay_s = link.latency_s + _extra_s(link, stream) + stream.queued_s(now_s)
        if link.corruption:
            frame.is_damaged = stream.rng.random() < link.corruption
        flight = self._leaving[stream] = _Flight(frame, rate, leaves_s, delay_s, left)
        if stream.down_bytes_per_s == math.inf:
            self._arrive(stream, flight)
        else:
            stream.first_byte_s = max(now_s + delay_s, stream.first_byte_s)
            self._agenda.at(stream.first_byte_s, self._first_byte, stream, flight)

    def path_changed(self) -> None:
        """Go on sending each frame that is leaving, now at its path's present rate."""
        now_s = self._agenda.now_s()
        for stream, flight in self._leaving.items():
            link = self._link(stream.source.place, stream.destination.place)
            rate = min(link.rate_bytes_per_s, stream.up_bytes_per_s)
            if stream.up_dirt is not None:
                rate = min(link.rate_bytes_per_s, stream.up_bytes_per_s * stream.up_dirt.now(now_s).factor)
            if rate == flight.rate_bytes_per_s or flight.frame.epoch != stream.epoch:
                continue
            unsent_bytes = (flight.leaves_s - now_s) * flight.rate_bytes_per_s
            flight.rate_bytes_per_s, flight.leaves_s = rate, now_s + unsent_bytes / rate
            flight.left.cancel()
            flight.left = self._agenda.at(flight.leaves_s, self._left, stream, flight.frame)
            if flight.arrival is not None:
                flight.arrival.cancel()
                stream.arrives_s = flight.arrived_before_s
                self._arrive(stream, flight)

    def _left(self, stream: Stream, frame: SimFrame) -> None:
        flight = self._leaving.get(stream)
        if flight is not None and flight.frame is frame:
            del self._leaving[stream]
        if frame.epoch == stream.epoch:
            self._on_left(stream, frame)

    def _first_byte(self, stream: Stream, flight: _Flight) -> None:
        if flight.frame.epoch == stream.epoch:
            plug = stream.destination.plug
            took_s = flight.frame.nbytes / stream.down_bytes_per_s
            starts_s = max(self._agenda.now_s(), plug.down_free_s)
            if stream.down_dirt is not None:
                took_s = stream.down_dirt.takes_s(starts_s, took_s)
            plug.down_free_s = flight.through_card_s = starts_s + took_s
            self._arrive(stream, flight)

    def _arrive(self, stream: Stream, flight: _Flight) -> None:
        flight.arrived_before_s = stream.arrives_s
        stream.arrives_s = max(flight.leaves_s + flight.delay_s, flight.through_card_s, stream.arrives_s)
        flight.arrival = self._agenda.at(stream.arrives_s, self._arrived, stream, flight.frame)

    def _arrived(self, stream: Stream, frame: SimFrame) -> None:
        if frame.epoch == stream.epoch:
            self._on_arrived(stream, frame)


def _extra_s(link: LinkSpec, stream: Stream) -> float:
    extra_s = stream.rng.uniform(0.0, link.jitter_s) if link.jitter_s else 0.0
    if link.spikes and stream.rng.random() < link.spikes:
        extra_s += stream.rng.uniform(0.0, link.spike_s)
    while link.loss and stream.rng.random() < link.loss:
        extra_s += 2.0 * link.latency_s
    return extra_s
