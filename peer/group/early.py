"""Keep pieces of rounds that we have not heard of yet: another member may hear of a round before we do. Pure.

A member can make up rounds, so only the latest few of each member are kept. A dropped piece costs an honest member
seconds: its round stands still, and it sends again (`pressing.py`). Step numbers have no bound: a member with a slow
device falls behind the rounds that it takes part in.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import GatherPart, ReducePart
from shoal.protocol.ports import Payload

ROUNDS_MAX: Final = 4
"""Per sender: attempts at the step that is due, all but one superseded, and one at the next step."""

Piece = ReducePart | GatherPart


@dataclass(slots=True)
class Early:
    """Early pieces by sender and round. Args: pieces_max: number that one member sends another in a round, at most."""

    piece_bytes_max: int
    pieces_max: int
    _kept: dict[PeerID, dict[tuple[int, int], dict[tuple[type, int], tuple[Piece, Payload]]]] = field(
        default_factory=dict
    )
    """Sender -> (step, attempt) -> (kind, first element) -> the piece."""

    def __len__(self) -> int:
        return sum(len(pieces) for rounds in self._kept.values() for pieces in rounds.values())

    def keep(self, mate: PeerID, piece: Piece, payload: Payload) -> None:
        """Raises: RemoteError: the piece is too large, or the sender sent more pieces than a round has."""
        if len(payload) > self.piece_bytes_max:
            raise RemoteError(mate, f"sent {len(payload)} bytes as a piece of a round")
        rounds = self._kept.setdefault(mate, {})
        pieces = rounds.setdefault((piece.step, piece.attempt), {})
        pieces[type(piece), piece.start] = piece, payload  # it may have been sent again
        if len(pieces) > self.pieces_max:
            del rounds[piece.step, piece.attempt]
            raise RemoteError(mate, f"sent more pieces of round {piece.step} than a round has")
        if len(rounds) > ROUNDS_MAX:
            del rounds[min(rounds)]

    def take(self, step: int, attempt: int) -> list[tuple[PeerID, Piece, Payload]]:
        """Remove and return the pieces of a round that begins here. Earlier attempts at its step are dropped."""
        came = []
        for mate, rounds in self._kept.items():
            came += [(mate, *piece) for piece in rounds.get((step, attempt), {}).values()]
            for key in [key for key in rounds if key[0] == step and key[1] <= attempt]:
                del rounds[key]
        return came

    def forget_before(self, version: int, *, group_peers: Container[PeerID]) -> None:
        """Drop pieces of steps before `version` and of peers that are no longer in `group_peers`."""
        kept = {
            mate: {key: pieces for key, pieces in rounds.items() if key[0] >= version}
            for mate, rounds in self._kept.items()
            if mate in group_peers
        }
        self._kept = {mate: rounds for mate, rounds in kept.items() if rounds}
