"""Collect the signatures that holders put on states, and decide which holders must have signed. Pure.

A newcomer cannot judge a state by itself, and one holder may lie: it could claim the highest version and give out any
parameters. So while a peer joins, the members that already held the layers sign each state they reach, and offer a
state together with the other members' signatures. The signatures of dead members count, too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import ATTESTATIONS_OF_ONE_MAX
from shoal.protocol.plan import Member


def voters(
    members: Sequence[Member], newcomer: PeerID, *, reported_empty: Collection[PeerID], draining: Sequence[PeerID]
) -> tuple[PeerID, ...]:
    """Return the voters: more than half of them must have signed a state before `newcomer` fetches it.

    The voters are the members that were in the group before the newcomer or, if there are none, those that came with
    it. If all of these report no state, the draining members vote. If none drains, the members that came later vote:
    they alone may have the state if the newcomer restarted at its old place. Members that report no state do not vote.
    """
    since = {member.peer: member.since for member in members}
    mine = since.pop(newcomer, None)
    older = [peer for peer, at in since.items() if mine is None or at < mine]
    same = [peer for peer, at in since.items() if at == mine]
    younger = [peer for peer, at in since.items() if mine is not None and at > mine]
    ranked = (
        [peer for peer in older or same if peer not in reported_empty],
        [peer for peer in draining if peer != newcomer],
        [peer for peer in younger if peer not in reported_empty],
    )
    return tuple(next(filter(None, ranked), []))


def is_majority(num: int, of: Sequence[PeerID]) -> bool:
    return 2 * num > len(of)


@dataclass(slots=True)
class Attestations:
    """The recent signatures of one group's holders."""

    _said: dict[int, dict[PeerID, tuple[str, bytes]]] = field(default_factory=dict)
    """Version -> holder -> (root: the digest of the whole state; the holder's signature of this digest)."""

    def heard(self, holder: PeerID, version: int, root: str, signature: bytes) -> None:
        """Record a signature. Keep the latest `ATTESTATIONS_OF_ONE_MAX` versions of each holder."""
        self._said.setdefault(version, {})[holder] = root, signature
        versions = [v for v, said in self._said.items() if holder in said]
        if len(versions) > ATTESTATIONS_OF_ONE_MAX:
            del self._said[min(versions)][holder]
        self._said = {v: said for v, said in self._said.items() if said}

    def signers(self, version: int, root: str) -> dict[PeerID, bytes]:
        """Return holder -> signature, for the holders that signed the state with digest `root` at `version`."""
        return {peer: signature for peer, (said, signature) in self._said.get(version, {}).items() if said == root}

    def clear(self) -> None:
        self._said.clear()
