"""Layers of the state that a light member (`learner.py`) has when it ends, on its disk, for its next process.

They are of use as long as some peer has the reduced gradients of the steps since. They lie beside the snapshots, in
their format, are read once, and are not offered to others.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Final

from shoal.peer.disk import snapshot
from shoal.peer.model.state import LayerState
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import Disk
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

FOLDER: Final = "light"


class PartialCheckpoint:
    """Keeps a light member's layers on disk for the peer's next process. Args: disk: None keeps nothing."""

    def __init__(
        self,
        disk: Disk | None,
        *,
        run: str,
        spec: RunSpec,
        run_blocking: Callable[[Callable[[], object]], Awaitable[object]],
    ) -> None:
        self._disk = disk
        self._run = run
        self._spec = spec
        self._folder = PurePosixPath(run) / FOLDER
        self._run_blocking = run_blocking

    async def write(self, era: int, layers: Mapping[str, tuple[int, LayerState]]) -> None:
        """Replace the kept layers by these; log a write that fails, after which they are fetched again.
        Args: layers: key -> (version, parameters and moments in float32 [N] on the host)."""
        if self._disk is None:
            return
        try:
            await self._run_blocking(partial(self._write, self._disk, era, layers))
        except (LocalError, OSError) as error:
            logger.warning("cannot keep layers, which will be fetched again: %s", error)

    async def take(self, era: int, keys: Collection[str]) -> dict[str, tuple[int, LayerState]]:
        """Read and remove the layers that an earlier process has left.
        Returns: key -> (version, layer on the host), for the undamaged ones of this era in `keys`."""
        taken: dict[str, tuple[int, LayerState]] = {}
        if self._disk is None:
            return taken
        try:
            await self._run_blocking(partial(self._take, self._disk, era, keys, taken))
        except (LocalError, OSError) as error:
            logger.warning("cannot read the layers that an earlier process has left: %s", error)
        return taken

    def _write(self, disk: Disk, era: int, layers: Mapping[str, tuple[int, LayerState]]) -> None:
        self._remove(disk)
        for version in sorted({version for version, _ in layers.values()}):
            of_version = {key: layer for key, (at, layer) in layers.items() if at == version}
            snapshot.write_snapshot(
                disk,
                self._folder,
                run=self._run,
                version=version,
                layers=of_version,
                spec=self._spec,
                era=era,
                keep=2**31,  # all versions stay: layers may be a step apart
            )

    def _take(self, disk: Disk, era: int, keys: Collection[str], taken: dict[str, tuple[int, LayerState]]) -> None:
        for stored in snapshot.list_snapshots(disk, self._folder, self._run):
            if stored.era != era:
                continue
            for key in stored.keys:
                if key not in keys:
                    continue
                try:
                    layer = snapshot.read_layers(disk, stored.path, [key])[key]
                except snapshot.DamagedSnapshot as damage:
                    logger.warning("%s: layer %s will be fetched again", damage, key)
                else:
                    taken[key] = stored.version, layer
        self._remove(disk)

    def _remove(self, disk: Disk) -> None:
        snapshot.remove_old(disk, self._folder, self._run, lambda age: True)
