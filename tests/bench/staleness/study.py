"""Runs the study: `study.py` takes hours of all cores, `study.py --short` five minutes of two.

Each run that ends is a line of `runs.jsonl` in the output folder, so a study that was stopped goes on where it was, and
runs that are in `results.json` already are not made again. At the end (or with --report at any time) both become
`results.json`, the tables in `tables.md`, and the plots.
"""

import argparse
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED as FIRST
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import msgspec
import report
from grids import full, short
from rows import Table, wanted
from settings import Finished, Run
from tasks import BatchShape, Task

HERE = Path(__file__).parent
LINES = "runs.jsonl"
RESULTS = "results.json"
UNITS_PER_S = {"bytes": 7000.0, "digits": 700.0, "sentences": 250.0}
"""What a core trains of each task, for the estimate of how long it takes."""
TASKS_KEPT = 4


def work(run: Run) -> Finished:
    """One run, in this process."""
    from regimes import train

    return Finished(key=run.key, run=run, outcome=train(_task(run.task, run.shape, run.seed), run))


@functools.lru_cache(maxsize=TASKS_KEPT)
def _task(name: str, shape: BatchShape, seed: int) -> Task:
    from classifiers import TASKS

    return TASKS[name](shape, seed)


def _worked(run: bytes) -> bytes:
    return msgspec.json.encode(work(msgspec.json.decode(run, type=Run)))


def load(out: Path) -> dict[str, Finished]:
    """All finished runs of a folder by key. A last line that a kill has cut off is passed over.

    Runs are known by what they are: a line whose key is not that of its run is of other code, and is left out.
    """
    found: dict[str, Finished] = {}
    results = out / RESULTS
    if results.exists():
        found |= {line.key: line for line in msgspec.json.decode(results.read_bytes(), type=list[Finished])}
    lines = out / LINES
    if lines.exists():
        for line in lines.read_bytes().splitlines():
            try:
                finished = msgspec.json.decode(line, type=Finished)
            except msgspec.DecodeError:
                continue
            found[finished.key] = finished
    return {key: line for key, line in found.items() if line.run.key == key}


def append(out: Path, finished: Finished) -> None:
    """As a line of its own, even behind one that was cut off."""
    with (out / LINES).open("a+b") as lines:
        if lines.tell() and not _ends_in_newline(lines.fileno()):
            lines.write(b"\n")
        lines.write(msgspec.json.encode(finished) + b"\n")
        lines.flush()
        os.fsync(lines.fileno())


def _ends_in_newline(file: int) -> bool:
    return os.pread(file, 1, os.fstat(file).st_size - 1) == b"\n"


def study(tables: Iterable[Table], out: Path, *, jobs: int, say: Callable[[str], None] = print) -> int:
    """Make every run that is missing. Returns: how many failed."""
    tables = list(tables)
    finished = load(out)
    failed: set[str] = set()
    begun_s = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        under_way: dict[Future[bytes], Run] = {}
        while True:
            busy = {run.key for run in under_way.values()} | failed
            missing = [run for run in wanted(tables, finished) if run.key not in busy]
            for run in missing[: jobs - len(under_way)]:
                under_way[pool.submit(_worked, msgspec.json.encode(run))] = run
            if not under_way:
                return len(failed)
            ended, _ = wait(under_way, return_when=FIRST)
            for future in ended:
                run = under_way.pop(future)
                error = future.exception()
                if error is not None:
                    failed.add(run.key)
                    say(f"failed: {described(run)}: {error!r}")
                    continue
                line = msgspec.json.decode(future.result(), type=Finished)
                append(out, line)
                finished[line.key] = line
                left = [run for run in wanted(tables, finished) if run.key not in failed]
                loss = line.outcome.validation_loss
                told = "diverged" if loss is None else f"{loss:.4f}"
                at_s, took_s = time.monotonic() - begun_s, line.outcome.processor_s
                say(
                    f"{at_s:7.0f} s  {told:>8}  {took_s:6.0f} s  {described(run)}"
                    f"  ({len(left)} left, about {seconds(left) / jobs / 60:.0f} min)"
                )


def seconds(runs: Iterable[Run]) -> float:
    """Of one core, about."""
    units = {"bytes": 256, "digits": 1, "sentences": 1}
    return sum(
        run.updates
        * run.shape.microbatches_per_step
        * run.shape.microbatch_size
        * units[run.task]
        / UNITS_PER_S[run.task]
        for run in runs
    )


def described(run: Run) -> str:
    o = run.optimizer
    return (
        f"{run.group} {run.regime.__class__.__name__} {run.method.label} {o.name} {o.learning_rate:g} seed {run.seed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="every kind of row once, five minutes")
    parser.add_argument("--out", type=Path, help="a folder; that of the study, or with --short one below it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, one a core")
    parser.add_argument("--only", default="", help="tables whose name this regular expression finds")
    parser.add_argument("--list", action="store_true", help="say what is missing, and how long it would take")
    parser.add_argument("--report", action="store_true", help="only write the report of what there is")
    options = parser.parse_args()
    tables = [table for table in (short() if options.short else full()) if re.search(options.only, table.name)]
    out = options.out or (HERE / "short" if options.short else HERE)
    out.mkdir(parents=True, exist_ok=True)
    missing = wanted(tables, load(out))
    if options.list:
        for run in missing:
            print(f"{run.key}  {described(run)}")
        hours = seconds(missing) / 3600
        print(f"{len(missing)} runs are missing, {hours:.1f} hours of a core, and more seeds of the best")
        return 0
    failed = 0 if options.report else study(tables, out, jobs=options.jobs)
    report.write(tables, load(out), out)
    return min(failed, 1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
