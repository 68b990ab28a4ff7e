"""Snapshots on this peer's disk: of the layers that it trains, and copies that other stages asked it to keep.

Every few steps two members of each group write its state, and each asks a peer outside the group to keep a copy. When
a layer has lost its last holder, the coordinator sees from the heartbeats (`holdings`) which version is still complete,
and the run goes back to it.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from shoal.peer.disk import snapshot
from shoal.peer.model.state import LayerAt, LayerState, StageState
from shoal.protocol.durable import replace_file
from shoal.protocol.errors import LocalError
from shoal.protocol.messages import Holding
from shoal.protocol.plan import Plan
from shoal.protocol.ports import Clock, Disk
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

FOLDER: Final = "snapshots"
PARTIAL_FOLDER: Final = "light"
KEPT: Final = 2
"""Newest versions kept of each layer group and era: stages write at slightly different times, so a whole step must
remain. Once the coordinator has seen all layers of a step on two disks each, earlier ones go (`Archive.thin`)."""
ABANDONED_SNAPSHOTS: Final = 10
"""A layer group is removed after this many snapshots here without it: other peers hold it now. Every peer keeps `KEPT`
versions, so no roll-back needs one that is so old."""
_COMPLAIN_S = 60.0


class Archive:
    """Snapshots of one run on one peer's disk. Args: disk: None keeps nothing."""

    def __init__(
        self,
        disk: Disk | None,
        *,
        run: str,
        spec: RunSpec,
        clock: Clock,
        run_blocking: Callable[[Callable[[], object]], Awaitable[object]],
    ) -> None:
        self._disk = disk
        self._run = run
        self._folder = PurePosixPath(run) / FOLDER
        self._partial = PurePosixPath(run) / PARTIAL_FOLDER
        self._path = PurePosixPath(run) / "era"
        self._past = PastEras(PurePosixPath(run) / "past-eras")
        self._spec = spec
        self._clock = clock
        self._run_blocking = run_blocking
        self._writing = asyncio.Lock()
        """One write at a time: otherwise the first to list the disk might be the last to store its list."""
        self._stored: dict[PurePosixPath, snapshot.StoredSnapshot] = {}
        self._damaged: set[PurePosixPath] = set()
        """Found damaged when read; not offered to others."""
        self._complained_s = -_COMPLAIN_S
        self._written: deque[tuple[int, int]] = deque(maxlen=ABANDONED_SNAPSHOTS + 1)
        """(era, version) of the last snapshots that this process wrote, of any layers."""
        self._wanted: dict[int, None] = {}
        """Versions for which a snapshot was requested, the latest request last."""
        self.era_begun = -1
        """The newest era that we may no longer begin: this process has begun it, or knows that it is under way."""
        self._groups_begun: set[int] = set()
        self._noted = (-1, 0)
        """The newest era that this or an earlier process has seen under way, and its version then."""
        self._saved = 0
        """Version of the last snapshot that this or an earlier process wrote here; 0: none."""
        self.unsaved = ""
        """A sentence that names the steps that the disk did not take, and why; empty: it took the last snapshot."""
        self._certified: frozenset[tuple[int, int]] = frozenset()
        """(era, version) that the live plan certifies, of any layers."""

    @property
    def keeps(self) -> bool:
        return self._disk is not None

    @property
    def _here(self) -> Disk:
        assert self._disk is not None, "no disk"
        return self._disk

    @property
    def has_lost_all(self) -> bool:
        """True if snapshots were written here before, and none of them can be read."""
        return self._saved > 0 and not self._stored

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """Snapshots here, newest first."""
        newest = sorted(self._stored.values(), key=lambda stored: (stored.age, stored.path), reverse=True)
        return tuple(Holding(era=stored.era, version=stored.version, layers=stored.keys) for stored in newest)

    def is_due(self, version: int) -> bool:
        """True if a snapshot of this version is to be written."""
        return self.keeps and self.is_attested(version)

    def is_attested(self, version: int) -> bool:
        """True if every member of a group signs its layers at this version, because snapshots of it are written."""
        if version == 0:
            return False
        interval = self._spec.swarm.snapshot_interval_steps
        by_steps = version == self._spec.training.steps or (interval > 0 and version % interval == 0)
        return by_steps or version in self._wanted

    def want(self, version: int) -> None:
        """Write a snapshot of this version too, beside the regular ones."""
        self._wanted.pop(version, None)
        self._wanted[version] = None
        while len(self._wanted) > 16:  # more than one only where coordinators or leavers overlap
            del self._wanted[next(iter(self._wanted))]

    def has(self, keys: Iterable[str], *, era: int, version: int) -> bool:
        """True if one snapshot here has all these layers."""
        return any(stored.age == (era, version) and set(keys) <= set(stored.keys) for stored in self._stored.values())

    def follow(self, plan: Plan) -> None:
        """Keep what this plan certifies, whatever others have us write."""
        self._certified = frozenset(entry.age for entry in plan.certified)

    def since(self, age: tuple[int, int], keys: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the (era, version), later than `age`, of snapshots here of exactly these layers."""
        return sorted(stored.age for stored in self._stored.values() if stored.keys == keys and stored.age > age)

    async def open(self) -> None:
        """Read what an earlier process of this peer has left on the disk."""
        if self.keeps:
            for read in (self._look, self._check, self._recall_past, self._recall_era):
                await self._run_blocking(read)

    def begin_era(self, era: int, group: int = 0) -> bool:
        """True if this peer may begin `era` from its beginning as a member of `group`: once per group and process, and
        in a later process unless it knows of progress (`note_era`): the others have gone on, or the state is lost."""
        if era == self.era_begun and self._groups_begun and group not in self._groups_begun:
            self._groups_begun.add(group)
            return True
        if era <= self.era_begun:
            return False
        self.era_begun = era
        self._groups_begun = {group}
        return True

    async def note_era(self, era: int, version: int) -> None:
        """Note that `era` is under way: it has reached `version`, which is past its beginning."""
        if era > self.era_begun:
            self.era_begun, self._groups_begun = era, set()
        if not self.keeps or era <= self._noted[0]:
            return
        before, self._noted = self._noted, (era, version)
        try:
            await self._run_blocking(self._write_notes)
        except OSError as error:
            self._noted = before  # the next step tries again
            self._complain(f"cannot note that era {era} is under way: {error.strerror or error}")

    async def note_rest(self, era: int, version: int) -> None:
        """Note that we leave at `version`, which is saved: as far as we know the run went no further."""
        if self.keeps:
            self._noted = (era, version)
            await self._run_blocking(self._note_saved)

    def version_noted(self, era: int) -> int:
        """Return the version that `era` has reached at least, as far as this peer remembers; 0: unknown."""
        return self._noted[1] if era == self._noted[0] else 0

    async def write(self, state: StageState, *, era: int) -> bool:
        """Write a snapshot. Returns: False: the disk did not take it, which was logged; training goes on without."""
        if not self.keeps:
            return False

        def write() -> None:
            path = snapshot.write_snapshot(
                self._here,
                self._folder / _name(state.layers),
                run=self._run,
                era=era,
                version=state.version,
                layers=state.layers,
                spec=self._spec,
                keep=KEPT,
                certified=self._certified,
            )
            self._damaged.discard(path)
            self._look()
            self._saved = state.version
            self._note_saved()
            with self._complaining("note that an era has ended"):  # the next snapshot tries again
                self._past.note(self._here, self._ages, self._clock.wall_s())
            self._remove_abandoned((era, state.version))
            if len({stored.era for stored in self._stored.values()}) > ERAS_KEPT + 1:
                self._remove((era, 0))  # too many eras for the disk, whatever other peers have
                self._look()

        try:
            async with self._writing:
                await self._run_blocking(write)
        except (OSError, LocalError) as error:
            self._complain(f"no snapshot of version {state.version}: {error}")
            first = self._saved + 1 if self._saved < state.version else 1  # of an older era
            steps = f"steps {first} to {state.version} are" if first < state.version else f"step {state.version} is"
            self.unsaved = f"{steps} not saved on this machine: {error}"
            return False
        self.unsaved = ""
        return True

    def may_thin(self, safe: tuple[int, int]) -> bool:
        """True if snapshots before `safe` (era, version) can be removed. Do not believe a coordinator that names a
        snapshot that no plan certifies, or that is newer than all of ours."""
        ages = self._ages
        if not ages or safe > max(ages) or safe not in self._certified or self._writing.locked():
            return False
        return any(map(self._is_old(safe), ages))

    async def thin(self, safe: tuple[int, int]) -> None:
        """Remove snapshots before `safe`, even of layers no longer ours, but keep older eras that the run may return
        to."""

        def thin() -> None:
            self._remove(safe)
            self._look()

        with self._complaining("remove old snapshots"):
            async with self._writing:
                await self._run_blocking(thin)

    async def read(self, era: int, version: int, keys: tuple[str, ...]) -> dict[str, LayerState]:
        """Read those of the layers that undamaged snapshots of (era, version) here have."""
        found: dict[str, LayerState] = {}
        for stored in sorted(self._stored.values(), key=lambda stored: stored.path):
            wanted = tuple(key for key in keys if key in stored.keys and key not in found)
            if stored.age != (era, version) or not wanted:
                continue

            def read(path: PurePosixPath = stored.path, wanted: tuple[str, ...] = wanted) -> None:
                found.update(snapshot.read_layers(self._here, path, wanted))

            try:
                await self._run_blocking(read)
            except LocalError as error:
                logger.warning("%s", error)
                self._damaged.add(stored.path)
                self._stored.pop(stored.path, None)  # it may have been pruned meanwhile
        return found

    # --- the incomplete state of a learner (`membership/learner.py`), for this peer's next process ---

    # It is of use as long as some peer has the reduced gradients of the steps since. It lies beside the snapshots, in
    # their format, is read once, and is not offered to others.

    async def keep_partial(self, era: int, layers: Mapping[str, LayerAt]) -> None:
        """Replace the kept layers by these, float32 on the host. If that fails, they will be fetched again."""

        def write() -> None:
            snapshot.remove_old(self._here, self._partial, self._run, lambda age: True)
            for version in sorted({at.version for at in layers.values()}):
                snapshot.write_snapshot(
                    self._here,
                    self._partial,
                    run=self._run,
                    version=version,
                    layers={key: at.layer for key, at in layers.items() if at.version == version},
                    spec=self._spec,
                    era=era,
                    keep=2**31,  # all versions stay: layers may be a step apart
                )

        await self._with_partial(write, "keep layers, which will be fetched again")

    async def take_partial(self, era: int, keys: Collection[str]) -> dict[str, LayerAt]:
        """Read and remove the layers that an earlier process has left. Return the undamaged ones of this era in
        `keys`, on the host."""
        taken: dict[str, LayerAt] = {}

        def take() -> None:
            for stored in snapshot.list_snapshots(self._here, self._partial, self._run):
                for key in stored.keys if stored.era == era else ():
                    if key not in keys:
                        continue
                    try:
                        layer = snapshot.read_layers(self._here, stored.path, [key])[key]
                    except snapshot.DamagedSnapshot as damage:
                        logger.warning("%s: layer %s will be fetched again", damage, key)
                    else:
                        taken[key] = LayerAt(stored.version, layer)
            snapshot.remove_old(self._here, self._partial, self._run, lambda age: True)

        await self._with_partial(take, "read the layers that an earlier process has left")
        return taken

    async def _with_partial(self, work: Callable[[], None], what: str) -> None:
        if self.keeps:
            try:
                await self._run_blocking(work)
            except (LocalError, OSError) as error:
                logger.warning("cannot %s: %s", what, error)

    # --- inside ---

    @property
    def _ages(self) -> list[tuple[int, int]]:
        return [stored.age for stored in self._stored.values()]

    def _is_old(self, safe: tuple[int, int]) -> Callable[[tuple[int, int]], bool]:
        kept = self._past.kept(self._ages, self._clock.wall_s())
        return lambda age: age < safe and (age[0] == safe[0] or age[0] not in kept)

    def _remove(self, safe: tuple[int, int]) -> None:
        is_old = self._is_old(safe)
        for name in self._here.list(self._folder):
            snapshot.remove_old(self._here, self._folder / name, self._run, is_old)

    def _write_notes(self) -> None:
        era, version = self._noted
        replace_file(self._here, self._path, f"{era} {version} {self._saved}".encode())

    def _note_saved(self) -> None:
        with self._complaining(f"note that version {self._saved} is saved"):  # the next snapshot tries again
            self._write_notes()

    def _recall_past(self) -> None:
        with self._complaining("read when eras have ended"):
            self._past.recall(self._here)

    def _recall_era(self) -> None:
        self._saved = max([self._saved, *(version for _, version in self._ages)])
        with contextlib.suppress(OSError, ValueError):  # absent or torn: as if it had not begun
            era, version, *saved = (int(word) for word in self._here.read(self._path).split())
            self._noted, self.era_begun = (era, version), era
            self._saved = max([self._saved, *saved])

    def _check(self) -> None:
        def note(damage: snapshot.DamagedSnapshot) -> None:
            logger.warning("%s", damage)
            self._damaged.add(damage.path)
            self._saved = max(self._saved, self._stored[damage.path].version)

        sound = snapshot.without_damaged(self._here, self._stored.values(), on_damage=note)
        self._stored = {stored.path: stored for stored in sound}

    def _look(self) -> None:
        stored: dict[PurePosixPath, snapshot.StoredSnapshot] = {}
        try:
            for name in self._here.list(self._folder):
                for found in snapshot.list_snapshots(self._here, self._folder / name, self._run):
                    if found.path not in self._damaged:
                        stored[found.path] = found
        except (OSError, LocalError) as error:
            self._complain(f"cannot look through the snapshots: {error}")
            return
        self._stored = stored

    def _remove_abandoned(self, age: tuple[int, int]) -> None:
        """Delete layer groups that the last ten snapshots, up to `age`, do not contain; `thin` handles older eras."""
        if age not in self._written:  # several groups write the same version
            self._written.append(age)
        if len(self._written) <= ABANDONED_SNAPSHOTS:
            return
        newest: dict[PurePosixPath, tuple[int, int]] = {}
        past = {path.parent for path, stored in self._stored.items() if stored.era != age[0]}
        for path, stored in self._stored.items():
            if path.parent not in past:
                newest[path.parent] = max(stored.age, newest.get(path.parent, stored.age))
        abandoned = {folder for folder, written in newest.items() if written < min(self._written)}
        with self._complaining("remove old snapshots"):  # the new snapshot is written all the same
            for folder in sorted(abandoned):
                snapshot.prune(self._here, folder, self._run, keep=0)
            self._stored = {path: stored for path, stored in self._stored.items() if path.parent not in abandoned}

    @contextlib.contextmanager
    def _complaining(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._complain(f"cannot {what}: {error.strerror or error}")

    def _complain(self, text: str) -> None:
        """Log at most once a minute: a full disk stays full."""
        if self._clock.now_s() >= self._complained_s + _COMPLAIN_S:
            self._complained_s = self._clock.now_s()
            logger.error("%s", text)


def _name(keys: Iterable[str]) -> str:
    """Return the folder of a group of layers that one stage holds, whichever peer trains it."""
    ordered = list(keys)
    return f"{ordered[0]}-{ordered[-1]}"


KEPT_S: Final = 7 * 24 * 3600.0
"""Time for an owner to notice."""
ERAS_KEPT: Final = 2
"""Older eras with snapshots here at the same time: with the current one three times the room of one."""


class PastEras:
    """Chooses the past eras of which one peer still keeps snapshots, so that the run can return to them.

    A roll-back may have been a mistake. So the last snapshots of an older era stay until the new era has its own on
    enough disks, and for a week, for `shoal recover --era`. Of too many older eras those that had come least far go
    first. Args: path: the file that remembers when eras ended.
    """

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
