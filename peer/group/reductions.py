"""One member's rounds in progress, their early pieces, and the reduced gradients that they ended in.

This module says what is to be done; `peer/membership/group_membership.py` does it.
"""

from collections.abc import Callable

from torch import Tensor

from shoal.peer.group.early import Early, Piece
from shoal.peer.group.reduce import MeanPiece, Reduction
from shoal.peer.pipeline.microbatch import indices_from
from shoal.peer.pipeline.shard import Shard
from shoal.peer.replica.views import GroupView
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import REPLAYED_BYTES_MAX, REPLAYED_STEPS_MIN
from shoal.protocol.messages import RoundStart
from shoal.protocol.ports import Payload
from shoal.protocol.wire_format import tensor_bytes

EarlyPieces = list[tuple[PeerID, Piece, Payload]]


class Reductions:
    """Rounds by step. Args: retained_from: returns the oldest version that a newcomer still builds on."""

    def __init__(self, core: GroupView, runtime: Shard, *, retained_from: Callable[[], int]) -> None:
        self._core = core
        self._runtime = runtime
        self._retained_from = retained_from
        vectors, size = runtime.vectors, runtime.num_parameters
        mean_bytes = vectors.mean_bytes * size
        self._replayed_steps = max(REPLAYED_STEPS_MIN, REPLAYED_BYTES_MAX // max(1, mean_bytes))
        self._rounds: dict[int, Reduction] = {}
        # Between two members, two parts of the gradient travel each way at most: the sender's own, and its share of the
        # receiver's.
        piece_bytes_max = max(tensor_bytes(form, vectors.chunk) for form in vectors.sums)
        self.early = Early(piece_bytes_max, size // vectors.chunk + 2)
        self.means: dict[int, Tensor] = {}
        """Step -> reduced gradient, until we have stepped with it, and for members behind us."""
        self.pieces: dict[int, tuple[MeanPiece, ...]] = {}
        """Step -> the same in few bits, where a round delivered it so: an eighth of the bytes for members behind us."""
        self._made_by: dict[int, RoundStart] = {}
        """Step -> our round that produced `means`."""
        self._stepping = -1
        self._stepping_round: RoundStart | None = None
        """The round whose result we step with; None: another member gave us the gradient."""

    def __contains__(self, step: int) -> bool:
        return step in self._rounds

    def get(self, step: int) -> Reduction | None:
        """Return our round of `step`, if one has begun."""
        return self._rounds.get(step)

    def begin(self, start: RoundStart) -> tuple[Reduction, Callable[[], Tensor | None], EarlyPieces]:
        """Take part in a round. Return (reduction, a function that makes our own sum, early pieces)."""
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
        """Return the round of a piece. None: the piece is useless, or is kept until we hear of its round.

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
        """True if the round is complete and not replaced, so that we may step with its result."""
        return reduction.is_complete and self._rounds.get(reduction.start.step) is reduction

    def keep(self, step: int, mean_N: Tensor, by: RoundStart | None, pieces: tuple[MeanPiece, ...] = ()) -> None:
        """Keep a reduced gradient. Args: by: our round that produced it; pieces: the same in few bits, if any."""
        self.means[step] = mean_N
        self.pieces[step] = pieces
        if by is None:
            self._made_by.pop(step, None)
        else:
            self._made_by[step] = by

    def next_mean(self) -> Tensor | None:
        """Return the reduced gradient to step with now, each once; None: it is missing, or we are stepping."""
        version = self._core.version
        mean_N = self.means.get(version)
        if mean_N is None or self._stepping >= version:
            return None
        self._stepping = version
        ours, by = self._rounds.get(version), self._made_by.get(version)
        self._stepping_round = by if ours is not None and ours.start is by else None
        return mean_N

    def reached(self, version: int) -> RoundStart | None:
        """Record that we have stepped to `version` or loaded its state, before the core hears of it. Return the round
        whose result we have stepped with."""
        self._forget_means(version, last=False)
        self._rounds = {step: r for step, r in self._rounds.items() if step >= version}
        self.early.forget_before(version, group_peers=(*self._core.group_peers, *self._core.draining))
        return self._stepping_round if version == self._stepping + 1 else None

    def _forget_means(self, version: int, *, last: bool) -> None:
        """Drop gradients of steps before `version` that no newcomer replays; `last`: the last step's, too."""
        keep_from = max(self._retained_from(), version - self._replayed_steps)
        keep_from = min(version if last else version - 1, keep_from)
        self.means = {step: mean_N for step, mean_N in self.means.items() if step >= keep_from}
        self.pieces = {step: pieces for step, pieces in self.pieces.items() if step >= keep_from}
        self._made_by = {step: start for step, start in self._made_by.items() if step >= keep_from}
