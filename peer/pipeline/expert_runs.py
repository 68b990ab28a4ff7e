"""Runs of microbatches that are *open* at an expert's holder: a backward has begun, and no end has been reported."""

from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.weight_set import WeightSet
from shoal.protocol.identity import PeerID

AT_ONCE_MAX: Final = 4
"""The most runs of one microbatch by one sender that may be open: each has a gradient as large as the expert. An honest
sender may have one run to report, one in progress, and in between some that it gave up without a report."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a microbatch, identified by the stage member that sends it (`source`), the number of this member's
    start (`incarnation`), and the number of the run since that start (`passage`)."""

    microbatch: Microbatch
    source: PeerID
    incarnation: int
    passage: int


@dataclass(slots=True)
class OpenRun:
    """The gradient of a run.

    Args:
        gradient_N: the gradient of the expert's weights so far; None: the group has the microbatch's gradient already.
        weights: the expert's weights when the run began, which the strategy against stale weights may need.
    """

    gradient_N: Tensor | None
    weights: WeightSet | None
    staleness_steps: int
    layers: set[int] = field(default_factory=set)
    """The layers in which the run's backward is finished: `gradient_N` includes them."""


class OpenRuns:
    """The open runs of one expert; the gradient of a closed run goes to `contributions`."""

    def __init__(self, contributions: Contributions) -> None:
        self._contributions = contributions
        self._open: dict[Run, OpenRun] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, run: Run) -> OpenRun | None:
        return self._open.get(run)

    def begin(self, run: Run, *, gradient_N: Tensor | None, weights: WeightSet | None, staleness_steps: int) -> OpenRun:
        earlier = [r for r in list(self._open) if (r.source, r.microbatch) == (run.source, run.microbatch)]
        for old in earlier[: 1 - AT_ONCE_MAX]:
            self._open.pop(old, None)
        opened = self._open[run] = OpenRun(gradient_N, weights, staleness_steps)
        return opened

    def layers_done(self, run: Run) -> int:
        """Return in how many layers this run has finished its backward."""
        opened = self._open.get(run)
        return len(opened.layers) if opened else 0

    def close(self, run: Run, *, version: int, zero_N: Tensor | None, keeps_weights: bool) -> int | None:
        """End a run: its gradient, or `zero_N` if the run brought no token, can then be contributed.

        Args: version: the holder's version; keeps_weights: the strategy needs the weights that the run used.
        Returns: the run's staleness in steps; None: the run adds nothing to the sum.
        """
        opened = self._open.pop(run, None)
        if self._contributions.has(run.microbatch) or run.microbatch.step < version:
            return None
        if opened is None:
            if zero_N is None:
                return None
            self._contributions.finish(run.microbatch, zero_N)
            return max(0, run.microbatch.step - version)
        if opened.gradient_N is None:
            return None
        self._contributions.finish(run.microbatch, opened.gradient_N, opened.weights if keeps_weights else None)
        return opened.staleness_steps

    def drop(self, source: PeerID, successor: int | None = None) -> None:
        """Forget the runs of `source`, which has died, or has restarted with the incarnation `successor`. Runs of
        `successor` stay: its tokens may arrive before the news of the restart."""
        for run in list(self._open):
            if run.source == source and (successor is None or run.incarnation < successor):
                self._open.pop(run, None)

    def forget_before(self, version: int) -> None:
        """Forget open runs of steps before `version`: these steps were committed without the runs."""
        for run in [run for run in list(self._open) if run.microbatch.step < version]:
            self._open.pop(run, None)
