"""Does a demo lose anything when its peers are killed? Some runs in peace, then many under `--chaos`, compared.

Run by `make soak-chaos` (3 and 20 runs of 300 s with 8 peers: 2 h), or with less: `--runs 2 --calm 1 --seconds 90`.
Every run has a chaos seed of its own, printed with it; `shoal demo --chaos --chaos-seed SEED` repeats its schedule.
Exits with 1 if any run fails, and keeps that run's logs and lines, and those of runs that stood still for long.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

STALL_S_USUAL = 8.0
"""Whoever stood still for longer is worth a look, though it passes."""
STALL_S_MAX = 20.0
DUPLICATES_SHARE_MAX = 0.001
RECOVERY_S_MAX = 5.0
"""Median over the kills of all runs; a single one may fall into another fault."""
LOSS_RATIO_MAX = 0.02
"""Validation loss above the median of the runs in peace, at the last step that all of these have validated too."""
LEAVING_S_MAX = 200.0
"""For the start of the processes, the last snapshots and the sample, beyond `--seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: int
    """124: the demo hung and was killed."""
    summary: dict[str, Any]
    left_behind: list[str]
    """Command lines of processes that outlived the demo."""
    folder: Path

    @property
    def validations(self) -> dict[int, float]:
        return {int(version): loss for version, loss in self.summary.get("validations", {}).items()}


def run_demo(folder: Path, arguments: argparse.Namespace, *extra: str) -> Outcome:
    folder.mkdir(parents=True)
    environment = os.environ | {"XDG_STATE_HOME": str(folder)}
    lines = folder / "lines.jsonl"
    command = [sys.executable, "-m", "shoal.deploy.cli", "demo", "--json", str(lines)]
    command += ["--peers", str(arguments.peers), "--seconds", str(arguments.seconds), *extra]
    if arguments.spec:
        command += ["--spec", str(arguments.spec)]
    if arguments.steps:
        command += ["--steps", str(arguments.steps)]
    with (folder / "output.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(arguments.seconds + LEAVING_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()  # its children go with it
            process.wait()
            status = 124
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # it may have been meant for us alone
            process.wait(LEAVING_S_MAX)
            raise
    left_behind = processes_of(folder)
    last = lines.read_text().splitlines()[-1:] if lines.exists() else []
    summary = json.loads(last[0]) if last else {}
    return Outcome(status=status, summary=summary if "run" in summary else {}, left_behind=left_behind, folder=folder)


def processes_of(folder: Path) -> list[str]:
    """Those that run in this state folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("XDG_STATE_HOME") == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue  # gone, or somebody else's
    return found


Calm = dict[int, float]
"""Validation loss by version: the median of the runs in peace."""


def median_losses(runs: list[Outcome]) -> Calm:
    versions = set.intersection(*(set(run.validations) for run in runs)) if runs else set()
    return {version: statistics.median(run.validations[version] for run in runs) for version in versions}


def common_loss(calm: Calm, run: Outcome) -> tuple[int, float] | None:
    """(the last version that both have validated, how much higher the run's loss is, as a share)."""
    versions = set(calm).intersection(run.validations)
    if not versions:
        return None
    version = max(versions)
    return version, run.validations[version] / calm[version] - 1.0


def flaws(calm: Calm | None, outcome: Outcome) -> list[str]:
    """What a run did not keep of its promises; `calm` None: it is one in peace."""
    summary = outcome.summary
    if outcome.status != 0 or not summary:
        return [f"the demo ended with status {outcome.status}", *outcome.left_behind]
    found = [f"left {line}" for line in outcome.left_behind]
    if summary["stall_s_max"] > STALL_S_MAX:
        found.append(f"no step for {summary['stall_s_max']:.1f} s")
    if summary["duplicates_share"] >= DUPLICATES_SHARE_MAX:
        found.append(f"{summary['duplicates']} duplicates are {summary['duplicates_share']:.3%}")
    found += [f"{name} {summary[name]}" for name in ("given_up", "dissenting", "failed") if summary[name]]
    if calm is None:
        return found
    chaos = summary["chaos"]
    if chaos["left_behind"]:
        found.append(f"{chaos['left_behind']} processes outlived their peers")
    common = common_loss(calm, outcome)
    if common is None:
        found.append("nothing was validated")
    elif common[1] > LOSS_RATIO_MAX:
        found.append(f"validation loss {common[1]:+.1%} at version {common[0]}")
    return found


def line(label: str, outcome: Outcome, calm: Calm | None) -> str:
    summary = outcome.summary
    if not summary:
        return f"{label}: no summary"
    parts = [
        f"{summary['steps']} steps{'' if summary['finished'] else ' (time over)'} in {summary['seconds']:.0f} s",
        f"{summary['tokens_per_s']:,.0f} tokens/s",
        f"staleness {summary['staleness_mean']:.2f}",  # its price is paid in loss, faults or none
        f"stall {summary['stall_s_max']:.1f} s",
        f"twice {summary['duplicates']} ({summary['duplicates_share']:.3%})",
        f"given up {summary['given_up']}",
        f"dissenting {summary['dissenting']}",
        f"failed {summary['failed']}",
    ]
    if chaos := summary["chaos"]:
        recovery = "-" if chaos["recovery_s_median"] is None else f"{chaos['recovery_s_median']:.1f} s"
        parts += [
            f"kills {chaos['kills']} ({chaos['coordinator_kills']} coordinating)",
            f"suspensions {chaos['suspensions']}",
            f"rollbacks {summary['rollbacks']}",
            f"recovery {recovery}",
        ]
    if calm is not None and (common := common_loss(calm, outcome)):
        parts.append(f"val {outcome.validations[common[0]]:.3f} at {common[0]} ({common[1]:+.1%})")
    elif summary["val_loss"] is not None:
        parts.append(f"val {summary['val_loss']:.3f}")
    return f"{label}: {', '.join(parts)}"


def all_recoveries_s(outcomes: list[Outcome]) -> list[float]:
    """One for each kill of which it can be told; infinite where the pace did not come back."""
    figures = [outcome.summary["chaos"] for outcome in outcomes if outcome.summary]
    return [seconds for chaos in figures for seconds in [*chaos["recovery_s"], *[math.inf] * chaos["unrecovered"]]]


def closing_line(calm: Calm, outcomes: list[Outcome], num_failed: int) -> str:
    def median(values: list[float]) -> str:
        return f"{statistics.median(values):.2f}" if values else "-"

    told = [outcome for outcome in outcomes if outcome.summary]
    recoveries = all_recoveries_s(outcomes)
    losses = [common[1] for outcome in told if (common := common_loss(calm, outcome))]
    return (
        f"{len(outcomes)} runs, {num_failed} failed; kills {sum(o.summary['chaos']['kills'] for o in told)}; medians: "
        f"stall {median([o.summary['stall_s_max'] for o in told])} s, recovery {median(recoveries)} s of "
        f"{len(recoveries)}; validation loss above peace {mean_and_error(losses)}; worst: "
        f"stall {max((o.summary['stall_s_max'] for o in told), default=0.0):.1f} s, "
        f"recovery {max(recoveries, default=0.0):.1f} s, validation loss {max(losses, default=0.0):+.1%}"
    )


def mean_and_error(shares: list[float]) -> str:
    """One run is as far from the next as chance makes it; what chaos costs is seen in the mean of many."""
    if len(shares) < 2:
        return "-"
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    return f"{statistics.mean(shares):+.1%} in the mean (standard error {error:.1%})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="under chaos")
    parser.add_argument("--calm", type=int, default=3, help="runs in peace, before those")
    parser.add_argument("--seconds", type=float, default=300.0, help="at most, each")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0: the demo's own number")
    parser.add_argument(
        "--spec", type=Path, default=None, help="of another run; with s_max = 0 the loss must not differ"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run's chaos; the others' follow")
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds")
    parser.add_argument("--suspend-for", type=float, default=20.0, help="seconds")
    parser.add_argument("--logs", type=Path, default=None, help="for all runs' lines, and what is kept; default: new")
    arguments = parser.parse_args()
    root = arguments.logs or Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
    storm = ["--chaos", "--kill-every", str(arguments.kill_every), "--suspend-for", str(arguments.suspend_for)]
    peaceful: list[Outcome] = []
    outcomes: list[Outcome] = []
    num_failed = 0
    for number in range(arguments.calm + arguments.runs):
        stormy = number >= arguments.calm
        seed = arguments.seed + number - arguments.calm
        label = f"run {number - arguments.calm} (seed {seed})" if stormy else f"in peace {number}"
        extra = [*storm, "--chaos-seed", str(seed)] if stormy else []
        calm = median_losses(peaceful) if stormy else None
        outcome = run_demo(root / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{number}", arguments, *extra)
        found = flaws(calm, outcome)
        num_failed += bool(found)
        verdict = f"  FAILED: {'; '.join(found)}; see {outcome.folder}" if found else ""
        sys.stdout.write(line(label, outcome, calm) + verdict + "\n")
        sys.stdout.flush()
        if not stormy and not outcome.summary:
            return 1
        (outcomes if stormy else peaceful).append(outcome)
        shutil.copy(outcome.folder / "lines.jsonl", root / f"lines-{number}.jsonl")
        if not found and outcome.summary["stall_s_max"] <= STALL_S_USUAL:
            shutil.rmtree(outcome.folder)
    calm = median_losses(peaceful)
    if len(peaceful) > 1:
        apart = [common[1] for run in peaceful if (common := common_loss(calm, run))]
        sys.stdout.write(f"in peace: validation losses {min(apart):+.1%} to {max(apart):+.1%} of their median\n")
    sys.stdout.write(closing_line(calm, outcomes, num_failed) + "\n")
    recoveries = all_recoveries_s(outcomes)
    slow = bool(recoveries) and statistics.median(recoveries) > RECOVERY_S_MAX
    if slow:
        sys.stdout.write(f"FAILED: the median recovery is longer than {RECOVERY_S_MAX:g} s\n")
    return int(num_failed > 0 or slow)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
