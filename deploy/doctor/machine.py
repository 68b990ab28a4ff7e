"""Diagnoses a machine's own problems: GPU, disk and memory."""

from collections.abc import Iterator

from shoal.deploy.doctor.findings import GpuFound, MachineFound, Problem

DISK_BYTES_MIN = 64 * 2**20
"""Less than a peer writes in its first minutes: plans, a log, the first snapshot of a small stage."""
DISK_BYTES_UNEASY = 2 * 2**30
MEMORY_BYTES_MIN = 512 * 2**20
"""A process with torch and hivemind has 280 MB before it holds any weight, and its network daemon 60 MB."""
MEMORY_BYTES_UNEASY = 2**30


def machine_problems(machine: MachineFound, *, wants_cuda: bool) -> Iterator[Problem]:
    yield from _gpu_problems(machine.gpu, wants_cuda)
    yield from _disk_problems(machine)
    free = machine.memory_free_bytes
    if free is not None and free < MEMORY_BYTES_UNEASY:
        yield Problem(
            code="memory",
            side="you",
            sentence=f"this machine has only {free / 1e6:,.0f} MB of memory left",
            remedy="end other programs, or give the container more: a peer takes 400 MB before it holds a layer",
            fatal=free < MEMORY_BYTES_MIN,
        )


def _gpu_problems(gpu: GpuFound, wants_cuda: bool) -> Iterator[Problem]:
    """Check from the bus upwards: device, driver, torch's build, torch's error. Only the lowest fault is reported."""
    if gpu.torch_version == "":
        yield Problem(
            code="torch-broken",
            side="you",
            sentence=f"torch cannot be loaded: {gpu.torch_error}",
            remedy="install it again: `pip install --force-reinstall torch`",
        )
    elif gpu.usable or gpu.present is None:
        return
    elif not gpu.present:
        if wants_cuda:
            yield Problem(
                code="no-gpu",
                side="you",
                sentence="no GPU of NVIDIA's is in this machine, and --device asks for one",
                remedy="leave --device away to compute on the CPU; in a container, pass the GPU through (`--gpus all`)",
            )
    elif gpu.driver == "":
        yield Problem(
            code="no-driver",
            side="you",
            sentence="this machine has an NVIDIA GPU, but its driver is not loaded",
            remedy="install the driver and restart: `sudo ubuntu-drivers install`, or NVIDIA's own for your system",
            fatal=wants_cuda,
        )
    elif gpu.torch_cuda == "":
        yield Problem(
            code="torch-without-cuda",
            side="you",
            sentence=f"torch {gpu.torch_version} was built without CUDA, so that the GPU in this machine stays idle",
            remedy="install the CUDA build: `pip install --force-reinstall torch --index-url` with the address that "
            "pytorch.org shows for your system",
            fatal=wants_cuda,
        )
    elif gpu.usable == 0:
        yield Problem(
            code="cuda-unusable",
            side="you",
            sentence=f"torch cannot use the GPU with driver {gpu.driver or 'unknown'}: "
            f"{gpu.torch_error or 'without a reason'}",
            remedy=f"upgrade the driver to one that supports CUDA {gpu.torch_cuda}, or restart after an upgrade of it",
            fatal=wants_cuda,
        )


def _disk_problems(machine: MachineFound) -> Iterator[Problem]:
    free = machine.disk_free_bytes
    if free is not None and free < DISK_BYTES_UNEASY:
        yield Problem(
            code="disk-full",
            side="you",
            sentence=f"the disk of {machine.folder} has only {free / 1e6:,.0f} MB left",
            remedy="make room: a peer keeps snapshots of what it holds; or give it another folder with --state-dir",
            fatal=free < DISK_BYTES_MIN,
        )
    if machine.folder_error and (free is None or free >= DISK_BYTES_MIN):
        yield Problem(
            code="disk-not-writable",
            side="you",
            sentence=f"nothing can be written to {machine.folder}: {machine.folder_error}",
            remedy="give this user the right to, or name another folder with --state-dir",
        )
