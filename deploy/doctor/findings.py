"""What the doctor has found out: plain values, so that a diagnosis can be made of any of them.

None means throughout that it was not looked at, or could not be told: nothing is diagnosed from it.
"""

from dataclasses import dataclass, field
from enum import Enum

from shoal.protocol.identity import PeerID
from shoal.protocol.invite import Invite


class Dial(Enum):
    """How a TCP connection to an address went."""

    ANSWERS = "answers"
    REFUSED = "refused"
    """The machine is there, and nothing listens on the port."""
    SILENT = "silent"
    """Nothing came back, because of a firewall or a router, or because there is no machine."""
    NO_ROUTE = "no route"
    """Our own network knows no way there."""
    NO_NAME = "no name"
    """The name cannot be resolved."""
    UNTRIED = "untried"
    """The address is no TCP address; it leads over a relay, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressFound:
    """One address of an invite."""

    peer: PeerID
    host: str
    """The IP address or the name."""
    port: int
    dial: Dial


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFound:
    """What a peer whose port answers said."""

    peer: PeerID
    protocol_version: int | None = None
    shoal: str = ""
    """The version of the peer's program."""
    is_in_run: bool | None = None
    ahead_s: float | None = None
    """How far our clock is ahead of the peer's."""
    called_back: bool | None = None
    """Whether it could connect to the port on which we listen."""
    speaks: bool = False
    """It is not somebody else: libp2p's handshake has shown a key, and it is the peer's; or it shows none."""
    mute: str = ""
    """Why it said nothing all the same, in the network's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmView:
    """A swarm as one of its peers sees it."""

    asked: PeerID
    coordinator: PeerID
    term: int
    members: frozenset[PeerID]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFound:
    online: bool | None = None
    """Whether an interface has an address that leads out of this machine."""
    own_addresses: tuple[str, ...] = ()
    """IP addresses of this machine's interfaces, loopback left out."""
    daemon_error: str = ""
    """Why our network daemon did not start; empty: it did, or was not tried."""
    port: int | None = None
    """The port on which we listened for the test."""
    relayed: bool = False
    """A relay offers a way to us."""
    addresses: tuple[AddressFound, ...] = ()
    peers: tuple[PeerFound, ...] = ()
    views: tuple[SwarmView, ...] = ()
    refused: str = ""
    """Why the run's peers do not let a holder of the invite in; empty: they do, or were not asked."""
    record_found: bool | None = None
    """Whether the directory has the run's spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFound:
    """NVIDIA's GPUs, and what stands between them and torch."""

    present: bool | None = None
    """Whether a device of NVIDIA's is on the bus."""
    driver: str | None = None
    """The kernel driver's version; empty: it is not loaded."""
    torch_version: str | None = None
    torch_cuda: str | None = None
    """The CUDA that torch was built for; empty: none."""
    torch_error: str = ""
    """Why torch cannot be imported, or cannot use CUDA, in its own words."""
    usable: int | None = None
    """Devices that torch can compute on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFound:
    gpu: GpuFound = field(default_factory=GpuFound)
    clock_synchronised: bool | None = None
    """Whether a time service keeps the clock, by the kernel's word."""
    folder: str = ""
    """The folder in which state is kept."""
    folder_error: str = ""
    """The reason why nothing can be written there."""
    disk_free_bytes: int | None = None
    memory_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    machine: MachineFound = field(default_factory=MachineFound)
    network: NetworkFound = field(default_factory=NetworkFound)
    invite: Invite | None = None
    wants_cuda: bool = False
    """The user asked for a GPU by name."""
