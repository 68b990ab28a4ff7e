"""Ten million messages, files and plans that are nearly right, at every door; run by `make soak-fuzz`.

Each target of `tests/fuzz/` gets its share, in pieces of its own process each, so that a hang or a crash of the
interpreter is seen too. Where Atheris is installed the first pieces follow coverage, and the others change what those
have found: following costs five times as much for each execution. What has been done is written down after every piece:
started again, it goes on. Exits with 1 if anything was found; findings stand in `tests/fuzz/corpus/`.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ENGINE = HERE.parent / "fuzz" / "fuzz_engine.py"
SHARES = {
    "frames": 1_700_000,
    "certificates": 300_000,
    "envelopes": 2_000_000,
    "frame_metas": 2_000_000,
    "directory_bytes": 1_000_000,
    "records": 800_000,
    "calls": 700_000,
    "plans": 500_000,
    "invites": 300_000,
    "spec_records": 150_000,
    "networks": 150_000,
    "run_specs": 100_000,
    "snapshots": 100_000,
    "scenarios": 60_000,
    "swarm_members": 80_000,
    "swarm_strangers": 40_000,
    "swarm_experts": 20_000,
}
"""Target -> executions, of ten millions: the quicker it is and the more strangers reach it, the more."""
PIECE_OF = 10
FOLLOWING = 2
"""So many of the pieces follow coverage."""
PIECE_S_MAX = 3600.0


def play(target: str, runs: int, piece: int, folder: Path) -> tuple[bool, str]:
    """Returns: (whether nothing was found, the last words of the process)."""
    words = [sys.executable, str(ENGINE), target, "--runs", str(runs), "--seed", str(piece), "--folder", str(folder)]
    words += [] if piece <= FOLLOWING else ["--plain"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PIECE_S_MAX, errors="replace")
    except subprocess.TimeoutExpired:
        return False, f"hung for {PIECE_S_MAX:.0f} s"
    said = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode == 0, "\n".join(said[-1:] if done.returncode == 0 else said[-40:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=10_000_000, help="in all")
    parser.add_argument("--folder", type=Path, default=HERE.parent.parent / "build" / "fuzz")
    parser.add_argument("--only", action="append", choices=[*SHARES], help="these targets alone")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    book = arguments.folder / "done.json"
    done: dict[str, int] = json.loads(book.read_text()) if book.exists() else {}
    scale = arguments.executions / sum(SHARES.values())
    found = 0
    begun_s = time.monotonic()
    for piece in range(PIECE_OF):
        for target, share in SHARES.items():
            runs = max(1, round(share * scale / PIECE_OF))
            if done.get(target, 0) >= runs * (piece + 1) or (arguments.only and target not in arguments.only):
                continue
            holds, said = play(target, runs, piece + 1, arguments.folder)
            print(f"{target} {piece + 1}/{PIECE_OF}: {'ok' if holds else 'FOUND'}: {said}", flush=True)
            found += not holds
            done[target] = runs * (piece + 1)
            book.write_text(json.dumps(done))
    print(f"{sum(done.values())} executions in all, {time.monotonic() - begun_s:.0f} s of them now, {found} findings")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
