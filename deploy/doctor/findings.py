"""Defines the doctor's findings as plain values, so that tests can diagnose any combination. `Problem` is a fault
concluded from findings.

A finding of None means that the fact was not examined or is unknown; no fault is concluded from None.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.invite import Invite
from shoal.protocol.messages import SwarmStatus


class Dial(Enum):
    """The result of a TCP connection attempt."""

    ANSWERS = "answers"
    REFUSED = "refused"
    """The machine exists, and nothing listens on the port."""
    SILENT = "silent"
    """No answer came: a firewall or router drops the packets, or no machine has the address."""
    NO_ROUTE = "no route"
    """Our own network has no route to the address."""
    NO_NAME = "no name"
    UNTRIED = "untried"
    """No TCP connection was tried: the address does not use TCP, or leads over a relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressFound:
    """One address of an invite, with the result of dialling it."""

    peer: PeerID
    host: str
    port: int
    dial: Dial


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFound:
    """The answers of one peer that the invite names. A peer is asked unless TCP shows that all its addresses fail."""

    peer: PeerID
    protocol_version: int | None = None
    shoal: str = ""
    """shoal's version on the peer."""
    is_in_run: bool | None = None
    ahead_s: float | None = None
    """Our clock minus the peer's clock, in seconds."""
    called_back: bool | None = None
    """True if the peer could connect to our port when we asked it to."""
    speaks: bool = False
    """False: another peer answered at the address, with another key. True: this peer answered, or nobody."""
    mute: str = ""
    """Why the peer did not answer; empty: it answered, or another peer did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFound:
    online: bool | None = None
    """True if this machine has an address of its own (`own_addresses`), or the invite has only loopback addresses."""
    own_addresses: tuple[str, ...] = ()
    """IP addresses of this machine's interfaces, without loopback and link-local ones."""
    daemon_error: str = ""
    """Why our network daemon did not start; empty: it started, or was not tried."""
    port: int | None = None
    """The port on which this machine listened for the test."""
    relayed: bool = False
    """True if other peers can reach this machine over a relay."""
    addresses: tuple[AddressFound, ...] = ()
    peers: tuple[PeerFound, ...] = ()
    statuses: tuple[SwarmStatus, ...] = ()
    """The run's status from each of several peers. If two of these differ, the run may have two swarms."""
    refused: str = ""
    """Why the run's peers refuse a machine with this invite; empty: they accept it, or were not asked."""
    record_found: bool | None = None
    """True if the run's spec is stored in the run's directory (a DHT)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFound:
    """NVIDIA GPUs, and what keeps torch from using them."""

    present: bool | None = None
    """True if the PCI bus has an NVIDIA GPU."""
    driver: str | None = None
    """The version of the loaded NVIDIA kernel driver; empty: none is loaded."""
    torch_version: str | None = None
    torch_cuda: str | None = None
    """The CUDA version for which torch was built; empty: torch was built without CUDA."""
    torch_error: str = ""
    """torch's error on import or on starting CUDA."""
    usable: int | None = None
    """The number of devices that torch can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFound:
    gpu: GpuFound = field(default_factory=GpuFound)
    clock_synchronised: bool | None = None
    """True if a time service keeps the clock, according to the kernel."""
    folder: str = ""
    folder_error: str = ""
    """Why the folder cannot be written; empty: it can."""
    disk_free_bytes: int | None = None
    memory_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    machine: MachineFound = field(default_factory=MachineFound)
    network: NetworkFound = field(default_factory=NetworkFound)
    invite: Invite | None = None
    wants_cuda: bool = False
    """True if the user asked for a GPU by name."""


Side = Literal["you", "host", "nobody"]
"""The side that can mend a fault: the user of this machine, the run's host (or the invite's sender), or nobody."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, in words for a person without background."""

    code: str
    """A name for scripts, such as `clock`; the README lists them."""
    side: Side = "you"
    sentence: str
    """The fault, in one line without a full stop."""
    remedy: str
    fatal: bool = True
    """True if the fault keeps this machine out of the run; false if it only slows the run down or may matter later."""
