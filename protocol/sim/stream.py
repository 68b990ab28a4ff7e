"""Remembers the state of one peer's network card, and of the stream of frames from one peer to another."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.protocol.frames import CreditWindow
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.ports import Priority
from shoal.protocol.sim.network import CardSpec
from shoal.protocol.sim.phantom import Phantom

_NUM_PRIORITIES = len(Priority)


@dataclass(slots=True, eq=False, kw_only=True)
class SimFrame:
    """One frame between `send` and the end of its handler."""

    meta: bytes
    payload: bytearray | memoryview | Phantom
    priority: Priority
    nbytes: int
    """Bytes on the wire, header and trailer included; the frame costs as much credit."""
    digest: int
    left: asyncio.Future[None]
    """Done when its last byte has left the sender; cancelled when the sender no longer waits."""
    epoch: int = 0
    """The stream's epoch when the frame started."""
    is_damaged: bool = False
    is_repeated: bool = False
    """Came a second time; it costs no credit."""

    def repeated(self) -> "SimFrame":
        """Make another frame of the same bytes, whatever the handler of the first does with its payload."""
        payload = self.payload if isinstance(self.payload, Phantom) else bytearray(self.payload)
        return replace(self, payload=payload, is_damaged=False, is_repeated=True)


class Plug:
    """The place where cards meet the network: one uplink and one downlink. Most peers have one of their own; machines
    of one box or one household share theirs, and what they send each other does not pass it."""

    def __init__(self, spec: CardSpec) -> None:
        self.spec = spec
        self.up_free_s = 0.0
        self.down_free_s = 0.0
        self.offers: list[Stream] = []
        """The streams that have a frame ready for the uplink; the first has waited longest."""
        self.tags_served = [0.0] * _NUM_PRIORITIES
        """The fair-queueing tag of the last frame that left, of each priority."""
        self.earned_bytes = 0.0
        """How many bytes may leave of the stream that has waited longest, whatever is more urgent."""
        self.grant: asyncio.TimerHandle | None = None


class Card:
    """A peer as the network sees it.

    A peer that comes back after a crash has a new card: nothing on the wire is meant for the new process.

    Args:
        number: order of joining the world; unlike a PeerID never used twice.
        place: row of the network's matrix.
        plug: shared by all of its streams, and maybe with other peers.
        frame_arrived: called when a frame is in `stream.arrived` and nobody handles that stream yet.
    """

    def __init__(
        self, *, number: int, place: int, peer_id: PeerID, plug: Plug, frame_arrived: "Callable[[Stream], None]"
    ) -> None:
        self.number = number
        self.place = place
        self.peer_id = peer_id
        self.plug = plug
        self.frame_arrived = frame_arrived
        self.is_alive = True
        self.is_serving = False
        self.is_up = True
        """Whether its network daemon runs."""
        self.came_up = asyncio.Event()
        """The event that callers wait for while `is_up` is false."""
        self.num_daemons_died = 0
        self.outgoing: dict[int, Stream] = {}
        self.incoming: dict[int, Stream] = {}
        self.flushed: asyncio.Future[None] | None = None


class Stream:
    """Frames from `source` to `destination`, by priority.

    `epoch` grows when the sender's side breaks: what was scheduled for an earlier one is void. The receiver refuses
    what comes of an epoch up to `refused_epoch`, so that nothing is handled behind a gap.
    """

    def __init__(
        self, source: Card, destination: Card, *, queue_bytes: float, make_rng: Callable[[], random.Random]
    ) -> None:
        self.source = source
        self.destination = destination
        self.take_rates()
        self._make_rng = make_rng
        self.queue_bytes = queue_bytes
        self.epoch = 0
        self.refused_epoch = 0
        self.arrived_epoch = 0
        self.first_byte_s = 0.0
        self.arrives_s = 0.0
        """When the frame before reaches the receiver's card, and its handler: jitter lets none overtake another."""
        self.control_free_s = 0.0
        self.connection = 0
        """Grows when the daemon at either end dies: control messages of an earlier one are lost."""
        self.tags = [0.0] * _NUM_PRIORITIES
        """The fair-queueing tag of the next frame, of each priority."""
        self.is_offered = False
        self.stall: asyncio.TimerHandle | None = None
        self.serving: asyncio.Task[None] | None = None
        self.arrived: list[SimFrame] = []
        self.clear()

    @cached_property
    def rng(self) -> random.Random:
        """Made when something is drawn: most links of a thousand peers carry a few calls and draw nothing."""
        return self._make_rng()

    def take_rates(self) -> None:
        """Go by the rates that the plugs at both ends have now. What stays behind one plug does not pass it."""
        up, down = self.source.plug, self.destination.plug
        self.up_bytes_per_s = math.inf if up is down else up.spec.up_bytes_per_s
        self.down_bytes_per_s = math.inf if up is down else down.spec.down_bytes_per_s

    def clear(self) -> None:
        """Begin as a new stream for frames that will be sent from now on; what has arrived stays until the first of
        these arrives."""
        self.epoch += 1
        self.window = CreditWindow(int(min(self.queue_bytes, STREAM_CREDIT_BYTES)))
        self.waiting: tuple[deque[SimFrame], ...] = ()
        """The waiting frames by priority, once there has been a frame."""
        self.leaving: SimFrame | None = None
        self.held: list[SimFrame] = []
        """Frames that reached a cut in the network; they come in order once it heals."""
        self.held_credits: list[int] = []
        self.first_byte_s = self.arrives_s = 0.0

    def put(self, frame: SimFrame) -> None:
        if not self.waiting:
            self.waiting = tuple(deque() for _ in range(_NUM_PRIORITIES))
        self.waiting[frame.priority].append(frame)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, flies or is being handled."""
        return self.window.outstanding_bytes == 0 and self.next_frame() is None

    def next_frame(self) -> SimFrame | None:
        """The frame that leaves next, credits aside. Forgets those whose senders gave up."""
        for queue in self.waiting:
            while queue and queue[0].left.done():
                queue.popleft()
            if queue:
                return queue[0]
        return None

    def take_next(self) -> SimFrame | None:
        """Remove and return the next frame if the receiver has credit for it."""
        frame = self.next_frame()
        if frame is None or not self.window.admits(frame.nbytes):
            return None
        self.waiting[frame.priority].popleft()
        frame.epoch = self.epoch
        self.window.take(frame.nbytes)
        return frame

    def rank(self) -> tuple[int, float, int, int]:
        """Where its next frame stands among those that wait for the uplink: the least is the most urgent, and of equals
        the one whose stream has sent least."""
        frame = self.next_frame()
        priority = 0 if frame is None else int(frame.priority)
        tag = max(self.tags[priority], self.source.plug.tags_served[priority])
        return priority, tag, self.destination.number, self.source.number

    def unsent(self) -> list[SimFrame]:
        """Frames whose senders still wait, in the order in which they would leave."""
        leaving = [self.leaving] if self.leaving is not None else []
        return [frame for frame in (*leaving, *(f for queue in self.waiting for f in queue)) if not frame.left.done()]
