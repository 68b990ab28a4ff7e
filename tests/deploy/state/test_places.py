import errno
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec
import psutil
import pytest

from shoal.deploy.state.places import (
    Running,
    all_running,
    announced,
    claim_first_free,
    claim_folder,
    last_running,
    state_root,
)
from shoal.protocol.errors import LocalError
from shoal.protocol.live.disk import LiveDisk


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_state_is_below_the_xdg_folder(tmp_path: Path) -> None:
    assert state_root() == tmp_path / "shoal"


def test_a_folder_has_one_holder(tmp_path: Path) -> None:
    lock = claim_folder(tmp_path / "peer")
    with pytest.raises(LocalError, match="another shoal runs in"):
        claim_folder(tmp_path / "peer")
    lock.release()
    claim_folder(tmp_path / "peer").release()


def test_a_second_peer_gets_a_second_folder_and_a_restart_the_first(tmp_path: Path) -> None:
    first, second = claim_first_free(tmp_path, "peer"), claim_first_free(tmp_path, "peer")
    assert (first.path.name, second.path.name) == ("peer-1", "peer-2")
    first.release()
    again = claim_first_free(tmp_path, "peer")
    assert again.path == first.path
    again.release()
    second.release()


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot use the state folder"):
        claim_first_free(tmp_path / "file", "peer")


def modes(folder: Path) -> dict[str, int]:
    """Of a folder and of all in it."""
    return {str(path.relative_to(folder)): path.lstat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}


def make_as_before(folder: Path) -> None:
    """A peer's folder with a snapshot, as a shoal left it that closed nothing."""
    for path in (folder / "snapshot-1", folder):
        path.mkdir(parents=True, exist_ok=True)
    for path in (folder / "identity.key", folder / "plans", folder / "snapshot-1" / "head.safetensors"):
        path.write_text("secret")
    for path in (state_root(), folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def own_umask() -> Iterator[None]:
    """That of most systems; a claim changes it for the process."""
    former = os.umask(0o022)
    yield
    os.umask(former)


@pytest.mark.usefixtures("own_umask")
def test_what_a_peer_writes_is_for_its_user_alone() -> None:
    folder = state_root() / "runs" / "run" / "peer-1"
    lock = claim_folder(folder)
    LiveDisk(folder).make_folder(PurePosixPath("run"))
    LiveDisk(folder).write(PurePosixPath("run/plans"), b"plan")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events").write_text("written by a library")
    with announced("shoal1abc", folder):
        found = modes(state_root())
    lock.release()
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}
    assert found["runs/run/peer-1/run/plans"] == 0o600


@pytest.mark.usefixtures("own_umask")
def test_what_an_older_shoal_left_open_is_closed(tmp_path: Path) -> None:
    folder, elsewhere = state_root() / "hosts" / "notes", tmp_path / "disk" / "peer"
    for place in (folder, state_root() / "hosts" / "another", elsewhere):
        make_as_before(place)
    (folder / "link").symlink_to(tmp_path)
    tmp_path.chmod(0o755)
    claim_folder(elsewhere).release()
    for place in (state_root(), elsewhere):
        assert {path: oct(mode) for path, mode in modes(place).items() if mode & 0o077 and path[-4:] != "link"} == {}
    assert (elsewhere / "plans").stat().st_mode & 0o777 == 0o600
    assert tmp_path.stat().st_mode & 0o777 == 0o755, "what a link leads to is not shoal's"


@pytest.mark.usefixtures("own_umask")
def test_a_folder_that_somebody_names_keeps_what_is_not_shoals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    (home / "peer").mkdir(parents=True)
    (home / "page.html").write_text("for everybody")
    (home / "peer" / "page.html").write_text("for everybody")
    claim_folder(home).release()
    claim_folder(home / "peer").release()
    assert (home / "page.html").stat().st_mode & 0o777 == 0o644
    assert (home / "peer" / "page.html").stat().st_mode & 0o777 == 0o644
    assert (home / "peer").stat().st_mode & 0o777 == 0o700


def test_a_run_is_found_only_while_it_lasts() -> None:
    assert last_running() is None
    with announced("shoal1abc"):
        found = last_running()
        assert found is not None
        assert found.invite == "shoal1abc"
        assert found.folder == ""
    assert last_running() is None


def test_a_note_says_where_the_peer_is(tmp_path: Path) -> None:
    with announced("shoal1abc", tmp_path / "peer"):
        assert [note.folder for note in all_running()] == [str(tmp_path / "peer")]


def test_the_note_of_a_dead_process_is_swept() -> None:
    with announced("alive"):
        folder = state_root() / "running"
        # The number of a living process, but of one that started at another time.
        dead = Running(1, created_s=1.0, started_s=9e9, invite="dead")
        (folder / "1.json").write_bytes(msgspec.json.encode(dead))
        (folder / "2.json").write_text("not json")
        found = last_running()
        assert found is not None
        assert found.invite == "alive"
        assert not (folder / "1.json").exists()


@pytest.mark.skipif(not psutil.LINUX, reason="elsewhere the system itself says when a process began by the clock")
def test_setting_the_clock_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    boot_s = psutil.boot_time()
    with announced("shoal1abc"):
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_s + 1.0)
        assert last_running() is not None


def test_a_note_that_cannot_be_written_is_said_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    state_root().mkdir()
    (state_root() / "running").write_text("in the way")
    with announced("shoal1abc"):
        assert last_running() is None
    assert "will not find this peer by themselves" in caplog.text


def test_a_full_disk_has_no_half_of_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full)
        with announced("shoal1abc"):
            assert list((state_root() / "running").iterdir()) == []
