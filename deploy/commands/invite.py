"""`shoal invite`: prints, makes, lists and revokes invites. `shoal exclude` shuts a member out, `readmit` undoes it."""

import io
import re
import sys
import time
from typing import Annotated, Any

import typer

from shoal.deploy.base.words import counted, duration
from shoal.deploy.commands.options import Json, examples
from shoal.deploy.commands.running import Running, running_here
from shoal.deploy.control.control_socket import ask
from shoal.deploy.control.fresh_invite import PEERS_NAMED
from shoal.deploy.terminal.plain import say, say_result
from shoal.protocol.errors import LocalError
from shoal.protocol.limits import ADDRESSES_MAX

_SPAN = re.compile(r"^(\d{1,6})([mhdw])$")
_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Peers = Annotated[
    int,
    typer.Option(
        min=1, max=ADDRESSES_MAX, help="Number of peers that the invite names. It works while one of them is there."
    ),
]
Qr = Annotated[bool, typer.Option("--qr", help="Also print the invite as a QR code.")]


@examples(
    "shoal invite  # to paste in a chat; any member's is as good as the host's",
    "shoal invite --qr  # to hold in front of a camera",
    "shoal invite --peers 1  # the shortest: only this machine's addresses",
    "shoal invite new --uses 20 --expires 4w  # on the host: another, for twenty machines, within four weeks",
    "shoal invite revoke 3f9a1c22  # on the host: exclude the members that joined with it",
)
def invite(
    context: typer.Context, peers: Peers = PEERS_NAMED, qr: Qr = False, state_dir: Running = None, json: Json = False
) -> None:
    """Print an invite to the run that is up here."""
    if context.invoked_subcommand is not None:
        return
    _show(ask(running_here(state_dir), "invite", peers=peers), qr=qr, json=json)


@examples(
    "shoal invite new  # for five machines at a time, to come within a week",
    "shoal invite new --uses 0 --expires 0  # for any number of machines, for ever: only for people that you trust",
    "shoal invite new --observe  # only to watch: `shoal status INVITE`",
)
def new(
    uses: Annotated[
        int, typer.Option(min=0, max=65535, help="Number of machines that may use it at a time; 0: any number.")
    ] = 5,
    expires: Annotated[
        str, typer.Option(help="Let newcomers in for this long, as in 90m, 12h, 7d or 4w; 0: for ever.")
    ] = "7d",
    observe: Annotated[bool, typer.Option("--observe", help="Members that join with it may only watch.")] = False,
    peers: Peers = PEERS_NAMED,
    qr: Qr = False,
    state_dir: Running = None,
    json: Json = False,
) -> None:
    """Make another invite, with a key and terms of its own. Only the run's host can do this."""
    terms: dict[str, Any] = {"lasts_s": _seconds(expires), "seats": uses, "observe": observe, "peers": peers}
    _show(ask(running_here(state_dir, hosts=True), "invite-new", **terms), qr=qr, json=json)


@examples("shoal invite list  # the terms of each, and which are revoked")
def list_(state_dir: Running = None, json: Json = False) -> None:
    """List the invites and the excluded members of this run."""
    answer = ask(running_here(state_dir, hosts=True), "invite-list")
    words = [_sentence(entry) for entry in answer["invites"]]
    words += [f"excluded from the run: {out}" for out in answer["excluded"]]
    say_result(answer["invites"], words, as_json=json)


@examples("shoal invite revoke 3f9a1c22  # a name that `shoal invite list` shows, or the beginning of one")
def revoke(
    name: Annotated[str, typer.Argument(help="The invite's name, or the beginning of it.")],
    state_dir: Running = None,
    json: Json = False,
) -> None:
    """Revoke an invite, and exclude the members that joined with it."""
    answer = ask(running_here(state_dir, hosts=True), "invite-revoke", name=name)
    say_result(answer, [_sentence(answer)], as_json=json)


@examples("shoal exclude bob  # the name or the last letters of the peer's ID, as `shoal status` shows them")
def exclude(
    peer: Annotated[str, typer.Argument(help="The peer's name, or the end of its ID.")],
    state_dir: Running = None,
    json: Json = False,
) -> None:
    """Exclude one member from the run. Only the run's host can do this.

    If it is the second excluded member of its invite, the invite and all its other members are excluded, too.
    """
    answer = ask(running_here(state_dir, hosts=True), "exclude", peer=peer)
    words = [f"{answer['name']} ({str(answer['peer'])[-8:]}) is out of the run"]
    if answer["invite"]:
        words.append(
            f"it is the second excluded member of the invite {answer['invite']}, so the whole invite is excluded; "
            f"`shoal readmit {answer['invite']}` readmits the others"
        )
    say_result(answer, words, as_json=json)


@examples(
    "shoal readmit bob  # the name or the end of the peer's ID, as `shoal invite list` shows them",
    "shoal readmit 3f9a1c22  # an invite, with the members that joined with it",
)
def readmit(
    who: Annotated[str, typer.Argument(help="The peer's name, or the end of its ID, or the invite's name.")],
    state_dir: Running = None,
    json: Json = False,
) -> None:
    """Readmit an excluded member or a revoked invite.

    Only the run's host can do this. The member itself must be started again.
    """
    answer = ask(running_here(state_dir, hosts=True), "readmit", who=who)
    say_result(answer, [f"{answer['name']} may come back: `shoal join` there"], as_json=json)


def _seconds(text: str) -> float:
    if text == "0":
        return 0.0
    match = _SPAN.match(text.strip().lower())
    if match is None or not int(match[1]):
        raise LocalError(f"{text!r} is no duration: write 90m, 12h, 7d or 4w, or 0 for ever")
    return float(int(match[1]) * _SECONDS[match[2]])


def _show(answer: dict[str, Any], *, qr: bool, json: bool) -> None:
    say_result(answer, [answer["invite"]], as_json=json)
    if "name" in answer and not json:
        say(_sentence(answer), err=True)
    if qr:
        stream = sys.stderr if json else sys.stdout
        typer.echo(qr_code(str(answer["invite"]), coloured=stream.isatty()), file=stream, color=True)


def _sentence(entry: dict[str, Any]) -> str:
    left_s = entry["expires_s"] - time.time()
    ends = "never expires" if not entry["expires_s"] else f"expires in {duration(left_s)}" if left_s > 0 else "expired"
    seats = f"{counted(entry['seats'], 'machine')} at a time" if entry["seats"] else "any number of machines"
    rights = "to watch" if entry["observe"] else "to train"
    return f"{entry['name']}  {rights}, {seats}, {ends}{', REVOKED' if entry['revoked'] else ''}"


def qr_code(text: str, *, coloured: bool) -> str:
    """Draw a QR code of half blocks. Args: coloured: light on dark on any terminal, so that cameras can read it."""
    import segno

    drawn = io.StringIO()
    segno.make(text, error="l", micro=False).terminal(drawn, compact=True)
    lines = drawn.getvalue().splitlines()
    return "\n".join(f"\x1b[97;40m{line}\x1b[0m" if coloured else line for line in lines)
