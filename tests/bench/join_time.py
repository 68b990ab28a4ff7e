"""How long does a newcomer take from its invite to its first microbatch? Real processes on loopback; run by hand.

A host and a first volunteer train two stages; volunteers join them one after the other, each with a new state folder.
For each: seconds from the start of its process until it takes part, until it says that it has computed a microbatch (it
says so once a second), and until a group commits a step with it.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SPEC = """
name = "joining"
[model]
dim = 64
num_layers = 4
num_heads = 4
num_kv_heads = 2
ffn_dim = 176
context = 64
[data]
source = "python-library"
tokens_max = 200000
[training]
steps = 100000
microbatches_per_step = 8
microbatch_size = 4
[optimizer]
warmup_steps = 10
[swarm]
stages = 2
min_peers = 2
snapshot_interval_steps = 0
"""
PATIENCE_S = 120.0
MARKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "takes part": lambda event: event["event"] == "Joined",
    "microbatch": lambda event: event["event"] == "Contribution" and event["microbatches_total"] > 0,
    "commit": lambda event: event["event"] == "Committed",
}


class Peer:
    """One `shoal host` or `shoal join`."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        folder.mkdir(exist_ok=True)
        own = {"XDG_STATE_HOME": str(folder / name), "XDG_CONFIG_HOME": str(folder / "config")}
        common = ["--name", name, "--json", "--threads", "1", "--listen", "127.0.0.1:0", "--limit", "nice=0"]
        self._output = folder / f"{name}.out"
        self.began_s = time.monotonic()
        with self._output.open("wb") as stdout, (folder / f"{name}.log").open("wb") as stderr:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "shoal.deploy.cli", *words, *common],
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """(seconds since the start, event), as they come."""
        with self._output.open() as output:
            line = ""
            while (since_s := time.monotonic() - self.began_s) < PATIENCE_S:
                line += output.readline()
                if line.endswith("\n"):
                    if line.startswith("{"):
                        yield since_s, json.loads(line)
                    line = ""
                elif self._popen.poll() is None:
                    time.sleep(0.02)
                else:
                    raise SystemExit(f"the process ended with {self._popen.returncode}")
        raise SystemExit(f"nothing came of it in {PATIENCE_S:.0f} s")

    def end(self) -> None:
        self._popen.send_signal(signal.SIGKILL)
        self._popen.wait()


def joined(peer: Peer) -> dict[str, float]:
    found: dict[str, float] = {}
    for since_s, event in peer.events():
        for mark, is_there in MARKS.items():
            if mark not in found and is_there(event):
                found[mark] = since_s
        if len(found) == len(MARKS):
            return found
    raise AssertionError("a process that goes on has events")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--newcomers", type=int, default=4)
    newcomers = parser.parse_args().newcomers
    with tempfile.TemporaryDirectory(prefix="shoal-join-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(SPEC)
        peers = [Peer(folder, "host", "host", str(folder / "run.toml"))]
        try:
            invite = next(event["invite"] for _, event in peers[0].events() if event["event"] == "Ready")
            print(f"the invite has {len(invite)} characters")
            peers.append(Peer(folder, "first", "join", invite))
            joined(peers[-1])
            rows = []
            for number in range(newcomers):
                peers.append(Peer(folder, f"newcomer-{number}", "join", invite))
                rows.append(joined(peers[-1]))
                print("  ".join(f"{mark} {seconds:.1f} s" for mark, seconds in rows[-1].items()), flush=True)
            print("median:", ", ".join(f"{m} {statistics.median(row[m] for row in rows):.1f} s" for m in MARKS))
        finally:
            for peer in peers:
                peer.end()


if __name__ == "__main__":
    main()
