"""Chooses the dtype of a peer's matrix products: bfloat16 where its device is quicker in it, else float32.

Members of a group may choose differently: only computations after the all-reduce must be bit-identical, and these are
in float32.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Final

import torch

from shoal.peer.model import llama
from shoal.peer.model.layout import init_layer, layer_layout
from shoal.peer.model.subspace import constants_of
from shoal.protocol.spec import ModelSpec, RunSpec

logger = logging.getLogger(__name__)

QUICKER: Final = 1.3
"""bfloat16 must be this many times as quick as float32 to be chosen: it rounds more, and a brief timing may be off."""


def precision_of(spec: RunSpec, device: torch.device, *, clock: Callable[[], float] = time.perf_counter) -> torch.dtype:
    """Return the dtype of this run's matrix products on this device; if the run leaves the dtype open, time both."""
    if spec.training.compute != "auto":
        return torch.bfloat16 if spec.training.compute == "bf16" else torch.float32
    if device.type == "cuda":
        # Older cards emulate bfloat16, many times slower.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    wide_s, narrow_s = _best_s(_sample(spec.model), device, clock)
    is_quicker = wide_s > QUICKER * narrow_s
    times = f"{wide_s / narrow_s:.2f} times as quick in bf16"
    logger.info("a layer is %s here: this peer computes in %s", times, "bf16" if is_quicker else "fp32")
    return torch.bfloat16 if is_quicker else torch.float32


def layer_job(spec: RunSpec, device: torch.device, dtype: torch.dtype, shape_BT: tuple[int, int]) -> Callable[[], None]:
    """Return a function that runs the forward of one decoder layer once, so that the caller can time it."""
    flat_N = init_layer(spec.model, "layers.0", 0).to(device, dtype)
    params = layer_layout(spec.model, "layers.0").views(flat_N)
    params |= constants_of(spec, "layers.0", device=device, dtype=dtype)
    rotary = llama.rotary_tables(spec.model, device)
    x_BTD = torch.ones(*shape_BT, spec.model.dim, device=device, dtype=dtype)

    def forward() -> None:
        with torch.no_grad():
            llama.decoder_layer(spec.model, 0, params, x_BTD, rotary)
        _wait_for(device)

    return forward


def _best_s(model: ModelSpec, device: torch.device, clock: Callable[[], float]) -> tuple[float, float]:
    """Time a layer's forward plus backward in both dtypes, in turns, so that other load slows both. Return the shortest
    times in seconds: (float32, bfloat16)."""
    jobs = [_there_and_back(model, device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    best_s = [math.inf, math.inf]
    for _ in range(3):
        for kind, job in enumerate(jobs):
            began_s = clock()
            job()
            best_s[kind] = min(best_s[kind], clock() - began_s)
    return best_s[0], best_s[1]


def _sample(model: ModelSpec) -> ModelSpec:
    """Return a model of one dense layer like the run's, cut to a size that can be timed within a second."""
    heads = max(1, min(model.dim, 768) // model.head_dim)
    ffn_dim = min(model.ffn_dim, 3 * heads * model.head_dim)
    return ModelSpec(
        dim=heads * model.head_dim,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_dim=ffn_dim,
        context=min(model.context, 256),
    )


def _there_and_back(model: ModelSpec, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    layout = layer_layout(model, "layers.0")
    flat_N = init_layer(model, "layers.0", 0).to(device, dtype)
    gradient_N, rotary = torch.zeros_like(flat_N), llama.rotary_tables(model, device)
    x_BTD = torch.ones(1, model.context, model.dim, device=device, dtype=dtype, requires_grad=True)

    def job() -> None:
        y_BTD = llama.decoder_layer(model, 0, layout.leaves(flat_N, gradient_N), x_BTD, rotary)
        torch.autograd.backward(y_BTD.sum())
        _wait_for(device)

    return job


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
