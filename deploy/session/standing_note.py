"""Writes the run's progress to disk, for commands that show this progress while no peer is up."""

import os
import time
from pathlib import Path

import msgspec

from shoal.deploy.node.node import Node
from shoal.deploy.record.report import Report, Status
from shoal.deploy.state.run_folder import RunFolder, SavedStanding


class StandingNote:
    """Writes the run's progress at the peer's start, every 20 s while the run's status arrives, and at its end."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._folder = RunFolder(folder, node.run)
        before = self._folder.standing()
        is_host = node.peer_id == node.owner
        self._standing = SavedStanding(
            name=node.spec.name,
            role="host" if is_host else "volunteer",
            step=before.step if before is not None else 0,
            loss=before.loss if before is not None else None,
            steps=node.spec.training.steps,
            used_s=time.time(),
            directory=os.fsencode(os.getcwd()).decode(errors="replace") if is_host else "",
        )
        self._write_at_s = 0.0
        self._write()

    def take(self, report: Report) -> None:
        if not isinstance(report, Status):
            return
        status = report.status
        if status.step > self._standing.step:
            loss = self._standing.loss if status.loss is None else status.loss
            self._standing = msgspec.structs.replace(self._standing, step=status.step, loss=loss)
        if time.monotonic() >= self._write_at_s:
            self._write()

    def end(self, *, finished: bool) -> None:
        step = self._standing.steps if finished else self._standing.step
        self._standing = msgspec.structs.replace(self._standing, step=step, finished=finished)
        self._write()

    def _write(self) -> None:
        self._write_at_s = time.monotonic() + 20.0
        self._folder.keep_standing(msgspec.structs.replace(self._standing, used_s=time.time()))
