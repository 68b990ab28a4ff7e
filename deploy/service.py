"""A peer as a service of this user: a systemd unit, or a launchd agent on macOS, from templates in this folder."""

import os
import plistlib
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.deploy.config import config_path
from shoal.protocol.errors import LocalError

UNIT: Final = "shoal.service"
AGENT: Final = "org.shoal.peer"
_HERE = Path(__file__).parent
_CONTROL: Final = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's control characters, halves of surrogate pairs (no file can hold them), and separators of lines."""


@dataclass(frozen=True, slots=True)
class Service:
    """The file of a service, and the commands that make the system take notice of it."""

    path: Path
    text: str
    invite: Path
    """The file in which the service finds its invite, which nobody else may read."""
    on: tuple[tuple[str, ...], ...]
    off: tuple[tuple[str, ...], ...]


def service(arguments: Sequence[str], *, platform: str = sys.platform) -> Service:
    """`arguments` of `shoal join`, without the invite.

    Raises: LocalError: an argument has a control character; this system has neither systemd nor launchd.
    """
    for argument in arguments:
        _refuse_control_characters(argument)
    invite = config_path().parent / "service.invite"
    _refuse_control_characters(str(invite))
    if platform == "darwin":
        path = Path.home() / "Library" / "LaunchAgents" / f"{AGENT}.plist"
        domain = f"gui/{os.getuid()}"
        on: tuple[tuple[str, ...], ...] = (("launchctl", "bootstrap", domain, str(path)),)
        return Service(path, _agent(arguments, invite), invite, on, (("launchctl", "bootout", f"{domain}/{AGENT}"),))
    if not platform.startswith("linux"):
        raise LocalError(f"shoal installs no service on {platform}")
    path = config_path().parents[1] / "systemd" / "user" / UNIT
    systemctl = ("systemctl", "--user")
    on = ((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", UNIT))
    return Service(path, _unit(arguments, invite), invite, on, ((*systemctl, "disable", "--now", UNIT),))


def install(invite: str, arguments: Sequence[str]) -> Path:
    """Write it and start it, now and whenever this user's services start.

    Raises: LocalError: it cannot be written, or the system does not start it; then nothing is left of it.
    """
    wanted = service(arguments)
    files = {wanted.path: wanted.text, wanted.invite: f"{invite}\n"}
    former = {path: path.read_bytes() if path.exists() else None for path in files}
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.chmod(0o600)  # before the invite is in it
            path.write_text(text)
        except OSError as error:
            raise LocalError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        for command in wanted.on:
            _run(command)
    except LocalError:
        for path, content in former.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)
        raise
    return wanted.path


def uninstall() -> Path:
    """Stop the service and remove it. Raises: LocalError: there is none, or it cannot be stopped."""
    found = service(())
    if not found.path.exists():
        raise LocalError(f"no service is installed: {found.path} is not there")
    for command in found.off:
        _run(command)
    found.path.unlink()
    found.invite.unlink(missing_ok=True)
    return found.path


def _unit(arguments: Sequence[str], invite: Path) -> str:
    words = {
        "@SHOAL@": _quoted(_shoal()),
        "@ARGUMENTS@": " ".join(map(_quoted, arguments)),
        "@INVITE@": str(invite).replace("%", "%%"),
    }
    template = (_HERE / "systemd" / UNIT).read_text()
    return re.sub("|".join(words), lambda found: words[found.group()], template)


def _agent(arguments: Sequence[str], invite: Path) -> str:
    agent = plistlib.loads((_HERE / "launchd" / f"{AGENT}.plist").read_bytes())
    agent["ProgramArguments"] = [_shoal(), "join", "-", *arguments]
    agent["StandardInPath"] = str(invite)
    agent["StandardErrorPath"] = agent["StandardOutPath"] = str(Path.home() / "Library" / "Logs" / "shoal.log")
    return plistlib.dumps(agent, sort_keys=False).decode()


def _refuse_control_characters(argument: str) -> None:
    """A unit is read line by line, so a line break would begin a setting of its own, whatever quotes are around it.

    Raises: LocalError.
    """
    if any(unicodedata.category(letter) in _CONTROL for letter in argument):
        raise LocalError(f"{argument!r} has a line break or another control character: a service cannot take it")


def _quoted(word: str) -> str:
    """Quote an argument for a unit: `%` begins a specifier there, `$` a variable, and quotes are as a shell's."""
    return shlex.quote(word.replace("\\", "\\\\")).replace("%", "%%").replace("$", "$$")


def _shoal() -> str:
    """The command of the environment that runs now: a service has no PATH of ours."""
    return str(Path(sys.executable).parent / "shoal")


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise LocalError(f"this machine has no {command[0]}: `shoal service show` prints what to install") from error
    except subprocess.CalledProcessError as error:
        why = (error.stderr or error.stdout or "").strip().splitlines()
        raise LocalError(
            f"`{' '.join(command)}` failed: {why[-1] if why else error.returncode}; "
            "`shoal service show` prints what to install by hand"
        ) from error
