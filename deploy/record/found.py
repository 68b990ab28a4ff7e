"""Finds the record that a person means: by the run's name, the beginning of its identifier, or a path."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.deploy.record.lines import RECORD, StartLine, decode_line
from shoal.deploy.state import places
from shoal.protocol.errors import LocalError

_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    path: Path
    run: str
    name: str
    used_s: float
    """When something was last written to it, seconds since 1970."""


def records() -> list[Found]:
    """All records of this user on this machine, the newest first."""
    return sorted(_records(), key=lambda found: (-found.used_s, str(found.path)))


def find_record(wanted: str) -> Path:
    """Args: wanted: a path, a run's name, or the beginning of its identifier; empty: the newest record.

    Raises: LocalError: there is none, or several mean that.
    """
    if wanted and Path(wanted).exists():
        return _below(Path(wanted))
    known = records()
    if not known:
        raise LocalError(
            "there is no record of a run on this machine: `shoal host` keeps one, and `shoal join --record`"
        )
    if not wanted:
        return known[0].path
    found = [one for one in known if one.name == wanted or one.run.startswith(wanted)]
    runs = {one.run for one in found}
    if len(runs) > 1:
        raise LocalError(f"{wanted!r} may be {_listed(found)}: say more of its identifier, or give the folder")
    if not found:
        raise LocalError(f"there is no record of a run {wanted!r}: there are {_listed(known)}")
    return found[0].path  # of several peers of one run on this machine the one that wrote last


def _below(path: Path) -> Path:
    if path.is_file():
        return path
    inside = sorted([*path.glob(RECORD), *path.glob(f"*/{RECORD}"), *path.glob(f"*/*/{RECORD}")])
    if not inside:
        raise LocalError(f"there is no {RECORD} in {path}")
    return max(inside, key=lambda file: file.stat().st_mtime)


def _records() -> Iterator[Found]:
    root = places.state_root()
    for path in [*root.glob(f"hosts/*/*/{RECORD}"), *root.glob(f"runs/*/*/*/{RECORD}")]:
        try:
            with path.open("rb") as file:
                first = decode_line(file.readline(65536))
            used_s = path.stat().st_mtime
        except OSError:
            continue
        name = first.name if isinstance(first, StartLine) else ""
        yield Found(path=path, run=path.parent.name, name=name, used_s=used_s)


def _listed(found: list[Found]) -> str:
    names = list(dict.fromkeys(f"{one.name} ({one.run})" if one.name else one.run for one in found))
    return ", ".join(names[:_SHOWN_MAX]) + (f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else "")
