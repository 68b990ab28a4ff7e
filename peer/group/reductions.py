"""The all-reduces of one replica of a stage (a *member* of its group). A *round* is one attempt to reduce a step's
gradient, which the members send each other in *pieces*.

Kept here are rounds in progress, pieces that came before we heard of their round, and reduced gradients that we or
members behind us need. This module also decides when pieces are sent again because a round stands still, and how long
gradients are kept for absent learners. `peer/membership/group_membership.py` does the sending.
"""

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from shoal.peer.group.reduce import MeanPiece, Reduction
from shoal.peer.pipeline.microbatch import indices_from
from shoal.peer.pipeline.shard import Shard
from shoal.peer.replica.views import GroupView
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import REPLAYED_BYTES_MAX, REPLAYED_STEPS_MIN
from shoal.protocol.messages import GatherPart, ReducePart, RoundStart
from shoal.protocol.ports import Payload
from shoal.protocol.wire_format import tensor_bytes

Piece = ReducePart | GatherPart
EarlyPieces = list[tuple[PeerID, Piece, Payload]]


class Reductions:
    """One member's rounds by step. Args: retained_from: returns the oldest version from which newcomers replay."""

    def __init__(self, core: GroupView, runtime: Shard, *, retained_from: Callable[[], int]) -> None:
        self._core = core
        self._runtime = runtime
        self._retained_from = retained_from
        vectors, size = runtime.vectors, runtime.num_parameters
        mean_bytes = vectors.mean_bytes * size
        self._replayed_steps = max(REPLAYED_STEPS_MIN, REPLAYED_BYTES_MAX // max(1, mean_bytes))
        self._rounds: dict[int, Reduction] = {}
        # In a round a member sends another at most two parts of the gradient: the mean of its own, and its contribution
        # to the receiver's.
        piece_bytes_max = max(tensor_bytes(form, vectors.chunk) for form in vectors.sums)
        self.early = Early(piece_bytes_max, size // vectors.chunk + 2)
        self.means: dict[int, Tensor] = {}
        """Step -> reduced gradient. It is kept until we have stepped with it, and for members that are behind us."""
        self.pieces: dict[int, tuple[MeanPiece, ...]] = {}
        """Step -> encoded pieces of its reduced gradient, if the round used few bits (an eighth of fp32's bytes)."""
        self._made_by: dict[int, RoundStart] = {}
        """Step -> our round that produced the gradient in `means`."""
        self._stepping = -1
        self._stepping_round: RoundStart | None = None
        """The round that made the gradient of our present step; None: another member gave us the gradient."""

    def __contains__(self, step: int) -> bool:
        return step in self._rounds

    def get(self, step: int) -> Reduction | None:
        """Return our round of `step`, if one has begun."""
        return self._rounds.get(step)

    def begin(self, start: RoundStart) -> tuple[Reduction, Callable[[], Tensor | None], EarlyPieces]:
        """Begin our side of a round. Return (it, a function that makes our gradient sum, pieces that came before)."""
        core, runtime = self._core, self._runtime
        self._forget_means(core.version, last=core.are_past(core.version - 1))
        mine = next(member.indices for member in start.members if member.peer == core.me)
        make_sum = runtime.gradient_sum(start.step, indices_from(mine, count=core.microbatches))
        reduction = Reduction(
            core.me, start, runtime.num_parameters, microbatches=core.microbatches, vectors=runtime.vectors
        )
        self._rounds[start.step] = reduction
        return reduction, make_sum, self.early.take(start.step, start.attempt)

    def is_void(self, reduction: Reduction) -> bool:
        """True if a later attempt at the step has replaced the round."""
        return self._rounds.get(reduction.start.step, reduction) is not reduction

    def round_of(self, source: PeerID, meta: Piece, payload: Payload) -> Reduction | None:
        """Return our round to which a piece belongs. None: the piece is useless, or is kept until we hear of its round.

        Raises: RemoteError: the piece is too large, or the sender sent more pieces than a round has.
        """
        if meta.step < self._core.version:
            return None
        reduction = self._rounds.get(meta.step)
        if reduction is None or reduction.start.attempt < meta.attempt:
            # The sender heard of the round before we did. A peer that our plan does not name yet sends the piece again.
            if self._core.has_place(source):
                self.early.keep(source, meta, payload)
            return None
        return reduction if reduction.start.attempt == meta.attempt else None

    def has_ended(self, reduction: Reduction) -> bool:
        """True if the round is complete and not replaced by another, so that we may step with its result."""
        return reduction.is_complete and self._rounds.get(reduction.start.step) is reduction

    def keep(self, step: int, mean_N: Tensor, by: RoundStart | None, pieces: tuple[MeanPiece, ...] = ()) -> None:
        """Keep a reduced gradient. Args: by: our round that made it; None: we fetched it; pieces: the encoded
        gradient."""
        self.means[step] = mean_N
        self.pieces[step] = pieces
        if by is None:
            self._made_by.pop(step, None)
        else:
            self._made_by[step] = by

    def next_mean(self) -> Tensor | None:
        """Return our next step's reduced gradient; None: it is missing, or was returned before (the step has begun)."""
        version = self._core.version
        mean_N = self.means.get(version)
        if mean_N is None or self._stepping >= version:
            return None
        self._stepping = version
        ours, by = self._rounds.get(version), self._made_by.get(version)
        self._stepping_round = by if ours is not None and ours.start is by else None
        return mean_N

    def reached(self, version: int) -> RoundStart | None:
        """Record that we have stepped to `version` or loaded a state of it; call this before the core hears of it.
        Return our round that made the gradient of step `version` - 1; None: a member or a loaded state gave it."""
        self._forget_means(version, last=False)
        self._rounds = {step: r for step, r in self._rounds.items() if step >= version}
        self.early.forget_before(version, group_peers=(*self._core.group_peers, *self._core.draining))
        return self._stepping_round if version == self._stepping + 1 else None

    def _forget_means(self, version: int, *, last: bool) -> None:
        """Drop the gradients of steps before `version` that no newcomer replays. Args: last: this applies to step
        `version` - 1, too; False: keep its gradient in any case."""
        keep_from = max(self._retained_from(), version - self._replayed_steps)
        keep_from = min(version if last else version - 1, keep_from)
        self.means = {step: mean_N for step, mean_N in self.means.items() if step >= keep_from}
        self.pieces = {step: pieces for step, pieces in self.pieces.items() if step >= keep_from}
        self._made_by = {step: start for step, start in self._made_by.items() if step >= keep_from}


ROUNDS_MAX: Final = 4
"""Number of a sender's rounds of which early pieces are kept: some attempts at the current step, one at the next."""


@dataclass(slots=True)
class Early:
    """Keeps pieces of rounds that we have not heard of yet, by sender and round. Pure.

    Another member may hear of a round before we do. A member can make up rounds, so pieces are kept only for the latest
    few rounds of each sender. If an honest sender's piece is dropped, the round stands still for seconds, until the
    sender sends the piece again (`Pressing`). Step numbers have no bound: a slow device's rounds may be far ahead of
    its version.

    Args: pieces_max: the most pieces that one member sends another in a round.
    """

    piece_bytes_max: int
    pieces_max: int
    _kept: dict[PeerID, dict[tuple[int, int], dict[tuple[type, int], tuple[Piece, Payload]]]] = field(
        default_factory=dict
    )
    """Sender -> (step, attempt) -> (kind, first element) -> the piece."""

    def __len__(self) -> int:
        return sum(len(pieces) for rounds in self._kept.values() for pieces in rounds.values())

    def keep(self, mate: PeerID, piece: Piece, payload: Payload) -> None:
        """Keep a piece. Raises: RemoteError: the piece is too large, or its sender sent more than a round has."""
        if len(payload) > self.piece_bytes_max:
            raise RemoteError(mate, f"sent {len(payload)} bytes as a piece of a round")
        rounds = self._kept.setdefault(mate, {})
        pieces = rounds.setdefault((piece.step, piece.attempt), {})
        pieces[type(piece), piece.start] = piece, payload  # a piece that was sent again replaces the first
        if len(pieces) > self.pieces_max:
            del rounds[piece.step, piece.attempt]
            raise RemoteError(mate, f"sent more pieces of round {piece.step} than a round has")
        if len(rounds) > ROUNDS_MAX:
            del rounds[min(rounds)]

    def take(self, step: int, attempt: int) -> list[tuple[PeerID, Piece, Payload]]:
        """Remove and return the early pieces of a round that begins here. Drop pieces of earlier attempts at `step`."""
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


PRESS_S = 5.0
"""Seconds without a new piece after which we assume that a piece was lost, or waits behind activations."""
BELIEVED_S = 120.0
"""We believe for this many seconds after the last piece that a member's pieces have not left; a member may lie."""


@dataclass(slots=True)
class Pressing:
    """Decides when pieces of a round that does not end are sent again. One object serves all rounds in turn. Pure."""

    _looked_at: tuple[Reduction | None, int] = (None, 0)
    _moved_s: float = 0.0
    _again_s: dict[PeerID, float] = field(default_factory=dict)
    _pressed: tuple[Reduction | None, int] = (None, 0)

    def stands_still(self, reduction: Reduction | None, now_s: float) -> bool:
        """True if no piece has arrived for `PRESS_S`, though some are missing."""
        now = reduction, reduction.num_taken if reduction is not None else 0
        if now != self._looked_at:
            if now[0] is not self._looked_at[0]:
                self._again_s = {}
            self._looked_at, self._moved_s = now, now_s
        if reduction is None or reduction.is_complete or now_s < self._moved_s + PRESS_S:
            return False
        self._pressed = now
        return True

    def is_due(self, peer: PeerID, now_s: float, *, took_s: float) -> bool:
        """True if our pieces should be sent to `peer` again. Args: took_s: time that a piece takes to leave."""
        if now_s < self._again_s.get(peer, self._moved_s) + max(PRESS_S, 2.0 * took_s):
            return False
        self._again_s[peer] = now_s
        return True

    def believes(self, now_s: float) -> bool:
        """True if we still wait for members that answered that their pieces have not left yet."""
        return now_s < self._moved_s + BELIEVED_S

    def was_in_vain(self, reduction: Reduction) -> bool:
        """True if no piece of the round has arrived since `stands_still` last said that the round stands still."""
        return self._pressed == (reduction, reduction.num_taken)


AWAY_S: Final = 600.0
"""Seconds for which gradients are kept for a learner that went away: its time to return and step its layers."""
STEPS_MAX: Final = 4
"""Number of latest steps with gradients (float32) kept for absent learners: as many as for the next layout's peers."""


class AbsentLight:
    """Decides how long one member keeps reduced gradients for learners that went away and may come back. Pure.

    A learner (a member with weights but not yet the whole state) that comes back still has the layers that it had
    fetched, at the version at which it left. If it gets the reduced gradients of the steps since then, it need not
    fetch those layers again.
    """

    def __init__(self) -> None:
        self._light: set[PeerID] = set()
        self._gone: dict[PeerID, tuple[int, float]] = {}
        """Learner that has gone -> (first step of which it may lack the gradient, time at which we noticed that)."""

    def wanted_from(self, ready: Collection[PeerID], whole: Collection[PeerID], *, version: int, now_s: float) -> int:
        """Return the first step with a gradient that an absent or just returned learner may still request; 2^62: none.

        Args: ready: other members that take part; whole: those with the whole state; version: the version just made.
        """
        learners = set(ready).difference(whole)
        for peer in self._light - learners:
            # The learner lacks the step that has just been made, and may have been one step behind before.
            self._gone[peer] = version - 2, now_s
        self._light = learners
        self._gone = {peer: at for peer, at in self._gone.items() if now_s < at[1] + AWAY_S and peer not in whole}
        wanted_from = min((step for step, _ in self._gone.values()), default=2**62)
        return max(wanted_from, version - STEPS_MAX)
