"""Describes a swarm's devices and the links between any two devices, for layer allocation and for simulations.

A topology can be read from a network file (`load_topology`): JSON as in the DT-FM paper's cases, with more optional
fields. The diagonals of a file's matrices are never read.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.protocol.complaint import complaint, misspelt, unread
from shoal.protocol.errors import LocalError
from shoal.protocol.limits import NETWORK_FILE_BYTES_MAX, SCENARIO_DEVICES_MAX
from shoal.protocol.toml_file import read_at_most

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

DEFAULT_FLOP_PER_S = 45e12
"""Default speed of a device in FLOP/s: that of a V100 in fp16, as the DT-FM paper measured it."""
DEFAULT_MEMORY_BYTES = 16e9
_UNREAD_SHOWN = 12
"""The most unread fields that a note lists by name; of further fields it gives the number."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Topology:
    """N devices and their links. Arrays are read-only; rows are senders, columns receivers.

    Raises: LocalError: sizes differ, or a number is impossible.
    """

    latency_s: Floats
    """[N, N], one-way latency, finite."""
    bytes_per_s: Floats
    """[N, N], rate of the path, without the limits of the network cards; 0: there is no path."""
    flop_per_s: Floats
    """[N], speed measured on real microbatches, not a peak."""
    memory_bytes: Floats
    """[N], memory for parameters, gradients, optimizer moments and activations."""
    up_bytes_per_s: Floats
    """[N], upload rate of the device's network card; inf if only paths limit it."""
    down_bytes_per_s: Floats
    """[N], download rate of the device's network card; inf if only paths limit it."""
    card: Ints
    """[N], number of the network card: devices with the same number share its upload and download rates."""
    names: tuple[str, ...]
    regions: tuple[str, ...]
    may_feed: Bools
    """[N], True if the device has the run's text, so that it may hold stage 0."""

    def __post_init__(self) -> None:
        if flaw := _flaw(self):
            raise LocalError(flaw)
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.flags.writeable = False

    @property
    def num_devices(self) -> int:
        return len(self.names)

    def take(self, devices: "list[int] | Ints") -> "Topology":
        """Return the topology of the given devices only, in the given order."""
        index = np.asarray(devices, dtype=np.int64)

        def taken(values: Any) -> Any:
            if isinstance(values, tuple):
                return tuple(values[i] for i in index)
            return values[np.ix_(index, index) if values.ndim == 2 else index]

        return Topology(**{name: taken(values) for name, values in vars(self).items()})


def make_topology(
    latency_s: Any,
    bytes_per_s: Any,
    *,
    flop_per_s: Any = DEFAULT_FLOP_PER_S,
    memory_bytes: Any = DEFAULT_MEMORY_BYTES,
    up_bytes_per_s: Any = math.inf,
    down_bytes_per_s: Any = math.inf,
    card: Any = None,
    names: tuple[str, ...] | None = None,
    regions: tuple[str, ...] | None = None,
    may_feed: Any = True,
) -> Topology:
    """Make a topology; all arguments are broadcast to the shapes in `Topology`. Raises: LocalError: sizes differ, or a
    number is impossible."""
    latency = _matrix("latency", latency_s)
    rate = _matrix("bandwidth", bytes_per_s)
    n = len(latency)

    def per_device(value: Any, what: str) -> Floats:
        array = np.asarray(value, dtype=np.float64)
        if array.shape not in ((), (n,)):
            raise LocalError(f"the {what} is given for {array.size} devices, the latency for {n}")
        return np.broadcast_to(array, (n,)).copy()

    return Topology(
        latency_s=latency,
        bytes_per_s=rate,
        flop_per_s=per_device(flop_per_s, "speed"),
        memory_bytes=per_device(memory_bytes, "memory"),
        up_bytes_per_s=per_device(up_bytes_per_s, "upload"),
        down_bytes_per_s=per_device(down_bytes_per_s, "download"),
        card=np.arange(n) if card is None else np.asarray(card, dtype=np.int64).copy(),
        names=tuple(f"device-{i}" for i in range(n)) if names is None else names,
        regions=("",) * n if regions is None else regions,
        may_feed=per_device(may_feed, "text") > 0.5,
    )


def load_topology(path: Path) -> tuple[Topology, "ReadNetwork"]:
    """Read a network file: a JSON object with `latency_ms` or `latency_s`, and `bandwidth_gbps` or
    `bandwidth_bits_per_s`, as square matrices with a row for each sender. Optional: `device_regions`, `devices` (one
    `DeviceEntry` for each), `unreachable` and `workload`.

    Returns: the topology, and the parsed file with notes for people.
    Raises: LocalError, in one line: the file is missing or is not JSON (with NaN it is not), a field is misspelt, a
        matrix is not square, a number is impossible, or a device is unreachable.
    """
    try:
        raw = read_at_most(path, NETWORK_FILE_BYTES_MAX)
        file = msgspec.json.decode(raw, type=NetworkFile)
        found = msgspec.json.decode(raw)
        if flaw := _misspelt(found):
            raise LocalError(flaw)
        return file.topology(), ReadNetwork(file, _notes(found, file))
    except RecursionError as error:
        raise LocalError(f"{path} is not a network: it is nested too deep") from error
    except OSError as error:
        raise LocalError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LocalError(f"{path} is not a network: {complaint(error, NetworkFile)}") from error
    except LocalError as error:
        raise LocalError(f"{path} is not a network: {error}") from error


def _misspelt(found: Any) -> str:
    """Return one line about a misspelt field, or "". Other unknown fields are allowed."""
    inner = misspelt(found.get("workload"), WorkloadEntry)
    return misspelt(found, NetworkFile) or (f"in workload {inner}" if inner else "")


def _notes(found: Any, file: "NetworkFile") -> tuple[str, ...]:
    names = unread(found, NetworkFile)
    of_devices = [name for name in names if name in DeviceEntry.__struct_fields__]
    others = [name for name in names if name not in of_devices]
    others += [f"workload.{name}" for name in unread(found.get("workload"), WorkloadEntry)]
    notes = []
    if of_devices:
        notes.append(f"not read at the top of the file: {_listed(of_devices)}; say it in each entry of devices")
    if others:
        notes.append(f"not read: {_listed(others)}")
    devices = file.devices or [DeviceEntry()] * len(file.latency_s or file.latency_ms or ())
    for what, default, given in (
        ("speed", f"{DEFAULT_FLOP_PER_S / 1e12:g} TFLOP/s", [entry.tflops is not None for entry in devices]),
        ("memory", f"{DEFAULT_MEMORY_BYTES / 1e9:g} GB", [entry.memory_gb is not None for entry in devices]),
    ):
        if not all(given):
            left = given.count(False)
            whose = "every device" if left == len(devices) else f"{left} of {len(devices)} devices"
            notes.append(f"the {what} of {whose} is assumed: {default}")
    return tuple(notes)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(_shown(name) for name in names[:_UNREAD_SHOWN])
    return shown + (f" and {len(names) - _UNREAD_SHOWN} more" if len(names) > _UNREAD_SHOWN else "")


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device of a network file; defaults are `DEFAULT_FLOP_PER_S` and `DEFAULT_MEMORY_BYTES`."""

    name: str = ""
    tflops: float | None = None
    memory_gb: float | None = None
    up_mbps: float = math.inf
    down_mbps: float = math.inf
    card: int | None = None
    has_text: bool = True
    watts: float | None = None
    """Power that the device draws while it trains; if missing, `shoal plan` assumes a value."""
    behind_nat: bool = False
    """True if only peers that it has dialled can reach it. Two such devices cannot connect unless they share a card."""


class WorkloadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, in 10^9 bytes, and other figures of a run, from which the DT-FM paper computes a layout's cost."""

    gradient_gigabytes_per_stage: float
    activation_gigabytes_per_replica: float
    model: str = ""
    num_layers: int = 0
    layers_per_stage: int = 0
    hidden_dim_of_model: int = 0
    sequence_length_tokens: int = 0
    global_batch_tokens: float = 0.0


class NetworkFile(msgspec.Struct, frozen=True, kw_only=True):
    """A network file's fields that we read. Others (such as its source) are for people; `load_topology` lists them."""

    latency_s: list[list[float]] | None = None
    latency_ms: list[list[float]] | None = None
    bandwidth_bits_per_s: list[list[float]] | None = None
    bandwidth_gbps: list[list[float]] | None = None
    name: str = ""
    title: str = ""
    device_regions: list[str] | None = None
    devices: list[DeviceEntry] | None = None
    unreachable: list[tuple[str, str]] = []
    """Pairs of device names that cannot reach each other; a bandwidth of 0 means the same."""
    workload: WorkloadEntry | None = None
    num_stages: int | None = None
    replicas_per_stage: int | None = None

    @property
    def watts(self) -> tuple[float | None, ...]:
        """[N], power of each device in watts; None for a device without such a figure in the file."""
        if self.devices is not None:
            return tuple(entry.watts for entry in self.devices)
        return (None,) * len(self.latency_s or self.latency_ms or ())

    def topology(self) -> Topology:
        """Return the file's topology. Raises: LocalError: the file is incomplete, or contradicts itself."""
        latency, latency_unit = (self.latency_s, 1.0) if self.latency_s is not None else (self.latency_ms, 1e-3)
        rate, rate_unit = (
            (self.bandwidth_bits_per_s, 1.0) if self.bandwidth_bits_per_s is not None else (self.bandwidth_gbps, 1e9)
        )
        if latency is None or rate is None:
            raise LocalError("it lacks latency_ms or bandwidth_gbps")
        if len(latency) > SCENARIO_DEVICES_MAX:
            raise LocalError(f"its {len(latency)} devices are more than {SCENARIO_DEVICES_MAX}")
        with np.errstate(over="ignore"):  # infinite values are refused later, with a sentence
            latency_s = _matrix("latency", latency) * latency_unit
            bytes_per_s = _matrix("bandwidth", rate) * (rate_unit / 8.0)
        n = len(latency_s)
        entries = self.devices if self.devices is not None else [DeviceEntry()] * n
        regions = self.device_regions if self.device_regions is not None else [""] * n
        if len(entries) != n or len(regions) != n:
            raise LocalError(f"{len(entries)} devices and {len(regions)} regions are named, the latency is for {n}")
        cards = {entry.card: index for index, entry in reversed(list(enumerate(entries))) if entry.card is not None}
        card = [index if entry.card is None else cards[entry.card] for index, entry in enumerate(entries)]
        names = tuple(entry.name or f"device-{index}" for index, entry in enumerate(entries))
        close_paths(bytes_per_s, card, names, [entry.behind_nat for entry in entries], self.unreachable)
        topology = make_topology(
            latency_s,
            bytes_per_s,
            flop_per_s=[DEFAULT_FLOP_PER_S if e.tflops is None else e.tflops * 1e12 for e in entries],
            memory_bytes=[DEFAULT_MEMORY_BYTES if e.memory_gb is None else e.memory_gb * 1e9 for e in entries],
            up_bytes_per_s=[entry.up_mbps * 1e6 / 8.0 for entry in entries],
            down_bytes_per_s=[entry.down_mbps * 1e6 / 8.0 for entry in entries],
            card=card,
            names=names,
            regions=tuple(regions),
            may_feed=[float(entry.has_text) for entry in entries],
        )
        check_everybody_is_reached(topology)
        return topology


class ReadNetwork(NamedTuple):
    """A parsed network file, with notes for people."""

    file: NetworkFile
    notes: tuple[str, ...]
    """Sentences for people about fields that are not read, and about assumed values."""


def close_paths(
    bytes_per_s: Floats,
    card: Sequence[int] | Ints,
    names: Sequence[str],
    behind_nat: Sequence[bool] | Bools,
    unreachable: Iterable[tuple[str, str]],
) -> None:
    """Set the rate to 0 where there is no path: between devices behind different NATs, and between the pairs in
    `unreachable`. Raises: LocalError: a pair names an unknown device."""
    if bytes_per_s.shape != (len(names), len(names)):
        return  # the sizes differ: `Topology` raises the error
    at, inside = np.asarray(card), np.asarray(behind_nat, dtype=np.bool_)
    bytes_per_s[inside[:, None] & inside[None, :] & (at[:, None] != at[None, :])] = 0.0
    number = {name: index for index, name in enumerate(names)}
    for pair in unreachable:
        for name in pair:
            if name not in number:
                raise LocalError(f"unreachable names {_shown(name)}, which is no device")
        i, j = number[pair[0]], number[pair[1]]
        bytes_per_s[i, j] = bytes_per_s[j, i] = 0.0


def _matrix(what: str, rows: Any) -> Floats:
    """Return a copy of a matrix with a diagonal of 0; float32 stays float32. Raises: LocalError: it is not square."""
    size = len(rows)
    if size == 0:
        raise LocalError(f"the {what} matrix is empty")
    for index, row in enumerate(rows):
        if len(row) != size:
            raise LocalError(f"the {what} matrix has {size} rows, but row {index} has {len(row)} columns")
    single = isinstance(rows, np.ndarray) and rows.dtype == np.float32
    matrix: Floats = np.array(rows, dtype=np.float32 if single else np.float64)
    np.fill_diagonal(matrix, 0.0)
    return matrix


def _flaw(t: Topology) -> str | None:
    n = t.num_devices
    if t.latency_s.shape != (n, n) or t.bytes_per_s.shape != (n, n):
        return f"latency is between {len(t.latency_s)} devices, bandwidth between {len(t.bytes_per_s)}, of {n}"
    vectors = (t.flop_per_s, t.memory_bytes, t.up_bytes_per_s, t.down_bytes_per_s, t.card, t.may_feed)
    if any(vector.shape != (n,) for vector in vectors) or len(t.regions) != n:
        return f"some fields do not have a value for each of {n} devices"
    for what, matrix in (("latency", t.latency_s), ("bandwidth", t.bytes_per_s)):
        links = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0.0)))
        if len(links):
            i, j = links[0]
            return f"the {what} of link {i} -> {j} is {matrix[i, j]}, and must be a number of 0 or more"
    for what, vector in (
        ("speed", t.flop_per_s),
        ("memory", t.memory_bytes),
        ("upload", t.up_bytes_per_s),
        ("download", t.down_bytes_per_s),
    ):
        bad = np.flatnonzero(~(vector > 0.0))
        if len(bad):
            return f"the {what} of {_shown(t.names[bad[0]])} is {vector[bad[0]]}, and must be above 0"
    if not np.isfinite(t.flop_per_s).all() or not np.isfinite(t.memory_bytes).all():
        return "a device has an infinite speed or memory"
    return None


def check_everybody_is_reached(topology: Topology) -> None:
    """Check that each device can reach another. Raises: LocalError. Only for files: a real peer may be cut off."""
    open_paths = topology.bytes_per_s > 0.0
    np.fill_diagonal(open_paths, False)
    lonely = np.flatnonzero(~(open_paths.any(axis=0) & open_paths.any(axis=1)))
    if topology.num_devices > 1 and len(lonely):
        raise LocalError(f"{_shown(topology.names[lonely[0]])} has no link to or from any other device")


def _shown(name: str) -> str:
    """Return a name from a file in a form that fits into one line, since the name may contain line breaks."""
    return name if name.isprintable() else repr(name)
