"""`shoal pause` and `shoal resume`: take the device back for a while."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.deploy.commands.options import examples
from shoal.deploy.commands.running import Everyone, Name, Running, which_peers
from shoal.deploy.control.control_socket import ask
from shoal.deploy.terminal.plain import say, say_json

Json = Annotated[bool, typer.Option("--json", help="Say how each is now, as JSON.")]


@examples(
    "shoal pause  # the device is free within a second; the peer stays in the swarm",
    "shoal pause bob  # of several peers on this machine, the one called bob",
    "shoal pause --all  # every peer on this machine",
)
def pause(name: Name = None, everyone: Everyone = False, state_dir: Running = None, json: Json = False) -> None:
    """Take the device back until `shoal resume`."""
    _do("pause", name, everyone, state_dir, json)


@examples(
    "shoal resume  # end a pause",
    "shoal resume bob  # of several peers on this machine, the one called bob",
)
def resume(name: Name = None, everyone: Everyone = False, state_dir: Running = None, json: Json = False) -> None:
    """End a pause. The set hours still hold."""
    _do("resume", name, everyone, state_dir, json)


def _do(verb: str, name: str | None, everyone: bool, state_dir: Path | None, json: bool) -> None:
    found = which_peers(verb, name=name, everyone=everyone, state_dir=state_dir)
    answers = [{"name": label, "folder": note.folder} | ask(Path(note.folder), verb) for label, note in found]
    if json:
        say_json(answers)
        return
    for answer in answers:
        say(f"{answer['name']}: {_state(answer)}")


def _state(answer: dict[str, Any]) -> str:
    return f"paused: {'; '.join(answer['reasons'])}" if answer["paused"] else "computing"
