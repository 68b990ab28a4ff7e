"""The rounds of one member: those that are under way, what has come of them, and the reduced gradients they ended in.

It says what there is to be done; `peer/tenures.py` does it.
"""

from collections.abc import Callable

from torch import Tensor

from shoal.peer.arithmetic import Held
from shoal.peer.group.early import Early, Piece
from shoal.peer.group.reduce import MeanPiece, Reduction
from shoal.peer.pipeline.microbatch import indices_from
from shoal.peer.replica.views import GroupView
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import REPLAYED_BYTES_MAX, REPLAYED_STEPS_MIN
from shoal.protocol.messages import RoundStart
from shoal.protocol.ports import Payload
from shoal.protocol.wire_format import tensor_bytes

EarlyPieces = list[tuple[PeerID, Piece, Payload]]


class Reductions:
    """Args:
    core: to be read.
    retained_from: the oldest version some newcomer still builds on; reduced gradients from there on are kept.
    """

    def __init__(self, core: GroupView, runtime: Held, *, retained_from: Callable[[], int]) -> None:
        self._core = core
        self._runtime = runtime
        self._retained_from = retained_from
        vectors, size = runtime.vectors, runtime.num_parameters
        mean_bytes = vectors.mean_bytes * size
        self._replayed_steps = max(REPLAYED_STEPS_MIN, REPLAYED_BYTES_MAX // max(1, mean_bytes))
        self._rounds: dict[int, Reduction] = {}
        # Two parts of the gradient go from one mate to another: one's own, and what it has of the other's.
        piece_bytes_max = max(tensor_bytes(form, vectors.chunk) for form in vectors.sums)
        self.early = Early(piece_bytes_max, size // vectors.chunk + 2)
        self.means: dict[int, Tensor] = {}
        """Step -> reduced gradient, until we have stepped with it, and for those behind us."""
        self.pieces: dict[int, tuple[MeanPiece, ...]] = {}
        """Step -> the same in few bits, where a round has brought it so: an eighth of the bytes for those behind us."""
        self._made_by: dict[int, RoundStart] = {}
        """Step -> the round of ours that `means` has it from."""
        self._stepping = -1
        """The version that we step from, or have stepped from last."""
        self._stepping_round: RoundStart | None = None
        """Whose result we step with; None: a mate's."""

    def __contains__(self, step: int) -> bool:
        return step in self._rounds

    def get(self, step: int) -> Reduction | None:
        """Our round of `step`, if one has begun."""
        return self._rounds.get(step)

    def begin(self, start: RoundStart) -> tuple[Reduction, Callable[[], Tensor | None], EarlyPieces]:
        """Take part in a round. Returns: (it; what makes our own sum; what has come of it before we heard of it)."""
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
        """A later attempt at the step has taken its place."""
        return self._rounds.get(reduction.start.step, reduction) is not reduction

    def round_of(self, source: PeerID, meta: Piece, payload: Payload) -> Reduction | None:
        """The round that a piece is of. None: it is of no use, or is kept until we hear of its round.

        Raises: RemoteError: no round has such pieces, or so many.
        """
        if meta.step < self._core.version:
            return None
        reduction = self._rounds.get(meta.step)
        if reduction is None or reduction.start.attempt < meta.attempt:
            # A mate heard of the round before we did. Who is no mate yet, by our plan, sends it again.
            if self._core.has_place(source):
                self.early.keep(source, meta, payload)
            return None
        return reduction if reduction.start.attempt == meta.attempt else None

    def has_ended(self, reduction: Reduction) -> bool:
        """Whether the round has ended, and in a reduced gradient that we may step with."""
        return reduction.is_complete and self._rounds.get(reduction.start.step) is reduction

    def keep(self, step: int, mean_N: Tensor, by: RoundStart | None, pieces: tuple[MeanPiece, ...] = ()) -> None:
        """The reduced gradient of `step` is here.

        Args:
            by: our round that it is from; None: it is a mate's.
            pieces: the same as it has travelled in few bits, if it has.
        """
        self.means[step] = mean_N
        self.pieces[step] = pieces
        if by is None:
            self._made_by.pop(step, None)
        else:
            self._made_by[step] = by

    def next_mean(self) -> Tensor | None:
        """The reduced gradient to step with now, each once; None: we have not got it, or are stepping."""
        version = self._core.version
        mean_N = self.means.get(version)
        if mean_N is None or self._stepping >= version:
            return None
        self._stepping = version
        ours, by = self._rounds.get(version), self._made_by.get(version)
        self._stepping_round = by if ours is not None and ours.start is by else None
        return mean_N

    def reached(self, version: int) -> RoundStart | None:
        """We have stepped to `version`, or loaded a state of it, and the core is about to hear so.

        Returns: the round whose result we have stepped with.
        """
        self._forget_means(version, last=False)
        self._rounds = {step: r for step, r in self._rounds.items() if step >= version}
        self.early.forget_before(version, mates=(*self._core.mates, *self._core.departing))
        return self._stepping_round if version == self._stepping + 1 else None

    def _forget_means(self, version: int, *, last: bool) -> None:
        """Of the steps that led to `version`, but for those that a newcomer has yet to replay. Args: last: of the last
        one, too."""
        keep_from = max(self._retained_from(), version - self._replayed_steps)
        keep_from = min(version if last else version - 1, keep_from)
        self.means = {step: mean_N for step, mean_N in self.means.items() if step >= keep_from}
        self.pieces = {step: pieces for step, pieces in self.pieces.items() if step >= keep_from}
        self._made_by = {step: start for step, start in self._made_by.items() if step >= keep_from}
