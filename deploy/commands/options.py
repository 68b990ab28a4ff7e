"""The options, examples and logging that commands share."""

import functools
import inspect
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from shoal.deploy.dashboard import address
from shoal.deploy.terminal.log_lines import LogLines
from shoal.protocol.errors import LocalError
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.names import is_name
from shoal.protocol.spec import AUTO_STAGES

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
DEFAULT_LISTEN = "0.0.0.0:0"

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|rocm|xpu)(:\d{1,4})?")


def _peer_name(text: str) -> str:
    if not is_name(text):
        raise LocalError(f"--name {text!r}: a name has no control characters and no line breaks")
    return text


def _device_name(text: str) -> str:
    if not _DEVICE.fullmatch(text):
        raise LocalError(f"--device {text}: shoal computes on cpu, cuda, rocm, xpu (each also with :N) or mps")
    return text


def _device_names(text: str) -> str:
    for name in () if text == "all" else text.split(","):
        _device_name(name)
    return text


PeerName = Annotated[str, typer.Option(help="This peer's name, which others see.", callback=_peer_name)]
Listen = Annotated[
    str, typer.Option(help="Where to listen: HOST:PORT, :PORT or a multiaddr. With port 0 the system chooses one.")
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        help="The folder for the peer's identity, plans and snapshots. Default: one in the user's state folder."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda or cuda:N; auto is the first GPU, or the CPU without one. rocm, xpu and mps are untested.",
        callback=_device_name,
        autocompletion=lambda: ["auto", "cpu", "cuda", "cuda:0", "cuda:1", "rocm", "xpu", "mps"],
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        help="cpu, cuda or cuda:N; auto is the first GPU, or the CPU without one; all starts a peer on each GPU, "
        "cuda:0,cuda:2 a peer on each of these two. rocm, xpu and mps are untested.",
        callback=_device_names,
        autocompletion=lambda: ["auto", "all", "cpu", "cuda", "cuda:0", "cuda:1", "rocm", "xpu", "mps"],
    ),
]
Dashboard = Annotated[
    str | None,
    typer.Option(
        address.OPTION,
        metavar="[HOST:PORT]",
        help=f"Show the run as a web page. Default address: {address.DEFAULT}, or the next free port.",
    ),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Use this limit in place of the one in `shoal config show`, as in upload_mbit_s=5. May be repeated.",
    ),
]
RunsTokenizer = Annotated[
    Path | None, typer.Option(help="The run's tokenizer.json. Default: where the run's spec says it is.")
]
RunsBase = Annotated[
    Path | None,
    typer.Option(help="The folder of the model that the run's adapters belong to, if shoal does not find it."),
]
LocalText = Annotated[
    str,
    typer.Option(
        help="Where the run's text is on this machine. If it has several sources, name all, separated by commas."
    ),
]
RunsInvite = Annotated[
    str | None,
    typer.Argument(help="The run's invite; - reads it from standard input. Default: the run last started here."),
]
ScenarioName = Annotated[
    str | None,
    typer.Argument(
        metavar="SCENARIO",
        help="SCENARIO.toml, NETWORK.json, or the name of a shipped scenario.",
        autocompletion=lambda incomplete: _scenario_names(incomplete),
    ),
]
PriceKwh = Annotated[
    float | None, typer.Option(min=0.0, help="Price of a kilowatt-hour, in your currency. Default: 0.30.")
]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, to standard error.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options that `shoal plan` has for planning a network."""

    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN.toml", help="Use the model, batch and goal of this run spec, not the scenario's."),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Say how long this many tokens take, as in 20B or 1.5T. "
            "Default: the run's steps; without a run, 20 a parameter.",
        ),
    ] = None
    price_kwh: PriceKwh = None
    objective: Annotated[
        str, typer.Option(help="What the search optimizes: throughput (ours), or dtfm (as in the DT-FM paper).")
    ] = "throughput"
    seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="About how long to search. It is a fixed amount of work, so that a seed gives the same plan again.",
        ),
    ] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same plan.")] = 0
    stages: Annotated[
        int | None,
        typer.Option(min=1, help="Number of stages. Default: the scenario's; if it names none, the best number."),
    ] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare all layouts in a table, row by row as they are found.")
    ] = False
    json: Json = False


_Command = TypeVar("_Command", bound=Callable[..., Any])


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the fields of a command's last parameter, a dataclass, into options: typer has no groups of options."""
    *own, group = inspect.signature(command).parameters.values()
    fields = inspect.signature(group.annotation).parameters.values()

    @functools.wraps(command)
    def call(**given: Any) -> None:
        said = {each.name: given.pop(each.name) for each in fields}
        command(**given, **{group.name: group.annotation(**said)})

    call.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
    return call


def examples(*lines: str) -> Callable[[_Command], _Command]:
    """Set the examples at the end of a command's `--help`: whole command lines, each followed by two spaces, a # and
    its purpose.

    tests/deploy/test_help.py checks that every command has some and that their options exist.
    """
    parts = [line.partition("  # ") for line in lines]
    text = "".join(f"\n  # {why}\n  {line}" for line, _, why in parts)

    def keep(command: _Command) -> _Command:
        vars(command)["epilog"] = f"\b\nExamples:{text}"  # \b keeps line breaks
        return command

    return keep


def examples_of(command: Callable[..., Any]) -> str | None:
    """Return a command's examples, the last paragraph of its help; None: it has none."""
    return vars(command).get("epilog")


def data_source(text: str) -> str:
    """Return the value of `--data` as a run spec needs it: an absolute path, or an unchanged source that is no path.

    Raises: LocalError: there is no such file or folder.
    """
    from shoal.peer.data.documents import HUB, PYTHON_LIBRARY

    if not text or text == PYTHON_LIBRARY or text.startswith(HUB):
        return text
    path = Path(text).expanduser().resolve()
    if not path.exists():
        raise LocalError(f"there is no file or folder {path} to train on")
    return str(path)


def said_stages(text: str) -> int | str:
    """Return the value of `--stages`, a number of stages or `auto`. Raises: LocalError: it is neither."""
    if text == AUTO_STAGES:
        return text
    if not text.isdecimal() or not 0 < int(text[:9]) <= STAGES_MAX:
        raise LocalError(f"--stages is a number from 1 to {STAGES_MAX}, or {AUTO_STAGES}; not {text!r}")
    return int(text)


def said_parts(text: str) -> tuple[float, ...]:
    """Parse the comma-separated numbers of `--parts`. Raises: LocalError: it is not a list of numbers above 0."""
    try:
        parts = tuple(float(word) for word in text.split(","))
    except ValueError:
        parts = ()
    if not parts or not all(0.0 < part < math.inf for part in parts):
        raise LocalError(f"--parts is numbers above 0 with commas between them, such as 1,1,2,4; not {text!r}")
    return parts


def check_writable(path: Path) -> None:
    """Check that a file can be written at `path`, before minutes of work. Raises: LocalError: it cannot."""
    if path.is_dir():
        raise LocalError(f"cannot write {path}: it is a folder")
    if not path.absolute().parent.is_dir():
        raise LocalError(f"cannot write {path}: there is no folder {path.parent}")


def _scenario_names(incomplete: str) -> list[str]:
    """Return the shipped scenarios' names for shell completion, without reading the files."""
    names = sorted(path.stem for path in (Path(__file__).parent.parent / "simulate" / "scenarios").glob("*.toml"))
    return [name for name in names if name.startswith(incomplete)]


def start_logging(verbose: bool) -> None:
    """Start logging. Args: verbose: log everything, with time and module; else warnings as text, without repeats."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s" if verbose else "shoal: %(message)s",
        handlers=[LogLines(every=verbose)],
    )
