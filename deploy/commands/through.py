"""Runs a command's work on a run's model through the swarm's stages instead of a local model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.deploy.commands.running import given_invite, running_invite
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import RunSpec

if TYPE_CHECKING:
    from shoal.deploy.visitor.swarm_model import SwarmPredictor
    from shoal.peer.data.tokenizer import Tokenizer


def with_swarm(
    command: str,
    work: "Callable[[SwarmPredictor], None]",
    *,
    invite: str | None,
    local: tuple[str | Path | None, ...],
    tokenizer: Path | None,
    keeps_version: bool = False,
) -> None:
    """Run `work` with the model of a run that is up.

    Args:
        invite: of the run; None: the run that is up on this machine.
        local: arguments that name a local model; all must be empty.
        keeps_version: see `through_swarm`.
    Raises: LocalError: the run cannot be found, or does not answer. DataError: there is no tokenizer.
    """
    if any(local):
        raise LocalError("--swarm asks the stages of a run, which have the model: leave MODEL and --base out")
    found = given_invite(invite) if invite else running_invite(f"{command} --swarm --invite")
    from shoal.deploy.visitor.swarm_model import through_swarm
    from shoal.peer.data.tokenizer import load_tokenizer
    from shoal.protocol.live.loop import run

    def vocabulary(spec: RunSpec) -> "Tokenizer":
        return load_tokenizer(spec.data, path=tokenizer)

    run(through_swarm(found, work, tokenizer=vocabulary, keeps_version=keeps_version))
