"""Plays scenarios with real peers in network namespaces and in virtual time, and prints both beside each other.

`make lab` runs all of them, an hour or so; `make lab ARGS='small two-nats'` those.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
import real
import virtual
from cpu_groups import NoQuota
from figures import Figures, Sides, table
from internet.emulator import Refused, why_not
from random_events import with_random_events
from scenario import Scenario, find_scenario, shipped, with_pin, with_seconds
from shoal.protocol.errors import LocalError


def play_real(scenario: Scenario, logs: Path | None) -> Figures:
    """SIGTERM ends it as Ctrl-C does, with everything that it started."""

    async def main() -> Figures:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await real.play(scenario, keep=logs)

    try:
        return asyncio.run(main())
    except (NoQuota, Refused) as error:
        raise SystemExit(f"{scenario.name}: {error}") from error


def play(scenario: Scenario, *, in_life: bool, simulated: bool, logs: Path | None = None) -> Sides:
    """Simulated devices get the speeds of the real ones, at work and by their probes, where the scenario says none."""
    lived = play_real(scenario, logs) if in_life else None
    foreseen = None
    if simulated:
        foreseen = virtual.play(scenario, lived.gflops, lived.probed) if lived else virtual.play(scenario)
    return Sides(scenario=scenario.name, title=scenario.file.title, real=lived, virtual=foreseen)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="NAME", help=f"a file, or one of {', '.join(shipped())}")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--real-only", action="store_true")
    only.add_argument("--virtual-only", action="store_true")
    parser.add_argument("--random-events", type=int, metavar="SEED", help="in place of the scenario's own events")
    parser.add_argument("--seconds", type=float, help="in place of the scenario's; of random events: default 3600")
    parser.add_argument("--pin", type=int, metavar="STAGES", help="keep the first layout, of so many stages")
    parser.add_argument("--json", type=Path, help="append a line for each scenario to this file")
    parser.add_argument("--logs", type=Path, help="keep the real peers' logs in this folder")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.CRITICAL)  # simulated peers' own words, of all of them at once
    try:
        scenarios = [find_scenario(what) for what in options.scenarios or shipped()]
        if options.pin is not None:
            scenarios = [with_pin(scenario, options.pin) for scenario in scenarios]
    except LocalError as error:
        parser.error(str(error))
    if (seed := options.random_events) is not None:
        seconds = options.seconds or 3600.0
        scenarios = [with_random_events(scenario, seed=seed, seconds=seconds) for scenario in scenarios]
    elif options.seconds is not None:
        scenarios = [with_seconds(scenario, options.seconds) for scenario in scenarios]
    if not options.virtual_only and (why := why_not()):
        parser.error(f"{why}: only --virtual-only works here")
    has_failed = False
    ratios = []
    with options.json.open("ab") if options.json else contextlib.nullcontext() as file:
        for scenario in scenarios:
            sides = play(scenario, in_life=not options.virtual_only, simulated=not options.real_only, logs=options.logs)
            print(table(sides), end="\n\n", flush=True)
            if file is not None:
                file.write(msgspec.json.encode(sides) + b"\n")
                file.flush()
            has_failed |= any(figures is not None and bool(figures.problems) for figures in (sides.real, sides.virtual))
            if sides.ratio is not None:
                ratios.append((sides.ratio, scenario.name))
    if len(ratios) > 1:
        print("simulated/real steps/s: " + ", ".join(f"{name} {ratio:.2f}" for ratio, name in sorted(ratios)))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
