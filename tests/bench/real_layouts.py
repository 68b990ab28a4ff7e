"""What layouts are worth among real processes of one machine whose cores are divided unequally: the live swarm beside
fixed layouts, in turns. Run by hand on a quiet machine, a quarter of an hour.

    real_layouts.py                              # all layouts, three rounds
    real_layouts.py --layouts live,greedy --rounds 5

    counted   three stages of two layers each, two peers a stage as they are counted off from the slowest on; fixed
    greedy    three stages of two layers each, peers dealt to them by their measured speed; fixed
    live      `--stages auto`: the swarm's own coordinators decide
    live-3    `--stages 3`: the same, with three stages

Figures are steps a second (4,096 tokens each) between `--since` and the end of a demo, standstills included, and the
processor's seconds that all processes spend on a step, network daemons included.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

LAYOUTS = ("counted", "greedy", "live", "live-3")
PARTS = "1,1,2,2,4,4"
PEER = Path(__file__).parent / "live" / "peer_with_layout.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default=PARTS)
    parser.add_argument("--since", type=float, default=30.0, help="seconds from the start that are not counted")
    parser.add_argument("--seconds", type=float, default=45.0, help="that are")
    options = parser.parse_args()
    layouts = options.layouts.split(",")
    found: dict[str, list[tuple[float, float]]] = {layout: [] for layout in layouts}
    print(f"{'layout':<10}{'steps/s':>10}{'CPU s/step':>12}", flush=True)
    for _ in range(options.rounds):
        for layout in layouts:
            found[layout].append(played(layout, options.parts, options.since, options.seconds))
            print(f"{layout:<10}{found[layout][-1][0]:>10.2f}{found[layout][-1][1]:>12.2f}", flush=True)
    print("medians")
    for layout, figures in found.items():
        rates, cpu_s = zip(*figures, strict=True)
        print(f"{layout:<10}{statistics.median(rates):>10.2f}{statistics.median(cpu_s):>12.2f}")


def played(layout: str, parts: str, since_s: float, seconds: float) -> tuple[float, float]:
    """(steps a second, processor seconds a step) of one demo."""
    live = layout.startswith("live")
    stages = "auto" if layout == "live" else "3"
    command = [sys.executable, str(PEER), "live" if live else layout, "demo"]
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "steps.jsonl"
        whole_s = since_s + seconds
        command += ["--stages", stages, "--parts", parts, "--seconds", str(whole_s + 5.0), "--steps", "100000"]
        command += ["--json", str(told)]
        environment = {**os.environ, "XDG_STATE_HOME": folder}
        began_s = time.monotonic()
        demo = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(since_s)
            before = _steps(told), _cpu_s(demo.pid)
            time.sleep(max(0.0, began_s + whole_s - time.monotonic()))
            after = _steps(told), _cpu_s(demo.pid)
            if not after[0]:
                raise SystemExit(f"{layout}: no step in {whole_s:.0f} s; see what `{' '.join(command)}` says")
        finally:
            demo.wait()
    steps = after[0] - before[0]
    return steps / seconds, (after[1] - before[1]) / max(1, steps)


def _steps(told: Path) -> int:
    if not told.exists():
        return 0
    return sum("step" in json.loads(line) for line in told.read_text().splitlines() if line.endswith("}"))


def _cpu_s(pid: int) -> float:
    """The processor's seconds of all processes that the demo has started."""
    total_s = 0.0
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total_s += times.user + times.system
    return total_s


if __name__ == "__main__":
    main()
