"""Chooses the past eras of which this peer still keeps snapshots, so that the run can return to them.

A roll-back may have been a mistake. So the last snapshots of an older era stay until the new era has its own on enough
disks, and for a week, for `shoal recover --era`. Of too many older eras those that had come least far go first.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from shoal.protocol.durable import replace_file
from shoal.protocol.ports import Disk

KEPT_S: Final = 7 * 24 * 3600.0
"""Time for an owner to notice."""
ERAS_KEPT: Final = 2
"""Older eras with snapshots here at the same time: with the current one three times the room of one."""


class PastEras:
    """The past eras of one run on one peer. Args: path: the file that remembers when eras ended."""

    def __init__(self, path: PurePosixPath) -> None:
        self._path = path
        self._ended_s: dict[int, float] = {}
        """Era -> wall-clock time when a snapshot of a later era was first written here."""

    def recall(self, disk: Disk) -> None:
        """Read the ends of eras from the file. Raises: OSError."""
        try:
            lines = disk.read(self._path).decode(errors="replace").splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            era, _, ended_s = line.partition(" ")
            try:
                self._ended_s[int(era)] = float(ended_s)
            except ValueError:
                continue  # torn: that era's week begins when it is seen again

    def note(self, disk: Disk, ages: Iterable[tuple[int, int]], wall_s: float) -> None:
        """Note that all but the last of the eras in `ages` have ended; ages: (era, version). Raises: OSError."""
        eras = {era for era, _ in ages}
        ended = {era: wall_s for era in eras if era < max(eras) and era not in self._ended_s}
        if not ended:
            return
        self._ended_s = dict(sorted((self._ended_s | ended).items())[-64:])
        text = "".join(f"{era} {ended_s:.0f}\n" for era, ended_s in self._ended_s.items())
        replace_file(disk, self._path, text.encode())

    def kept(self, ages: Iterable[tuple[int, int]], wall_s: float) -> frozenset[int]:
        """Return the older eras in `ages` that keep their snapshots."""
        versions = dict(sorted(ages))  # the last version of each era
        current = max(versions, default=0)
        young = [era for era in versions if era < current and abs(wall_s - self._ended_s.get(era, wall_s)) < KEPT_S]
        return frozenset(sorted(young, key=lambda era: (versions[era], era), reverse=True)[:ERAS_KEPT])
