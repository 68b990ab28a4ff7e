"""Do peers come back whose network daemons are killed or suspended at any moment? `make soak-daemons`."""

import argparse
import logging
import random
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from daemon_kills import back_after_each

from shoal.protocol.live.loop import run

BACK_S = 35.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    rng = random.Random(options.seed)
    signals = [*[signal.SIGSTOP] * options.stops, *[signal.SIGKILL] * options.kills]
    rng.shuffle(signals)
    with tempfile.TemporaryDirectory() as folder:
        took_s = run(back_after_each(signals, Path(folder), rng, print))
    late = sum(each > BACK_S for each in took_s)
    print(f"{len(took_s)} daemons hit: back after {max(took_s):.1f} s at most, {late} later than {BACK_S:g} s")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
