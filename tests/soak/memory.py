"""Does a peer's memory grow? A long demo, sampled; run by `make soak` (30 minutes, `--seconds` for another length).

Compares each process's resident memory early on with that at the end, and says both.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WARM_UP_S = 120.0
WINDOW_S = 300.0
SAMPLE_S = 15.0
PEER_MB_MAX = 450.0
GROWTH_MAX = 1.03
"""The last window's mean over the first's: what a leak of 2 kB a step would pass in half an hour."""


def sample(parent: psutil.Process) -> dict[str, float]:
    """Resident megabytes of every child, by name and process id."""
    resident = {}
    for child in parent.children(recursive=True):
        try:
            resident[f"{child.name()}-{child.pid}"] = child.memory_info().rss / 1e6
        except psutil.Error:
            continue  # It ended meanwhile.
    return resident


def watch(process: subprocess.Popen[bytes]) -> list[tuple[float, dict[str, float]]]:
    begun_s = time.monotonic()
    samples = []
    while process.poll() is None:
        time.sleep(SAMPLE_S)
        try:
            samples.append((time.monotonic() - begun_s, sample(psutil.Process(process.pid))))
        except psutil.Error:
            break
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    seconds = parser.parse_args().seconds
    window_s = min(WINDOW_S, seconds / 4)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "shoal.deploy.cli", "demo", "--steps", "1000000", "--seconds", str(seconds)]
        with log.open("wb") as output:
            environment = os.environ | {"XDG_STATE_HOME": folder}
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            samples = watch(process)
        if process.returncode:
            sys.stdout.write(log.read_text())
            return process.returncode
    ended_s = seconds  # what comes after is the swarm leaving and the sample of text
    early = [row for at_s, row in samples if WARM_UP_S <= at_s <= WARM_UP_S + window_s]
    late = [row for at_s, row in samples if ended_s - window_s <= at_s <= ended_s]
    failed = False
    for name in sorted(set.intersection(*(set(row) for row in early + late))):
        first, last = (statistics.mean(row[name] for row in rows) for rows in (early, late))
        most = max(row[name] for _, row in samples if name in row)
        too_much = last > GROWTH_MAX * first or (name.startswith("python") and most > PEER_MB_MAX)
        failed |= too_much
        sys.stdout.write(
            f"{name:16} {first:7.1f} -> {last:7.1f} MB, at most {most:7.1f}{'  TOO MUCH' if too_much else ''}\n"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
