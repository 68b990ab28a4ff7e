"""What may be relied on of a disk, whichever: every test runs on both, and a long random one compares them."""

import random
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.ports import Disk
from shoal.protocol.sim.disk import SimDisk

ROOT = PurePosixPath()


@pytest.fixture(params=["sim", "live"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    disk: Disk = SimDisk(random.Random(0)) if request.param == "sim" else LiveDisk(tmp_path / "root")
    disk.make_folder(ROOT)
    return disk


def at(path: str) -> PurePosixPath:
    return PurePosixPath(path)


@pytest.mark.parametrize("data", [b"", b"some bytes", bytearray(b"array"), memoryview(b"a view")[2:]])
def test_what_is_written_is_read(disk: Disk, data: Any) -> None:
    disk.write(at("file"), data)
    assert disk.read(at("file")) == bytes(data)


def test_a_file_is_overwritten_whole(disk: Disk) -> None:
    disk.write(at("file"), b"a long text")
    disk.write(at("file"), b"short")
    assert disk.read(at("file")) == b"short"


def test_a_file_needs_its_folder(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.write(at("folder/file"), b"")
    disk.make_folder(at("folder"))
    disk.write(at("folder/file"), b"x")
    assert disk.read(at("folder/file")) == b"x"


def test_folders_are_made_with_those_above_and_made_again_without_harm(disk: Disk) -> None:
    disk.make_folder(at("a/b/c"))
    disk.write(at("a/b/file"), b"x")
    disk.make_folder(at("a/b/c"))
    disk.make_folder(at("a/b"))
    assert disk.list(at("a/b")) == ("c", "file")


def test_names_are_listed_in_order_and_none_where_there_is_no_folder(disk: Disk) -> None:
    for name in ("b", "a", "C", ".d"):
        disk.write(at(name), b"")
    assert disk.list(ROOT) == (".d", "C", "a", "b")
    assert disk.list(at("nowhere")) == ()
    assert disk.list(at("nowhere/at/all")) == ()


def test_a_file_replaces_a_file(disk: Disk) -> None:
    disk.write(at("new"), b"new")
    disk.write(at("old"), b"old")
    disk.replace(at("new"), at("old"))
    assert disk.list(ROOT) == ("old",)
    assert disk.read(at("old")) == b"new"


def test_a_folder_moves_with_all_that_is_in_it(disk: Disk) -> None:
    disk.make_folder(at("a/b/c"))
    disk.write(at("a/b/c/file"), b"x")
    disk.replace(at("a/b"), at("a/z"))
    assert disk.list(at("a")) == ("z",)
    assert disk.read(at("a/z/c/file")) == b"x"


def test_a_folder_does_not_replace_one_with_content(disk: Disk) -> None:
    for name in ("a", "b"):
        disk.make_folder(at(name))
        disk.write(at(name) / "file", name.encode())
    with pytest.raises(OSError, match="not empty"):
        disk.replace(at("a"), at("b"))
    assert disk.read(at("a/file")), disk.read(at("b/file")) == (b"a", b"b")


def test_nothing_moves_between_folders(disk: Disk) -> None:
    disk.make_folder(at("folder"))
    disk.write(at("file"), b"x")
    with pytest.raises(ValueError, match="in two folders"):
        disk.replace(at("file"), at("folder/file"))
    assert disk.read(at("file")) == b"x"


def test_a_tree_is_removed_and_nothing_is_too(disk: Disk) -> None:
    disk.make_folder(at("a/b"))
    disk.write(at("a/b/file"), b"x")
    disk.write(at("file"), b"x")
    for path in ("a", "file", "a", "a/b", "nowhere/at/all"):
        disk.remove_tree(at(path))
    assert disk.list(ROOT) == ()
    with pytest.raises(OSError, match="busy"):
        disk.remove_tree(ROOT)


def test_a_lock_is_free_again_after_use_and_after_an_error(disk: Disk) -> None:
    with disk.lock(at(".lock")):
        assert disk.list(ROOT) == (".lock",)
    with pytest.raises(RuntimeError, match="inside"), disk.lock(at(".lock")):
        raise RuntimeError("inside")
    with disk.lock(at(".lock")), disk.lock(at("another")):
        pass


@pytest.mark.parametrize("path", ["/etc", "..", "../x", "a/../../x", "/"])
@pytest.mark.parametrize(
    "call",
    [
        lambda disk, path: disk.read(path),
        lambda disk, path: disk.write(path, b""),
        lambda disk, path: disk.replace(path, path.parent / "y"),
        lambda disk, path: disk.replace(path.parent / "y", path),
        lambda disk, path: disk.remove_tree(path),
        lambda disk, path: disk.list(path),
        lambda disk, path: disk.make_folder(path),
        lambda disk, path: disk.sync_folder(path),
        lambda disk, path: disk.lock(path).__enter__(),
    ],
)
def test_no_path_leads_out(disk: Disk, path: str, call: Callable[[Disk, PurePosixPath], Any]) -> None:
    with pytest.raises(ValueError, match="leads out of"):
        call(disk, at(path))


def test_a_message_can_name_any_path(disk: Disk) -> None:
    assert disk.where(at("a/b")).endswith("/a/b")
    assert disk.where(ROOT)


# Both at once


PATHS = [at(path) for path in ("", "a", "b", "c", "a/a", "a/b", "a/c", "b/a", "a/b/a", "a/b/b", "b/a/b/c")]


def some_call(rng: random.Random) -> Callable[[Disk], object]:
    path, other = rng.choice(PATHS), rng.choice(PATHS)
    match rng.randrange(9):
        case 0 | 1:
            return lambda disk: disk.write(path, str(other).encode())
        case 2 | 3:
            return lambda disk: disk.make_folder(path)
        case 4:
            return lambda disk: disk.replace(path, path.with_name(other.name)) if path.name and other.name else None
        case 5:
            return lambda disk: disk.remove_tree(path)
        case 6:
            return lambda disk: disk.read(path)
        case 7:
            return lambda disk: disk.sync_folder(path)
    return lambda disk: disk.list(path)


def outcome(call: Callable[[Disk], object], disk: Disk) -> object:
    try:
        return call(disk)
    except OSError as error:
        return error.errno


def tree(disk: Disk, path: PurePosixPath = ROOT) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in disk.list(path):
        try:
            found[name] = disk.read(path / name)
        except IsADirectoryError:
            found[name] = tree(disk, path / name)
    return found


def test_both_disks_answer_every_call_alike(tmp_path: Path) -> None:
    """1,000 calls drawn; the errors are the operating system's."""
    rng = random.Random(5)
    live, sim = LiveDisk(tmp_path / "root"), SimDisk(random.Random(0))
    live.make_folder(ROOT)
    seen = set()
    for number in range(1000):
        call = some_call(rng)
        answers = outcome(call, live), outcome(call, sim)
        assert answers[0] == answers[1], (number, call.__code__.co_firstlineno, answers)
        if isinstance(answers[0], int):
            seen.add(answers[0])
        if number % 50 == 0:
            assert tree(live) == tree(sim), number
    assert tree(live) == tree(sim)
    assert len(seen) >= 5, "few kinds of errors met"
