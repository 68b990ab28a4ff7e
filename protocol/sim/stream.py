"""The state of a peer's network card, and of a stream of frames between two peers."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.protocol.frames import CreditWindow
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Priority
from shoal.protocol.sim.dirt import LineDirt
from shoal.protocol.sim.network import CardSpec
from shoal.protocol.sim.phantom import Phantom

_NUM_PRIORITIES = len(Priority)


@dataclass(slots=True, eq=False, kw_only=True)
class SimFrame:
    """One frame, from `send` to the end of the receiver's handler."""

    meta: bytes
    payload: bytearray | memoryview | Phantom
    priority: Priority
    nbytes: int
    """Bytes on the wire, header and trailer included; also the credit that the frame takes."""
    digest: int
    left: asyncio.Future[None]
    """Done when the last byte has left, or with an error if the stream breaks; cancelled if the sender gives up."""
    epoch: int = 0
    """The stream's epoch when the frame began to leave."""
    is_damaged: bool = False
    is_repeated: bool = False
    """True for a second delivery, which takes no credit."""

    def repeated(self) -> "SimFrame":
        """Return a copy for a second delivery, with a payload that the first delivery's handler cannot change."""
        payload = self.payload if isinstance(self.payload, Phantom) else bytearray(self.payload)
        return replace(self, payload=payload, is_damaged=False, is_repeated=True)


class Plug:
    """One uplink and one downlink. Machines of one household share a plug; traffic between them bypasses it."""

    def __init__(self, spec: CardSpec, up_dirt: LineDirt | None = None, down_dirt: LineDirt | None = None) -> None:
        self.spec = spec
        self.up_dirt, self.down_dirt = up_dirt, down_dirt
        self.up_free_s = 0.0
        self.down_free_s = 0.0
        self.offers: list[Stream] = []
        """Streams with a frame ready for the uplink; the stream that has waited longest is first."""
        self.tags_served = [0.0] * _NUM_PRIORITIES
        """[priority]: fair-queueing tag, in bytes, of the frame of that priority that began to leave last."""
        self.earned_bytes = 0.0
        """Bytes that the longest-waiting stream may send regardless of priorities."""
        self.grant: asyncio.TimerHandle | None = None


class NetworkCard:
    """A peer as the network sees it.

    A peer that returns after a crash has a new card, so that no old message reaches the new process.

    Args:
        number: the peer's number in joining order; unlike a PeerID it is never used twice.
        place: the peer's row in the network's matrices.
        plug: the uplink and downlink of all of the peer's streams, perhaps shared with other peers.
        frame_arrived: called when `stream.arrived` has a frame and no handler runs for that stream.
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
        self.came_up = asyncio.Event()
        """Set while `is_up` is true."""
        self.num_daemons_died = 0
        self.outgoing: dict[int, Stream] = {}
        self.incoming: dict[int, Stream] = {}
        self.flushed: asyncio.Future[None] | None = None


class Stream:
    """Frames from `source` to `destination`, by priority.

    `epoch` grows when the stream breaks at the sender: later events of frames of earlier epochs then have no effect.
    The receiver refuses frames of epochs up to `refused_epoch`, so that no frame after a missing one is handled.
    """

    def __init__(self, source: NetworkCard, destination: NetworkCard, make_rng: Callable[[], random.Random]) -> None:
        self.source = source
        self.destination = destination
        self.take_rates()
        self._make_rng = make_rng
        self.epoch = 0
        self.refused_epoch = 0
        self.arrived_epoch = 0
        self.first_byte_s = 0.0
        self.arrives_s = 0.0
        """Times at which the latest frame's first byte (`first_byte_s`) and last byte (`arrives_s`) reach the receiver.
        No later frame comes earlier: jitter does not reorder frames."""
        self.control_free_s = 0.0
        self.connection = 0
        """A number that grows when the network daemon at either end dies: control messages in flight are then lost."""
        self.tags = [0.0] * _NUM_PRIORITIES
        """[priority]: fair-queueing tag, in bytes, of the stream's next frame of that priority."""
        self.is_offered = False
        self.stall: asyncio.TimerHandle | None = None
        self.serving: asyncio.Task[None] | None = None
        self.arrived: list[SimFrame] = []
        self.clear()

    @cached_property
    def rng(self) -> random.Random:
        """The stream's random generator, made at the first draw: most streams of a thousand peers never draw."""
        return self._make_rng()

    def take_rates(self) -> None:
        """Read the present rates of the plugs at both ends; traffic within one plug is not limited."""
        up, down = self.source.plug, self.destination.plug
        self.up_bytes_per_s = math.inf if up is down else up.spec.up_bytes_per_s
        self.down_bytes_per_s = math.inf if up is down else down.spec.down_bytes_per_s
        self.up_dirt = None if up is down else up.up_dirt
        self.down_dirt = None if up is down else down.down_dirt

    def queued_s(self, now_s: float) -> float:
        """Return the seconds that a message waits in the lines' queues behind other people's traffic."""
        up_s = 0.0 if self.up_dirt is None else self.up_dirt.now(now_s).delay_s
        return up_s if self.down_dirt is None else up_s + self.down_dirt.now(now_s).delay_s

    def clear(self) -> None:
        """Begin a new epoch for later frames. Received frames stay until the first frame of the new epoch arrives."""
        self.epoch += 1
        self.window = CreditWindow()
        self.waiting: tuple[deque[SimFrame], ...] = ()
        """Frames that have not begun to leave, one queue for each priority; empty before the first frame."""
        self.leaving: SimFrame | None = None
        self.held: list[SimFrame] = []
        """Frames that a cut holds back between sender and receiver; they arrive in order once the cut heals."""
        self.held_credits: list[int] = []
        self.first_byte_s = self.arrives_s = 0.0

    def put(self, frame: SimFrame) -> None:
        if not self.waiting:
            self.waiting = tuple(deque() for _ in range(_NUM_PRIORITIES))
        self.waiting[frame.priority].append(frame)

    @property
    def is_idle(self) -> bool:
        """True if no frame waits, is in flight or is being handled."""
        return self.window.outstanding_bytes == 0 and self.next_frame() is None

    def next_frame(self) -> SimFrame | None:
        """Return the next frame, even if there is no credit for it. Drop frames that their senders gave up."""
        for queue in self.waiting:
            while queue and queue[0].left.done():
                queue.popleft()
            if queue:
                return queue[0]
        return None

    def take_next(self) -> SimFrame | None:
        """Remove and return the next frame, and take its credit; None if there is no frame or not enough credit."""
        frame = self.next_frame()
        if frame is None or not self.window.admits(frame.nbytes):
            return None
        self.waiting[frame.priority].popleft()
        frame.epoch = self.epoch
        self.window.take(frame.nbytes)
        return frame

    def rank(self) -> tuple[int, float, int, int]:
        """Return the sort key by which the uplink selects a stream: the next frame's priority, then its fair-queueing
        tag, which is lowest for the stream that has sent the fewest bytes."""
        frame = self.next_frame()
        priority = 0 if frame is None else int(frame.priority)
        tag = max(self.tags[priority], self.source.plug.tags_served[priority])
        return priority, tag, self.destination.number, self.source.number

    def unsent(self) -> list[SimFrame]:
        """Return the frames that have not left and that senders still wait for, in the order of leaving."""
        leaving = [self.leaving] if self.leaving is not None else []
        return [frame for frame in (*leaving, *(f for queue in self.waiting for f in queue)) if not frame.left.done()]
