"""`shoal doctor`: finds out why this machine cannot join a run, and the remedy."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shoal.deploy.commands.addresses import listen_addresses
from shoal.deploy.commands.options import (
    DEFAULT_LISTEN,
    EXIT_FAILED,
    EXIT_USER_ERROR,
    Device,
    Json,
    Listen,
    StateDir,
    Verbose,
    examples,
    start_logging,
)
from shoal.deploy.commands.running import given_invite
from shoal.deploy.state import places
from shoal.deploy.terminal.plain import say, say_result
from shoal.protocol.errors import RunNotFound
from shoal.protocol.invite import Invite, parse_invite

if TYPE_CHECKING:
    from shoal.deploy.doctor.diagnosis import Diagnosis


@examples(
    "shoal doctor  # this machine, and the run that is up here if there is one",
    "shoal doctor shoal1…  # and the way to this run: clock, ports, DNS, version, host",
    "shoal doctor shoal1… --listen :4001  # whether others can connect to this port",
    "shoal doctor --json  # for a script; exit code 1 if something keeps this machine out",
)
def doctor(
    invite: Annotated[
        str | None,
        typer.Argument(
            help="Check the way to this invite's run; - reads the invite from standard input. Default: the run that is "
            "up here, if there is one."
        ),
    ] = None,
    listen: Listen = DEFAULT_LISTEN,
    state_dir: StateDir = None,
    device: Device = "auto",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find what keeps this machine out of a run, and how to fix it."""
    note = places.last_running() if invite is None else None
    found = given_invite(invite) if invite else parse_invite(note.invite) if note else None
    start_logging(verbose)
    from shoal.deploy.doctor.diagnosis import as_json, lines

    diagnosis = diagnosis_of(found, listen=listen_addresses(listen), state_dir=state_dir, device=device)
    say_result(as_json(diagnosis), lines(diagnosis), as_json=json)
    if diagnosis.main is not None:
        raise typer.Exit(EXIT_FAILED)


def explain(
    error: RunNotFound, invite: Invite, *, listen: tuple[str, ...], state_dir: Path | None, device: str
) -> NoReturn:
    """Find out why no peer of the invite's run was found, print it, and end the command.

    Raises: RunNotFound: `error`, if no reason was found.
    """
    from shoal.deploy.doctor.diagnosis import problem_lines

    say(f"shoal: nobody at the invite's addresses has the run {invite.run}; looking for the reason…", err=True)
    diagnosis = diagnosis_of(invite, listen=listen, state_dir=state_dir, device=device)
    if diagnosis.main is None:
        raise error
    for problem in diagnosis.problems:
        for line in problem_lines(problem):
            say(line, err=True)
    raise typer.Exit(EXIT_USER_ERROR) from error


def diagnosis_of(invite: Invite | None, *, listen: tuple[str, ...], state_dir: Path | None, device: str) -> "Diagnosis":
    """Examine this machine and, with an invite, the network path to its run."""
    from shoal.deploy.doctor.diagnosis import diagnose
    from shoal.deploy.doctor.probes import examine
    from shoal.deploy.state.known_peers import ways_to
    from shoal.protocol.live.loop import run
    from shoal.protocol.live.transport import dialable

    more = tuple(way for way in dialable(ways_to(invite)) if way not in invite.addresses) if invite else ()
    looking = examine(
        invite,
        folder=state_dir or places.state_root(),
        wants_cuda=device.startswith("cuda"),
        listen=listen,
        more=more,
    )
    return diagnose(run(looking))
