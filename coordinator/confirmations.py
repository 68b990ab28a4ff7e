"""Holds what a majority confirms: the version of each group's state, and the end of the run. Pure.

A version of a group counts once a majority of the members that hold the group's state report at least that version. The
end of the run counts once a majority of *all* members of every group has signed it: a member that ends cannot come
back, so silence is no consent. A learner may sign with the last version's weights alone. The signatures travel with the
news (`HeartbeatReply.ends`), and each peer checks them before it ends."""

from collections.abc import Collection, Iterable

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan

Ends = tuple[tuple[PeerID, bytes], ...]
"""(member, its signature of `end_body`)."""

_ENCODER = msgspec.msgpack.Encoder()


def end_body(*, era: int, steps: int, revision: int) -> bytes:
    """Encode what a member signs, as an `end` statement, once all that it holds is at the run's last version."""
    return _ENCODER.encode((era, steps, revision))


def proves_end(plan: Plan, signers: Collection[PeerID]) -> bool:
    """True if the signers are a majority of every group of the plan."""
    return all(
        2 * sum(1 for peer in group if peer in signers) > len(group)
        for group in ([stage.peers for stage in plan.stages] + [expert.peers for expert in plan.experts])
    )


class Confirmations:
    """The reports of the live plan's members; other peers do not count."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._versions: dict[int, dict[PeerID, int]] = {}
        """Group -> member that holds the group's state -> its version."""
        self._ends: dict[PeerID, bytes] = {}

    def obey(self, plan: Plan) -> None:
        """Record a live plan. A member that has lost its place in a group does not count there any more."""
        if self._plan is not None and plan.era != self._plan.era:
            self._versions, self._ends = {}, {}
        self._plan = plan
        for group, said in list(self._versions.items()):
            members = {member.peer for member in plan.group_members(group)}
            self._versions[group] = {peer: version for peer, version in said.items() if peer in members}
        self._ends = {peer: signature for peer, signature in self._ends.items() if plan.has(peer)}

    def note(self, peer: PeerID, group: int | None, version: int, *, holds: bool) -> None:
        """Record that a heartbeat of the plan's era reports `version` for the peer's state of this group."""
        if self._plan is None or group is None or group not in self._plan.groups_of(peer):
            return
        said = self._versions.setdefault(group, {})
        if holds:
            said[peer] = version
        else:
            said.pop(peer, None)

    def version(self, group: int) -> int:
        """The version that a majority of the group's holders has reached; 0: no member holds the state."""
        said = sorted(self._versions.get(group, {}).values(), reverse=True)
        return max(0, said[len(said) // 2]) if said else 0

    def note_ends(self, ends: Iterable[tuple[PeerID, bytes]]) -> None:
        """Record signatures of the run's end; the caller has verified them."""
        if self._plan is not None:
            self._ends.update((peer, signature) for peer, signature in ends if self._plan.has(peer))

    def knows_end_of(self, peer: PeerID) -> bool:
        return peer in self._ends

    @property
    def ends(self) -> Ends:
        """The proof that the run is done; empty: none yet."""
        if self._plan is None or not self._ends or not proves_end(self._plan, self._ends):
            return ()
        return tuple(sorted(self._ends.items()))
