"""Checks at a peer's start that its optimizer steps have the same bits as those of all other peers.

IEEE 754 defines every operation of a step to the last bit. A device or torch build that fuses two operations, flushes
denormals to zero or computes another square root would disagree with its group at each commit. So the device makes
three steps of a small layer, and the result is compared with the digests below. The inputs are integers times powers of
two, the same on every machine, from 1 to 10^-21: the squares of the smallest inputs are denormal.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from shoal.peer.model.layout import layer_layout
from shoal.peer.model.state import initial_state, step_layer
from shoal.protocol.errors import ShoalError
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec

logger = logging.getLogger(__name__)

KNOWN: Final[Mapping[str, str]] = {
    "sgd": "56f2f41d7558c7671b73f6f36f288155",
    "adamw": "3d53911d6fa33f366b79c3e3f9a1f2a1",
    "nadam": "987e3d8ba9815e2066be37ecc0eff12c",
    "muon": "d86eabd6674151dd41316c7748ab4211",
}
"""Optimizer -> the digest that the small test layer must have after three steps, on every device."""
_KEY: Final = "layers.0"
_MODEL: Final = ModelSpec(vocab_size=256, dim=32, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=64, context=32)
_CPU: Final = torch.device("cpu")


def steps_on(optimizer: str, device: torch.device) -> torch.device:
    """Return the device for a peer's optimizer steps: `device` if its steps have the right bits, else the CPU.
    Raises: ShoalError: the steps on the CPU have wrong bits, too."""
    for where in dict.fromkeys((device, _CPU)):
        if answer(optimizer, where) == KNOWN[optimizer]:
            return where
        logger.warning("optimizer steps on %s (%s) differ from those of all others", where, optimizer)
    raise ShoalError(
        f"this machine's optimizer steps ({optimizer}) differ from those of all others, so it cannot train with them:"
        " its torch is another build than the one that `make setup` installs, or its processor is at fault"
    )


def answer(optimizer: str, device: torch.device) -> str:
    """Make three steps of the small layer on a device. Returns: the layer's digest after these steps."""
    spec = RunSpec(model=_MODEL, optimizer=OptimizerSpec(name=optimizer, warmup_steps=0))  # type: ignore[arg-type]
    layer = initial_state(spec, (_KEY,), _CPU).layers[_KEY]
    numel = layer_layout(_MODEL, _KEY).numel
    layer = replace(layer, param_N=_numbers(numel, 0, smallest=8)).to(device)
    for step in range(3):
        gradient_N = _numbers(numel, 1 + step, smallest=70).to(device)
        layer = step_layer(spec, _KEY, layer, gradient_N, step) or layer
    return layer.digest()


def _numbers(numel: int, seed: int, *, smallest: int) -> Tensor:
    """Return float32 [numel], pseudo-random, with magnitudes from 1 down to 2^-smallest."""
    index_N = torch.arange(numel, dtype=torch.int64)
    whole_N = (index_N * 2654435761 + seed * 40503 * 65537) % 2**24 - 2**23
    return torch.ldexp(whole_N.to(torch.float32), -23 - index_N % smallest)
