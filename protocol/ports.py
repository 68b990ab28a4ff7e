"""The five ports through which drivers touch the world. `live/` and `sim/` each implement all of them.

Drivers are ordinary asyncio programs; both worlds run them on an asyncio event loop (the simulated one jumps its
clock to the next timer), so `asyncio.sleep`, queues and timeouts mean the same in both.
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


class Priority(IntEnum):
    """Order in which a peer's frames leave, whomever they are for: backward frees memory upstream, a step ends when its
    gradients are reduced, a peer without its state cannot begin; a copy of it, and a probe, can wait. Calls go before
    all of them."""

    GRADIENT = 0
    ACTIVATION = 1
    REDUCTION = 2
    STATE = 3
    BULK = 4


CallHandler = Callable[[PeerID, bytes], Awaitable[bytes]]
"""(source, request bytes) -> reply bytes. The source is authenticated by the transport."""

FrameHandler = Callable[[PeerID, bytes, Payload], Awaitable[None]]
"""(source, frame meta, payload). The frame's credit returns to the sender when this returns."""


class Transport(Protocol):
    """Calls (small, request and reply) and frames (a tensor and its header, one way) between peers."""

    @property
    def peer_id(self) -> PeerID: ...

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs (with `/p2p/…`) under which others reach us."""
        ...

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        """Set the handlers. Once, before the first message can arrive."""
        ...

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        """Say where `peer` can be found. A hint: never raises."""
        ...

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        """Raises: Unreachable."""
        ...

    async def send(
        self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority, again: bytes | None = None
    ) -> None:
        """Put one frame on the long-lived stream to `peer`; returns when it has left or is credited.

        Frames of one priority to one peer arrive in order, whole and checked, or the stream breaks and every waiting
        sender gets Unreachable. At most once: a broken stream says nothing about what arrived before.

        Args: again: the frame's meta if it may be sent once more, on the next stream, where its own breaks after it has
            left and before it is known to be handled. It may then come twice, and must not change.
        Raises: Unreachable.
        """
        ...

    async def close(self) -> None: ...


class Directory(Protocol):
    """Signed records with an expiry, found by key and subkey by everyone in the run (a DHT)."""

    async def store(self, key: str, subkey: str, value: bytes, *, expires_in_s: float) -> bool:
        """Whether at least one node accepted it. Read back what matters."""
        ...

    async def get(self, key: str) -> Mapping[str, bytes]:
        """subkey -> value of all unexpired records; empty if there is none."""
        ...


JobKind = Literal["forward", "backward", "step", "validate", "probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Generic[T]):
    """Holds what a job returned and when it ran, in the clock's seconds."""

    value: T
    started_s: float
    ended_s: float


class Compute(Protocol):
    """One device that runs one job at a time, in the order given."""

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Run `work`. `flop` is the job's arithmetic; the simulated twin turns it into seconds.

        Raises: whatever `work` raises.
        """
        ...

    async def run_on_host(self, work: Callable[[], T]) -> T:
        """Run `work` in the host's memory, beside the device's jobs: sums, copies, digests and encodings of tensors.
        They would hold up the event loop, and as jobs of the device they would wait for the one that runs.

        One at a time, in the order given. In virtual time it takes no time.
        Raises: whatever `work` raises.
        """
        ...

    def close(self) -> None: ...


class Clock(Protocol):
    """The loop's time. Monotonic; shared by nobody else, so only durations cross the network."""

    def now_s(self) -> float: ...

    def wall_s(self) -> float:
        """Seconds since 1970, for people and files only."""
        ...


class Disk(Protocol):
    """Files below one root, and what of them survives a power cut.

    Paths are relative to the root; `PurePosixPath()` is the root. Calls block: run them where blocking is fine.
    *Durable* means that it survives a power cut; what is not may come back as it was before, as it is now, or (the
    content of a file) as any mixture of the two. Names and content are durable apart from each other: a folder's names
    are after `sync_folder`, whatever its files hold.

    Raises: OSError from every call, as the operating system has it (full, gone, unreadable, not there). A call that
    raised may have done its work, none of it, or a part. ValueError: the path leads out of the root.
    """

    def where(self, path: PurePosixPath) -> str:
        """Give the name of `path` for a message to a person. Never raises."""
        ...

    def read(self, path: PurePosixPath) -> bytes: ...

    def write(self, path: PurePosixPath, data: Payload) -> None:
        """Make a file of `data`, or overwrite one. On return the content is durable; a new file's name is not.

        A crash meanwhile leaves any part of the old and the new content: write beside, then `replace`.
        """
        ...

    def replace(self, source: PurePosixPath, target: PurePosixPath) -> None:
        """Rename within one folder. Not durable before `sync_folder`, but never half done: after a crash the content is
        under the old name or under the new one.

        A file replaces a file; a folder needs a name that nothing with content has. Raises: ValueError: two folders.
        """
        ...

    def remove_tree(self, path: PurePosixPath) -> None:
        """Remove a file, or a folder with all that is in it, but not the root; nothing there is fine.

        Neither durable nor all at once: rename away what must not be seen half removed, and sync, first.
        """
        ...

    def list(self, path: PurePosixPath) -> tuple[str, ...]:
        """The names in a folder, sorted; none if there is no such folder."""
        ...

    def make_folder(self, path: PurePosixPath) -> None:
        """Make a folder and those above it, or find them there. On return all of their names are durable."""
        ...

    def sync_folder(self, path: PurePosixPath) -> None:
        """Make the names in this folder durable before this returns: files made, renamed and removed in it."""
        ...

    def lock(self, path: PurePosixPath) -> AbstractContextManager[None]:
        """Hold the file `path` (made if missing) for this caller alone, on all of this machine; wait until it is free.
        The end of the process gives it back.
        """
        ...
