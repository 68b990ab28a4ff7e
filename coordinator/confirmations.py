"""What members have seen with their own eyes: to which version their state has come, and that it was the last. Pure.

One heartbeat is one peer's word. A version of a group counts once a majority of its members that hold the group's state
say that theirs is as high: who only fetches it has seen nothing yet, and while somebody fetches the run is not to
stand still on the screen. The end of a run counts once a majority of *all* members of every group has signed that it
has come to the last version: a peer that ends cannot come back, so here nobody's silence counts as consent, and the
signatures travel with the news (`HeartbeatReply.ends`), so that each peer checks them before it ends.
"""

from collections.abc import Collection, Iterable

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan

Ends = tuple[tuple[PeerID, bytes], ...]
"""(member, signature of `end_body`)."""

_ENCODER = msgspec.msgpack.Encoder()


def end_body(*, era: int, steps: int, revision: int) -> bytes:
    """What a member signs (as an `end` statement) once all that it holds is at the run's last version."""
    return _ENCODER.encode((era, steps, revision))


def proves_end(plan: Plan, signers: Collection[PeerID]) -> bool:
    """Whether they are a majority of every group of the plan."""
    return all(
        2 * sum(1 for peer in group if peer in signers) > len(group)
        for group in ([stage.peers for stage in plan.stages] + [expert.peers for expert in plan.experts])
    )


class Confirmations:
    """Of the plan that is obeyed; what others say is no testimony."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._versions: dict[int, dict[PeerID, int]] = {}
        """By group, of the members that hold its state."""
        self._ends: dict[PeerID, bytes] = {}

    def obey(self, plan: Plan) -> None:
        """Whoever has lost its place in a group is no witness of it any more."""
        if self._plan is not None and plan.era != self._plan.era:
            self._versions, self._ends = {}, {}
        self._plan = plan
        for group, said in list(self._versions.items()):
            members = {member.peer for member in plan.group_members(group)}
            self._versions[group] = {peer: version for peer, version in said.items() if peer in members}
        self._ends = {peer: signature for peer, signature in self._ends.items() if plan.has(peer)}

    def note(self, peer: PeerID, group: int | None, version: int, *, holds: bool) -> None:
        """A heartbeat of the plan's era says so."""
        if self._plan is None or group is None or group not in self._plan.groups_of(peer):
            return
        said = self._versions.setdefault(group, {})
        if holds:
            said[peer] = version
        else:
            said.pop(peer, None)

    def version(self, group: int) -> int:
        """That most of those who hold its state have come to; 0: nobody says that it does."""
        said = sorted(self._versions.get(group, {}).values(), reverse=True)
        return max(0, said[len(said) // 2]) if said else 0

    def note_ends(self, ends: Iterable[tuple[PeerID, bytes]]) -> None:
        """Signatures that have been checked."""
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
