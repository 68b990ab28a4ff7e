"""Decides which members vote on the next plan and which plans a voter refuses; keeps the reasons for people. Pure.

**The roll.** A plan's roll lists its electors: the members that vote on the next plan. A vote must be earned by work.
The first roll has all members with a place (a stage or an expert), and spares up to `ELECTORS_MIN`, so that a run of
three survives its owner. Later a member joins the roll after `PROBATION_HEARTBEATS` in a place, and stays on it while
it is a member. If fewer than `ELECTORS_MIN` are left, members with places join at once, the oldest first. Electors that
joined the run by the same invite form one group for good. A coordinator may not have seen every certificate, so it
assigns newcomers to groups and moves no other member. Voters check the groups by what they know (`Electorate.flaw`).

**The judgement.** Before a peer votes for a plan, it checks that the plan does not contradict what it knows. The plan
need not be the best one. What a voter does not know is no objection, otherwise a run of strangers would stand still.
Before it objects, a voter asks the removed members, or the holders of the state that a plan discards, for their
standing (what each holds, and whether it leaves). Their answers count; silence does not.

| a plan                                        | is refused if                                                        |
|-----------------------------------------------|----------------------------------------------------------------------|
| leaves this peer out                          | this peer does not mean to leave the run                             |
| leaves out a member that was heard just now   | the member answers that it stays                                     |
| discards the state of the live layout         | every stage and every expert has a member that holds its state       |
| begins before the newest certified version    | that version's layers are on the disks of the peers that answer      |
| has shares or bandwidths                      | one is over two million times another of its stage                   |
| has members that this peer has not met        | they are more than 16, and more than half of all members             |

Until the answers arrive the voter replies "not yet", and the coordinator asks again at its next tick."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEER_ID_CHARS_MAX
from shoal.protocol.messages import Heartbeat, PlanNote, Standing
from shoal.protocol.plan import Member, Plan, SignedPlan

PROBATION_HEARTBEATS = 120.0
"""How long a member must hold a stage or expert before it votes: two minutes, or two terms, at a heartbeat a second."""
ELECTORS_MIN = 3
HEARD_HEARTBEATS = 2.0
"""A removed member that was heard within this time is asked whether it is gone. A coordinator's timeout is at least
three heartbeats, so most plans after a failure need no question."""
ANSWER_HEARTBEATS = 0.5
"""How long a voter waits for the answers of the members that it asks. A missing process refuses at once."""
ASKED_MAX = 64
"""Maximum number of members that a voter asks about one plan, and of refusals that it remembers."""
APART_MAX = 1e6
"""Maximum ratio of two shares or bandwidths within a stage (a data centre's GPU beside a single CPU core). A proposer
stays below it whatever members claim; a voter refuses more than twice this ratio."""
UNMET_MIN = 16
"""A plan may always have this many members that a voter has not met: a small run may grow at once."""
NOTES_MAX = 16
REASON_CHARS_MAX = 160
TOLD_S = 600.0
"""A refusal is shown for this long. If the same refusal comes later, it is reported again."""

Roll = tuple[tuple[int, ...], ...]
"""Groups of electors, one for each invite (one for each elector without an invite). An elector is its position among
the plan's members (`Plan.roll`)."""
InviteOf = Callable[[PeerID], bytes | None]
"""Returns the key of a member's invite; empty: the member needed none; None: not known."""


class Electorate:
    """Decides which members vote on the next plan, and which rolls this peer accepts."""

    def __init__(self, heartbeat_s: float, invite_of: InviteOf) -> None:
        self._probation_s = PROBATION_HEARTBEATS * heartbeat_s
        self._invite_of = invite_of
        self._placed: dict[PeerID, tuple[float, bool]] = {}
        """Member with a stage or expert -> (when we first obeyed a plan that gave it one; False: we had missed the plan
        before that one, so the member may have had its place for longer)."""
        self._refused: set[PeerID] = set()
        self._one_by_one = False

    def obey(self, plan: Plan, now_s: float, *, follows: bool) -> None:
        """Record a live plan. Args: follows: True if `plan` is the successor of the plan that we obeyed before."""
        self._placed = {peer: self._placed.get(peer, (now_s, follows)) for peer in _holders(plan)}

    def begin_term(self) -> None:
        self._refused, self._one_by_one = set(), False

    def refused(self, before: Plan, plan: Plan) -> None:
        """Record that our `plan` was refused, perhaps because of its new electors. If there were several, new electors
        join one by one from now on; if there was one, it does not join in this term."""
        added = _on_roll(plan) - _on_roll(before)
        self._one_by_one = self._one_by_one or len(added) > 1
        if len(added) == 1:
            self._refused |= added

    def roll(self, before: Plan | None, plan: Plan, now_s: float) -> Roll:
        """Return the roll of `plan`, which has none yet and follows `before`."""
        holders = _holders(plan)
        placed_s = {peer: self._placed[peer][0] if peer in self._placed else now_s for peer in holders}
        if before is None:
            return self._numbered(plan, (), plan.members[: max(len(holders), ELECTORS_MIN)])  # holders come first
        voted = _on_roll(before)
        kept = [peer for peer in plan.members if peer in voted]
        waiting = sorted({*holders} - {*kept} - self._refused, key=lambda peer: (placed_s[peer], peer))
        needed = ELECTORS_MIN - len(kept)
        added = [
            peer
            for at, peer in enumerate(peer for peer in waiting if self._invite_of(peer) is not None)
            if at < needed or now_s >= placed_s[peer] + self._probation_s
        ]
        if len(kept) + len(added) == 0:
            added = holders
        if self._one_by_one and needed <= 0:
            added = added[:1]
        # Plans of older releases have no rolls: make the groups anew.
        groups = [[peer for peer in group if plan.has(peer)] for group in before.groups_on_roll] if before.roll else []
        return self._numbered(plan, groups, added if before.roll else [*kept, *added])

    def _numbered(self, plan: Plan, groups: Iterable[list[PeerID]], added: Iterable[PeerID]) -> Roll:
        """Return `groups` with these members added, as a roll: each in the group of its invite, else in a new group."""
        found = [list(group) for group in groups if group]
        of_invite = {invite: group for group in found for peer in group if (invite := self._invite_of(peer))}
        for peer in added:
            invite = self._invite_of(peer)
            group = of_invite.get(invite) if invite else None
            if group is None:
                found.append(group := [])
                if invite:
                    of_invite[invite] = group
            group.append(peer)
        at = {peer: at for at, peer in enumerate(plan.members)}
        return tuple(sorted(tuple(sorted(at[peer] for peer in group)) for group in found))

    def are_enough(self, signed: Set[PeerID], signers: Sequence[PeerID]) -> bool:
        """True if a majority of `signers` has signed, from at least two invites if `signers` joined by several."""

        def invites(peers: Iterable[PeerID]) -> int:
            return len({self._invite_of(peer) or peer for peer in peers})

        return 2 * len(signed) > len(signers) and invites(signed) >= min(2, invites(signers))

    def flaw(self, plan: Plan, before: Plan, now_s: float, name_of: Callable[[PeerID], str]) -> str:
        """Say why we reject the roll of `plan`, the successor of `before`; empty: nothing that we know of."""
        old, new = _on_roll(before), _on_roll(plan)
        kept = {peer for peer in old if plan.has(peer)}
        if gone := sorted(kept - new):
            return f"it takes {name_of(gone[0])} off the roll"
        if before.roll and _parted(before, kept) != _parted(plan, kept):
            return "it groups electors anew"
        added = sorted(new - kept)
        if idle := [peer for peer in added if not plan.groups_of(peer)]:
            return f"it gives {name_of(idle[0])} a vote, which holds no place"
        came_s = {peer: at_s for peer, (at_s, is_seen) in self._placed.items() if is_seen}
        early = [peer for peer in added if peer in came_s and now_s < came_s[peer] + self._probation_s / 2]
        if len(early) > max(0, ELECTORS_MIN - len(kept)):
            return f"it gives {name_of(early[0])} a vote, which came a moment ago"
        for peer in added:
            invite = self._invite_of(peer)
            for group in plan.groups_on_roll if invite else ():
                known = {other: self._invite_of(other) for other in group if other != peer}
                odd = (o for o, by in known.items() if by and (by == invite) is not (peer in group))
                if (other := next(odd, None)) is not None:
                    how = "with" if peer in group else "apart from"
                    return f"it counts {name_of(peer)} {how} {name_of(other)}, against their invites"
        return ""


def _holders(plan: Plan) -> list[PeerID]:
    return [peer for peer in plan.members if plan.groups_of(peer)]


def _on_roll(plan: Plan) -> set[PeerID]:
    return {peer for group in plan.groups_on_roll for peer in group}


def _parted(plan: Plan, among: set[PeerID]) -> set[frozenset[PeerID]]:
    """Return the plan's groups of electors, without the electors outside `among`, and without empty groups."""
    return {found for group in plan.groups_on_roll if (found := frozenset(group) & among)}


class Acquaintance(msgspec.Struct, frozen=True):
    """What this peer knows, from its driver, of the members that an offered plan drops and of those that it adds."""

    heard: frozenset[PeerID] = frozenset()
    """Dropped members from which a message arrived within `HEARD_HEARTBEATS`."""
    excluded: frozenset[PeerID] = frozenset()
    """Dropped members that the plan's exclusion orders name."""
    unmet: frozenset[PeerID] = frozenset()
    """Newcomers that showed no certificate or, in an open run, sent nothing to this peer or the directory."""


class Judge:
    """Judges, for one voter, the plans that coordinators offer."""

    def __init__(self, *, me: PeerID, heartbeat_s: float, revision: int, name_of: Callable[[PeerID], str]) -> None:
        self._me, self._heartbeat_s, self._revision, self._name_of = me, heartbeat_s, revision, name_of
        self._digest = ""
        """Digest of the plan about which members were last asked."""
        self._waiting: set[PeerID] = set()
        self._expires_at_s = 0.0
        self._told: dict[PeerID, Standing] = {}

    def questions(self, offered: SignedPlan, live: Plan, knows: Acquaintance, now_s: float) -> tuple[PeerID, ...]:
        """Return the members to ask for their standing before `offered` is judged; each is asked once."""
        if self._digest == offered.digest:
            return ()
        plan = offered.plan
        asks = [peer for peer in _left_out(plan, live, knows) if peer in knows.heard and peer != self._me]
        if goes_back(plan, live):
            asks += [peer for peer in live.members if peer != self._me and live.groups_of(peer)]
        peers = tuple(dict.fromkeys(asks))[:ASKED_MAX]
        self._digest, self._waiting, self._told = offered.digest, set(peers), {}
        self._expires_at_s = now_s + ANSWER_HEARTBEATS * self._heartbeat_s
        return peers

    def told(self, peer: PeerID, standing: Standing | None) -> None:
        """Record the standing of `peer`. None: it did not answer."""
        if peer in self._waiting:
            self._waiting.discard(peer)
            if standing is not None:
                self._told[peer] = standing

    def is_waiting(self, now_s: float) -> bool:
        return bool(self._waiting) and now_s < self._expires_at_s

    def flaw(
        self,
        offered: SignedPlan,
        live: Plan,
        knows: Acquaintance,
        *,
        own: Heartbeat | None,
        leaves: bool,
        newest: tuple[int, int] = (0, 0),
        layers: frozenset[str] = frozenset(),
    ) -> str:
        """Say what is wrong with `offered`; empty: nothing that we know of.

        Args:
            own: our last heartbeat; None: none yet.
            leaves: True if we are about to leave the run.
            newest: (era, version) of the newest complete version that `live` certifies.
            layers: the layers of that version.
        """
        plan, told = offered.plan, self._told
        for peer in _left_out(plan, live, knows):
            if peer == self._me and not leaves:
                return f"it drops {self._name_of(peer)} itself"
            standing = told.get(peer)
            if standing is not None and not standing.leaves and standing.revision == self._revision:
                return f"it drops {self._name_of(peer)}, which {self._name_of(self._me)} hears"
        if goes_back(plan, live):
            said: dict[PeerID, Standing | Heartbeat] = {**told}
            if own is not None:
                said[self._me] = own
            if _held(said, plan, live).issuperset(range(len(live.stages) + len(live.experts))):
                return f"it goes back to version {plan.restore_version}, and every stage still has its state"
            if (plan.restore_era, plan.restore_version) < newest and _stored(said, newest) >= layers:
                return f"it goes back to version {plan.restore_version}, and version {newest[1]} is on the disks"
        for index, stage in enumerate(plan.stages):
            if (apart := _apart(stage.members)) > 2 * APART_MAX:
                return f"the shares of stage {index} are {apart:.0e} times apart"
        if len(knows.unmet) > max(UNMET_MIN, len(plan.members) // 2):
            return f"{self._name_of(self._me)} has not met {len(knows.unmet)} of its {len(plan.members)} members"
        return ""


def _left_out(plan: Plan, live: Plan, knows: Acquaintance) -> list[PeerID]:
    return [peer for peer in live.members if not plan.has(peer) and peer not in knows.excluded]


def goes_back(plan: Plan, live: Plan) -> bool:
    """True if the plan discards what the live layout has trained, instead of continuing where that layout ends."""
    ended = live.cutover_version > 0 and (plan.restore_era, plan.restore_version) == (live.era, live.cutover_version)
    return plan.era != live.era and not ended


def _held(said: Mapping[PeerID, Standing | Heartbeat], plan: Plan, live: Plan) -> set[int]:
    """Return the groups of `live` with state that a peer reports. If `plan` begins at a version of this era that a peer
    other than its coordinator has reached, older state does not count."""
    held: list[tuple[PeerID, int, int]] = []
    for peer, each in said.items():
        if each.era == live.era:
            held += [(peer, group, version) for group, version in each.held]
            if each.synced and each.stage is not None:
                held.append((peer, each.stage, each.version))
    # A holder behind the version at which the plan begins loses nothing, so it does not count. But a version that no
    # peer except the coordinator has reached is no version of this run. Certificates are checked elsewhere.
    version_max = max((version for peer, _, version in held if peer != plan.coordinator), default=0)
    is_reached = plan.restore_era == live.era and plan.restore_version <= version_max
    floor = plan.restore_version if is_reached else 0
    return {group for _, group, version in held if version >= floor}


def _stored(said: Mapping[PeerID, Standing | Heartbeat], age: tuple[int, int]) -> frozenset[str]:
    """Return the layers of snapshot `age`, an (era, version), that are on the disks of these peers."""
    held = (holding for each in said.values() for holding in each.holdings)
    return frozenset(key for holding in held if (holding.era, holding.version) == age for key in holding.layers)


def _apart(members: tuple[Member, ...]) -> float:
    shares, bandwidths = [m.share for m in members], [m.bandwidth for m in members]
    return max(max(shares) / min(shares), max(bandwidths) / min(bandwidths))


# --- for people ---


class PlanNotes:
    """Keeps for people the coordinator, reason and speed of each of the last layouts, also of those heard from others.
    A plan that moves nobody (a certificate, new shares) has no note: such plans would displace all others."""

    def __init__(self) -> None:
        self._notes: dict[tuple[int, int], tuple[float, PlanNote]] = {}

    def obey(self, plan: Plan, before: Plan | None, now_s: float) -> None:
        """Note `plan` if it differs from `before` in the place of a peer, now or next, or if the run goes back."""
        if before is None or _places(plan) != _places(before):
            note = PlanNote(plan.term, plan.sequence, 0.0, plan.coordinator, plan.reason[:REASON_CHARS_MAX])
            self._add(now_s, note)

    def judge(self, outcome: str) -> None:
        """Add to the newest layout's note a sentence on its predicted and measured speed."""
        for name in list(self._notes)[-1:]:
            at_s, note = self._notes[name]
            self._notes[name] = at_s, msgspec.structs.replace(note, outcome=outcome[:REASON_CHARS_MAX])

    def inherit(self, notes: Iterable[PlanNote], now_s: float) -> None:
        """Add another coordinator's notes on plans up to our newest. If both of us have a note on a plan, it gets that
        coordinator's outcome, if any, and the greater age."""
        newest = max(self._notes, default=(math.inf, 0))
        for told in notes:
            if math.isfinite(told.seconds_ago) and (told.term, told.sequence) <= newest:
                coordinator, reason = PeerID(told.coordinator[:PEER_ID_CHARS_MAX]), told.reason[:REASON_CHARS_MAX]
                fresh = PlanNote(told.term, told.sequence, 0.0, coordinator, reason)
                told_s = now_s - max(0.0, told.seconds_ago)
                at_s, own = self._notes.get((told.term, told.sequence), (told_s, fresh))
                outcome = told.outcome[:REASON_CHARS_MAX] or own.outcome
                self._add(min(at_s, told_s), msgspec.structs.replace(own, outcome=outcome))

    def _add(self, at_s: float, note: PlanNote) -> None:
        self._notes[note.term, note.sequence] = at_s, note
        self._notes = dict(sorted(self._notes.items())[-NOTES_MAX:])

    def tell(self, now_s: float) -> tuple[PlanNote, ...]:
        return tuple(msgspec.structs.replace(note, seconds_ago=now_s - at_s) for at_s, note in self._notes.values())


def _places(plan: Plan) -> tuple[object, ...]:
    """Return the era, the members of each stage of this layout and of the next, and the spares."""
    layouts = [[(s.layers, frozenset(s.peers)) for s in stages] for stages in (plan.stages, plan.next_layout)]
    return plan.era, layouts, frozenset(plan.spares)


class Refusals:
    """The refusals that this peer has made or heard."""

    def __init__(self) -> None:
        self._noted: OrderedDict[tuple[PeerID, str], tuple[float, str]] = OrderedDict()

    def note(self, voter: PeerID, name: str, sequence: int, reason: str, now_s: float) -> str:
        """Record that `voter` has refused plan `sequence`. Returns: a sentence for people; empty: it is no news."""
        reason = "".join(filter(str.isprintable, reason))[:REASON_CHARS_MAX]
        at_s, _ = self._noted.get((voter, reason), (-TOLD_S, ""))
        if now_s < at_s + TOLD_S:
            return ""
        sentence = f"{name} refused plan {sequence}: {reason}"
        self._noted[voter, reason] = now_s, sentence
        self._noted.move_to_end((voter, reason))
        if len(self._noted) > ASKED_MAX:
            self._noted.popitem(last=False)
        return sentence

    def tell(self, now_s: float) -> tuple[str, ...]:
        """Return the sentences of the last minutes, at most three, newest last."""
        return tuple(text for at_s, text in self._noted.values() if now_s < at_s + TOLD_S)[-3:]
