"""Defines a modelled shard (the layers or experts that a peer holds), with states and gradients of only a size."""

from collections.abc import Mapping

from torch import Tensor

from shoal.peer.model.layout import state_layout
from shoal.peer.model.state import StageState, moment2_numel
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.shard import Shard


class ModelledShard(Shard):
    """Replaces the methods of `Shard` that need the numbers of tensors."""

    def initial_state(self) -> StageState:
        layers = {}
        for key in self.keys:
            size = state_layout(self.spec, key).numel
            param_N, moment1_N = self.vectors.empty(size), self.vectors.empty(size)
            moment2_N = self.vectors.empty(moment2_numel(self.spec, key))
            layers[key] = self.vectors.layer_state(param_N, moment1_N, moment2_N)
        return StageState(version=0, layers=layers)

    def load_base(self, stored: Mapping[str, Tensor]) -> None:
        """Do nothing: the frozen base has no contents, and only its arrival matters."""

    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        before = self.state
        assert before is not None, "a step before there is a state"
        after = StageState(version=before.version + 1, layers=before.layers)
        self.state, self._version = after, after.version
        self._weights.stepped(self._weights.kept_of(before))
        self._contributions.forget_before(after.version)
        return after, after.digest(), 0

    def make_room(self) -> None:
        """Do nothing: modelled values take no memory."""

    def _finish(self, microbatch: Microbatch, contributes: bool) -> None:
        if contributes and not self._contributions.has(microbatch):
            self._contributions.finish(microbatch, self._zero_gradient())
