"""The five interfaces (ports) through which a driver uses network, directory, device, clock and disk.

`live/` implements them on real machines, `sim/` in a simulation. Drivers are ordinary asyncio programs. `live/` and
`sim/` both run them on an asyncio event loop (the simulated loop jumps its clock to the next timer), so
`asyncio.sleep`, queues and timeouts work the same in both.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import PurePosixPath
from typing import Generic, Literal, Protocol, TypeVar

from shoal.protocol.identity import PeerID

T = TypeVar("T")

Payload = bytes | bytearray | memoryview
RunBlocking = Callable[[Callable[[], object]], Awaitable[object]]
"""Runs a function that would block the event loop: in a thread on real machines; directly (`inline`) in simulations."""


async def inline(work: Callable[[], object]) -> object:
    return work()


class Priority(IntEnum):
    """Order in which a peer sends its frames to all receivers. A gradient frees memory at the preceding stage, a
    reduction ends a step, a newcomer needs state to begin; copies and probes can wait. Calls go before all frames."""

    GRADIENT = 0
    ACTIVATION = 1
    REDUCTION = 2
    STATE = 3
    BULK = 4


CallHandler = Callable[[PeerID, bytes], Awaitable[bytes]]
"""(authenticated source, request bytes) -> reply bytes."""

FrameHandler = Callable[[PeerID, bytes, Payload], Awaitable[None]]
"""(source, frame meta, payload). The frame's credit returns to the sender when the handler returns."""


class Transport(Protocol):
    """Calls (small, request and reply) and frames (a tensor with a header, one way) between peers."""

    @property
    def peer_id(self) -> PeerID: ...

    def addresses(self) -> tuple[str, ...]:
        """Return the multiaddrs (with `/p2p/…`) at which other peers reach us."""
        ...

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        """Set the handlers, once, before the first message can arrive."""
        ...

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        """Remember addresses at which `peer` may be reached. Never raises."""
        ...

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return the reply. Raises: Unreachable."""
        ...

    async def send(
        self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority, again: bytes | None = None
    ) -> None:
        """Send one frame on the long-lived stream to `peer`; return when the frame has left this process.

        Frames of one priority to one peer arrive in order, whole and checked, or the stream breaks and every waiting
        sender gets Unreachable. Delivery is at most once: after a break the sender does not know which frames arrived.

        Args:
            again: a header with which to send the frame a second time, on the next stream, if this stream breaks after
                the frame has left and before it is known to be handled. The frame may then arrive twice, and the caller
                must not change the payload. None: the frame is sent once.
        Raises: Unreachable.
        """
        ...

    async def close(self) -> None: ...


class Directory(Protocol):
    """Stores signed records with an expiry (a DHT). Everyone in the run finds a record by its key and subkey."""

    async def store(self, key: str, subkey: str, value: bytes, *, expires_in_s: float) -> bool:
        """Store a record. Return True if at least one node accepted it; read an important record back to be sure."""
        ...

    async def get(self, key: str) -> Mapping[str, bytes]:
        """Return subkey -> value of all unexpired records of `key`; empty if there is none."""
        ...


JobKind = Literal["forward", "backward", "step", "validate", "probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Generic[T]):
    """A job's result, with the times by `Clock` at which the job began and ended."""

    value: T
    started_s: float
    ended_s: float


class Compute(Protocol):
    """Runs jobs on one device, one at a time, in the order of the calls."""

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Run `work` on the device; a simulated device takes the time for `flop` operations. Raises: errors of
        `work`."""
        ...

    async def run_on_host(self, work: Callable[[], T]) -> T:
        """Run `work` on tensors in host memory (sums, copies, digests, encodings), in parallel with the device's jobs.
        On the event loop this would block the loop; as a device job it would wait for the running job.

        Host work runs one at a time, in the order of the calls, and takes no virtual time. Raises: errors of `work`.
        """
        ...

    def close(self) -> None: ...


class Clock(Protocol):
    """The loop's monotonic time. Peers share no clock, so only durations cross the network."""

    def now_s(self) -> float: ...

    def wall_s(self) -> float:
        """Return seconds since 1970, for people and files only."""
        ...


class Disk(Protocol):
    """Files below one root folder, with defined durability.

    Paths are relative to the root; `PurePosixPath()` is the root. Calls block: run them where blocking is fine.
    *Durable* data survives a power cut. After a power cut, other data is as before the change, as after it, or (the
    content of a file) any mixture of both. `write` makes a file's content durable, `sync_folder` the names in a folder.

    Raises: OSError from every call, as the operating system raises it. A call that raised may have done all, none or
        part of its work. ValueError: the path leads out of the root.
    """

    def where(self, path: PurePosixPath) -> str:
        """Return the text by which messages to people name `path`. Never raises."""
        ...

    def read(self, path: PurePosixPath) -> bytes: ...

    def write(self, path: PurePosixPath, data: Payload) -> None:
        """Create or overwrite a file. On return the content is durable; a new file's name is not.

        A crash during the write leaves any mixture of old and new content: to avoid this, use a new file and `replace`.
        """
        ...

    def replace(self, source: PurePosixPath, target: PurePosixPath) -> None:
        """Rename within one folder: atomic (after a crash the old name or the new one), durable after `sync_folder`.

        A file may replace a file; a folder may replace only an empty folder. Raises: ValueError: the folders differ.
        """
        ...

    def remove_tree(self, path: PurePosixPath) -> None:
        """Remove a file, or a folder with its content, but not the root; no error if nothing is there.

        The removal is neither durable nor atomic. If nobody may see it half done, rename the folder first and sync.
        """
        ...

    def list(self, path: PurePosixPath) -> tuple[str, ...]:
        """Return the names in a folder, sorted; none if there is no such folder."""
        ...

    def make_folder(self, path: PurePosixPath) -> None:
        """Make a folder and its missing parents. On return the names of all these folders are durable."""
        ...

    def sync_folder(self, path: PurePosixPath) -> None:
        """Make this folder's list of names durable, after files in it were made, renamed or removed."""
        ...

    def lock(self, path: PurePosixPath) -> AbstractContextManager[None]:
        """Lock the file `path` (made if missing) against all other processes of this machine; wait while another
        process holds the lock."""
        ...
