"""Replaces a file atomically: after a crash or a power cut the file has either the old content or the new one."""

from pathlib import PurePosixPath

from shoal.protocol.ports import Disk, Payload


def replace_file(disk: Disk, path: PurePosixPath, content: Payload) -> None:
    """Write `content` beside `path`, then rename; durable on return. Raises: OSError: for example, the disk is full."""
    beside = path.with_suffix(".new")
    disk.make_folder(path.parent)
    disk.write(beside, content)
    disk.replace(beside, path)
    disk.sync_folder(path.parent)
