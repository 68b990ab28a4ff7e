"""Makes a peer's promises durable before they are sent, so that it cannot vote twice after a restart.

The file is the BLAKE3 digest of a msgpack record, then the record: a flipped bit in a term must not be accepted.

With a full or broken disk a peer still obeys plans and sends heartbeats, which promise nothing. It casts no vote,
grants no term, and requests none, because a candidate also votes for itself. A new peer that cannot write any record
does not start."""

import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Final

import msgspec
from blake3 import blake3

from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.coordination_events import Ask, Command, Persist, Reply
from shoal.protocol.errors import LocalError
from shoal.protocol.messages import PlanOffer, PlanVote, Refusal, TermGrant, TermRequest
from shoal.protocol.ports import Disk

logger = logging.getLogger(__name__)

COMPLAIN_EVERY_S: Final = 60.0
DIGEST_BYTES: Final = 32
PLANS: Final = PurePosixPath("plans.msgpack")


class PlanStore:
    """Keeps one `ChainRecord` in one file, and holds back commands that depend on a record until it is saved.

    Args:
        disk: the file system; None: keep the record in memory, for simulations in which peers never restart.
        path: the file; its folder is made with the first record.
    """

    def __init__(self, disk: Disk | None = None, path: PurePosixPath = PLANS) -> None:
        self._disk = disk
        self._path = path
        self._record: ChainRecord | None = None
        self._has_folder = False
        self._owed: ChainRecord | None = None
        """The newest record, if it is not on disk yet; None: every record is on disk."""
        self._complained_s = -math.inf

    def load(self, run: str) -> ChainRecord | None:
        """Read the record that was saved for `run`; None if nothing was ever saved.
        Raises: LocalError: the file cannot be read, is damaged, or belongs to another run. The peer must then not take
        part under this identity, because it does not know its promises."""
        if self._disk is not None:
            self._record = self._read(self._disk)
        if self._record is not None and self._record.run != run:
            raise LocalError(f"{self._where} belongs to run {self._record.run}, not {run}: use another state folder")
        return self._record

    def save(self, record: ChainRecord) -> None:
        """Save `record`, which then survives a power cut.
        Raises: LocalError: writing failed; do not vote then. The file holds `record` or the previous one."""
        if record == self._record:
            return
        if self._disk is not None:
            self._record = None  # until the end of the write, either record may be there
            try:
                self._write(self._disk, record)
            except OSError as error:
                raise LocalError(
                    f"cannot keep votes in {self._where}: {error.strerror or error}: "
                    "make room, or restart with a --state-dir on another disk"
                ) from error
        self._record = record

    def backed(self, commands: Iterable[Command], now_s: float) -> Iterator[Command]:
        """Save the records of `commands`, and yield the commands that may be carried out, in order. A promise that
        cannot be saved becomes a refusal."""
        tried = False
        for command in commands:
            if isinstance(command, Persist):
                self._owed, tried = command.record, False
            elif self._owed is None or not _is_promise(command):
                yield command
                continue
            if not tried:
                self._save_owed(now_s)
                tried = True
            if isinstance(command, Reply):
                yield Reply(message=Refusal(reason="cannot save its promise on disk")) if self._owed else command
            elif not isinstance(command, Persist) and self._owed is None:
                yield command

    def _save_owed(self, now_s: float) -> None:
        assert self._owed is not None
        try:
            self.save(self._owed)
        except LocalError as error:
            if now_s >= self._complained_s + COMPLAIN_EVERY_S:
                self._complained_s = now_s
                logger.error("this peer cannot vote: %s", error)
        else:
            self._owed = None

    @property
    def _where(self) -> str:
        return self._disk.where(self._path) if self._disk is not None else "memory"

    def _read(self, disk: Disk) -> ChainRecord | None:
        try:
            data = disk.read(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalError(f"cannot read {self._where}: {error.strerror or error}") from error
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if blake3(content).digest() != digest:
            raise self._damaged("its checksum does not fit")
        try:
            return msgspec.msgpack.decode(content, type=ChainRecord)
        except msgspec.DecodeError as error:
            raise self._damaged(str(error).splitlines()[0]) from error

    def _damaged(self, reason: str) -> LocalError:
        # A peer without the file would return under the same identity and vote twice.
        return LocalError(
            f"{self._where} is not a record of plans ({reason}), so this peer has forgotten its votes: restore the "
            "file, or give shoal a new --state-dir, with which it is a new peer"
        )

    def _write(self, disk: Disk, record: ChainRecord) -> None:
        if not self._has_folder:
            disk.make_folder(self._path.parent)
            self._has_folder = True
        content = msgspec.msgpack.encode(record)
        beside = self._path.with_name(f"{self._path.name}.new")
        disk.write(beside, blake3(content).digest() + content)
        disk.replace(beside, self._path)
        disk.sync_folder(self._path.parent)


def _is_promise(command: Command) -> bool:
    message = command.message if isinstance(command, Ask | Reply) else None
    match message:
        case TermGrant():
            return message.granted
        case PlanVote():
            return message.accepted
    return isinstance(message, TermRequest | PlanOffer)
