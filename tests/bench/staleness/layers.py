"""One layer of a training run: its state, its version, its compensation. The arithmetic is the project's own."""

from collections.abc import Sequence
from typing import Any

from settings import Method
from tasks import Task
from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS, clip
from shoal.peer.model.schedule import learning_rate
from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.prediction import compensation
from shoal.peer.pipeline.prediction.compensation import OwnGradients
from shoal.protocol.spec import OptimizerSpec, TrainingSpec


class Layer:
    """Flat state of one layer, immutable a version; `N` elements.

    Args:
        updates: of the whole run, for the schedule.
    """

    def __init__(self, task: Task, key: str, optimizer: OptimizerSpec, method: Method, *, updates: int) -> None:
        self.key = key
        self.layout = task.layout(key)
        self.version = 0
        self.compensation = compensation(method.name, optimizer.name)
        newer = TrainingSpec(compensation=method.name).wants_newer_weights  # type: ignore[arg-type]
        self.stashes = not newer if method.stash is None else method.stash
        param_N = task.initial(key)
        moment1_N, moment2_N = OPTIMIZERS[optimizer.name].moments(param_N, self.layout.matrices)
        self.state = LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)
        self._optimizer = optimizer
        self._updates = updates

    def weights(
        self, staleness_steps: int, seen_N: Tensor | None = None, displacement_N: Tensor | None = None
    ) -> Tensor:
        """What a microbatch `staleness_steps` ahead of this version computes with: float32 [N].

        Args:
            seen_N: mean gradient of a part of the step that is made from this version.
            displacement_N: these weights minus those of that gradient.
        """
        seen = []
        if seen_N is not None:
            seen.append(OwnGradients(clip(seen_N, clip_norm=self._optimizer.clip_norm)[0], displacement_N))
        return self.compensation.weights(self.state, self._settings(), staleness_steps, seen)

    def step(self, gradient_N: Tensor, displacement_N: Tensor | None = None) -> None:
        """Commit the mean gradient. A layer whose gradient is not finite stays what it is, one version on.

        Args:
            displacement_N: weights now minus those of the gradient, if the compensation corrects.
        """
        settings, before = self._settings(), self.state
        if displacement_N is not None:
            gradient_N = self.compensation.corrected(gradient_N, displacement_N, before, settings)
        clipped_N, norm = clip(gradient_N, clip_norm=self._optimizer.clip_norm)
        if norm < float("inf"):
            tensors = OPTIMIZERS[self._optimizer.name].step(
                before.param_N, clipped_N, before.moment1_N, before.moment2_N, **settings
            )
            self.state = LayerState(param_N=tensors[0], moment1_N=tensors[1], moment2_N=tensors[2])
            self.compensation.committed(before, self.state, settings)
        self.version += 1

    def leaves(self, weights_N: Tensor, gradient_N: Tensor) -> dict[str, Tensor]:
        """Autograd leaves on `weights_N` whose gradients add into `gradient_N`."""
        return self.layout.leaves(weights_N, gradient_N)

    def _settings(self) -> dict[str, Any]:
        o = self._optimizer
        return {
            "learning_rate": learning_rate(o, self.version, self._updates),
            "beta1": o.beta1,
            "beta2": o.beta2,
            "epsilon": o.epsilon,
            "weight_decay": o.weight_decay,
            "num_decayed": self.layout.num_decayed,
            "step": self.version,
            "matrices": self.layout.matrices,
        }


def cut(keys: Sequence[str], stages: int) -> list[tuple[str, ...]]:
    """Layers to stages as evenly as can be; the embedding is with the first decoder layer, the head with the last.

    Raises: ValueError: fewer decoder layers than stages.
    """
    inner = len(keys) - 2
    if stages > inner:
        raise ValueError(f"{inner} layers cannot be cut into {stages} stages")
    bounds = [1 + inner * stage // stages for stage in range(stages + 1)]
    bounds[0], bounds[-1] = 0, len(keys)
    return [tuple(keys[bounds[stage] : bounds[stage + 1]]) for stage in range(stages)]
