"""What a machine says of itself, from files that say so."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from shoal.deploy.doctor import local
from shoal.deploy.doctor.diagnosis import diagnose
from shoal.deploy.doctor.findings import Findings, MachineFound

DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x)\nGCC version: 12\n"


def device(root: Path, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices" / f"0000:0{len(list(root.rglob('vendor')))}:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "class").write_text(kind + "\n")


def test_a_gpu_without_its_driver_is_seen_on_the_bus(tmp_path: Path) -> None:
    device(tmp_path, "0x8086", "0x030000")
    assert local.nvidia(tmp_path) == (False, "")
    device(tmp_path, "0x10de", "0x040300")  # the sound of its HDMI
    assert local.nvidia(tmp_path) == (False, "")
    device(tmp_path, "0x10de", "0x030200")
    assert local.nvidia(tmp_path) == (True, "")
    problems = diagnose(Findings(machine=MachineFound(gpu=local.gpu(tmp_path)), wants_cuda=True)).problems
    assert [problem.code for problem in problems] == ["no-driver"]


def test_the_drivers_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(DRIVER)
    assert local.nvidia(tmp_path) == (True, "570.86.15")


def codes(root: Path) -> list[str]:
    findings = Findings(machine=MachineFound(gpu=local.gpu(root)), wants_cuda=True)
    return [problem.code for problem in diagnose(findings).problems]


@pytest.fixture
def with_driver(tmp_path: Path) -> Path:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(DRIVER)
    return tmp_path


def test_torch_without_cuda(with_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert codes(with_driver) == ["torch-without-cuda"]


def test_a_driver_that_torch_cannot_use(with_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    assert codes(with_driver) == ["cuda-unusable"]
    assert local.gpu(with_driver).torch_error.endswith("(found version 12020).")


def test_torch_that_cannot_be_loaded(with_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert codes(with_driver) == ["torch-broken"]


def test_no_gpu_at_all(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    assert codes(tmp_path) == ["no-gpu"]


def test_where_there_is_no_bus_nothing_is_claimed(tmp_path: Path) -> None:
    assert local.nvidia(tmp_path) == (None, None)


def test_a_folder_that_can_be_written_and_one_to_be_made(tmp_path: Path) -> None:
    free_bytes, error = local.disk(tmp_path)
    assert error == ""
    assert free_bytes is not None
    assert local.disk(tmp_path / "not" / "there" / "yet")[1] == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    free_bytes, error = local.disk(tmp_path / "file")
    assert "is a file" in error or "not a directory" in error
    found = MachineFound(folder=str(tmp_path / "file"), folder_error=error, disk_free_bytes=free_bytes)
    assert [problem.code for problem in diagnose(Findings(machine=found)).problems] == ["disk-not-writable"]


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    found = MachineFound(folder=str(tmp_path), disk_free_bytes=local.disk(tmp_path)[0])
    assert [problem.code for problem in diagnose(Findings(machine=found)).problems] == ["disk-full"]


def test_the_clock_is_kept_or_not_or_nobody_knows() -> None:
    assert local.clock_synchronised() in (True, False, None)


def test_loopback_is_no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(*texts: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(address=text) for text in texts]

    found = {
        "lo": addresses("127.0.0.1", "::1"),
        "eth0": addresses("fe80::1%eth0", "192.168.1.2", "00:11:22:33:44:55"),
        "eth1": addresses("10.0.0.1"),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "eth1") for name in found})
    assert local.own_addresses() == ("192.168.1.2",)
