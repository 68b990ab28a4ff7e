"""Breaks many swarms on purpose, each in the way of its seed, on all cores; run by `make soak-campaign`.

Prints every seed that fails with the command that plays it again, and the sum of all.
"""

import argparse
import dataclasses
import logging
import multiprocessing
import os
import sys
import time
from functools import partial
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from campaign_report import failure, json_line, one_line, summary
from campaign_run import run_seed, run_trial
from trial import CampaignOptions, draw_trial, parse_kinds, parse_wire
from witness import RunVerdict

from shoal.peer.membership import learner


def run_light_seed(seed: int, options: CampaignOptions) -> RunVerdict:
    """Play a seed with `s_max = 1` in which no state is small and none comes soon: so its fetcher is light first."""
    learner._SMALL_BYTES, learner.LIGHT_STATE_S = 0, 0.0
    trial = draw_trial(seed, options)
    training = msgspec.structs.replace(trial.spec.training, s_max=1)
    return run_trial(dataclasses.replace(trial, spec=msgspec.structs.replace(trial.spec, training=training))).verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=0.0, help="Begin no seed after this long; 0: no limit.")
    parser.add_argument("--wire", metavar="FORTH,BACK,SUMS", help="formats in place of fp32, as int8,int8,hadamard4")
    parser.add_argument("--peers", type=int, default=CampaignOptions().peers)
    parser.add_argument("--stages", type=int, default=CampaignOptions().stages)
    parser.add_argument("--steps", type=int, default=CampaignOptions().steps)
    parser.add_argument("--experts", type=int, default=0, help="of the model, spread over the peers")
    parser.add_argument("--fault-seconds", type=float, default=CampaignOptions().fault_s, help="how long faults happen")
    parser.add_argument("--mean-gap", type=float, default=CampaignOptions().mean_gap_s, help="seconds between faults")
    parser.add_argument("--kind", action="append", default=[], help="let only faults of this kind happen; repeatable")
    parser.add_argument("--lines", action="store_true", help="print a line for each seed")
    parser.add_argument("--json", type=Path, help="write a line for each seed to this file")
    parser.add_argument("--light", action="store_true", help="whoever joins a stale run is a light member at first")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    options = CampaignOptions(
        peers=arguments.peers,
        stages=arguments.stages,
        steps=arguments.steps,
        experts=arguments.experts,
        fault_s=arguments.fault_seconds,
        mean_gap_s=arguments.mean_gap,
        kinds=parse_kinds(arguments.kind),
        wire=parse_wire(arguments.wire),
    )
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    begun_s = time.monotonic()
    verdicts: list[RunVerdict] = []
    # Fresh processes: torch's threads do not survive a fork, and no seed may see what another left behind.
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=20) as pool:
        for verdict in pool.imap_unordered(
            partial(run_light_seed if arguments.light else run_seed, options=options), seeds
        ):
            verdicts.append(verdict)
            if arguments.lines or verdict.broken is not None:
                sys.stdout.write(f"{one_line(verdict)}\n")
            if verdict.broken is not None:
                sys.stdout.write(f"{failure(verdict, options)}\n")
            sys.stdout.flush()
            if arguments.json is not None:
                with arguments.json.open("ab") as file:
                    file.write(json_line(verdict))
            if arguments.seconds and time.monotonic() - begun_s > arguments.seconds:
                pool.terminate()
                break
    sys.stdout.write(f"{summary(verdicts)}\n")
    return int(any(verdict.broken is not None for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
