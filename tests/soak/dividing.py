"""Is anything lost when the stages' boundaries and number change all the time while peers die?

Run by `make soak-dividing` (500 seeds of 60 steps, half synchronous, 100 of 30 steps with placed experts, and 100 whose
head is the embedding), or with less: `--seeds 10`. A line a seed; `--first SEED --seeds 1` repeats it exactly. Exits
with 1 if any seed ended otherwise than one process would, or has given anything up.
"""

import argparse
import logging
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from dividing import DividingRun, flaws_of, play_dividing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--s-max", type=int, default=None, help="default: 0 for even seeds, 1 for odd ones")
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--experts", type=int, default=0, help="of each layer, placed among the members of its stage")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--kill-every", type=float, default=8.0, help="seconds; 0: nobody dies")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # peers that complain of each other
    failed, totals = [], Counter[str]()
    for seed in range(options.first, options.first + options.seeds):
        run = DividingRun(
            seed=seed,
            peers=options.peers,
            s_max=seed % 2 if options.s_max is None else options.s_max,
            steps=options.steps,
            experts=options.experts,
            tied=options.tied,
            kill_every_s=options.kill_every,
        )
        try:
            result = play_dividing(run)
        except TimeoutError as error:
            failed.append(seed)
            sys.stdout.write(f"seed {seed}: {error}  FAILED\n")
            continue
        flaws = flaws_of(run, result)
        failed += [seed] if flaws else []
        totals.update(divisions=result.divisions, called_off=result.called_off, kills=result.kills, twice=result.twice)
        sys.stdout.write(
            f"seed {seed}: {result.divisions} divisions into {sorted(result.stage_counts)} stages, "
            f"{result.called_off} called off, {result.kills} kills, went back {result.rollbacks} times, longest stall "
            f"{result.stall_s:.1f} s{'  FAILED: ' + '; '.join(flaws) if flaws else ''}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"{options.seeds} seeds, {len(failed)} failed {failed or ''}; {dict(totals)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
