"""The work of one expert's holder: it serves tokens, and counts the microbatches that senders report as finished."""

from typing import Protocol

from shoal.peer.model.flop import expert_flop
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.expert_runs import Run
from shoal.peer.pipeline.expert_shard import ExpertShard
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.tensors import BACKWARD_PER_FORWARD


class Upwards(Protocol):
    """The unit's group, as seen by the work."""

    @property
    def is_ready(self) -> bool: ...

    def wants(self, microbatch: Microbatch) -> bool: ...

    def contributed(self, microbatch: Microbatch, *, loss: float, staleness_steps: int, retried: bool) -> None: ...


class ExpertWork:
    """Expert `expert` of stage `stage` at its holder. `version` changes only on the loop's thread."""

    def __init__(self, runtime: ExpertShard, stage: int, *, upwards: Upwards) -> None:
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
        """Return the FLOP of a job; a backward repeats the forward."""
        forward = expert_flop(self.runtime.spec.model, num_tokens)
        return (1.0 + BACKWARD_PER_FORWARD) * forward if backward else forward

    def has_whole(self, run: Run, num_layers: int) -> bool:
        return self.runtime.open_runs.layers_done(run) == num_layers

    def close_run(self, run: Run, *, retried: bool) -> None:
        """End a run: it counts if the group lacks it."""
        staleness_steps = self.runtime.close(run, wanted=self.upwards.wants(run.microbatch))
        if staleness_steps is not None:
            self.upwards.contributed(run.microbatch, loss=0.0, staleness_steps=staleness_steps, retried=retried)
