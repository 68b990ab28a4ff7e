"""What a live swarm reaches of what is planned for it, in virtual time: the swarm's own coordinators against a layout
that is searched with every figure known, and pinned.

    live_swarm.py scenarios                      # shipped scenarios and six equal machines
    live_swarm.py scenarios --only mixed-cards --seeds 3 --seconds 600
    live_swarm.py uneven --seeds 20              # random networks of 6 to 64 devices
    live_swarm.py growth                         # 1, 2, 6, 24, 40, 12 and 1 peers, ten minutes each
    live_swarm.py slowed                         # a device four times slower in mid-run, links at a tenth
    live_swarm.py traces --traces FOLDER         # recorded churn, its own of `spot-fleet` where no folder is named
    live_swarm.py traces --played                # the layout of each set of peers is played, too, pinned

`planned` is the simulated pace of the layout of `shoal plan`, pinned. `best other` is the best of random, mod, greedy
and DT-FM's layout, pinned, with the same staleness and wire: the one that the planner's arithmetic finds quickest is
played. `live/planned` is the live swarm's rate from the 300th virtual second on, standstills included, against planned;
`work` its tokens by the end of the 600th (or of the run) against as long at the planned pace. Each line of --out is one
case and seed; lines of an earlier run with the same layouts lend their pinned figures, so that only the live swarm is
played again. --coarse 4 makes one microbatch of four, so that a case takes a quarter of the time.
"""

import argparse
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from live import comparison, growth, slowed, traced
from live.cases import SHIPPED, SIX_EQUAL, case, coarser, in_subspace, with_wire

from shoal.deploy.simulate.reached import WORK_S

SLOWED = (SIX_EQUAL, "mixed-cards")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whats = ("scenarios", "uneven", "growth", "slowed", "traces")
    parser.add_argument("what", nargs="?", choices=whats, default="scenarios")
    parser.add_argument("--only", help="comma-separated names of cases")
    parser.add_argument("--seeds", type=int, default=1, help="of worlds; of `uneven` how many networks")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=WORK_S, help="of virtual time; of growth, for each size")
    parser.add_argument("--coarse", type=int, default=1, help="so many microbatches become one")
    parser.add_argument("--wire", metavar="FORTH,BACK,SUMS", help="formats in place of the case's, as int8,int8,int8")
    parser.add_argument("--subspace", type=int, help="numbers a token over each cut, in place of all of the width")
    parser.add_argument("--without-other", action="store_true", help="play no other layout")
    parser.add_argument("--traces", type=Path, help="a folder of CSV files")
    parser.add_argument("--played", action="store_true", help="of traces: play what is planned, too")
    parser.add_argument("--out", type=Path, help="append a JSON line for each case and seed")
    options = parser.parse_args()
    begun_s = time.time()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    names = options.only.split(",") if options.only else None
    if options.what == "growth":
        for seed in seeds:
            grown = growth.grow(seed, growth.SIZES, options.seconds)
            _tell(options.out, grown, *growth.lines_of(grown))
    elif options.what == "slowed":
        print(slowed.HEADING)
        for name, what in [(name, what) for name in names or SLOWED for what in ("device", "links")]:
            for seed in seeds:
                found = slowed.slowed(name, what, seed, {})
                _tell(options.out, found, slowed.row(found))
    elif options.what == "traces":
        print(traced.HEADING)
        files = sorted(options.traces.glob("*.csv")) if options.traces else [None]
        for file, seed in [(file, seed) for file in files for seed in seeds]:
            lived = traced.traced(file, seed, options.seconds, coarse=options.coarse, plays_ideal=options.played)
            _tell(options.out, lived, traced.row(lived))
    else:
        cases = names or (SIX_EQUAL, *SHIPPED)
        runs = [(name, seed) for seed in seeds for name in cases]
        if options.what == "uneven":
            runs = [(f"uneven-{seed}", 0) for seed in seeds]
        known = comparison.known_of(options.out)
        print(comparison.HEADING, flush=True)
        for name, seed in runs:
            scenario = coarser(case(name), options.coarse)
            scenario = with_wire(scenario, *options.wire.split(",")) if options.wire else scenario
            scenario = in_subspace(scenario, options.subspace) if options.subspace else scenario
            line = comparison.compared(scenario, seed, options.seconds, known, with_other=not options.without_other)
            _tell(options.out, line, comparison.row(line))
    print(f"{time.time() - begun_s:,.0f} s")


def _tell(out: Path | None, found: msgspec.Struct, *lines: str) -> None:
    print("\n".join(lines), flush=True)
    if out is not None:
        with out.open("ab") as file:
            file.write(msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    main()
