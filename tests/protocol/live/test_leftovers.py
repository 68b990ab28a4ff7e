import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.protocol.errors import TransportError
from shoal.protocol.live import leftovers


def stale_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    return path


def gone_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_sockets_of_a_killed_peer_are_removed_and_no_others(tmp_path):
    ours = stale_socket(tmp_path / "hivemind-p2pd-ours.sock")
    foreign = stale_socket(tmp_path / "hivemind-p2pd-foreign.sock")
    unrelated = stale_socket(tmp_path / "precious.sock")
    leftovers.remember(tmp_path, gone_process(), [ours, unrelated])
    asyncio.run(leftovers.clear(tmp_path))
    assert not ours.exists()
    assert foreign.exists()
    assert unrelated.exists()
    assert not (tmp_path / "p2pd.json").exists()


def test_a_socket_that_somebody_listens_on_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "_GRACE_S", 0.2)
    path = tmp_path / "hivemind-p2pd-live.sock"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        leftovers.remember(tmp_path, gone_process(), [path])
        asyncio.run(leftovers.clear(tmp_path))
        assert path.exists()


def test_a_socket_that_is_closed_a_moment_later_is_removed(tmp_path):
    """The kernel takes a killed process's name before it closes what it had open."""
    path = tmp_path / "hivemind-p2pd-dying.sock"
    leftovers.remember(tmp_path, gone_process(), [path])

    async def main():
        with socket.socket(socket.AF_UNIX) as dying:
            dying.bind(str(path))
            dying.listen()
            clearing = asyncio.create_task(leftovers.clear(tmp_path))
            await asyncio.sleep(0.1)
            assert path.exists()
        await clearing

    asyncio.run(main())
    assert not path.exists()


def begun(process):
    """Wait until the kernel shows the command line of the new process. `Popen` may return before that: on a busy core
    302 of 400 new processes had none yet."""
    deadline_s = time.monotonic() + 30.0
    while b"time.sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_daemon_that_will_not_go_is_ended_and_another_process_of_its_number_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "_GRACE_S", 0.2)
    path = tmp_path / "hivemind-p2pd-stuck.sock"
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"-listen=/unix{path}"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for process in (daemon, other):
            begun(process)
            with monkeypatch.context() as former:
                former.setattr("os.getpid", gone_process)
                leftovers.remember(tmp_path, process.pid, [path])
            began_s = time.monotonic()
            asyncio.run(leftovers.clear(tmp_path))
        assert time.monotonic() - began_s < 60
        assert daemon.wait(30) != 0
        assert other.poll() is None
    finally:
        for process in (daemon, other):
            process.kill()
            process.wait()


def test_the_daemon_of_a_peer_that_runs_is_never_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "_GRACE_S", 0.2)
    path = tmp_path / "hivemind-p2pd-busy.sock"
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"-listen=/unix{path}"])
    try:
        begun(daemon)
        leftovers.remember(tmp_path, daemon.pid, [path])
        with pytest.raises(TransportError, match=f"is a copy runs on this machine, as process {os.getpid()}"):
            asyncio.run(leftovers.clear(tmp_path))
        assert daemon.poll() is None
    finally:
        daemon.kill()
        daemon.wait()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"process_id": "x", "sockets": []}', "\x00"])
def test_a_record_that_cannot_be_read_is_no_obstacle(tmp_path, text):
    (tmp_path / "p2pd.json").write_text(text)
    asyncio.run(leftovers.clear(tmp_path))


def test_a_disk_that_takes_no_note_is_no_obstacle(tmp_path, caplog):
    (tmp_path / "p2pd.json").symlink_to("/dev/full")
    leftovers.remember(tmp_path, gone_process(), [])
    assert "No space left on device" in caplog.text
