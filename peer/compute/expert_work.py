"""The work of one expert's holder: it serves tokens, and counts the microbatches that senders report as finished."""

from typing import Protocol

from shoal.peer.compute.arithmetic import HeldExpert
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.expert_runs import Run
from shoal.peer.pipeline.microbatch import Microbatch


class Upwards(Protocol):
    """The unit's group, as seen by the work."""

    @property
    def serves(self) -> bool:
        """True if we hold the group's state and take part."""
        ...

    def wants(self, microbatch: Microbatch) -> bool: ...

    def contributed(self, microbatch: Microbatch, *, loss: float, staleness_steps: int, retried: bool) -> None: ...


class ExpertWork:
    """Expert `expert` of stage `stage` at its holder. `version` changes only on the loop's thread."""

    def __init__(self, runtime: HeldExpert, stage: int, *, upwards: Upwards) -> None:
        self.runtime = runtime
        self.stage = stage
        self.expert = runtime.expert
        self.upwards = upwards
        self.version = 0
        self.is_paused = False

    def load(self, state: StageState) -> None:
        self.runtime.load(state)
        self.version = state.version

    def flop(self, num_tokens: int, *, backward: bool) -> float:
        return self.runtime.backward_flop(num_tokens) if backward else self.runtime.forward_flop(num_tokens)

    def has_whole(self, run: Run, num_layers: int) -> bool:
        return self.runtime.open_runs.layers_done(run) == num_layers

    def close_run(self, run: Run, *, retried: bool) -> None:
        """End a run: it counts if the group lacks it."""
        staleness_steps = self.runtime.close(run, wanted=self.upwards.wants(run.microbatch))
        if staleness_steps is not None:
            self.upwards.contributed(run.microbatch, loss=0.0, staleness_steps=staleness_steps, retried=retried)
