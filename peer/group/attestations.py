"""Who has signed which state of a group's layers, and who must have for a newcomer to fetch it. Pure.

A newcomer cannot judge a state by itself, and one holder's word is one holder's word: whoever claimed the highest
version could give it any parameters. So those who held the layers before it sign what they have stepped to, while
somebody joins, and hand each other's signatures on with what they offer: those of the dead count, too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import ATTESTATIONS_OF_ONE_MAX
from shoal.protocol.plan import Member


def voters(
    members: Sequence[Member], newcomer: PeerID, *, without_state: Collection[PeerID], departing: Sequence[PeerID]
) -> tuple[PeerID, ...]:
    """More than half of whom must have signed what `newcomer` fetches: who had a place in the group before it did.

    If nobody had, those who came with it. Who says itself that it has no state yet is not waited for. If none of these
    has, those who drain from the group; and if there are none, those who came after it: a member that has begun anew at
    its old place has no state, and theirs is all there is.
    """
    since = {member.peer: member.since for member in members}
    mine = since.pop(newcomer, None)
    older = [peer for peer, at in since.items() if mine is None or at < mine]
    same = [peer for peer, at in since.items() if at == mine]
    younger = [peer for peer, at in since.items() if mine is not None and at > mine]
    ranked = (
        [peer for peer in older or same if peer not in without_state],
        [peer for peer in departing if peer != newcomer],
        [peer for peer in younger if peer not in without_state],
    )
    return tuple(next(filter(None, ranked), []))


def is_majority(num: int, of: Sequence[PeerID]) -> bool:
    return 2 * num > len(of)


@dataclass(slots=True)
class Attestations:
    """What the holders of one group have signed of late."""

    _said: dict[int, dict[PeerID, tuple[str, bytes]]] = field(default_factory=dict)
    """Version -> holder -> (root, signature)."""

    def heard(self, holder: PeerID, version: int, root: str, signature: bytes) -> None:
        """Of each holder its latest versions are kept, `ATTESTATIONS_OF_ONE_MAX` of them."""
        self._said.setdefault(version, {})[holder] = root, signature
        versions = [v for v, said in self._said.items() if holder in said]
        if len(versions) > ATTESTATIONS_OF_ONE_MAX:
            del self._said[min(versions)][holder]
        self._said = {v: said for v, said in self._said.items() if said}

    def signers(self, version: int, root: str) -> dict[PeerID, bytes]:
        """Who has signed that root at that version, and how."""
        return {peer: signature for peer, (said, signature) in self._said.get(version, {}).items() if said == root}

    def clear(self) -> None:
        self._said.clear()
