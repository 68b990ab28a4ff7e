"""How long does a newcomer take from its invite to its first microbatch? Real processes on loopback; run by hand.

A host and a first volunteer train two stages; volunteers join them one after the other, each with a new state folder.
For each: seconds from the start of its process until it takes part, until it says that it has computed a microbatch (it
says so once a second), and until a group commits a step with it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from peer_processes import SPEC, PeerProcess, start_peer

PATIENCE_S = 120.0
EAGER = ("--limit", "nice=0")
MARKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "takes part": lambda event: event["event"] == "Joined",
    "microbatch": lambda event: event["event"] == "Contribution" and event["microbatches_total"] > 0,
    "commit": lambda event: event["event"] == "Committed",
}


def events(peer: PeerProcess) -> Iterator[tuple[float, dict[str, Any]]]:
    """(seconds since the start, event), as they come."""
    while (since_s := time.monotonic() - peer.began_s) < PATIENCE_S:
        yield from ((since_s, event) for event in peer.fresh())
        if peer.has_ended:
            raise SystemExit(f"the process ended with {peer.popen.returncode}")
        time.sleep(0.02)
    raise SystemExit(f"nothing came of it in {PATIENCE_S:.0f} s")


def joined(peer: PeerProcess) -> dict[str, float]:
    found: dict[str, float] = {}
    for since_s, event in events(peer):
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
        (folder / "run.toml").write_text(SPEC.format(name="joining", layers=4, stages=2, peers=2))
        peers = [start_peer(folder, "host", "host", str(folder / "run.toml"), *EAGER)]
        try:
            invite = next(event["invite"] for _, event in events(peers[0]) if event["event"] == "Ready")
            print(f"the invite has {len(invite)} characters")
            peers.append(start_peer(folder, "first", "join", invite, *EAGER))
            joined(peers[-1])
            rows = []
            for number in range(newcomers):
                peers.append(start_peer(folder, f"newcomer-{number}", "join", invite, *EAGER))
                rows.append(joined(peers[-1]))
                print("  ".join(f"{mark} {seconds:.1f} s" for mark, seconds in rows[-1].items()), flush=True)
            print("median:", ", ".join(f"{m} {statistics.median(row[m] for row in rows):.1f} s" for m in MARKS))
        finally:
            for peer in peers:
                peer.kill()


if __name__ == "__main__":
    main()
