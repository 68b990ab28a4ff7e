"""How long does a newcomer on 100 Mbit/s take to a stage of 1 G parameters? Real drivers in virtual time; run by hand.

    python tests/bench/slow_newcomer.py                # as a light member, until its state is whole
    python tests/bench/slow_newcomer.py --before       # without light members

`peer/handoff/MEASURED.md` has the figures; `tests/lib/newcomer_run.py` says who is there.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from newcomer_run import COMES_S, first_microbatch_s, play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", action="store_true", help="no member is ever light")
    parser.add_argument("--seconds", type=float, default=5000.0, help="of virtual time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result, moments = play(seconds=args.seconds, may_be_learner=not args.before, seed=args.seed)
    steps_s = [step.committed_at_s for step in result.steps]
    took_s = [after_s - before_s for before_s, after_s in pairwise(steps_s)]
    alone_s = [took for took, at_s in zip(took_s, steps_s[1:], strict=True) if at_s < COMES_S + 100.0]
    print(f"first microbatch after {first_microbatch_s(result)} s")
    print(f"weights after {[round(at_s) for at_s in moments.weights_s]} s")
    print(f"states after {[round(at_s) for at_s in moments.whole_s]} s")
    print(f"median step: {median(alone_s):.0f} s without it, {median(took_s[5:]):.0f} s later; {len(steps_s)} steps")
    print(f"duplicates {result.duplicates}, given up {result.given_up}, failures {result.failures}")


if __name__ == "__main__":
    main()
