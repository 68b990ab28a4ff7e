"""What a peer computes on, and how."""

from dataclasses import dataclass

import torch

from shoal.peer.known_answers import steps_on
from shoal.peer.precision import precision_of
from shoal.protocol.spec import RunSpec

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    """What jobs multiply in."""
    steps_on: torch.device = _CPU
    """What makes the optimizer's steps."""

    @classmethod
    def of(cls, spec: RunSpec, device: torch.device) -> "ComputeDevice":
        """Try out the device for a run, for a moment. Raises: ShoalError: this machine cannot take part."""
        return cls(device, precision_of(spec, device), steps_on(spec.optimizer.name, device))
