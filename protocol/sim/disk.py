"""A disk in memory that loses unsynced data in a power cut in all the ways that POSIX allows.

A file has visible bytes and durable bytes; a folder has visible names and unsynced changes. `crash` draws from the seed

- whether each unsynced change of a folder (a name made, renamed, removed) has happened: each change happens whole or
  not at all, and any combination of changes is possible;
- the content of each file that was not synced: old, empty, new, new but cut at some byte, or a patchwork of old, new
  and zeros. So a file's name may survive without its content.

Tests inject faults with `limit`, `fail`, `cut_power` and `rot`.
"""

import errno
import itertools
import os
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, Literal, TypeVar

from shoal.protocol.ports import Payload

T = TypeVar("T")

Operation = Literal["read", "write", "replace", "remove_tree", "list", "make_folder", "sync_folder", "lock"]
EVERYTHING: Final[frozenset[Operation]] = frozenset(
    ("read", "write", "replace", "remove_tree", "list", "make_folder", "sync_folder", "lock")
)


class PowerCut(BaseException):
    """The machine has lost its power. This is a BaseException, so that no `except Exception` handles it."""


@dataclass(slots=True)
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass(slots=True)
class _Folder:
    names: "dict[str, _File | _Folder]" = field(default_factory=dict)
    synced: "dict[str, _File | _Folder]" = field(default_factory=dict)
    changes: "list[dict[str, _File | _Folder | None]]" = field(default_factory=list)

    def change(self, change: "dict[str, _File | _Folder | None]") -> None:
        _apply(change, self.names)
        self.changes.append(change)

    def sync(self) -> None:
        self.synced = dict(self.names)
        self.changes.clear()


@dataclass(slots=True)
class _Trouble:
    """A fault: the next `spare` operations of these `kinds` succeed, and the `times` operations after them raise
    `error()`."""

    kinds: frozenset[Operation]
    spare: int
    times: float
    error: Callable[[], BaseException]


class SimDisk:
    """The disk of one machine; it outlives processes. `rng` draws the outcomes of crashes and faults."""

    def __init__(self, rng: random.Random, name: str = "disk") -> None:
        self.name = name
        self.num_operations = 0
        """The number of operations so far, from which a test can choose the one that `cut_power` or `fail` hits."""
        self._rng = rng
        self._root = _Folder()
        self._capacity_bytes: int | None = None
        self._troubles: list[_Trouble] = []
        self._held: set[PurePosixPath] = set()
        self._is_dead = False

    # The port ------------------------------------------------------------------------------------------------------

    def where(self, path: PurePosixPath) -> str:
        return f"{self.name}:/{path if path.parts else ''}"

    def read(self, path: PurePosixPath) -> bytes:
        return self._do("read", lambda: self._file(path).data)

    def write(self, path: PurePosixPath, data: Payload) -> None:
        content = bytes(data)
        self._do(
            "write",
            lambda: self._write(path, content, is_synced=True),
            lambda: self._write(path, content[: self._rng.randrange(len(content) + 1)], is_synced=False),
        )

    def replace(self, source: PurePosixPath, target: PurePosixPath) -> None:
        if source.parent != target.parent:
            raise ValueError(f"{source} and {target} are in two folders, so that a crash could leave neither")
        self._do("replace", lambda: self._replace(source, target))

    def remove_tree(self, path: PurePosixPath) -> None:
        self._do("remove_tree", lambda: self._remove(path), lambda: self._remove(path, most=self._rng.randrange(9)))

    def list(self, path: PurePosixPath) -> tuple[str, ...]:
        def names() -> tuple[str, ...]:
            try:
                return tuple(sorted(self._folder(path).names))
            except FileNotFoundError:
                return ()

        return self._do("list", names)

    def make_folder(self, path: PurePosixPath) -> None:
        self._do("make_folder", lambda: self._make(path), lambda: self._make(path, is_synced=False))

    def sync_folder(self, path: PurePosixPath) -> None:
        self._do("sync_folder", lambda: self._folder(path).sync())

    @contextmanager
    def lock(self, path: PurePosixPath) -> Iterator[None]:
        self._do("lock", lambda: self._hold(path))
        try:
            yield
        finally:
            self._held.discard(path)

    # Faults --------------------------------------------------------------------------------------------------------

    def limit(self, free_bytes: int | None) -> None:
        """Limit the disk to `free_bytes` more than it holds now; removing files makes room. None: no limit."""
        self._capacity_bytes = None if free_bytes is None else _bytes(self._root) + free_bytes

    def fail(
        self,
        *,
        after: int = 0,
        times: float = 1,
        only: Collection[Operation] = EVERYTHING,
        code: int = errno.EIO,
    ) -> None:
        """Let the next `after` operations of these kinds succeed. The following `times` (maybe infinite) raise OSError.

        A draw decides whether a failed operation has had its whole effect, none, or (for some kinds) a part of it.
        """
        self._troubles.append(_Trouble(frozenset(only), after, times, lambda: OSError(code, os.strerror(code))))

    def cut_power(self, *, after: int = 0, then: Callable[[], object] = lambda: None) -> None:
        """Let the next `after` operations succeed, and raise PowerCut from the one that follows. A draw decides whether
        that operation has had its whole effect, a part of it, or none.

        `then` is called just before PowerCut is raised, to stop the machine's other processes; it may call `crash`.
        """

        def cut() -> BaseException:
            self._is_dead = True
            then()
            return PowerCut(self.name)

        self._troubles.append(_Trouble(EVERYTHING, after, 1, cut))

    def mend(self) -> None:
        """Remove the faults of `fail` and `cut_power`."""
        self._troubles.clear()

    def rot(self, path: PurePosixPath, *, bit: int | None = None) -> None:
        """Flip one bit of a file's content, visible and durable: bit number `bit`, or a random one."""
        file = self._file(path)
        bit = self._rng.randrange(8 * len(file.data)) if bit is None else bit
        data = bytearray(file.data)
        data[bit // 8] ^= 1 << bit % 8
        file.data = file.synced = bytes(data)

    def crash(self) -> "SimDisk":
        """Cut the power now. Return the machine's disk after a restart. Operations on the old disk raise PowerCut."""
        self._is_dead = True
        after = SimDisk(self._rng, self.name)
        after._root = self._survivor(self._root)
        after._capacity_bytes = self._capacity_bytes
        return after

    # What operations do --------------------------------------------------------------------------------------------

    def _do(self, kind: Operation, whole: Callable[[], T], part: Callable[[], object] = lambda: None) -> T:
        if self._is_dead:
            raise PowerCut(self.name)
        self.num_operations += 1
        trouble = self._strikes(kind)
        if trouble is None:
            return whole()
        with suppress(OSError):  # `trouble.error()` is raised in any case
            self._rng.choice((lambda: None, part, whole))()
        raise trouble.error()

    def _strikes(self, kind: Operation) -> _Trouble | None:
        for trouble in self._troubles:
            if kind not in trouble.kinds:
                continue
            if trouble.spare > 0:
                trouble.spare -= 1
                continue
            trouble.times -= 1
            if trouble.times <= 0:
                self._troubles.remove(trouble)
            return trouble
        return None

    def _write(self, path: PurePosixPath, data: bytes, *, is_synced: bool) -> None:
        folder = self._folder_of(path)
        file = folder.names.get(path.name)
        if isinstance(file, _Folder) or not path.name:
            raise _os_error(errno.EISDIR, path)
        if file is None:
            file = _File()
            folder.change({path.name: file})
        file.data = b""
        room = len(data) if self._capacity_bytes is None else max(0, self._capacity_bytes - _bytes(self._root))
        file.data = data[:room]
        if room < len(data):
            raise _os_error(errno.ENOSPC, path)
        if is_synced:
            file.synced = file.data

    def _replace(self, source: PurePosixPath, target: PurePosixPath) -> None:
        folder = self._folder_of(source)
        _parts(target)
        moved, there = folder.names.get(source.name), folder.names.get(target.name)
        if moved is None:
            raise _os_error(errno.ENOENT, source)
        if isinstance(moved, _Folder) and isinstance(there, _File):
            raise _os_error(errno.ENOTDIR, target)
        if isinstance(there, _Folder):
            if isinstance(moved, _File):
                raise _os_error(errno.EISDIR, target)
            if there.names and there is not moved:
                raise _os_error(errno.ENOTEMPTY, target)
        if moved is not there:
            folder.change({source.name: None, target.name: moved})

    def _remove(self, path: PurePosixPath, *, most: int | None = None) -> None:
        parts = _parts(path)
        if not parts:
            raise _os_error(errno.EBUSY, path)
        try:
            folder = self._folder_of(path)
        except FileNotFoundError:
            return
        if path.name not in folder.names:
            return
        doomed = [(folder, path.name)]
        for parent, name in doomed:  # grows during the loop
            node = parent.names[name]
            if isinstance(node, _Folder):
                doomed.extend((node, inner) for inner in sorted(node.names))
        for parent, name in doomed[::-1][:most]:
            parent.change({name: None})

    def _make(self, path: PurePosixPath, *, is_synced: bool = True) -> None:
        folder = self._root
        parts = _parts(path)
        for depth, name in enumerate(parts, start=1):
            inner = folder.names.get(name)
            if isinstance(inner, _File):
                raise _os_error(errno.EEXIST if depth == len(parts) else errno.ENOTDIR, path)
            if inner is None:
                inner = _Folder()
                folder.change({name: inner})
            if is_synced:
                folder.sync()
            folder = inner

    def _hold(self, path: PurePosixPath) -> None:
        if path in self._held:
            raise RuntimeError(f"{self.where(path)} is held by a caller that cannot go on before we do: a deadlock")
        folder = self._folder_of(path)
        if path.name in folder.names:
            self._file(path)
        else:
            folder.change({path.name: _File()})
        self._held.add(path)

    def _node(self, path: PurePosixPath) -> "_File | _Folder":
        node: _File | _Folder = self._root
        for name in _parts(path):
            if isinstance(node, _File):
                raise _os_error(errno.ENOTDIR, path)
            if name not in node.names:
                raise _os_error(errno.ENOENT, path)
            node = node.names[name]
        return node

    def _file(self, path: PurePosixPath) -> _File:
        node = self._node(path)
        if isinstance(node, _Folder):
            raise _os_error(errno.EISDIR, path)
        return node

    def _folder(self, path: PurePosixPath) -> _Folder:
        node = self._node(path)
        if isinstance(node, _File):
            raise _os_error(errno.ENOTDIR, path)
        return node

    def _folder_of(self, path: PurePosixPath) -> _Folder:
        _parts(path)  # refuses the path `..`, as its parent would be the root
        return self._folder(path.parent)

    # What a crash leaves -------------------------------------------------------------------------------------------

    def _survivor(self, folder: _Folder) -> _Folder:
        names = dict(folder.synced)
        likely = self._rng.choice((0.0, 0.5, 0.9, 1.0))
        for change in folder.changes:
            if self._rng.random() < likely:
                _apply(change, names)
        left: dict[str, _File | _Folder] = {}
        for name, node in names.items():
            if isinstance(node, _Folder):
                left[name] = self._survivor(node)
            else:
                data = self._torn(node)
                left[name] = _File(data, data)
        return _Folder(left, dict(left))

    def _torn(self, file: _File) -> bytes:
        old, new = file.synced, file.data
        if old == new:
            return new
        match self._rng.randrange(5):
            case 0:
                return old
            case 1:
                return new
            case 2:
                return b""
            case 3:
                return new[: self._rng.randrange(len(new) + 1)]
        # A file's length may be durable before its blocks, and blocks become durable in any order.
        length = self._rng.choice((len(old), len(new)))
        sources = [content[:length].ljust(length, b"\0") for content in (old, new, b"")]
        cuts = [0, *sorted(self._rng.randrange(length + 1) for _ in range(3)), length]
        return b"".join(self._rng.choice(sources)[a:b] for a, b in itertools.pairwise(cuts))


def _apply(change: "dict[str, _File | _Folder | None]", names: "dict[str, _File | _Folder]") -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _bytes(node: _File | _Folder) -> int:
    return len(node.data) if isinstance(node, _File) else sum(map(_bytes, node.names.values()))


def _parts(path: PurePosixPath) -> tuple[str, ...]:
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{path} leads out of the disk")
    return path.parts


def _os_error(code: int, path: PurePosixPath) -> OSError:
    return OSError(code, os.strerror(code), str(path))
