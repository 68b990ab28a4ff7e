"""What a record costs, and whether TensorBoard reads it: `python tests/bench/record.py [--steps 20000]`.

Needs the package tensorboard for the second half, which shoal itself does not: `pip install tensorboard` in any
environment, and `--tensorboard PYTHON` to name it.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from shoal.deploy.record.exports import EventsFile, scalars
from shoal.deploy.record.html_page import render_page
from shoal.deploy.record.lines import StepLine, encode_line, perplexity
from shoal.deploy.record.reading import Record, read_record
from shoal.deploy.record.writing import RecordFile

_READER = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
print(json.dumps({tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""


def line(step: int) -> StepLine:
    loss = 1.6 + 4.2 * (1 + step / 30) ** -0.45
    return StepLine(
        time=1.7e9 + step,
        step=step,
        loss=loss,
        perplexity=perplexity(loss),
        learning_rate=4e-3 / (1 + step),
        gradient_norm=1.0 + 1.0 / step,
        gradient_norms=(0.5, 0.6),
        tokens=8192,
        tokens_per_s=1000.0 + step % 7,
        staleness=0.3,
        peers=6,
    )


def memory_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def timed(name: str, began_s: float, count: int) -> None:
    cpu_s = time.process_time() - began_s
    print(f"{name:<34} {1e6 * cpu_s / count:9.1f} CPU µs a step   {cpu_s:8.3f} CPU s in all")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--tensorboard", default=sys.executable, help="A python that has the package tensorboard.")
    options = parser.parse_args()
    torch.zeros(1)  # a peer has it anyway
    before_mb, began_s = memory_mb(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        events = EventsFile(folder, Record())
        took_s, more_mb = time.perf_counter() - began_s, memory_mb() - before_mb
        print(f"tensorboardX beside torch: {1e3 * took_s:.0f} ms, {more_mb:.1f} MB")
        steps = [line(number) for number in range(1, options.steps + 1)]
        file = RecordFile(folder / "record.jsonl", say=print, now_s=time.monotonic)
        for name, write in (
            ("record.jsonl, a line at a time", lambda one: file.append([one])),
            ("TensorBoard's file", lambda one: events.add([one])),
        ):
            began_s = time.process_time()
            for one in steps:
                write(one)
            timed(name, began_s, options.steps)
        file.close()
        events.close()
        began_s = time.process_time()
        record = read_record(folder)
        timed("reading the record back", began_s, options.steps)
        began_s = time.process_time()
        page = render_page(record)
        timed("shoal report", began_s, options.steps)
        sizes = {path.name.split(".")[0]: path.stat().st_size for path in folder.iterdir()}
        print(", ".join(f"{name}: {size / options.steps:.0f} bytes a step" for name, size in sizes.items()))
        most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"the page: {len(page) / 1e3:.0f} kB; most memory of this process: {most_mb:.0f} MB")
        assert [encode_line(one) for one in record.steps] == [encode_line(one) for one in steps]
        said = subprocess.run([options.tensorboard, "-c", _READER, str(folder)], capture_output=True, text=True)
        if said.returncode:
            print("TensorBoard: not asked,", said.stderr.strip().splitlines()[-1])
            return
        read = json.loads(said.stdout)
        for tag, value in scalars(steps[-1]).items():
            assert [step for step, _ in read[tag]] == [one.step for one in steps], tag
            assert abs(read[tag][-1][1] - value) <= 1e-6 * abs(value), tag
        print(
            f"TensorBoard's EventAccumulator reads {len(read)} curves of {options.steps} steps, each value as written"
        )


if __name__ == "__main__":
    main()
