"""Places a simulated live swarm among the rows of a comparison; `shoal plan` itself runs nothing."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from shoal.deploy.base.words import printable
from shoal.deploy.simulate.reached import Reached
from shoal.protocol.errors import LocalError
from shoal.protocol.limits import TRACE_BYTES_MAX
from shoal.protocol.toml_file import read_at_most


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """The used fields of a file that `shoal simulate --json` wrote."""

    scenario: str
    devices: tuple[str, ...]
    tokens_per_step: int
    reached: Reached | None = None


def read_simulated(path: Path, *, scenario: str, num_devices: int, tokens_per_step: int) -> Reached:
    """Read the file. Raises: LocalError, in one line: no such file, another swarm, or no live swarm in it."""
    try:
        found = msgspec.json.decode(read_at_most(path, TRACE_BYTES_MAX), type=Simulated)
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise LocalError(f"{path} is no comparison that `shoal simulate --json` wrote: {error}") from error
    if (found.scenario, len(found.devices), found.tokens_per_step) != (scenario, num_devices, tokens_per_step):
        raise LocalError(
            f"{path} is of {printable(found.scenario)}, {len(found.devices)} devices and {found.tokens_per_step:,} "
            f"tokens a step, and this is {scenario}, {num_devices} devices and {tokens_per_step:,} tokens"
        )
    if found.reached is None:
        raise LocalError(f"in {path} no live swarm is beside a planned one: simulate with --strategies ours,live")
    return found.reached


def said_of_live(reached: Reached, tokens_per_s: Mapping[str, float]) -> str:
    """Return a sentence for people. Args: tokens_per_s: row -> its predicted rate."""
    slower = {name: rate for name, rate in tokens_per_s.items() if rate <= reached.tokens_per_s}
    faster = {name: rate for name, rate in tokens_per_s.items() if rate > reached.tokens_per_s}
    places = []
    if slower:
        name = max(slower, key=lambda each: slower[each])
        places.append(f"above {name} ({slower[name]:,.0f})")
    if faster:
        name = min(faster, key=lambda each: faster[each])
        places.append(f"below {name} ({faster[name]:,.0f})")
    between = f": {' and '.join(places)}" if places else ""
    return (
        f"A live swarm reaches {reached.tokens_per_s:,.0f} tokens/s, as simulated from {reached.from_s:,.0f} s of "
        f"virtual time on{between}. That is {reached.share:.2f} of the simulated pace of {printable(reached.planned)}."
    )


def said_of_none(scenario: str) -> str:
    """Return a sentence that tells how to simulate a live swarm."""
    return (
        "Arithmetic does not say which of these rows a live swarm reaches: its coordinators measure, search and move. "
        f"`shoal simulate {printable(scenario)} --strategies ours,live --json live.json` plays one, and `--simulated "
        "live.json` here says it."
    )
