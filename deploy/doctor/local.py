"""Examines this machine: GPU, clock, disk, memory, network. Its functions block; most are for Linux."""

import ctypes
import ipaddress
import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

from shoal.deploy.doctor.findings import GpuFound, MachineFound
from shoal.peer.compute.cgroup import free_memory_bytes

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""The PCI class of display and 3D controllers."""
_TIMEX_STATUS_OFFSET = 40
"""The offset of `status` in struct timex on 64-bit Linux: modes, offset, freq, maxerror, esterror take 8 bytes each."""


def machine(folder: Path) -> MachineFound:
    free_bytes, error = disk(folder)
    return MachineFound(
        gpu=gpu(),
        clock_synchronised=clock_synchronised(),
        folder=str(folder),
        folder_error=error,
        disk_free_bytes=free_bytes,
        memory_free_bytes=free_memory_bytes(),
    )


def gpu(root: Path = Path("/")) -> GpuFound:
    """Examine the GPUs. Args: root: the folder that contains `sys` and `proc`; tests use another than /."""
    present, driver = nvidia(root)
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        return GpuFound(present=present, driver=driver, torch_version="", torch_error=_one_line(error))
    usable, why = 0, ""
    if torch.version.cuda:
        try:
            usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if not usable and present:
                torch.cuda.init()  # type: ignore[no-untyped-call]  # the error says why not
        except Exception as error:
            why = _one_line(error)
    return GpuFound(
        present=present,
        driver=driver,
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda or "",
        torch_error=why,
        usable=usable,
    )


def nvidia(root: Path = Path("/")) -> tuple[bool | None, str | None]:
    """Return (True if an NVIDIA GPU is on the bus, the loaded driver's version or ""); a value is None if unknown."""
    driver = root / "proc/driver/nvidia/version"
    try:
        text = driver.read_text()
        match = re.search(r"Module[^\n]*?\s(\d+\.[\d.]+)", text)
        version = match[1] if match else "unknown"
        return True, version
    except OSError:
        pass
    devices = root / "sys/bus/pci/devices"
    if not devices.is_dir():
        return None, None
    for device in devices.iterdir():
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            return True, ""
    return False, ""


def disk(folder: Path) -> tuple[int | None, str]:
    """Return (free bytes of the disk with `folder`, why `folder` cannot be written or ""); `folder` may be missing."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free_bytes = shutil.disk_usage(there).free
    except OSError as error:
        return None, error.strerror or str(error)
    try:
        if not there.is_dir():
            raise NotADirectoryError(0, f"{there} is a file")
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return free_bytes, (error.strerror or str(error)).lower()
    return free_bytes, ""


def clock_synchronised() -> bool | None:
    """Return True if a time service keeps this machine's clock, according to the kernel; None: unknown."""
    try:
        buffer = ctypes.create_string_buffer(208)  # struct timex
        if ctypes.CDLL(None).adjtimex(buffer) < 0:
            return None
    except (OSError, AttributeError):
        return None
    status = int.from_bytes(buffer.raw[_TIMEX_STATUS_OFFSET : _TIMEX_STATUS_OFFSET + 4], "little")
    return not status & 0x40  # STA_UNSYNC of adjtimex(2)


def own_addresses() -> tuple[str, ...]:
    """Return IP addresses of interfaces that are up, without loopback and link-local ones; IPv4 first."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses if name in up else ():
            try:
                ip = ipaddress.ip_address(address.address.partition("%")[0])
            except ValueError:
                continue  # a MAC address
            if not (ip.is_loopback or ip.is_link_local):
                found.append(ip)
    return tuple(str(ip) for ip in sorted(found, key=lambda ip: (ip.version, ip.packed)))


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0][:200]
