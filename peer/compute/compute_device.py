"""A peer's device: memory and name, and for a run the dtype of matrix products and the device of optimizer steps."""

from dataclasses import dataclass

import torch

from shoal.peer.compute.cgroup import free_memory_bytes, total_memory_bytes
from shoal.peer.compute.known_answers import steps_on
from shoal.peer.compute.precision import precision_of
from shoal.protocol.spec import RunSpec

_CPU = torch.device("cpu")


def free_bytes(device: torch.device) -> int:
    if device.type in ("cuda", "xpu"):
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return free_memory_bytes()  # an Apple GPU shares the host's memory


def total_bytes(device: torch.device) -> int:
    if device.type in ("cuda", "xpu"):
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return total_memory_bytes()


def name_of(device: torch.device) -> str:
    """Return the maker's name of a CUDA or XPU device; for any other device its type, such as "cpu"."""
    if device.type in ("cuda", "xpu"):
        return str(torch.get_device_module(device).get_device_name(device))
    return device.type


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """The device of one peer in one run, the dtype of its matrix products, and the device of its optimizer steps."""

    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    steps_on: torch.device = _CPU

    @classmethod
    def of(cls, spec: RunSpec, device: torch.device) -> "ComputeDevice":
        """Choose, by tests, the dtype of the device's matrix products and the device of optimizer steps. Raises:
        ShoalError: optimizer steps have wrong bits even on the CPU."""
        return cls(device, precision_of(spec, device), steps_on(spec.optimizer.name, device))
