"""Installs a peer as the user's service: a systemd unit, or a launchd agent on macOS, from templates."""

import os
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.manners.config import config_path
from shoal.deploy.state.places import cache_root, state_root
from shoal.protocol.errors import LocalError

UNIT: Final = "shoal.service"
AGENT: Final = "org.shoal.peer"
_HERE = Path(__file__).parents[1]
_SHOAL: Final = Path(sys.executable).parent / "shoal"
"""The path of the `shoal` command in this Python environment: a service does not have our PATH."""
_OWN_VIEW: Final = "# Its own view of the files:"
"""The comment above those lines of the systemd unit that hide the user's other files. They need a user namespace."""
_NO_NAMESPACE: Final = ("217", "226")
"""Exit statuses of the unit's process if systemd cannot make a user namespace (EXIT_USER, EXIT_NAMESPACE)."""
_CACHES: Final = {
    "NUMBA_CACHE_DIR": "numba",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "HF_DATASETS_CACHE": "datasets",
}
"""Environment variable that sets a library's cache folder -> the name of this folder within shoal's cache."""
_TOLD: Final = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "HF_HOME")
"""Environment variables that locate the user's files. The unit gets a copy, since a service manager may lack them."""
_CONTROL: Final = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories: control characters, surrogates (no file can hold them), and line separators."""


@dataclass(frozen=True, slots=True)
class Service:
    """The file of a service, and the commands that enable and disable it."""

    path: Path
    text: str
    invite: Path
    """The file with the service's invite. Only the user of the service can read the file."""
    on: tuple[tuple[str, ...], ...]
    off: tuple[tuple[str, ...], ...]


def service(arguments: Sequence[str], *, watches: bool = False, platform: str = sys.platform) -> Service:
    """Return the service that runs `shoal join`.

    Args:
        arguments: the arguments of `shoal join`, without the invite.
        watches: True if the peer must reach the desktop, to learn whether somebody uses the machine.
    Raises: LocalError: an argument has a control character; this system has neither systemd nor launchd.
    """
    for argument in arguments:
        _refuse_control_characters(argument)
    invite = config_path().parent / "service.invite"
    for place in (invite, state_root(), cache_root(), *_environment().values()):
        _refuse_control_characters(str(place))
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
    unit = _unit(arguments, invite, watches=watches)
    return Service(path, unit, invite, on, ((*systemctl, "disable", "--now", UNIT),))


def install(invite: str, arguments: Sequence[str], *, watches: bool = False) -> tuple[Path, bool]:
    """Write the service's files and start it, now and whenever this user's services start.

    Returns: the service's file, and True if the service sees only those files of the user that it needs.
    Raises: LocalError: the service cannot be written or started; then the former files are restored.
    """
    wanted = service(arguments, watches=watches)
    for folder in (state_root(), cache_root()):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {wanted.path: wanted.text, wanted.invite: f"{invite}\n"}
    former = {path: path.read_bytes() if path.exists() else None for path in files}
    for path, text in files.items():
        with or_say(f"cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.chmod(0o600)  # before the invite is written
            path.write_text(text)
    has_own_view = _OWN_VIEW in wanted.text
    try:
        try:
            _run_all(wanted.on)
        except LocalError:
            if not has_own_view or _exit_status() not in _NO_NAMESPACE:
                raise
            has_own_view = False
            _run_all(wanted.off)  # else the next start would wait a minute for the retry of the failed one
            wanted.path.write_text(without_own_view(wanted.text))
            _run_all(wanted.on)
    except LocalError:
        for path, content in former.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)
        raise
    return wanted.path, has_own_view


def uninstall() -> Path:
    """Stop the service and remove it. Raises: LocalError: there is none, or it cannot be stopped."""
    found = service(())
    if not found.path.exists():
        raise LocalError(f"no service is installed: {found.path} is not there")
    _run_all(found.off)
    found.path.unlink()
    found.invite.unlink(missing_ok=True)
    return found.path


def without_own_view(unit: str) -> str:
    """Return a systemd unit without the part that hides other files, for a system without user namespaces."""
    before, _, after = unit.partition(_OWN_VIEW)
    return before + "[Install]" + after.partition("[Install]")[2]


def _unit(arguments: Sequence[str], invite: Path, *, watches: bool) -> str:
    code = {Path(sys.prefix), Path(sys.base_prefix), _HERE.parent}
    hugging_face = Path(os.environ.get("HF_HOME") or cache_root().parent / "huggingface")
    reads = [*sorted(code), config_path().parent, hugging_face]
    desktop = ["%t", "/tmp/.X11-unix", "%h/.Xauthority"] if watches else []
    words = {
        "@SHOAL@": _quoted(str(_SHOAL)),
        "@ARGUMENTS@": " ".join(map(_quoted, arguments)),
        "@INVITE@": str(invite).replace("%", "%%"),
        "@ENVIRONMENT@": " ".join(_word(f"{name}={value}") for name, value in _environment().items()),
        "@WRITES@": " ".join(map(_bound, (state_root(), cache_root()))),
        "@READS@": " ".join([*map(_bound, reads), *(f"-{place}" for place in desktop)]),
    }
    template = (_HERE / "systemd" / UNIT).read_text()
    return re.sub("|".join(words), lambda found: words[found.group()], template)


def _agent(arguments: Sequence[str], invite: Path) -> str:
    import plistlib  # only macOS needs it

    agent = plistlib.loads((_HERE / "launchd" / f"{AGENT}.plist").read_bytes())
    agent["ProgramArguments"] = [str(_SHOAL), "join", "-", *arguments]
    agent["StandardInPath"] = str(invite)
    agent["StandardErrorPath"] = agent["StandardOutPath"] = str(Path.home() / "Library" / "Logs" / "shoal.log")
    return plistlib.dumps(agent, sort_keys=False).decode()


def _refuse_control_characters(argument: str) -> None:
    """Raise LocalError if the argument has a line break or the like: even in quotes these begin a new setting."""
    if any(unicodedata.category(letter) in _CONTROL for letter in argument):
        raise LocalError(f"{argument!r} has a line break or another control character: a service cannot take it")


def _bound(path: Path) -> str:
    """Quote a path for a unit's list of mounts (SOURCE:TARGET): escape colons. A leading `-` allows a missing path."""
    return _word(f"-{path}").replace(":", "\\:")


def _environment() -> dict[str, str]:
    told = {name: os.environ[name] for name in _TOLD if os.environ.get(name)}
    return told | {name: str(cache_root() / folder) for name, folder in _CACHES.items()}


def _quoted(word: str) -> str:
    """Quote an argument of a systemd unit's command line, in which `$` begins a variable."""
    return _word(word).replace("$", "$$")


def _word(word: str) -> str:
    """Quote a word of a systemd unit, in which `%` begins a specifier and quotes are as in a shell."""
    return shlex.quote(word.replace("\\", "\\\\")).replace("%", "%%")


def _exit_status() -> str:
    """Return the exit status of the unit's last process from systemd; empty if unknown."""
    command = ("systemctl", "--user", "show", UNIT, "--property=ExecMainStatus", "--value")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _run_all(commands: Iterable[Sequence[str]]) -> None:
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise LocalError(
                f"this machine has no {command[0]}: `shoal service show` prints what to install"
            ) from error
        except subprocess.CalledProcessError as error:
            why = (error.stderr or error.stdout or "").strip().splitlines()
            raise LocalError(
                f"`{' '.join(command)}` failed: {why[-1] if why else error.returncode}; "
                "`shoal service show` prints what to install by hand"
            ) from error
