"""Replaces a file as a whole: after a crash or a power cut there is the old content or the new one, never none."""

from pathlib import PurePosixPath

from shoal.protocol.ports import Disk, Payload


def replace_file(disk: Disk, path: PurePosixPath, content: Payload) -> None:
    """Write `content` beside `path` and rename it. On return it is durable, and so is its name.

    Raises: OSError: there is no room, for example.
    """
    beside = path.with_suffix(".new")
    disk.make_folder(path.parent)
    disk.write(beside, content)
    disk.replace(beside, path)
    disk.sync_folder(path.parent)
