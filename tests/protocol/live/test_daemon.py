"""A daemon does not outlive its peer, whatever it is doing."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from daemon_kills import back_after_each

from shoal.protocol.live import leftovers
from shoal.protocol.live.loop import run

PEER = """
import asyncio, sys
from pathlib import Path
from shoal.protocol.identity import Identity
from shoal.protocol.live.daemon import Daemon

async def main(folder):
    identity = Identity.load_or_create(folder / "identity.key")
    listen = ("/ip4/127.0.0.1/tcp/0",)
    daemon = Daemon(identity, folder / "state", listen=listen, announce=(), relays=(), use_relay=False)
    await daemon.start()
    print(daemon.process_id, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.skipif(not shutil.which("setpriv"), reason="nothing here tells the kernel whose end is whose: util-linux")
def test_the_daemon_of_a_killed_peer_ends_even_if_it_can_do_nothing(tmp_path: Path) -> None:
    """Suspended it cannot notice by itself that its peer is gone."""
    peer = subprocess.Popen([sys.executable, "-c", PEER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert peer.stdout is not None
        daemon = psutil.Process(int(peer.stdout.readline()))
        os.kill(daemon.pid, signal.SIGSTOP)
        assert not ended(daemon)
        peer.kill()
        peer.wait(30)
        deadline_s = time.monotonic() + 30.0
        while not ended(daemon):
            assert time.monotonic() < deadline_s, "it is still there"
            time.sleep(0.02)
    finally:
        peer.kill()
        peer.wait(30)
        asyncio.run(leftovers.clear(tmp_path / "state"))  # its sockets; should it live, it too


@pytest.mark.process
@pytest.mark.timeout(300)
def test_peers_come_back_whenever_their_daemons_are_killed_or_suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers that dial others, absent ones too. `tests/soak/daemons.py` does the same fifty times."""
    monkeypatch.setattr("shoal.protocol.live.daemon._PULSE_S", 0.5)
    monkeypatch.setattr("shoal.protocol.live.daemon._PULSE_TIMEOUT_S", 2.0)
    signals = [signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL, signal.SIGKILL]
    assert len(run(back_after_each(signals, tmp_path, random.Random(1)))) == len(signals)
    assert not psutil.Process().children()
