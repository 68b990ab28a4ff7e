"""What only a real disk can show: that syncs happen, that a dead process leaves no lock, how a full one feels."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path, PurePosixPath

import pytest

from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.store import PlanStore
from shoal.protocol.live.disk import LiveDisk

FILE = PurePosixPath("a", "b", "file")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of what fsync was called, in order."""
    paths: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return paths


def test_each_call_syncs_what_it_promises(tmp_path: Path, synced: list[str]) -> None:
    root = tmp_path / "root"
    disk = LiveDisk(root)

    def since() -> list[str]:
        paths = [str(Path(path).relative_to(tmp_path)) for path in synced]
        synced.clear()
        return paths

    disk.make_folder(FILE.parent)
    assert since() == [".", "root", "root/a"], "the name of a new folder is in the one above it"
    disk.make_folder(FILE.parent)
    assert since() == [".", "root", "root/a"], "who made it may have died before it synced"
    disk.write(FILE, b"x")
    assert since() == ["root/a/b/file"]
    disk.replace(FILE, FILE.with_name("other"))
    disk.remove_tree(FILE.with_name("other"))
    assert since() == []
    disk.sync_folder(FILE.parent)
    assert since() == ["root/a/b"]


def test_a_file_is_synced_after_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    LiveDisk(tmp_path).write(PurePosixPath("file"), b"few bytes")  # which a buffer could hold back
    assert sizes == [9]


def test_a_full_disk_is_an_error_of_the_write() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        LiveDisk(Path("/dev")).write(PurePosixPath("full"), b"x")
    assert caught.value.errno == errno.ENOSPC


def test_a_folder_without_leave_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotADirectoryError):
        LiveDisk(tmp_path / "file" / "root").make_folder(PurePosixPath())


def test_a_lock_makes_another_thread_wait(tmp_path: Path) -> None:
    lock = PurePosixPath(".lock")
    order = []

    def second() -> None:
        with LiveDisk(tmp_path).lock(lock):
            order.append("second")

    with LiveDisk(tmp_path).lock(lock):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.05)  # it has had a chance to be wrong
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import signal, sys; from pathlib import Path, PurePosixPath; from shoal.protocol.live.disk import LiveDisk\n"
        "with LiveDisk(Path(sys.argv[1])).lock(PurePosixPath('.lock')):\n"
        "    print('held', flush=True)\n"
        "    signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        child.kill()
    with LiveDisk(tmp_path).lock(PurePosixPath(".lock")):
        pass


VOTER = """
import sys
from pathlib import Path
from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.store import PlanStore
from shoal.protocol.live.disk import LiveDisk
store = PlanStore(LiveDisk(Path(sys.argv[1])))
kept = store.load("run")
term = kept.granted_term if kept else 0
while True:
    term += 1
    store.save(ChainRecord(run="run", granted_term=term, live=bytes(term % 50 * 1000)))
    print(term, flush=True)
"""


@pytest.mark.process
def test_a_voter_killed_at_any_moment_finds_every_vote_it_cast(tmp_path: Path) -> None:
    """SIGKILL, eight times, at no particular moment of a loop that does nothing but save."""
    total = 0
    for life in range(8):
        child = subprocess.Popen([sys.executable, "-c", VOTER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        with child:
            assert child.stdout is not None
            for _ in range(5 + life):
                child.stdout.readline()
            child.kill()
            rest = child.stdout.read()
        lines = [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        kept = PlanStore(LiveDisk(tmp_path)).load("run")
        assert isinstance(kept, ChainRecord)
        if lines:
            assert kept.granted_term in (int(lines[-1]), int(lines[-1]) + 1)
        assert kept.granted_term > total, "this life's votes"
        total = kept.granted_term
