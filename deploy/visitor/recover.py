"""`shoal recover`: when half of a plan's members are gone for good, the run's owner lets the others go on.

Nobody has a majority then, and nobody may take one: those that are missing may be alive on the other side of a cut
network, training on. So a person decides, with the owner's key: one peer in reach is mandated to make a plan without
votes. It begins a *reign*, which counts before terms, so that whoever comes back from the other side adopts it,
whatever they have agreed on among themselves meanwhile; what they trained meanwhile is lost.

With an era to go back to, the same mandate undoes what became of the run since, a majority in reach or not: peers keep
the last snapshots of an older era for a week (`peer/archive.py`).

Open `assess` first: it says what there is to recover. `Recovery` looks and acts on any of the two worlds' ports.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from shoal.coordinator import election
from shoal.coordinator.discovery import Discovery
from shoal.coordinator.era import Disks
from shoal.coordinator.plan_layout import Beginning
from shoal.deploy.visitor.entrance import FIND_S, entering
from shoal.protocol.durable import replace_file
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused, RemoteError, Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite
from shoal.protocol.layers import held_keys
from shoal.protocol.limits import CONTROL_BYTES_MAX, ERA_MAX, TERM_JUMP_MAX, TERM_MAX
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.messages import Advert, Done, Reset, Standing, StandingRequest, StatusRequest, SwarmStatus
from shoal.protocol.plan import Mandate, Plan, PlanShape, SignedPlan, open_link, open_plan, sign_mandate
from shoal.protocol.ports import Clock, Directory, Disk
from shoal.protocol.quorum import is_quorum
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

RESET_TERMS = 1000
"""How far a reset's term is above all known ones, so that people see in a term that the owner stepped in. What counts
is the reign."""
ASK_TIMEOUT_S = 5.0
ASKED_MAX = 32
"""How many peers are asked at the same time."""
FOLLOW_S = 30.0
"""How long to wait for those in reach to obey the new plan."""
_LOOK_AGAIN_S = 0.5
_ENVELOPE_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One peer in reach."""

    peer: PeerID
    advert: Advert
    standing: Standing
    plan: SignedPlan | None
    """The plan that the peer obeys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A run whose highest known plan has lost its majority."""

    base: SignedPlan
    found: tuple[Found, ...]
    """The peers in reach, in the order of their identifiers."""
    missing: tuple[PeerID, ...]
    """Members of `base` that are not in reach."""
    term_max: int
    """The highest term that anybody in reach has promised, of those that can be believed."""
    beginning: Beginning | None = None
    """Where the run is to go back to; None: it goes on as it is."""

    @property
    def version(self) -> int:
        """The highest version in the plan's era."""
        era = self.base.plan.era
        return max((found.standing.version for found in self.found if found.standing.era == era), default=0)

    @property
    def term(self) -> int:
        """The term of the next plan."""
        term = self.term_max + RESET_TERMS
        return term if term < TERM_MAX // 2 else 1  # in a new reign terms may begin anew

    def coordinator(self, term: int) -> PeerID:
        """The peer that is to make the next plan."""
        obey = [found for found in self.found if found.plan is not None and found.plan.digest == self.base.digest]
        willing = [found.peer for found in obey if found.advert.willing_to_coordinate] or [found.peer for found in obey]
        return election.rank(self.base.plan.run, term, willing)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The plan that the run goes on with."""

    plan: Plan
    following: tuple[PeerID, ...]
    """The peers in reach that obey the plan by now."""
    status: SwarmStatus | None
    """The run as its coordinator sees it."""


def assess(found: Iterable[Found], owner: PeerID, *, era: int | None = None, layers: Collection[str] = ()) -> Situation:
    """What there is to recover.

    Args: era: to which the run is to go back, whoever is in reach; layers: of which a snapshot consists.

    Raises: LocalError: nothing; the sentence says why.
    """
    peers = sorted(found, key=lambda each: each.peer)
    if not peers:
        raise LocalError("no peer of the run is in reach: start one of them, or ask for an invite of one that is up")
    plans = [each.plan for each in peers if each.plan is not None]
    if not plans:
        raise LocalError("nothing to recover: the run has no plan yet, it begins by itself once enough peers are there")
    # What most obey, and not the highest: that may be the invention of one of them, who would get the mandate for it.
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
    """The newest snapshot of `era` that is whole on the disks in reach. Raises: LocalError: there is none."""
    disks = Disks.of((each.peer, each.standing.holdings) for each in found)
    whole = [version for of_era, version in disks.parts if of_era == era and disks.covers((era, version), layers)]
    if not whole:
        eras = sorted({of_era for of_era, version in disks.parts if disks.covers((of_era, version), layers)})
        there = f"there are whole ones of era {', '.join(map(str, eras))}" if eras else "there is no whole one at all"
        raise LocalError(f"no snapshot of era {era} is whole on the disks that are in reach; {there}")
    heard = (each.standing.era for each in found)
    last = max(live.era, disks.era_max, *(e for e in heard if e < ERA_MAX))
    return Beginning(era=last + 1, version=max(whole), from_era=era)


class Recovery:
    """Looks at what is left of a run and, if told to, has it go on.

    Args:
        endpoint: of a throwaway identity; takes no part in the run.
    """

    def __init__(self, *, endpoint: Endpoint, directory: Directory, clock: Clock, owner: PeerID, spec: RunSpec) -> None:
        self._endpoint, self._owner, self._spec = endpoint, owner, spec
        self._notices = Discovery(endpoint, directory, clock)
        self._clock = clock

    async def look(self, *, era: int | None = None) -> Situation:
        """Ask everybody whom the directory knows.

        Args: era: to go back to; None: the run is to go on where it is.
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
        """Mandate a plan for those in reach, and wait until they obey it.

        Args: folder: where the owner keeps how many reigns were begun: none may ever begin twice.
        Raises: LocalError: it did not come about; the sentence says why.
        """
        assert owner.peer_id == self._owner
        run, disk = self._endpoint.run, LiveDisk(folder)
        known = (found.plan.plan.reign for found in situation.found if found.plan is not None)
        reign = max(_mandated(disk, run), *known) + 1
        _remember(disk, run, reign)
        term, back = situation.term, situation.beginning
        coordinator = situation.coordinator(term)
        leave = Mandate(
            reign=reign,
            term=term,
            coordinator=coordinator,
            previous=situation.base.digest,
            era=back.era if back else 0,
            restore_era=back.from_era if back else 0,
            restore_version=back.version if back else 0,
        )
        mandate = sign_mandate(owner, leave, run=run)
        live = situation.base.link
        roster = _roster(situation, spare_bytes=CONTROL_BYTES_MAX - len(live) - len(mandate) - _ENVELOPE_BYTES)
        reset = Reset(mandate=mandate, live=live, version=situation.version, roster=roster)
        try:
            await self._endpoint.ask(coordinator, reset, Done)
        except Refused as error:
            raise LocalError(f"peer {coordinator[-8:]} cannot make a plan: {error.reason}") from error
        except (Unreachable, RemoteError) as error:
            raise LocalError(f"{error}: look again with `shoal recover`") from error
        return await self._followed(situation, coordinator, reign)

    async def _followed(self, situation: Situation, coordinator: PeerID, reign: int) -> Recovered:
        adverts = {found.peer: found.advert for found in situation.found}
        until_s = self._clock.now_s() + FOLLOW_S
        while True:
            found = await self._ask_all(adverts)
            following = [each for each in found if each.plan is not None and each.plan.plan.reign >= reign]
            if len(following) == len(adverts) or (following and self._clock.now_s() >= until_s):
                break
            if self._clock.now_s() >= until_s:
                raise LocalError("nobody obeys the new plan: look again with `shoal recover`")
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
                    return Found(peer=peer, advert=advert, standing=standing, plan=self._open(standing.live, peer))
                except (Unreachable, Refused, RemoteError) as error:
                    logger.info("%s", error)
                    return None

        found = await asyncio.gather(*(ask(peer, advert) for peer, advert in sorted(adverts.items())))
        return [each for each in found if each is not None]

    def _open(self, data: bytes, source: PeerID) -> SignedPlan | None:
        run = self._endpoint.run
        if not data:
            return None
        envelope, proof = open_link(data, source=source)
        plan = open_plan(envelope, run=run, owner=self._owner, source=source, shape=PlanShape.of(self._spec))
        return msgspec.structs.replace(plan, proof=proof)


def _roster(situation: Situation, *, spare_bytes: int) -> tuple[tuple[PeerID, Advert], ...]:
    """The peers that fit in the message, those with state first. The others are planned as newcomers right after."""
    roster = []
    for found in sorted(situation.found, key=lambda each: (not each.standing.synced, each.peer)):
        spare_bytes -= len(msgspec.msgpack.encode((found.peer, found.advert)))
        if spare_bytes < 0:
            break
        roster.append((found.peer, found.advert))
    return tuple(sorted(roster))


# --- the owner's side ---


def find_owner(invite: Invite, folders: Iterable[Path]) -> tuple[Identity, Path]:
    """The owner's key and the state folder that it is in.

    Raises: LocalError: it is in none of them.
    """
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


def _reign_file(run: str) -> PurePosixPath:
    return PurePosixPath(f"mandated-{run}.txt")


def _mandated(disk: Disk, run: str) -> int:
    """The last reign that was begun, which a plan that nobody in reach knows may be of."""
    path = _reign_file(run)
    try:
        return int(disk.read(path))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise LocalError(f"cannot read {disk.where(path)}, which says what was mandated: {error}") from error


def _remember(disk: Disk, run: str, reign: int) -> None:
    path = _reign_file(run)
    try:
        replace_file(disk, path, b"%d\n" % reign)
    except OSError as error:
        raise LocalError(f"cannot write {disk.where(path)}: {error.strerror}") from error


@contextlib.asynccontextmanager
async def recovery(invite: Invite, owner: Identity) -> AsyncIterator[Recovery]:
    """Begin a recovery on libp2p, with an identity of its own. Raises: LocalError: the run cannot be found."""
    async with entering(invite, owner=owner) as entrance:
        # hivemind takes a second: what only looks at a situation does not need it.
        from shoal.protocol.live.loop import LoopClock

        yield Recovery(
            endpoint=entrance.endpoint,
            directory=entrance.directory,
            clock=LoopClock(),
            owner=invite.owner,
            spec=entrance.spec,
        )
