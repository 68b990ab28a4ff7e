"""What a majority of members confirms: the version that their state has come to, and that it is the run's last. Pure.

One heartbeat is one peer's word. A version of a group counts once a majority of those members that hold the group's
state say that theirs is as high. A member that only fetches the state has seen nothing yet, and while it fetches the
run is not to stand still on the screen. The end of a run counts once a majority of *all* members of every group has
signed that it has come to the last version, a light member with its weights alone: a peer that ends cannot come back,
so here silence is no consent. The signatures travel with the news (`HeartbeatReply.ends`), and each peer checks them
before it ends.
"""

from collections.abc import Collection, Iterable

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan

Ends = tuple[tuple[PeerID, bytes], ...]
"""(member, its signature under `end_body`)."""

_ENCODER = msgspec.msgpack.Encoder()


def end_body(*, era: int, steps: int, revision: int) -> bytes:
    """The bytes that a member signs, as an `end` statement, once all that it holds is at the run's last version."""
    return _ENCODER.encode((era, steps, revision))


def proves_end(plan: Plan, signers: Collection[PeerID]) -> bool:
    """Whether the signers are a majority of every group of the plan."""
    return all(
        2 * sum(1 for peer in group if peer in signers) > len(group)
        for group in ([stage.peers for stage in plan.stages] + [expert.peers for expert in plan.experts])
    )


class Confirmations:
    """What the members of the live plan say; other peers do not count."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._versions: dict[int, dict[PeerID, int]] = {}
        """The versions by group and member, of the members that hold the group's state."""
        self._ends: dict[PeerID, bytes] = {}

    def obey(self, plan: Plan) -> None:
        """A plan is live: a member that has lost its place in a group does not count for it any more."""
        if self._plan is not None and plan.era != self._plan.era:
            self._versions, self._ends = {}, {}
        self._plan = plan
        for group, said in list(self._versions.items()):
            members = {member.peer for member in plan.group_members(group)}
            self._versions[group] = {peer: version for peer, version in said.items() if peer in members}
        self._ends = {peer: signature for peer, signature in self._ends.items() if plan.has(peer)}

    def note(self, peer: PeerID, group: int | None, version: int, *, holds: bool) -> None:
        """A heartbeat of the plan's era says that the peer's state of this group is at `version`."""
        if self._plan is None or group is None or group not in self._plan.groups_of(peer):
            return
        said = self._versions.setdefault(group, {})
        if holds:
            said[peer] = version
        else:
            said.pop(peer, None)

    def version(self, group: int) -> int:
        """The version that most holders of the group's state have come to; 0: nobody says that it holds it."""
        said = sorted(self._versions.get(group, {}).values(), reverse=True)
        return max(0, said[len(said) // 2]) if said else 0

    def note_ends(self, ends: Iterable[tuple[PeerID, bytes]]) -> None:
        """Note signatures under the run's end, which have been checked."""
        if self._plan is not None:
            self._ends.update((peer, signature) for peer, signature in ends if self._plan.has(peer))

    def knows_end_of(self, peer: PeerID) -> bool:
        return peer in self._ends

    @property
    def ends(self) -> Ends:
        """The proof that the run has come to its end; empty: there is none yet."""
        if self._plan is None or not self._ends or not proves_end(self._plan, self._ends):
            return ()
        return tuple(sorted(self._ends.items()))
