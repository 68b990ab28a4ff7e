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
        """Replace the kept layers by these. If that fails, they will be fetched again.
        Args: layers: key -> (version, parameters and moments in float32 [N] on the host)."""

        def write(disk: Disk) -> None:
            self._remove(disk)
            for version in sorted({version for version, _ in layers.values()}):
                snapshot.write_snapshot(
                    disk,
                    self._folder,
                    run=self._run,
                    version=version,
                    layers={key: layer for key, (at, layer) in layers.items() if at == version},
                    spec=self._spec,
                    era=era,
                    keep=2**31,  # all versions stay: layers may be a step apart
                )

        await self._on_disk(write, "keep layers, which will be fetched again")

    async def take(self, era: int, keys: Collection[str]) -> dict[str, tuple[int, LayerState]]:
        """Read and remove the layers that an earlier process has left.
        Returns: key -> (version, layer on the host), for the undamaged ones of this era in `keys`."""
        taken: dict[str, tuple[int, LayerState]] = {}

        def take(disk: Disk) -> None:
            for stored in snapshot.list_snapshots(disk, self._folder, self._run):
                for key in stored.keys if stored.era == era else ():
                    if key not in keys:
                        continue
                    try:
                        layer = snapshot.read_layers(disk, stored.path, [key])[key]
                    except snapshot.DamagedSnapshot as damage:
                        logger.warning("%s: layer %s will be fetched again", damage, key)
                    else:
                        taken[key] = stored.version, layer
            self._remove(disk)

        await self._on_disk(take, "read the layers that an earlier process has left")
        return taken

    async def _on_disk(self, work: Callable[[Disk], None], what: str) -> None:
        if self._disk is None:
            return
        try:
            await self._run_blocking(partial(work, self._disk))
        except (LocalError, OSError) as error:
            logger.warning("cannot %s: %s", what, error)

    def _remove(self, disk: Disk) -> None:
        snapshot.remove_old(disk, self._folder, self._run, lambda age: True)
