"""Writes the record for TensorBoard: one event file beside it.

The file is rewritten when a peer starts and when the run goes back, and only grows in between, so it never contains a
step twice or a void one. It uses tensorboardX, which adds no dependencies; `torch.utils.tensorboard` needs all of
TensorBoard with its web server.
"""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from shoal.deploy.record.lines import StepLine, ValidationLine

_SUFFIX: Final = ".shoal"


class EventsFile:
    """The event file of `folder`; replaces those of earlier starts. Raises: OSError."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # 7 ms, 1 MB: only with a record

        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
            old.unlink(missing_ok=True)
        self._writer: Any = EventsWriter(str(folder / "events"), filename_suffix=f".{time.time_ns() % 10**9}{_SUFFIX}")
        self._write_start()

    def add(self, lines: Iterable[StepLine | ValidationLine]) -> None:
        """Append the values of these lines. Raises: OSError."""
        for line in lines:
            self._write(line.time, line.step, scalars(line))

    def flush(self) -> None:
        """Flush the file. Raises: OSError."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file. Raises: OSError."""
        self._writer.close()

    def _write_start(self) -> None:
        """Write the marker that makes a running TensorBoard discard the earlier files."""
        from tensorboardX.proto import event_pb2

        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=0, session_log=start))

    def _write(self, time_s: float, step: int, values: dict[str, float]) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2

        summary = summary_pb2.Summary(
            value=[summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._writer.write_event(event_pb2.Event(wall_time=time_s, step=step, summary=summary))


def scalars(line: StepLine | ValidationLine) -> dict[str, float]:
    """Return tag -> value of a line for TensorBoard and Weights & Biases, without unknown values."""
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
