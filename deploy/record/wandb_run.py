"""Sends the record to Weights & Biases on request; only then is its package imported."""

from collections.abc import Iterable, Mapping
from typing import Any

from shoal.deploy.record.events_file import scalars
from shoal.deploy.record.lines import StepLine, ValidationLine
from shoal.protocol.errors import LocalError


def need_wandb() -> None:
    """Check that the package is installed. Raises: LocalError: it is not."""
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise LocalError(
            "--wandb needs the package wandb, which is not installed here: `pip install wandb`, or leave --wandb out "
            "(the record and TensorBoard's file are written anyway)"
        ) from error


class WandbRun:
    """One run of `project`, the same after each restart: its id consists of the run's id and the peer.

    Raises: LocalError: wandb does not start, for example without a login.
    """

    def __init__(self, project: str, *, run: str, name: str, folder: str, facts: Mapping[str, Any]) -> None:
        need_wandb()
        import wandb

        try:
            self._run: Any = wandb.init(
                project=project,
                id=run,
                name=name,
                resume="allow",
                dir=folder,
                config=dict(facts),
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # wandb raises several kinds
            raise LocalError(f"Weights & Biases does not begin: {error}") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, lines: Iterable[StepLine | ValidationLine]) -> None:
        for line in lines:
            self._run.log({"step": line.step, **scalars(line)})

    def close(self) -> None:
        self._run.finish()
