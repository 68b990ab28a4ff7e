"""A modelled peer's state of layers or experts: states and gradients have only a size."""

from collections.abc import Callable, Mapping

from torch import Tensor

from shoal.deploy.simulate.extents import NOWHERE
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.model.layout import state_layout
from shoal.peer.model.state import RoundedWeights, StageState, moment2_numel
from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.protocol.spec import RunSpec


class ModelledShard:
    """Implements `Held`, for the layers or units `keys`."""

    def __init__(self, spec: RunSpec, keys: tuple[str, ...], *, vectors: Vectors) -> None:
        self.spec = spec
        self.vectors = vectors
        self.device = NOWHERE
        self.keys = keys
        self.state: StageState | None = None
        self._light_version: int | None = None
        self.num_parameters = sum(state_layout(spec, key).numel for key in keys)
        self.step_flop = 20.0 * self.num_parameters
        self._contributions = Contributions(self.num_parameters, vectors)
        self._gradient_N = vectors.empty(self.num_parameters)
        self._has_stepped = False

    @property
    def version(self) -> int:
        if self._light_version is not None:
            return self._light_version
        assert self.state is not None, "the stage has no state yet"
        return self.state.version

    @property
    def is_learner(self) -> bool:
        return self._light_version is not None

    @property
    def is_stepping(self) -> bool:
        """False: a step in progress changes nothing here."""
        return False

    @property
    def remembers(self) -> bool:
        return self._has_stepped or self.spec.training.s_max > 0

    def initial_state(self) -> StageState:
        layers = {}
        for key in self.keys:
            size = state_layout(self.spec, key).numel
            param_N, moment1_N = self.vectors.empty(size), self.vectors.empty(size)
            moment2_N = self.vectors.empty(moment2_numel(self.spec, key))
            layers[key] = self.vectors.layer_state(param_N, moment1_N, moment2_N)
        return StageState(version=0, layers=layers)

    def load(self, state: StageState) -> None:
        assert tuple(state.layers) == self.keys, "the state is another stage's"
        self.state, self._light_version = state, None
        self._has_stepped = False
        self._contributions.forget_before(self.version)

    def load_weights(self, weights: RoundedWeights) -> None:
        assert tuple(weights.params) == self.keys, "the weights are another stage's"
        self._light_version = weights.version
        self._contributions.forget_before(self.version)

    def load_base(self, stored: Mapping[str, Tensor]) -> None:
        """Do nothing: only the arrival of a base matters here."""

    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        assert self.state is not None
        before = self.state
        after = StageState(version=before.version + 1, layers=before.layers)
        if self.state is before:
            self.state = after
            self._has_stepped = True
            self._contributions.forget_before(self.version)
        return after, after.digest(), 0

    # --- between jobs ---

    def contribute(self, microbatch: Microbatch, *, held_out: bool = False) -> bool | None:
        return self._contributions.contribute(microbatch, version=self.version, held_out=held_out)

    def gradient_sum(self, step: int, indices: Indices | None = None) -> Callable[[], Tensor | None]:
        total = self._contributions.total(step, indices)

        def make() -> Tensor | None:
            summed = total()
            return summed.sum_N if summed is not None else None

        return make

    def forget(self, microbatch: Microbatch) -> None:
        self._contributions.forget(microbatch)

    def make_room(self) -> None:
        """Do nothing: modelled values take no memory."""

    def _finish(self, microbatch: Microbatch, contributes: bool) -> None:
        if contributes and not self._contributions.has(microbatch):
            self._contributions.finish(microbatch, self._gradient_N)
