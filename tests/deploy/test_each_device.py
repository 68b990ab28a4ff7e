"""`shoal join --device all` and lists: a peer for each device, under one command."""

import json
import signal
from typing import Any

import pytest
import torch

from shoal.deploy.manners.device import devices_of
from shoal.deploy.manners.limits import Limits
from shoal.deploy.session.each_device import Each, share_of
from shoal.protocol.errors import LocalError


def test_all_are_the_gpus_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices_of("all") == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices_of("cuda:2,cpu") == ["cuda:2", "cpu"]
    with pytest.raises(LocalError, match="sees 3 devices of that kind"):
        devices_of("cuda:0,cuda:3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LocalError, match="--device all: torch sees no GPU"):
        devices_of("all")


def test_lines_are_shared_and_devices_are_not() -> None:
    limits = Limits(upload_mbit_s=30.0, download_mbit_s=0.0, relay_mbit_s=0.2, memory_gb=8.0, compute_share=0.5)
    part = share_of(limits, 3)
    assert (part.upload_mbit_s, part.download_mbit_s, part.relay_mbit_s) == (10.0, 0.0, 0.1)
    assert (part.memory_gb, part.compute_share) == (8.0, 0.5)


def test_only_the_first_peer_has_the_port_that_was_asked_for(tmp_path: Any) -> None:
    each = Each(
        name="me",
        limits=Limits(only_when_idle=True, hours="22:00-07:00"),
        listen="/ip4/0.0.0.0/tcp/4001",
        state_dir=tmp_path,
        threads=0,
        flags=["--no-record"],
    )
    one, two = (each.argv(index, f"cuda:{index}", among=2, threads=1) for index in (0, 1))
    assert {
        "--name=me-1",
        "--device=cuda:0",
        "--listen=/ip4/0.0.0.0/tcp/4001",
        f"--state-dir={tmp_path / 'peer-1'}",
    } <= set(one)
    assert {
        "--name=me-2",
        "--device=cuda:1",
        "--listen=/ip4/0.0.0.0/tcp/0",
        f"--state-dir={tmp_path / 'peer-2'}",
    } <= set(two)
    assert {"--limit=only_when_idle=true", "--limit=hours=22:00-07:00", "--yes", "--no-record"} <= set(one)


@pytest.mark.process
@pytest.mark.timeout(180)
def test_two_peers_take_part_under_one_command_and_leave_with_it(world: Any) -> None:
    slowly = ("--reports", "--threads", 1, "--limit", "compute_share=0.1")  # nothing here is about training
    host = world.shoal("host", world.spec(5000), "--listen", "127.0.0.1:0", "--device", "cpu", *slowly)
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    both = world.shoal(
        "join", invite, "--device", "cpu,cpu", "--listen", "127.0.0.1:0", "--name", "box", "--threads", 1
    )

    def names() -> set[str]:
        whole, _, _ = host.output.rpartition("\n")
        told = [json.loads(line) for line in whole.splitlines() if line.startswith('{"event":"Status"')]
        return {peer["name"] for peer in told[-1]["status"]["peers"]} if told else set()

    world.until(lambda: {"box-1", "box-2"} <= names(), timeout_s=90)
    both.process.send_signal(signal.SIGTERM)
    assert both.wait(60) == 0, both.output + world.logs()
    assert "cpu: " in both.output
    host.process.send_signal(signal.SIGTERM)
    assert host.wait(60) == 0, world.logs()
    world.until(lambda: not world.ours(), timeout_s=20)


@pytest.mark.process
def test_a_list_with_something_else_is_refused_before_anything_is_done(world: Any) -> None:
    wrong = world.shoal("join", "shoal1", "--device", "cpu,tpu")
    assert wrong.wait(60) == 2
    assert "--device tpu: shoal computes on" in wrong.errors
