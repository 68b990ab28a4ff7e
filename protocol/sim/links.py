"""Moves frames between the network cards of a simulated world, and breaks streams that make no progress.

Theory of operation. A frame of n bytes waits in its stream's queue (by priority, then in order) until the stream's path
is free, the receiver has credit, and the sender's uplink selects this stream. This moment is `start`:

    leaves     start + n / min(path rate, uplink rate)        the sender is told; the path takes the next frame
    uplink     busy until start + n / uplink rate             so a slow path does not block the card
    arrives    leaves + latency                               if the receiver's downlink is free all the while
               max(first byte, downlink free) + n / downlink  if that is later; first byte = start + latency

If no other stream uses the two cards, a frame arrives at max(now, free) + n / rate + latency. An uplink selects the
most urgent waiting frame of all streams, as `live/throttle.py` does. At least a sixth of its bytes go to the stream
that has waited longest, and frames of one priority share it by start-time fair queueing in bytes. A downlink serves
frames in the order of their first bytes. A frame that is being sent is not preempted; if the path's rate changes, its
rest is sent at the new rate (`flights.py`). Credit returns one latency after the receiver's handler ends.

Loss and spikes delay a frame: a reliable stream retransmits and keeps its order. A damaged frame, or a damaged credit,
breaks its stream when the decoder finds the damage: earlier frames are still handled, later ones are not.

A stream with waiting frames breaks when its path has been cut in either direction for `stall_s`, or one latency after
the receiver's process or network daemon ended. Opening a stream takes no time; if no daemon answers, it fails after one
round trip.
"""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import TypeVarTuple

from shoal.protocol.errors import Unreachable
from shoal.protocol.sim.clock import Agenda
from shoal.protocol.sim.damage import damaged_credit, damaged_data
from shoal.protocol.sim.flights import Flights
from shoal.protocol.sim.network import CardSpec, LinkSpec
from shoal.protocol.sim.paths import Cut, Cuts, Paths
from shoal.protocol.sim.stream import NetworkCard, Plug, SimFrame, Stream
from shoal.protocol.sim.trace import Kind, Trace

Ts = TypeVarTuple("Ts")

_EARNED = 0.2
"""Bytes that the longest-waiting stream may send per byte of other streams, so a sixth of all (`live/throttle.py`)."""


class Links:
    """The streams between the peers of one world.

    Args:
        rng: returns the random generator of a name, the same in every run.
        stall_s: time without progress after which a stream breaks.
    """

    def __init__(
        self, paths: Paths, agenda: Agenda, trace: Trace, rng: Callable[[str], random.Random], *, stall_s: float
    ) -> None:
        self.link = paths.link
        self._agenda = agenda
        self._trace = trace
        self._rng = rng
        self._streams: dict[tuple[int, int], Stream] = {}
        self._flights = Flights(paths.link, agenda, left=self._left, arrived=self._arrive)
        self.cuts = Cuts()
        self.sent_bytes: dict[tuple[int, int], int] = {}
        """(sender's place, receiver's place) -> bytes of all frames that began to leave."""
        self.stall_s = stall_s

    # Frames -------------------------------------------------------------------------------------------------------

    def send(self, source: NetworkCard, destination: NetworkCard, frame: SimFrame) -> None:
        """Queue `frame`. `frame.left` is done when the last byte has left, or gets the error if the stream breaks."""
        stream = self.stream(source, destination)
        stream.put(frame)
        self._record(Kind.FRAME_QUEUED, stream, frame)
        self._offer(stream)
        self._watch(stream)
        if not destination.is_up:
            there, back = self._both_ways(stream)
            self._later(there.latency_s + back.latency_s, self._unanswered, stream, stream.epoch)

    def given_up(self, source: NetworkCard, destination: NetworkCard) -> None:
        """Let the uplink choose the stream's next frame, since the sender of a waiting frame no longer waits."""
        if (stream := source.outgoing.get(destination.number)) is not None:
            self._offer(stream)

    def handled(self, stream: Stream, frame: SimFrame) -> None:
        """Send the credit of a handled frame back to its sender."""
        self._record(Kind.FRAME_HANDLED, stream, frame)
        if frame.is_repeated:
            return
        back = self.link(stream.destination.place, stream.source.place)
        if back.corruption and stream.rng.random() < back.corruption:
            self._later(back.latency_s, self._damaged_credit, stream, frame.nbytes, frame.epoch)
        else:
            self._later(back.latency_s, self._credit, stream, frame.nbytes, frame.epoch)

    async def flush(self, card: NetworkCard) -> None:
        """Wait until each frame that `card` has sent is handled, or its stream has broken."""
        while any(stream.window.outstanding_bytes for stream in card.outgoing.values()):
            card.flushed = self._agenda.loop.create_future()
            await card.flushed

    def _wake_flush(self, card: NetworkCard) -> None:
        if card.flushed is not None and not card.flushed.done():
            card.flushed.set_result(None)  # `flush` looks again

    def reset(self, stream: Stream, why: str) -> None:
        """End the stream at the receiver, which handles no more of its frames. The sender learns of this one latency
        later."""
        stream.arrived.clear()
        self._refuse(stream, why)

    def _refuse(self, stream: Stream, why: str) -> None:
        stream.refused_epoch = stream.epoch
        back = self.link(stream.destination.place, stream.source.place)
        self._later(back.latency_s, self._was_reset, stream, why, stream.epoch)

    def stream(self, source: NetworkCard, destination: NetworkCard) -> Stream:
        """Return the stream from one process to another; make a stream if there is none yet."""
        stream = source.outgoing.get(destination.number)
        if stream is None:
            stream = Stream(source, destination, partial(self._rng, f"link {source.number} {destination.number}"))
            source.outgoing[destination.number] = destination.incoming[source.number] = stream
            self._streams[source.number, destination.number] = stream
        return stream

    def set_card(self, plug: Plug, card: CardSpec) -> None:
        """Change the rates of a plug (uplink and downlink), for all its streams. A frame being sent keeps its rate."""
        plug.spec = card
        for stream in self._streams.values():
            if plug in (stream.source.plug, stream.destination.plug):
                stream.take_rates()

    def _offer(self, stream: Stream) -> None:
        source, destination = stream.source, stream.destination
        if (
            stream.is_offered
            or stream.leaving is not None
            or not destination.is_serving
            or self.cuts.is_cut(source.place, destination.place)
        ):
            return
        frame = stream.next_frame()
        if frame is None or not stream.window.admits(frame.nbytes):
            return
        if stream.up_bytes_per_s == math.inf:
            self._start(stream, self._agenda.now_s())
            return
        plug = source.plug
        stream.is_offered = True
        plug.offers.append(stream)
        self._grant(plug)

    def _grant(self, plug: Plug) -> None:
        now_s = self._agenda.now_s()
        while plug.offers and plug.up_free_s <= now_s:
            has_earned = self._has_earned(plug)
            stream = plug.offers[0] if has_earned else min(plug.offers, key=Stream.rank)
            plug.offers.remove(stream)
            stream.is_offered = False
            if not stream.destination.is_serving or self.cuts.is_cut(stream.source.place, stream.destination.place):
                continue  # blocked since the offer; `heal` and `opened` offer the stream again
            priority, tag, *_ = stream.rank()
            nbytes = self._start(stream, now_s)
            if nbytes is not None:
                plug.tags_served[priority] = tag
                stream.tags[priority] = tag + nbytes
                plug.earned_bytes = 0.0 if has_earned else plug.earned_bytes + _EARNED * nbytes
        if plug.offers and plug.grant is None:
            plug.grant = self._agenda.at(plug.up_free_s, self._grant_again, plug)

    def _has_earned(self, plug: Plug) -> bool:
        """True if the longest-waiting stream has earned enough bytes to send its frame before more urgent ones."""
        frame = plug.offers[0].next_frame()
        return frame is not None and plug.earned_bytes >= frame.nbytes

    def _start(self, stream: Stream, now_s: float) -> int | None:
        """Start to send the stream's next frame. Return its bytes; None: there is no frame, or too little credit."""
        frame = stream.take_next()
        if frame is None:
            return None
        pair = stream.source.place, stream.destination.place
        self.sent_bytes[pair] = self.sent_bytes.get(pair, 0) + frame.nbytes
        self._record(Kind.FRAME_STARTED, stream, frame)
        self._flights.start(stream, frame, now_s)
        return frame.nbytes

    def _grant_again(self, plug: Plug) -> None:
        plug.grant = None
        self._grant(plug)

    def _left(self, stream: Stream, frame: SimFrame) -> None:
        stream.leaving = None
        if not frame.left.done():
            frame.left.set_result(None)
        self._offer(stream)

    def _arrive(self, stream: Stream, frame: SimFrame) -> None:
        if frame.epoch <= stream.refused_epoch:
            return
        if stream.held or self.cuts.is_cut(stream.source.place, stream.destination.place):
            stream.held.append(frame)
            return
        if frame.is_damaged and not self._passes(stream, frame):
            return
        self._record(Kind.FRAME_ARRIVED, stream, frame)
        if frame.epoch != stream.arrived_epoch:  # a new stream drops unhandled frames of the broken one
            stream.arrived.clear()
            stream.arrived_epoch = frame.epoch
        link = self.link(stream.source.place, stream.destination.place)
        if link.duplication and stream.rng.random() < link.duplication:
            self._later(stream.rng.uniform(0.0, link.repeat_s), self._repeat, stream, frame.repeated())
        self._hand_over(stream, frame)

    def _hand_over(self, stream: Stream, frame: SimFrame) -> None:
        stream.arrived.append(frame)
        if stream.serving is None:
            stream.destination.frame_arrived(stream)

    def _repeat(self, stream: Stream, frame: SimFrame) -> None:
        """Deliver a frame a second time, on the same stream (a real sender would open a new stream)."""
        if stream.destination.is_serving and not self.cuts.is_cut(stream.source.place, stream.destination.place):
            self._record(Kind.FRAME_REPEATED, stream, frame)
            self._hand_over(stream, frame)

    def _passes(self, stream: Stream, frame: SimFrame) -> bool:
        """Return whether the decoder accepts the damaged frame. If it does not, the receiver ends the stream."""
        self._record(Kind.FRAME_DAMAGED, stream, frame)
        outcome = damaged_data(frame.meta, frame.payload, source=stream.source.peer_id, rng=stream.rng)
        if isinstance(outcome, str):
            self._refuse(stream, outcome)
            return False
        frame.meta, frame.payload = outcome.meta, outcome.payload
        return True

    def _damaged_credit(self, stream: Stream, nbytes: int, epoch: int) -> None:
        if epoch != stream.epoch or self.cuts.is_cut(stream.destination.place, stream.source.place):
            self._credit(stream, nbytes, epoch)
            return
        self._trace.add(self._agenda.now_s(), Kind.CREDIT_DAMAGED, stream.source.number, stream.destination.number)
        outcome = damaged_credit(nbytes, source=stream.destination.peer_id, rng=stream.rng)
        self._break(stream, outcome if isinstance(outcome, str) else "it returned more credit than it got")

    def _credit(self, stream: Stream, nbytes: int, epoch: int) -> None:
        if epoch != stream.epoch:
            return
        if self.cuts.is_cut(stream.destination.place, stream.source.place):
            stream.held_credits.append(nbytes)
            return
        stream.window.give_back(nbytes, stream.destination.peer_id)
        self._wake_flush(stream.source)
        self._unwatch(stream)
        self._offer(stream)
        self._watch(stream)

    def path_changed(self) -> None:
        """Send the rest of frames in flight at the new rates. Each frame keeps the latency with which it began."""
        self._flights.path_changed()
        for stream in self._streams.values():
            stream.control_free_s = min(stream.control_free_s, self._agenda.now_s())

    # Faults -------------------------------------------------------------------------------------------------------

    def opened(self, card: NetworkCard) -> None:
        """Mark `card` as serving, and offer to the uplinks the frames that wait for this card."""
        card.is_serving = True
        for stream in card.incoming.values():
            self._revive(stream)

    def disconnected(self, card: NetworkCard, *, why: str) -> None:
        """Handle the death of the card's network daemon. Its own senders get Unreachable at once; other peers learn of
        the death by a reset of their streams, one latency later."""
        card.is_serving = card.is_up = False
        card.came_up.clear()
        card.num_daemons_died += 1
        for stream in card.outgoing.values():
            stream.connection += 1
            self._clear(stream, why)
        for stream in card.incoming.values():
            stream.connection += 1
            self._refuse(stream, "its network daemon died")

    def _unanswered(self, stream: Stream, epoch: int) -> None:
        here, there = stream.source.place, stream.destination.place
        if epoch == stream.epoch and not (
            stream.destination.is_up or self.cuts.is_cut(here, there) or self.cuts.is_cut(there, here)
        ):
            self._break(stream, "none of its addresses answers")

    def gone(self, card: NetworkCard, *, why: str | None) -> None:
        """Handle the end of the card's process. Its senders get Unreachable(`why`), or no error if `why` is None."""
        card.is_alive = card.is_serving = False
        for stream in card.outgoing.values():
            self._clear(stream, why)
            self._forget(stream)
        for stream in card.incoming.values():
            self.reset(stream, "its process ended")
            stream.serving = None

    def cut(self, sources: set[int], destinations: set[int], *, one_way: bool) -> Cut:
        cut = self.cuts.add(sources, destinations, one_way=one_way, now_s=self._agenda.now_s())
        for stream in self._streams.values():
            self._watch(stream)
        return cut

    def heal(self, cut: Cut | None) -> None:
        self.cuts.remove(cut)
        for stream in self._streams.values():
            self._revive(stream)

    def _revive(self, stream: Stream) -> None:
        if self._is_blocked(stream):
            return
        self._unwatch(stream)
        there, back = self._both_ways(stream)
        if stream.refused_epoch == stream.epoch:  # the cut may have swallowed the reset
            self._later(back.latency_s, self._was_reset, stream, "it had ended the stream", stream.epoch)
        if stream.held:
            self._later(there.latency_s, self._release, stream, stream.epoch)
        for nbytes in stream.held_credits:
            self._later(there.latency_s, self._credit, stream, nbytes, stream.epoch)
        stream.held_credits.clear()
        self._offer(stream)

    def _release(self, stream: Stream, epoch: int) -> None:
        if epoch == stream.epoch and not self.cuts.is_cut(stream.source.place, stream.destination.place):
            held = list(stream.held)
            stream.held.clear()
            for frame in held:
                self._arrive(stream, frame)

    def _is_blocked(self, stream: Stream) -> bool:
        here, there = stream.source.place, stream.destination.place
        return not stream.destination.is_serving or self.cuts.is_cut(here, there) or self.cuts.is_cut(there, here)

    def _watch(self, stream: Stream) -> None:
        if stream.stall is None and self._is_blocked(stream) and not stream.is_idle:
            stream.stall = self._agenda.at(self._agenda.now_s() + self.stall_s, self._stalled, stream)

    def _unwatch(self, stream: Stream) -> None:
        if stream.stall is not None:
            stream.stall.cancel()
            stream.stall = None

    def _stalled(self, stream: Stream) -> None:
        stream.stall = None
        if not stream.is_idle:
            self._break(stream, f"nothing got through for {self.stall_s:g} s")

    def _was_reset(self, stream: Stream, why: str, epoch: int) -> None:
        if epoch != stream.epoch:
            return
        if self.cuts.is_cut(stream.destination.place, stream.source.place):
            self._watch(stream)
        else:
            self._break(stream, why)

    def _break(self, stream: Stream, why: str) -> None:
        self._clear(stream, why)
        if not stream.destination.is_alive:
            del stream.source.outgoing[stream.destination.number]
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop((stream.source.number, stream.destination.number), None)

    def _clear(self, stream: Stream, why: str | None) -> None:
        self._unwatch(stream)
        self._trace.add(self._agenda.now_s(), Kind.STREAM_BROKEN, stream.source.number, stream.destination.number)
        unsent = stream.unsent()
        stream.clear()
        self._wake_flush(stream.source)
        if why is not None:
            for frame in unsent:
                frame.left.set_exception(Unreachable(stream.destination.peer_id, why))

    # ----------------------------------------------------------------------------------------------------------------

    def _both_ways(self, stream: Stream) -> tuple[LinkSpec, LinkSpec]:
        here, there = stream.source.place, stream.destination.place
        return self.link(here, there), self.link(there, here)

    def _later(self, in_s: float, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        self._agenda.at(self._agenda.now_s() + in_s, callback, *args)

    def _record(self, kind: Kind, stream: Stream, frame: SimFrame) -> None:
        self._trace.add(
            self._agenda.now_s(), kind, stream.source.number, stream.destination.number, frame.nbytes, frame.digest
        )
