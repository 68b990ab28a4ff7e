"""Writes the record for other programs: an event file for TensorBoard and, on request, Weights & Biases.

The event file is written by tensorboardX, which adds no dependencies; `torch.utils.tensorboard` needs all of
TensorBoard with its web server. Libraries are imported only where they are used.
"""

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from shoal.deploy.base.words import short
from shoal.deploy.record.lines import StartLine, StepLine, ValidationLine
from shoal.deploy.record.reading import Record, read_record
from shoal.protocol.errors import LocalError

_SUFFIX: Final = ".shoal"


class EventsFile:
    """TensorBoard's event file beside the record in `folder`. It replaces the files of earlier starts.

    The file is rewritten when the peer starts, and at the first line after the run went back to a snapshot; else it
    grows. So it never contains a step twice, and undone steps only until that line.

    Args: record: the record so far. Raises: OSError: the file cannot be written.
    """

    trouble = "TensorBoard's file cannot be written ({})"

    def __init__(self, folder: Path, record: Record) -> None:
        self._folder = folder
        self._begin(record)

    def add(self, lines: Sequence[StepLine | ValidationLine]) -> None:
        """Append the values of `lines`, which the record contains by now. Raises: OSError: the disk fails."""
        if max(line.era for line in lines) > self._era:
            self._writer.close()
            self._begin(read_record(self._folder))  # the run went back: earlier events are void
            return
        self._write(lines)
        if time.monotonic() >= self._flushed_s + 5.0:
            self._flush()

    def close(self) -> None:
        """Close the file. Raises: OSError: the disk fails."""
        self._writer.close()

    def _begin(self, record: Record) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # 7 ms, 1 MB
        from tensorboardX.proto import event_pb2

        self._era = record.reached[0]
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
            old.unlink(missing_ok=True)
        suffix = f".{time.time_ns() % 10**9}{_SUFFIX}"
        self._writer: Any = EventsWriter(str(self._folder / "events"), filename_suffix=suffix)
        # This marker makes a running TensorBoard discard the earlier files.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=0, session_log=start))
        self._write(sorted((*record.steps, *record.validations), key=lambda line: line.step))
        self._flush()

    def _write(self, lines: Iterable[StepLine | ValidationLine]) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2

        for line in lines:
            values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line).items()]
            summary = summary_pb2.Summary(value=values)
            self._writer.write_event(event_pb2.Event(wall_time=line.time, step=line.step, summary=summary))

    def _flush(self) -> None:
        self._writer.flush()
        self._flushed_s = time.monotonic()


def need_wandb() -> None:
    """Raise LocalError if the package wandb is not installed."""
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise LocalError(
            "--wandb needs the package wandb, which is not installed here: `pip install wandb`, or leave --wandb out "
            "(the record and TensorBoard's file are written anyway)"
        ) from error


class WandbRun:
    """One run at Weights & Biases, in `project`. A restarted peer continues it: the id is the run's id and the peer's.

    Raises: LocalError: wandb does not start, for example without a login.
    """

    trouble = "Weights & Biases has failed, and gets no more: {}"

    def __init__(self, project: str, start: StartLine, folder: Path) -> None:
        need_wandb()
        import wandb

        try:
            self._run: Any = wandb.init(
                project=project,
                id=f"{start.run}-{short(start.peer)}",
                name=start.name,
                resume="allow",
                dir=str(folder),
                config={name: getattr(start, name) for name in StartLine.__struct_fields__ if name != "time"},
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # wandb raises several kinds
            raise LocalError(f"Weights & Biases does not begin: {error}") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, lines: Sequence[StepLine | ValidationLine]) -> None:
        for line in lines:
            self._run.log({"step": line.step, **scalars(line)})

    def close(self) -> None:
        self._run.finish()


def scalars(line: StepLine | ValidationLine) -> dict[str, float]:
    """Return {name of a figure: its value} for a line of the record; unknown values are left out."""
    if isinstance(line, ValidationLine):
        values: dict[str, float | None] = {"loss/validation": line.loss, "perplexity/validation": line.perplexity}
    else:
        values = {
            "loss/training": line.loss,
            "perplexity/training": line.perplexity,
            "optimizer/learning_rate": line.learning_rate,
            "optimizer/gradient_norm": line.gradient_norm,
            "swarm/tokens_per_s": line.tokens_per_s,
            "swarm/tokens_per_s_foreseen": line.foreseen_tokens_per_s,
            "swarm/staleness_steps": line.staleness,
            "swarm/peers": float(line.peers),
            "swarm/microbatches_given_up": float(line.given_up),
            "swarm/microbatches_twice": float(line.duplicates),
        }
    return {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}
