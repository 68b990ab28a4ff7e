import hashlib
import platform
import shutil
import sys
from pathlib import Path

import pytest

from shoal.protocol.errors import TransportError
from shoal.protocol.identity import Identity
from shoal.protocol.live import daemon as daemon_module
from shoal.protocol.live.daemon import Daemon, daemon_path
from shoal.protocol.live.daemon_binary import check_daemon
from shoal.protocol.live.loop import run

HERE = f"{sys.platform}-{platform.machine()}"


@pytest.fixture
def tampered(tmp_path: Path) -> Path:
    """The daemon with one bit flipped: it would run."""
    path = tmp_path / "p2pd"
    shutil.copy(daemon_path(), path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes((last ^ 1,)))
    return path


def test_hiveminds_own_daemon_is_known() -> None:
    check_daemon(daemon_path())


def test_another_daemon_is_refused_in_a_line_that_says_what_to_do(tampered: Path, tmp_path: Path) -> None:
    for binary in (tampered, tmp_path / "missing"):
        with pytest.raises(TransportError, match="install hivemind again: `pip install") as refused:
            check_daemon(binary)
        assert len(str(refused.value).splitlines()) == 1


def test_of_two_known_versions_either_will_do_and_of_an_unknown_machine_nothing_is_said(tmp_path: Path) -> None:
    binary, known = tmp_path / "p2pd", tmp_path / "known"
    binary.write_bytes(b"the next one")
    digest = hashlib.sha256(b"the next one").hexdigest()
    known.write_text(f"{'0' * 64}  {HERE}\n{digest}  {HERE}\n")
    check_daemon(binary, known=known)
    known.write_text(f"{'0' * 64}  plan9-mips\n")
    check_daemon(binary, known=known)


@pytest.mark.process
def test_a_peer_does_not_start_a_daemon_that_was_changed(
    tampered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "daemon_path", lambda: tampered)

    async def main() -> None:
        daemon = Daemon(
            Identity.generate(),
            tmp_path / "state",
            listen=("/ip4/127.0.0.1/tcp/0",),
            announce=(),
            relays=(),
            use_relay=False,
        )
        with pytest.raises(TransportError, match="not the one that hivemind ships"):
            await daemon.start()
        assert not daemon.is_open
        assert not (tmp_path / "state" / "p2pd.key").exists()
        await daemon.close()

    run(main())
