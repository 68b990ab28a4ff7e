"""Pieces of rounds that we have not heard of yet: a mate may have heard the lead's word before we do. Pure.

Which rounds there are a mate may make up. So of each mate no more is kept than a few whole rounds, the latest. What is
let go costs an honest one seconds: its round stands still, and it sends its pieces again (`pressing.py`). Steps have no
bound: whose device is slow to step falls behind the rounds that it takes part in.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import GatherPart, ReducePart
from shoal.protocol.ports import Payload

ROUNDS_MAX: Final = 4
"""Of one mate: attempts at the step that is due, of which all but one are superseded, and one at the step after it."""

Piece = ReducePart | GatherPart


@dataclass(slots=True)
class Early:
    """Args:
    piece_bytes_max: the largest piece of a round.
    pieces_max: what one mate sends another in a round, at most.
    """

    piece_bytes_max: int
    pieces_max: int
    _kept: dict[PeerID, dict[tuple[int, int], dict[tuple[type, int], tuple[Piece, Payload]]]] = field(
        default_factory=dict
    )
    """Mate -> (step, attempt) -> (kind, where it begins) -> the piece."""

    def __len__(self) -> int:
        return sum(len(pieces) for rounds in self._kept.values() for pieces in rounds.values())

    def keep(self, mate: PeerID, piece: Piece, payload: Payload) -> None:
        """Raises: RemoteError: no round has such pieces, or so many."""
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
        """That round has begun here: what has come of it. No earlier attempt at its step will."""
        came = []
        for mate, rounds in self._kept.items():
            came += [(mate, *piece) for piece in rounds.get((step, attempt), {}).values()]
            for key in [key for key in rounds if key[0] == step and key[1] <= attempt]:
                del rounds[key]
        return came

    def forget_before(self, version: int, *, mates: Container[PeerID]) -> None:
        """We are at `version`, and these are still our mates."""
        kept = {
            mate: {key: pieces for key, pieces in rounds.items() if key[0] >= version}
            for mate, rounds in self._kept.items()
            if mate in mates
        }
        self._kept = {mate: rounds for mate, rounds in kept.items() if rounds}
