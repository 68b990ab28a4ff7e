"""The small scenario: four real peers, one behind a NAT, and an uplink that becomes slow; then the same simulated."""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from figures import Sides, table
from internet.emulator import why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.timeout(240),
]
RUN = Path(__file__).parents[1] / "run.py"
MARK = "SHOAL_LAB_TEST"


class Lab:
    """`run.py` in a process of its own. Whatever it starts inherits a mark."""

    def __init__(self, folder, *words):
        self.mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [sys.executable, str(RUN), *words],
            env=os.environ | {MARK: self.mark, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ours(self):
        """The commands of all living processes that have the mark. With the last of them goes the last namespace."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def dead_sockets():
    """Sockets of network daemons on which nobody listens."""
    listening = {part for line in Path("/proc/net/unix").read_text().splitlines() for part in line.split()[7:]}
    return {str(path) for path in Path("/tmp").glob("hivemind-p2p*.sock")} - listening


def test_a_swarm_trains_through_a_slow_uplink_and_leaves_nothing(tmp_path):
    before = dead_sockets()
    lab = Lab(tmp_path, "small", "--json", str(tmp_path / "out.jsonl"), "--logs", str(tmp_path / "logs"))
    printed, _ = lab.process.communicate(timeout=200)
    logs = "".join(path.read_text()[-2000:] for path in (tmp_path / "logs").glob("*.log"))
    assert lab.process.returncode == 0, printed + logs
    assert not lab.ours()
    assert not dead_sockets() - before
    assert not list(tmp_path.glob("shoal-lab-*"))
    sides = msgspec.json.decode((tmp_path / "out.jsonl").read_bytes(), type=Sides)
    assert printed.strip() == table(sides).strip()
    for figures in (sides.real, sides.virtual):
        assert figures is not None
        assert figures.steps > 2, printed + logs
        assert all(steps_per_s > 0.0 for steps_per_s in figures.parts), printed + logs
        assert (figures.given_up, figures.dissenting, figures.rollbacks) == (0, 0, 0), printed + logs
        assert not figures.problems
    assert sides.real is not None
    assert all(megabytes > 0.0 for megabytes in sides.real.up_mb.values()), "everybody takes part"
    assert sides.real.up_mb["d"] < (20 * 8 + 5 * 9) / 8 * 1.05, "20 Mbit/s until 8 s, 5 Mbit/s from then on"


def test_nothing_is_left_when_it_is_told_to_stop(tmp_path):
    lab = Lab(tmp_path, "small", "--real-only")
    deadline_s = time.monotonic() + 60
    while not any("p2pd" in command.split()[0] for command in lab.ours()):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    lab.process.send_signal(signal.SIGTERM)
    lab.process.communicate(timeout=60)
    assert lab.process.returncode != 0
    assert not lab.ours()
    assert not list(tmp_path.glob("shoal-lab-*"))
