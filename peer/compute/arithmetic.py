"""The arithmetic of a peer: the only part of its code in which a training peer and a simulated one differ.

The drivers (the code that carries out a peer's decisions) get all their computations from it. Its twin in
`deploy/simulate` computes nothing and returns values of the same size, so that the same drivers run a thousand peers in
one process.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.peer.compute.cgroup import free_memory_bytes
from shoal.peer.compute.compute_device import ComputeDevice, free_bytes, name_of
from shoal.peer.compute.precision import layer_job
from shoal.peer.data.corpus import Corpus
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.model.frozen import seed_base
from shoal.peer.model.state import LayerState, step_layer
from shoal.peer.pipeline.expert_shard import ExpertShard
from shoal.peer.pipeline.expert_wire import TokenWire
from shoal.peer.pipeline.offload import Offload
from shoal.peer.pipeline.shard import How, StageShard
from shoal.peer.pipeline.stage import StageRuntime
from shoal.peer.pipeline.trunk import StageTrunk
from shoal.protocol.spec import RunSpec


class Arithmetic:
    """The computations of one peer on a torch device, and its free memory. A simulated peer has a twin of this class.

    Args:
        corpus: the run's text; None: this peer does not have the text, and cannot hold stage 0.
        steps_on: the device that makes the optimizer's steps (`known_answers.py`); None: `device`.
    """

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus | None,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        steps_on: torch.device | None = None,
    ) -> None:
        self.vectors = Vectors(torch.device("cpu"), sums=spec.wire.sums)
        self.tokens = TokenWire(spec)
        self.device_name = name_of(device)
        self.has_text = corpus is not None
        self._spec = spec
        self._corpus = corpus
        self._device, self._dtype, self._steps_on = device, dtype, steps_on or device
        self._how: How = {"device": device, "dtype": dtype, "steps_on": steps_on, "offload": Offload(device)}

    @classmethod
    def on(cls, use: ComputeDevice, spec: RunSpec, corpus: Corpus | None) -> "Arithmetic":
        return cls(spec, corpus, use.device, dtype=use.dtype, steps_on=use.steps_on)

    def free_bytes(self) -> int:
        return free_bytes(self._device)

    def free_host_bytes(self) -> int:
        """Return the free bytes of the host's memory, which a CPU and an Apple GPU use as their only memory."""
        return free_memory_bytes()

    @torch.no_grad()
    def step_layer(self, key: str, layer: LayerState, gradient_N: Tensor, version: int) -> LayerState:
        """Make a layer's optimizer step from `version`, on the device `steps_on`: the result has the same bits on every
        replica. `layer`, `gradient_N` and the result are on the host."""
        there = layer.to(self._steps_on)
        stepped = step_layer(self._spec, key, there, gradient_N.to(self._steps_on), version) or there
        return stepped.to(self.vectors.host)

    def seed_base(self, key: str) -> Tensor:
        """Return a layer of a frozen base model made from the run's seed: its stored bytes, as float32 [bytes / 4]."""
        return seed_base(self._spec, key)

    def probe_job(self) -> Callable[[], None]:
        """Return a function that runs the forward of one decoder layer once, so that the caller can time it."""
        shape_BT = self._spec.training.microbatch_size, self._spec.model.context
        return layer_job(self._spec, self._device, self._dtype, shape_BT)

    def runtime(self, first_layer: int, last_layer: int) -> StageShard:
        """Make the runtime of a replica of decoder layers [first_layer, last_layer)."""
        return StageRuntime(self._spec, first_layer, last_layer, corpus=self._text_of(first_layer), **self._how)

    def trunk(self, first_layer: int, last_layer: int) -> StageShard:
        """Make the runtime of a replica of decoder layers [first_layer, last_layer); other peers hold the experts."""
        return StageTrunk(self._spec, first_layer, last_layer, corpus=self._text_of(first_layer), **self._how)

    def expert(self, first_layer: int, last_layer: int, expert: int) -> ExpertShard:
        """Make the runtime of a peer that holds one expert of these layers."""
        return ExpertShard(self._spec, first_layer, last_layer, expert, **self._how)

    def _text_of(self, first_layer: int) -> Corpus | None:
        return self._corpus if first_layer == 0 else None
