"""The key file: whole or not there, and never somebody else's."""

import os
import stat
from pathlib import Path

import pytest

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity


def test_the_next_process_is_the_same_peer(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.key"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_no_flipped_bit_and_no_tear_makes_us_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(LocalError, match="is not a shoal identity"):
            Identity.load_or_create(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(LocalError, match="is not a shoal identity"):
            Identity.load_or_create(path)


def test_what_a_crash_left_beside_it_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "identity.key.new").write_bytes(b"half a k")
    first = Identity.load_or_create(tmp_path / "identity.key")
    assert Identity.load_or_create(tmp_path / "identity.key").peer_id == first.peer_id


def test_a_full_disk_is_one_line_and_leaves_no_half_key(tmp_path: Path) -> None:
    (tmp_path / "identity.key.new").symlink_to("/dev/full")
    with pytest.raises(LocalError, match=r"cannot write the key file .*: No space left on device"):
        Identity.load_or_create(tmp_path / "identity.key")
    assert not (tmp_path / "identity.key").exists()
