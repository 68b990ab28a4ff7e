"""Snapshots on this peer's disk: of the layers that the peer trains, and copies that it keeps for other stages.

Every few steps two members of each group write the group's state, and each asks a peer outside the group to keep a
copy. If the last holder of a layer dies, the coordinator sees from the heartbeats (`holdings`) which version is
complete on the disks, and the run goes back to that version.
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
"""Number of newest versions kept of each layer group and era. One is too few: stages write at slightly different times,
so a version must stay until all have written the next. Once the coordinator has seen each layer of a version on two
disks, earlier versions are removed (`Archive.thin`)."""
ABANDONED_SNAPSHOTS: Final = 10
"""A layer group's snapshots are removed once more than this many later versions were written here without the group:
other peers hold it now. No roll-back goes so far back, since every peer keeps `KEPT` versions."""
_COMPLAIN_S = 60.0


class Archive:
    """Snapshots of one run on one peer's disk. Args: disk: holds the snapshots; None: nothing is kept."""

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
        """Allows one write at a time: of two writes at once, the one with the older list of snapshots might store its
        list last."""
        self._stored: dict[PurePosixPath, snapshot.StoredSnapshot] = {}
        self._damaged: set[PurePosixPath] = set()
        """Snapshots that were found damaged when they were read; they are not offered to other peers."""
        self._complained_s = -_COMPLAIN_S
        self._written: deque[tuple[int, int]] = deque(maxlen=ABANDONED_SNAPSHOTS + 1)
        """(era, version) of the last snapshots that this process wrote, once for all layer groups of a version."""
        self._wanted: dict[int, None] = {}
        """Versions of which a snapshot is wanted besides the regular ones, the latest request last."""
        self.era_begun = -1
        """The newest era that this process has begun, or knows to be under way, and so cannot begin again."""
        self._groups_begun: set[int] = set()
        self._noted = (-1, 0)
        """(era, version) in the note on disk: the newest era known to be under way, and a version it has reached."""
        self._saved = 0
        """Version of the last snapshot that this or an earlier process has written here; 0: none."""
        self.unsaved = ""
        """A sentence that names the steps that could not be written, and why; empty: the last snapshot was written."""
        self._certified: frozenset[tuple[int, int]] = frozenset()
        """(era, version) of each state that the plan in force certifies, for any of its layer groups."""

    @property
    def keeps(self) -> bool:
        return self._disk is not None

    @property
    def _here(self) -> Disk:
        assert self._disk is not None, "no disk"
        return self._disk

    @property
    def has_lost_all(self) -> bool:
        """True if earlier processes wrote snapshots here, and none of these can be read."""
        return self._saved > 0 and not self._stored

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """The undamaged snapshots on this disk, newest first, for heartbeats."""
        newest = sorted(self._stored.values(), key=lambda stored: (stored.age, stored.path), reverse=True)
        return tuple(Holding(era=stored.era, version=stored.version, layers=stored.keys) for stored in newest)

    def is_due(self, version: int) -> bool:
        """True if a snapshot of this version is to be written."""
        return self.keeps and self.is_attested(version)

    def is_attested(self, version: int) -> bool:
        """True if all members, even those without a disk, sign their layers at this version: its snapshots are due."""
        if version == 0:
            return False
        interval = self._spec.swarm.snapshot_interval_steps
        by_steps = version == self._spec.training.steps or (interval > 0 and version % interval == 0)
        return by_steps or version in self._wanted

    def want(self, version: int) -> None:
        """Have a snapshot of this version written, besides the regular ones."""
        self._wanted.pop(version, None)
        self._wanted[version] = None
        while len(self._wanted) > 16:  # more than one only if several coordinators or leaving peers overlap
            del self._wanted[next(iter(self._wanted))]

    def has(self, keys: Iterable[str], *, era: int, version: int) -> bool:
        """True if one snapshot here, of (era, version), has all the layers `keys`."""
        return any(stored.age == (era, version) and set(keys) <= set(stored.keys) for stored in self._stored.values())

    def follow(self, plan: Plan) -> None:
        """Never remove the versions that this plan certifies, whatever snapshots are written later."""
        self._certified = frozenset(entry.age for entry in plan.certified)

    def since(self, age: tuple[int, int], keys: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return (era, version), sorted, of our snapshots newer than `age` that have exactly the layers `keys`."""
        return sorted(stored.age for stored in self._stored.values() if stored.keys == keys and stored.age > age)

    async def open(self) -> None:
        """Read the snapshots and notes that an earlier process of this peer has left on the disk."""
        if self.keeps:
            for read in (self._look, self._check, self._recall_past, self._recall_era):
                await self._run_blocking(read)

    def begin_era(self, era: int, group: int = 0) -> bool:
        """Return True if this peer may load, as a member of `group`, the state with which `era` begins. It may do so
        once per group and process, but not if the era is known to be under way (`note_era`): then the other members
        have gone on."""
        if era == self.era_begun and self._groups_begun and group not in self._groups_begun:
            self._groups_begun.add(group)
            return True
        if era <= self.era_begun:
            return False
        self.era_begun = era
        self._groups_begun = {group}
        return True

    async def note_era(self, era: int, version: int) -> None:
        """Record that `era` is under way: the run has reached `version`, later than the era's first version."""
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
        """Record that we leave: `version` is saved here, and we know of no later version of the run."""
        if self.keeps:
            self._noted = (era, version)
            await self._run_blocking(self._note_saved)

    def version_noted(self, era: int) -> int:
        """Return a version that `era` has reached, from this peer's notes; 0: unknown."""
        return self._noted[1] if era == self._noted[0] else 0

    async def write(self, state: StageState, *, era: int) -> bool:
        """Write a snapshot. Returns: False if this failed: the failure is logged, and training goes on."""
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
                self._remove((era, 0))  # too many eras for the disk, even if other peers lack this one
                self._look()

        try:
            async with self._writing:
                await self._run_blocking(write)
        except (OSError, LocalError) as error:
            self._complain(f"no snapshot of version {state.version}: {error}")
            first = self._saved + 1 if self._saved < state.version else 1  # the saved version is of an older era
            steps = f"steps {first} to {state.version} are" if first < state.version else f"step {state.version} is"
            self.unsaved = f"{steps} not saved on this machine: {error}"
            return False
        self.unsaved = ""
        return True

    def may_thin(self, safe: tuple[int, int]) -> bool:
        """True if there are snapshots before `safe` (era, version) that may be removed: none is being written, and
        `safe` is certified by a plan (a coordinator alone is not believed) and not newer than all of our snapshots."""
        ages = self._ages
        if not ages or safe > max(ages) or safe not in self._certified or self._writing.locked():
            return False
        return any(map(self._is_old(safe), ages))

    async def thin(self, safe: tuple[int, int]) -> None:
        """Remove snapshots before `safe` (era, version), even of layers that we no longer train. Keep snapshots of
        older eras to which the run may return."""

        def thin() -> None:
            self._remove(safe)
            self._look()

        with self._complaining("remove old snapshots"):
            async with self._writing:
                await self._run_blocking(thin)

    async def read(self, era: int, version: int, keys: tuple[str, ...]) -> dict[str, LayerState]:
        """Return those of the layers `keys` that undamaged snapshots of (era, version) on this disk contain."""
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
                self._stored.pop(stored.path, None)  # `pop`: it may have been pruned meanwhile
        return found

    # --- the incomplete state of a learner (`membership/learner.py`), for this peer's next process ---

    # It can be used as long as some peer has the reduced gradients of the steps since then. It lies beside the
    # snapshots, in their format, is read once, and is not offered to other peers.

    async def keep_partial(self, era: int, layers: Mapping[str, LayerAt]) -> None:
        """Store a learner's layers (float32, on the host) for its next process, in place of earlier ones. If this
        fails, the next process fetches them again."""

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
        """Read and remove the layers that an earlier process has stored. Return, on the host, the undamaged ones among
        `keys` that are of this era."""
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
        with contextlib.suppress(OSError, ValueError):  # the file is absent or torn: assume that no era has begun
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
        """Delete the snapshots of each layer group that is in none of the last 11 versions written here, `age` the
        last: other peers hold it now. A group with snapshots of another era is left to `thin`."""
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
        with self._complaining("remove old snapshots"):  # if this fails, the new snapshot is written all the same
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
        """Log `text`, at most once a minute, because a full disk stays full."""
        if self._clock.now_s() >= self._complained_s + _COMPLAIN_S:
            self._complained_s = self._clock.now_s()
            logger.error("%s", text)


def _name(keys: Iterable[str]) -> str:
    """Return the name, equal on all peers, of the folder for snapshots of these layers."""
    ordered = list(keys)
    return f"{ordered[0]}-{ordered[-1]}"


KEPT_S: Final = 7 * 24 * 3600.0
"""Seconds for which the snapshots of a past era stay: time for the run's owner to notice a mistaken roll-back."""
ERAS_KEPT: Final = 2
"""Number of past eras that keep snapshots here; with the current one they take three times the room of one era."""


class PastEras:
    """Chooses the past eras of which one peer still keeps snapshots, so that the run can return to them.

    A roll-back may have been a mistake. So the last snapshots of an older era stay for `shoal recover --era`: until the
    new era has snapshots on enough disks, and for a week at least. If there are too many older eras, those with the
    lowest last version are removed first. Args: path: the file with the times when eras ended.
    """

    def __init__(self, path: PurePosixPath) -> None:
        self._path = path
        self._ended_s: dict[int, float] = {}
        """Era -> wall-clock time when a snapshot of a later era was first written here."""

    def recall(self, disk: Disk) -> None:
        """Read the times when eras ended from the file. Raises: OSError."""
        try:
            lines = disk.read(self._path).decode(errors="replace").splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            era, _, ended_s = line.partition(" ")
            try:
                self._ended_s[int(era)] = float(ended_s)
            except ValueError:
                continue  # a torn line: that era's week begins when it is seen again

    def note(self, disk: Disk, ages: Iterable[tuple[int, int]], wall_s: float) -> None:
        """Record `wall_s` as the end of each era in `ages`, (era, version), but the newest. Raises: OSError."""
        eras = {era for era, _ in ages}
        ended = {era: wall_s for era in eras if era < max(eras) and era not in self._ended_s}
        if not ended:
            return
        self._ended_s = dict(sorted((self._ended_s | ended).items())[-64:])
        text = "".join(f"{era} {ended_s:.0f}\n" for era, ended_s in self._ended_s.items())
        replace_file(disk, self._path, text.encode())

    def kept(self, ages: Iterable[tuple[int, int]], wall_s: float) -> frozenset[int]:
        """Return the past eras in `ages`, (era, version), of which this peer still keeps snapshots at `wall_s`."""
        versions = dict(sorted(ages))  # the last version of each era
        current = max(versions, default=0)
        young = [era for era in versions if era < current and abs(wall_s - self._ended_s.get(era, wall_s)) < KEPT_S]
        return frozenset(sorted(young, key=lambda era: (versions[era], era), reverse=True)[:ERAS_KEPT])
