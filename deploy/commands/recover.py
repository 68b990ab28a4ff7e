"""`shoal recover`: resets a run that cannot go on, or takes it back to an older state, with the owner's key."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.deploy.commands.addresses import listen_addresses
from shoal.deploy.commands.doctor import explain
from shoal.deploy.commands.options import DEFAULT_LISTEN, Json, RunsInvite, Verbose, examples, start_logging
from shoal.deploy.commands.running import given_invite, running_invite
from shoal.deploy.state.runs import peer_folders
from shoal.deploy.terminal.plain import say_json
from shoal.deploy.terminal.screen import open_console, tell
from shoal.protocol.errors import RunNotFound


@examples(
    "shoal recover  # the run that this machine hosts: look, ask, go on",
    "shoal recover shoal1… --yes --json  # with an invite of anybody, without a question",
    "shoal recover --era 0  # go back to the last snapshot of era 0, whatever has become of the run since",
)
def recover(
    invite: RunsInvite = None,
    state_dir: Annotated[Path | None, typer.Option(help="The host's state folder, which has the owner's key.")] = None,
    era: Annotated[
        int | None, typer.Option(help="Go back to the last snapshot of this era. Peers keep it for a week.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Continue without half of the peers, or from an older era.

    Use it when at least half of the peers are gone; with fewer gone, the others go on by themselves. With --era the
    number does not matter. It needs the key of the run's owner.
    """
    found = given_invite(invite) if invite else running_invite("recover")
    start_logging(verbose)
    from shoal.deploy.visitor.recover import find_owner, recovery
    from shoal.deploy.visitor.recover_view import WARNING, as_json, going_back, headline, outcome, situation_table
    from shoal.protocol.live.loop import run

    hosts = [state_dir] if state_dir else peer_folders()
    owner, folder = find_owner(found, hosts)

    async def look() -> Any:
        async with recovery(found, owner) as session:
            return await session.look(era=era)

    async def reset() -> Any:
        async with recovery(found, owner) as session:
            now = await session.look(era=era)  # the run may have changed during the question
            return now, await session.reset(now, owner, folder)

    try:
        situation = run(look())
    except RunNotFound as error:
        explain(error, found, listen=listen_addresses(DEFAULT_LISTEN), state_dir=state_dir, device="cpu")
    console = open_console(stderr=json)
    tell(console, headline(situation))
    console.print(situation_table(situation))
    if not yes:
        tell(console, WARNING if era is None else going_back(situation))
        typer.confirm("Go on without them?" if era is None else "Go back?", abort=True, err=json)
    situation, recovered = run(reset())
    if json:
        say_json(as_json(situation, recovered))
        return
    tell(console, outcome(recovered, situation))
