"""Does training stand still when members of a stage move away one after the other while others die?

Run by `make soak-moves` (100 seeds, half a minute each), or with less: `--seeds 10`. A line a seed;
`--first SEED --seeds 1` repeats it exactly. Exits with 1 if any stood still for longer than `--stall`.
"""

import argparse
import logging
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from restless import RestlessRun, play_restless

STALL_S_MAX = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--s-max", type=int, default=1)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0, help="of virtual time, each")
    parser.add_argument("--kill-every", type=float, default=8.0, help="seconds")
    parser.add_argument("--stall", type=float, default=STALL_S_MAX, help="seconds without a step that are too many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # hundreds of peers that complain of each other
    stalls_s, failed = [], []
    for seed in range(options.first, options.first + options.seeds):
        result = play_restless(
            RestlessRun(
                seed=seed,
                peers=options.peers,
                s_max=options.s_max,
                kill_every_s=options.kill_every,
                seconds=options.seconds,
            )
        )
        stalls_s.append(result.stall_s)
        verdict = "" if result.stall_s <= options.stall else "  FAILED"
        if verdict:
            failed.append(seed)
        sys.stdout.write(
            f"seed {seed}: {result.steps} steps, {result.kills} kills, {result.moves} plans that move somebody, "
            f"longest stall {result.stall_s:.1f} s, until {result.stalled_at_s:.1f} s{verdict}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(
        f"{options.seeds} seeds, {len(failed)} failed {failed or ''}; "
        f"stall: median {statistics.median(stalls_s):.1f} s, worst {max(stalls_s):.1f} s\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
