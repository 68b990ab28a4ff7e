"""Decoder layers compiled by `torch.compile` in the background.

A peer uses the layers of `llama.py` until the compiled ones are ready, or for good if compiling fails. All layers of
one kind (with or without an attention window) in this process share one compiled layer.

B samples   T tokens   D width
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shoal.peer.model import llama
from shoal.peer.model.layout import layer_index, layer_layout
from shoal.peer.model.rotary import Rotary
from shoal.peer.model.subspace import BASIS
from shoal.protocol.spec import ModelSpec, RunSpec

logger = logging.getLogger(__name__)

Layer = Callable[[tuple[Tensor, ...], Tensor, Rotary], Tensor]
"""(a layer's tensors in the layout's order, then a subspace's basis if there is one; input [B, T, D]; rotary tables) ->
output [B, T, D]."""
DEVICES: Final = ("cuda",)
"""The device types for which layers are compiled. On a CPU compiling saves no time (`MEASURED.md`), costs memory, and
needs a C++ compiler."""


@dataclass(frozen=True, slots=True)
class CompiledShapes:
    """The shapes for which layers are compiled."""

    model: ModelSpec
    num_samples: int
    device: torch.device
    dtype: torch.dtype


class CompiledLayers:
    """The dense layers of one model. `start` compiles them, with `backend`, for microbatches of one shape."""

    def __init__(self, job: CompiledShapes, *, backend: str | Callable[..., object] = "inductor") -> None:
        self._job = job
        self._backend = backend
        self._by_kind: dict[bool, Layer] = {}
        self._thread = threading.Thread(target=self._compile, name="compile layers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Wait until compiling has ended or failed; for benchmarks and tests."""
        self._thread.join()

    def layer(self, key: str, params: Mapping[str, Tensor], rotary: Rotary) -> Callable[[Tensor], Tensor] | None:
        """Return the forward of one layer with these weights; None: the layer is not compiled (yet)."""
        layer = self._by_kind.get(self._is_windowed(layer_index(key)))
        return None if layer is None else functools.partial(_run, layer, tuple(params.values()), rotary)

    def _is_windowed(self, index: int) -> bool:
        return self._job.model.window_of(index) > 0

    def _compile(self) -> None:
        first_of_kind: dict[bool, int] = {}
        for index in range(self._job.model.num_layers):
            first_of_kind.setdefault(self._is_windowed(index), index)
        for kind, index in first_of_kind.items():
            began_s = time.monotonic()
            try:
                self._by_kind[kind] = self._compiled(index)
            except Exception as error:  # training goes on uncompiled, whatever the compiler's error
                logger.warning("layers stay uncompiled, which is slower: %s", f"{error}".strip().split("\n")[0])
                return
            logger.info("layers like layer %d are compiled, after %.0f s", index, time.monotonic() - began_s)

    def _compiled(self, index: int) -> Layer:
        """Compile one layer; run it with and without gradients, because torch compiles each case at its first call."""
        job, layout = self._job, layer_layout(self._job.model, f"layers.{index}")
        names = (*layout.names, BASIS) if job.model.subspace else layout.names
        layer: Layer = torch.compile(
            _uncompiled(job.model, index, names), backend=self._backend, fullgraph=True, dynamic=False
        )
        flat_N = torch.zeros(layout.numel, device=job.device, dtype=job.dtype)
        tensors = tuple(layout.leaves(flat_N, torch.zeros_like(flat_N)).values())
        if job.model.subspace:
            tensors += (torch.zeros(job.model.dim, job.model.subspace, device=job.device, dtype=job.dtype),)
        rotary = llama.rotary_tables(job.model, job.device)
        shape_BTD = (job.num_samples, job.model.context, job.model.dim)
        x_BTD = torch.ones(shape_BTD, device=job.device, dtype=job.dtype, requires_grad=True)
        torch.autograd.backward(_run(layer, tensors, rotary, x_BTD).sum())
        with torch.no_grad():
            _run(layer, tensors, rotary, x_BTD)
        return layer


def compiled_layers(spec: RunSpec, device: torch.device, dtype: torch.dtype) -> CompiledLayers | None:
    """Return the compiled layers of a run; the first call begins to compile. Return None on a device not in `DEVICES`,
    for models with experts (the device alone knows the sizes of expert groups) and for adapters (they decode a
    quantised base)."""
    if device.type not in DEVICES or spec.model.num_experts or spec.adapter is not None:
        return None
    return _started(CompiledShapes(spec.model, spec.training.microbatch_size, device, dtype))


@functools.cache
def _started(job: CompiledShapes) -> CompiledLayers:
    layers = CompiledLayers(job)
    layers.start()
    return layers


def _uncompiled(model: ModelSpec, index: int, names: tuple[str, ...]) -> Layer:
    def layer(tensors: tuple[Tensor, ...], x_BTD: Tensor, rotary: Rotary) -> Tensor:
        return llama.decoder_layer(model, index, dict(zip(names, tensors, strict=True)), x_BTD, rotary)

    return layer


def _run(layer: Layer, tensors: tuple[Tensor, ...], rotary: Rotary, x_BTD: Tensor) -> Tensor:
    """Run a layer. If gradients are off, detach its input: torch compiles anew for an input that requires grad."""
    return layer(tensors, x_BTD if torch.is_grad_enabled() else x_BTD.detach(), rotary)
