"""Sends the record to Weights & Biases, for a user who asks for it. Its package is imported only then."""

from collections.abc import Iterable, Mapping
from typing import Any

from shoal.deploy.record.events_file import scalars
from shoal.deploy.record.lines import StepLine, ValidationLine
from shoal.protocol.errors import LocalError


def need_wandb() -> None:
    """Check for the package before anything begins. Raises: LocalError: it is not here."""
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise LocalError(
            "--wandb needs the package wandb, which is not installed here: `pip install wandb`, or leave --wandb out "
            "(the record and TensorBoard's file are written anyway)"
        ) from error


class WandbRun:
    """One run of the project `project`, the same after each restart: wandb knows it by shoal's name of the run and the
    peer that keeps the record.

    Raises: LocalError: wandb does not begin, as without a login.
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
        except Exception as error:  # wandb's own, of several kinds
            raise LocalError(f"Weights & Biases does not begin: {error}") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, lines: Iterable[StepLine | ValidationLine]) -> None:
        for line in lines:
            self._run.log({"step": line.step, **scalars(line)})

    def close(self) -> None:
        self._run.finish()
