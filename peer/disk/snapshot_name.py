"""Names of snapshot folders, in a file of their own so that listing snapshots needs no torch."""

import re
from typing import Final, NamedTuple

MANIFEST: Final = "manifest.json"
UNFINISHED_PREFIX: Final = ".unfinished-"
_NAME: Final = re.compile(r"(?P<run>[^.].*)-era-(?P<era>\d+)-step-(?P<version>\d+)-(?P<digest>[0-9a-f]{16})")


class SnapshotName(NamedTuple):
    run: str
    era: int
    version: int
    manifest_digest: str
    """First 16 hex digits of the BLAKE3 digest of `manifest.json`."""

    @classmethod
    def parse(cls, name: str) -> "SnapshotName | None":
        """Parse the name of a folder; None: the folder is no snapshot."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(match["run"], int(match["era"]), int(match["version"]), match["digest"])

    def __str__(self) -> str:
        return f"{self.run}-era-{self.era}-step-{self.version:08d}-{self.manifest_digest}"
