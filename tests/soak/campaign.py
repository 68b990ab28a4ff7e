"""Many seeds of `shoal simulate --campaign`, on all cores; run by `make soak-campaign` (`--seeds` for another number).

Prints every seed that fails with the command that plays it again, and the sum of all.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from functools import partial

from shoal.deploy.simulate.campaign import run_seed
from shoal.deploy.simulate.campaign_report import failure, one_line, summary
from shoal.deploy.simulate.trial import CampaignOptions
from shoal.deploy.simulate.witness import Verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=0.0, help="Begin no seed after this long; 0: no limit.")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    options = CampaignOptions()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    begun_s = time.monotonic()
    verdicts: list[Verdict] = []
    # Fresh processes: torch's threads do not survive a fork, and no seed may see what another left behind.
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=20) as pool:
        for verdict in pool.imap_unordered(partial(run_seed, options=options), seeds):
            verdicts.append(verdict)
            if verdict.broken is not None:
                sys.stdout.write(f"{one_line(verdict)}\n{failure(verdict, options)}\n")
                sys.stdout.flush()
            if arguments.seconds and time.monotonic() - begun_s > arguments.seconds:
                pool.terminate()
                break
    sys.stdout.write(f"{summary(verdicts)}\n")
    return int(any(verdict.broken is not None for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
