"""Chooses what a peer's device multiplies in: bfloat16 where it is quicker.

Members of a group may choose differently: what must be equal bit for bit is made from reduced gradients, in float32.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Final

import torch

from shoal.peer.model import llama
from shoal.peer.model.layout import init_layer, layer_layout
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

QUICKER: Final = 1.15
"""By so much bfloat16 must be quicker: it rounds, and what was timed for a moment may not last."""
_RUNS: Final = 4
_FLOP: Final = 2e9
"""Of a forward that is timed, or so."""
_TOKENS: Final = range(16, 2049)


def precision_of(spec: RunSpec, device: torch.device, *, clock: Callable[[], float] = time.perf_counter) -> torch.dtype:
    """What jobs of this run multiply in on this device. It takes a moment: where the run leaves it open a layer's
    forward is timed in both."""
    if spec.training.compute != "auto":
        return torch.bfloat16 if spec.training.compute == "bf16" else torch.float32
    if device.type == "cuda":
        # Older cards emulate it, many times slower.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    wide_s, narrow_s = _best_s(spec, device, clock)
    is_quicker = wide_s > QUICKER * narrow_s
    times = f"{wide_s / narrow_s:.2f} times as quick in bf16"
    logger.info("a layer's forward is %s here: this peer computes in %s", times, "bf16" if is_quicker else "fp32")
    return torch.bfloat16 if is_quicker else torch.float32


def layer_job(spec: RunSpec, device: torch.device, dtype: torch.dtype, shape_BT: tuple[int, int]) -> Callable[[], None]:
    """The forward of one decoder layer, to be timed."""
    flat_N = init_layer(spec.model, "layers.0", 0).to(device, dtype)
    params = layer_layout(spec.model, "layers.0").views(flat_N)
    rotary = llama.rotary_tables(spec.model, device)
    x_BTD = torch.ones(*shape_BT, spec.model.dim, device=device, dtype=dtype)

    def forward() -> None:
        with torch.no_grad():
            llama.decoder_layer(spec.model, 0, params, x_BTD, rotary)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return forward


def _best_s(spec: RunSpec, device: torch.device, clock: Callable[[], float]) -> tuple[float, float]:
    """The shortest times in float32 and in bfloat16, taken in turns: what else the machine does hits both."""
    num_tokens = round(_FLOP / (2 * layer_layout(spec.model, "layers.0").numel))
    shape_BT = 1, min(max(num_tokens, _TOKENS[0]), _TOKENS[-1], spec.model.context)
    jobs = [layer_job(spec, device, dtype, shape_BT) for dtype in (torch.float32, torch.bfloat16)]
    best_s = [math.inf, math.inf]
    for _ in range(_RUNS):
        for kind, job in enumerate(jobs):
            began_s = clock()
            job()
            best_s[kind] = min(best_s[kind], clock() - began_s)
    return best_s[0], best_s[1]
