"""Implements `shoal recover`: when half of a plan's members are gone for good, the run's owner lets the rest go on.

The reachable members are then no majority, and must not act as a majority: the missing members may be training on the
other side of a network partition. So a person decides: the owner's key mandates one reachable peer to make a plan
without votes. The mandate begins a new *override epoch*. Of two plans the one with the higher override epoch wins,
whatever their terms are. So a peer that returns from the other side adopts the mandated plan, and loses what it trained
meanwhile.

With `era` (a generation of the training state, up to the next roll-back or repartition of the layers) the same mandate
takes the run back to the last snapshot of an older era, whether or not a majority is in reach. Peers keep such
snapshots for a week (`peer/disk/archive.py`).

Open `assess` first: it decides whether there is anything to recover. `Recovery` asks the peers and sends the mandate;
it runs on a real network and in the simulator.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from shoal.coordinator.allocate.interface import Beginning
from shoal.coordinator.chain_sync import VerifiedPlans
from shoal.coordinator.discovery import Discovery
from shoal.coordinator.era import CheckpointCatalog
from shoal.coordinator.role import rank
from shoal.deploy.base.disk_error import or_say
from shoal.deploy.state.spec_record import FIND_S
from shoal.deploy.visitor.entrance import entering
from shoal.protocol.durable import replace_file
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused, RemoteError, Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite
from shoal.protocol.layers import held_keys
from shoal.protocol.limits import CONTROL_BYTES_MAX, ENVELOPE_BYTES_MAX, ERA_MAX, TERM_JUMP_MAX, TERM_MAX
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.messages import Advert, Done, Reset, Standing, StandingRequest, StatusRequest, SwarmStatus
from shoal.protocol.plan import Mandate, Plan, PlanShape, SignedPlan, is_quorum, sign_mandate
from shoal.protocol.ports import Clock, Directory, Disk
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

RESET_TERMS = 1000
"""A recovery's plan has a term so much above all known terms: people then see that the owner intervened."""
ASK_TIMEOUT_S = 5.0
ASKED_MAX = 32
"""The most concurrent requests."""
_LOOK_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A reachable peer, its state, and the plan that it obeys."""

    peer: PeerID
    advert: Advert
    standing: Standing
    plan: SignedPlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The state of a run that is to be recovered. `base` is the plan that most reachable peers obey."""

    base: SignedPlan
    found: tuple[Found, ...]
    """The reachable peers, ordered by identifier."""
    missing: tuple[PeerID, ...]
    """Unreachable members of `base`."""
    term_max: int
    """The highest term that a reachable peer has voted for or obeys; implausibly high terms do not count."""
    beginning: Beginning | None = None
    """The snapshot to which the run goes back; None: the run goes on from its present state."""

    @property
    def version(self) -> int:
        """The highest model version of reachable peers in the era (training generation) of `base`; 0: there is none."""
        era = self.base.plan.era
        return max((found.standing.version for found in self.found if found.standing.era == era), default=0)

    @property
    def term(self) -> int:
        """The term of the mandated plan: `RESET_TERMS` above all known terms. If that is too high, it is 1, since the
        plan's new override epoch outranks every term."""
        term = self.term_max + RESET_TERMS
        return term if term < TERM_MAX // 2 else 1  # a new override epoch may restart its terms

    def coordinator(self, term: int) -> PeerID:
        """Return the peer to make the recovery's plan: the first in rank for `term` of those that obey `base`."""
        obey = [found for found in self.found if found.plan is not None and found.plan.digest == self.base.digest]
        willing = [found.peer for found in obey if found.advert.willing_to_coordinate] or [found.peer for found in obey]
        return rank(self.base.plan.run, term, willing)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The result of a recovery: the plan with which the run goes on."""

    plan: Plan
    following: tuple[PeerID, ...]
    """The reachable peers that already obey the plan."""
    status: SwarmStatus | None


def assess(found: Iterable[Found], owner: PeerID, *, era: int | None = None, layers: Collection[str] = ()) -> Situation:
    """Assess a run from its reachable peers.

    Args:
        found: the reachable peers.
        era: the era (training generation) to go back to, even if a majority is reachable; None: no going back.
        layers: the layers that a whole snapshot has.
    Raises: LocalError: there is nothing to recover; the sentence says why.
    """
    peers = sorted(found, key=lambda each: each.peer)
    if not peers:
        raise LocalError("no peer of the run is in reach: start one of them, or ask for an invite of one that is up")
    plans = [each.plan for each in peers if each.plan is not None]
    if not plans:
        raise LocalError("nothing to recover: the run has no plan yet, it begins by itself once enough peers are there")
    # Take the plan that most peers obey, not the highest plan: a liar may have made that one up to get the mandate.
    obeying = Counter(plan.digest for plan in plans)
    base = max(plans, key=lambda plan: (obeying[plan.digest], plan.plan.height))
    here = {each.peer for each in peers}
    members = base.plan.members
    beginning = _beginning(peers, base.plan, era, layers) if era is not None else None
    if beginning is None and is_quorum(here, base.plan, owner):
        num_here = len(here.intersection(members))
        raise LocalError(
            f"nothing to recover: {num_here} of the {len(members)} members of the last plan are in reach, "
            "which is enough for them to go on by themselves"
        )
    return Situation(
        base=base,
        found=tuple(peers),
        missing=tuple(peer for peer in members if peer not in here),
        term_max=max(
            base.plan.term, *(e.standing.term for e in peers if e.standing.term <= base.plan.term + TERM_JUMP_MAX)
        ),
        beginning=beginning,
    )


def _beginning(found: Iterable[Found], live: Plan, era: int, layers: Collection[str]) -> Beginning:
    """Return the newest snapshot of `era` that reachable peers have with every layer. Raises: LocalError: none."""
    catalog = CheckpointCatalog.of((each.peer, each.standing.holdings) for each in found)
    whole = [version for of_era, version in catalog.parts if of_era == era and catalog.covers((era, version), layers)]
    if not whole:
        eras = sorted({of_era for of_era, version in catalog.parts if catalog.covers((of_era, version), layers)})
        there = f"there are whole ones of era {', '.join(map(str, eras))}" if eras else "there is no whole one at all"
        raise LocalError(f"no snapshot of era {era} is whole on the disks that are in reach; {there}")
    heard = (each.standing.era for each in found)
    last = max(live.era, catalog.era_max, *(e for e in heard if e < ERA_MAX))
    return Beginning(era=last + 1, version=max(whole), from_era=era)


class Recovery:
    """Examines a run, and makes the run go on, or go back, if the owner wants that.

    Args: endpoint: the visitor's endpoint, with a throwaway identity.
    """

    def __init__(self, *, endpoint: Endpoint, directory: Directory, clock: Clock, owner: PeerID, spec: RunSpec) -> None:
        self._endpoint, self._owner, self._spec = endpoint, owner, spec
        self._notices = Discovery(endpoint, directory, clock)
        self._plans = VerifiedPlans(endpoint.run, owner=owner, shape=PlanShape.of(spec), seals=endpoint.seals)
        self._clock = clock

    async def look(self, *, era: int | None = None) -> Situation:
        """Ask all peers in the directory, and assess the run.

        Args: era: the era (training generation) to go back to; None: do not go back.
        Raises: LocalError: there is nothing to recover.
        """
        until_s = self._clock.now_s() + FIND_S
        found: list[Found] = []
        while not found and self._clock.now_s() < until_s:
            found = await self._ask_all(await self._notices.adverts())
            if not found:
                await asyncio.sleep(_LOOK_AGAIN_S)
        keys = held_keys(self._spec.model, placed=self._spec.swarm.expert_slots > 0)
        return assess(found, self._owner, era=era, layers=keys)

    async def reset(self, situation: Situation, owner: Identity, folder: Path) -> Recovered:
        """Mandate a plan for the reachable peers, and wait up to 30 s until they obey it.

        Args: folder: the owner's folder; it records the last override epoch, so that none is used twice.
        Raises: LocalError: the reset failed; the sentence says why.
        """
        assert owner.peer_id == self._owner
        run, disk = self._endpoint.run, LiveDisk(folder)
        known = (found.plan.plan.override_epoch for found in situation.found if found.plan is not None)
        override_epoch = max(_mandated(disk, run), *known) + 1
        _remember(disk, run, override_epoch)
        term, back = situation.term, situation.beginning
        coordinator = situation.coordinator(term)
        leave = Mandate(
            override_epoch=override_epoch,
            term=term,
            coordinator=coordinator,
            previous=situation.base.digest,
            era=back.era if back else 0,
            restore_era=back.from_era if back else 0,
            restore_version=back.version if back else 0,
        )
        mandate = sign_mandate(owner, leave, run=run)
        live = situation.base.link
        roster = _roster(situation, spare_bytes=CONTROL_BYTES_MAX - len(live) - len(mandate) - ENVELOPE_BYTES_MAX)
        reset = Reset(mandate=mandate, live=live, version=situation.version, roster=roster)
        try:
            await self._endpoint.ask(coordinator, reset, Done)
        except Refused as error:
            raise LocalError(f"peer {coordinator[-8:]} cannot make a plan: {error.reason}") from error
        except (Unreachable, RemoteError) as error:
            raise LocalError(f"{error}: look again with `shoal recover`") from error
        return await self._followed(situation, coordinator, override_epoch)

    async def _followed(self, situation: Situation, coordinator: PeerID, override_epoch: int) -> Recovered:
        adverts = {found.peer: found.advert for found in situation.found}
        until_s = self._clock.now_s() + 30.0
        while True:
            found = await self._ask_all(adverts)
            following = [
                each for each in found if each.plan is not None and each.plan.plan.override_epoch >= override_epoch
            ]
            if len(following) == len(adverts) or (following and self._clock.now_s() >= until_s):
                break
            if self._clock.now_s() >= until_s:
                raise LocalError("no peer obeys the new plan: look again with `shoal recover`")
            await asyncio.sleep(_LOOK_AGAIN_S)
        plan = max((each.plan for each in following if each.plan), key=lambda plan: plan.plan.height).plan
        status: SwarmStatus | None = None
        with contextlib.suppress(Unreachable, Refused, RemoteError):
            status = await self._endpoint.ask(plan.coordinator, StatusRequest(), SwarmStatus, timeout_s=ASK_TIMEOUT_S)
        return Recovered(plan=plan, following=tuple(sorted(each.peer for each in following)), status=status)

    async def _ask_all(self, adverts: dict[PeerID, Advert]) -> list[Found]:
        gate = asyncio.Semaphore(ASKED_MAX)

        async def ask(peer: PeerID, advert: Advert) -> Found | None:
            async with gate:
                try:
                    standing = await self._endpoint.ask(peer, StandingRequest(), Standing, timeout_s=ASK_TIMEOUT_S)
                    plan = self._plans.open_link(standing.live, peer) if standing.live else None
                    return Found(peer=peer, advert=advert, standing=standing, plan=plan)
                except (Unreachable, Refused, RemoteError) as error:
                    logger.info("%s", error)
                    return None

        found = await asyncio.gather(*(ask(peer, advert) for peer, advert in sorted(adverts.items())))
        return [each for each in found if each is not None]


def _roster(situation: Situation, *, spare_bytes: int) -> tuple[tuple[PeerID, Advert], ...]:
    """Return the members of the recovery's plan: reachable peers, those with state first, as many as fit into
    `spare_bytes`. The next plan adds the others."""
    roster = []
    for found in sorted(situation.found, key=lambda each: (not each.standing.synced, each.peer)):
        spare_bytes -= len(msgspec.msgpack.encode((found.peer, found.advert)))
        if spare_bytes < 0:
            break
        roster.append((found.peer, found.advert))
    return tuple(sorted(roster))


# --- the owner's side ---


def find_owner(invite: Invite, folders: Iterable[Path]) -> tuple[Identity, Path]:
    """Return the owner's key and its state folder. Raises: LocalError: none of the folders has the key."""
    for folder in folders:
        path = folder / "identity.key"
        if path.exists():
            identity = Identity.load_or_create(path)
            if identity.peer_id == invite.owner:
                return identity, folder
    raise LocalError(
        f"the key of the run's owner {invite.owner[-8:]} is not on this machine: recover where the run was hosted, "
        "or name the host's --state-dir"
    )


def _override_epoch_file(run: str) -> PurePosixPath:
    return PurePosixPath(f"mandated-{run}.txt")


def _mandated(disk: Disk, run: str) -> int:
    """Return the last override epoch that the owner has used, from the owner's disk: reachable peers may not know it.
    0: none was used. Raises: LocalError: the file cannot be read."""
    path = _override_epoch_file(run)
    try:
        return int(disk.read(path))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise LocalError(f"cannot read {disk.where(path)}, which says what was mandated: {error}") from error


def _remember(disk: Disk, run: str, override_epoch: int) -> None:
    path = _override_epoch_file(run)
    with or_say(f"cannot write {disk.where(path)}"):
        replace_file(disk, path, b"%d\n" % override_epoch)


@contextlib.asynccontextmanager
async def recovery(invite: Invite, owner: Identity) -> AsyncIterator[Recovery]:
    """Open a recovery on libp2p with a throwaway identity. Raises: LocalError: the run cannot be found."""
    async with entering(invite, owner=owner) as entrance:
        # Importing hivemind takes a second; `assess` does not need it.
        from shoal.protocol.live.loop import LoopClock

        yield Recovery(
            endpoint=entrance.endpoint,
            directory=entrance.directory,
            clock=LoopClock(),
            owner=invite.owner,
            spec=entrance.spec,
        )
