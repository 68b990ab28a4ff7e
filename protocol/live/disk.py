"""The port `Disk` on a folder of this machine."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from shoal.protocol.ports import Payload


class LiveDisk:
    """Files below the folder `root`. Several threads and processes may work here at once if each uses paths of its own
    or holds a lock. The caller makes the folders above `root` durable."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def where(self, path: PurePosixPath) -> str:
        return str(self.root / path)

    def read(self, path: PurePosixPath) -> bytes:
        return self._at(path).read_bytes()

    def write(self, path: PurePosixPath, data: Payload) -> None:
        with self._at(path).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, source: PurePosixPath, target: PurePosixPath) -> None:
        if source.parent != target.parent:
            raise ValueError(f"{source} and {target} are in two folders, so that a crash could leave neither")
        os.rename(self._at(source), self._at(target))

    def remove_tree(self, path: PurePosixPath) -> None:
        if not path.parts:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self.root))
        with suppress(FileNotFoundError):
            try:
                shutil.rmtree(self._at(path))
            except NotADirectoryError:
                self._at(path).unlink()

    def list(self, path: PurePosixPath) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(self._at(path))))
        except FileNotFoundError:
            return ()

    def make_folder(self, path: PurePosixPath) -> None:
        self._at(path).mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # the parent folder may be unreadable to us
            _sync(self.root.absolute().parent)
        # Sync the parents of existing folders, too: the process that made these may have been killed before it synced.
        for folder in reversed(path.parents):
            _sync(self._at(folder))

    def sync_folder(self, path: PurePosixPath) -> None:
        _sync(self._at(path))

    @contextmanager
    def lock(self, path: PurePosixPath) -> Iterator[None]:
        descriptor = os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _at(self, path: PurePosixPath) -> Path:
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{path} leads out of {self.root}")
        return self.root / path


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
