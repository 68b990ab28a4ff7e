"""What a peer computes on, and how."""

from dataclasses import dataclass

import torch

from shoal.peer.cgroup import free_memory_bytes, total_memory_bytes
from shoal.peer.known_answers import steps_on
from shoal.peer.precision import precision_of
from shoal.protocol.spec import RunSpec

_CPU = torch.device("cpu")


def free_bytes(device: torch.device) -> int:
    """Of a device's memory, now."""
    if device.type in ("cuda", "xpu"):
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return free_memory_bytes()  # an Apple GPU has the processor's


def total_bytes(device: torch.device) -> int:
    """Of a device's memory, whatever is in use."""
    if device.type in ("cuda", "xpu"):
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return total_memory_bytes()


def name_of(device: torch.device) -> str:
    """As its maker calls it, where torch knows that."""
    if device.type in ("cuda", "xpu"):
        return str(torch.get_device_module(device).get_device_name(device))
    return device.type


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """The device of one peer, and how it is used in one run."""

    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    """What jobs multiply in."""
    steps_on: torch.device = _CPU
    """What makes the optimizer's steps."""

    @classmethod
    def of(cls, spec: RunSpec, device: torch.device) -> "ComputeDevice":
        """Try out the device for a run, for a moment. Raises: ShoalError: this machine cannot take part."""
        return cls(device, precision_of(spec, device), steps_on(spec.optimizer.name, device))
