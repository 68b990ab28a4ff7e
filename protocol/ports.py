"""The five ports between drivers and the world. `live/` and `sim/` each implement all of them.

Drivers are ordinary asyncio programs. Both worlds run them on an asyncio event loop (the simulated loop jumps its clock
to the next timer), so `asyncio.sleep`, queues and timeouts mean the same in both.
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
"""Runs work that would block the event loop: in a thread in reality, at once (`inline`) in virtual time."""


async def inline(work: Callable[[], object]) -> object:
    return work()


class Priority(IntEnum):
    """Order in which a peer's frames leave, over all receivers. A gradient frees memory upstream, a reduction ends a
    step, and a newcomer cannot begin without state; copies and probes can wait. Calls go before all frames."""

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
        """Return the multiaddrs (with `/p2p/…`) at which others reach us."""
        ...

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        """Set the handlers, once, before the first message can arrive."""
        ...

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        """Give addresses of `peer`, as a hint. Never raises."""
        ...

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return the reply. Raises: Unreachable."""
        ...

    async def send(
        self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority, again: bytes | None = None
    ) -> None:
        """Send one frame on the long-lived stream to `peer`; return when it has left or is credited.

        Frames of one priority to one peer arrive in order, whole and checked, or the stream breaks and every waiting
        sender gets Unreachable. Delivery is at most once: a broken stream says nothing about what arrived before.

        Args:
            again: the frame's meta for one repetition on the next stream, if this one breaks after the frame has left
                and before it is known to be handled. It may then arrive twice, and must not change.
        Raises: Unreachable.
        """
        ...

    async def close(self) -> None: ...


class Directory(Protocol):
    """Signed records with an expiry, found by key and subkey by everyone in the run (a DHT)."""

    async def store(self, key: str, subkey: str, value: bytes, *, expires_in_s: float) -> bool:
        """Store a record; True if at least one node accepted it. Read back what matters."""
        ...

    async def get(self, key: str) -> Mapping[str, bytes]:
        """Return subkey -> value of all unexpired records of `key`; empty if there is none."""
        ...


JobKind = Literal["forward", "backward", "step", "validate", "probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Generic[T]):
    """A job's result, and when it ran by the clock."""

    value: T
    started_s: float
    ended_s: float


class Compute(Protocol):
    """One device that runs one job at a time, in the order given."""

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Run `work` of `flop` operations, which the simulated device turns into seconds. Raises: errors of `work`."""
        ...

    async def run_on_host(self, work: Callable[[], T]) -> T:
        """Run `work` on tensors in host memory, beside the device's jobs: sums, copies, digests, encodings. On the
        event loop it would block the loop, and as a device job it would wait for the running one.

        One at a time, in the order given. Takes no virtual time. Raises: any error of `work`.
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
    """Files below one root, with defined durability.

    Paths are relative to the root; `PurePosixPath()` is the root. Calls block: run them where blocking is fine.
    *Durable* data survives a power cut; other data may come back as before, as now, or (file content) as any mixture.
    Names and content are durable separately: a folder's names are after `sync_folder`, whatever its files hold.

    Raises: OSError from every call, as the operating system raises it. A call that raised may have done all, none or
        part
        of its work. ValueError: the path leads out of the root.
    """

    def where(self, path: PurePosixPath) -> str:
        """Return the name of `path` for a message to a person. Never raises."""
        ...

    def read(self, path: PurePosixPath) -> bytes: ...

    def write(self, path: PurePosixPath, data: Payload) -> None:
        """Create or overwrite a file. On return the content is durable; a new file's name is not.

        A crash meanwhile leaves any mixture of old and new content: write beside, then `replace`.
        """
        ...

    def replace(self, source: PurePosixPath, target: PurePosixPath) -> None:
        """Rename within one folder: atomic (after a crash the old name or the new one), durable after `sync_folder`.

        A file replaces a file; a folder needs a free name, or that of an empty folder. Raises: ValueError: two folders.
        """
        ...

    def remove_tree(self, path: PurePosixPath) -> None:
        """Remove a file, or a folder with its content, but not the root; no error if nothing is there.

        Neither durable nor atomic: rename away what must not be seen half removed, and sync, first.
        """
        ...

    def list(self, path: PurePosixPath) -> tuple[str, ...]:
        """Return the names in a folder, sorted; none if there is no such folder."""
        ...

    def make_folder(self, path: PurePosixPath) -> None:
        """Make a folder and its parents if missing. On return all of their names are durable."""
        ...

    def sync_folder(self, path: PurePosixPath) -> None:
        """Make the names in this folder durable: of files made, renamed and removed in it."""
        ...

    def lock(self, path: PurePosixPath) -> AbstractContextManager[None]:
        """Lock the file `path` (made if missing) among all processes of this machine; wait until it is free, or its
        holder ended."""
        ...
