"""Turns findings into sentences that name the side at fault and the remedy. Pure, so that every diagnosis has a test.

`diagnose` checks the machine, then the network from this machine outwards, then the run. If a fault explains others,
only this fault is reported: a machine without a network is not told that the host is down.
"""

import ipaddress
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.deploy.base.words import printable
from shoal.deploy.doctor.findings import (
    AddressFound,
    Dial,
    Findings,
    GpuFound,
    MachineFound,
    NetworkFound,
    PeerFound,
    Problem,
)
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.messages import SwarmStatus

CLOCK_S_MAX = 3.0
"""Seconds by which a machine's clock may be off; if it is further off, hivemind refuses the machine's records."""
DISK_BYTES_MIN = 64 * 2**20
"""Less free space than this is fatal: a peer soon writes as much, in plans, a log and a small stage's snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result: `problems` in the order in which to solve them, fatal ones first; `fine`: checks that passed."""

    problems: tuple[Problem, ...]
    fine: tuple[str, ...]

    @property
    def main(self) -> Problem | None:
        """The fatal problem to solve first; None: no problem is fatal."""
        return next((problem for problem in self.problems if problem.fatal), None)


def diagnose(findings: Findings) -> Diagnosis:
    problems = [*_machine_problems(findings.machine, wants_cuda=findings.wants_cuda), *_network_problems(findings)]
    ordered = sorted(problems, key=lambda problem: not problem.fatal)  # stable: keeps the order of discovery
    return Diagnosis(problems=tuple(ordered), fine=tuple(_fine(findings, {problem.code for problem in problems})))


# --- the machine ---


def _machine_problems(machine: MachineFound, *, wants_cuda: bool) -> Iterator[Problem]:
    yield from _gpu_problems(machine.gpu, wants_cuda)
    yield from _disk_problems(machine)
    free = machine.memory_free_bytes
    if free is not None and free < 2**30:
        yield Problem(
            code="memory",
            sentence=f"this machine has only {free / 1e6:,.0f} MB of memory left",
            remedy="end other programs, or give the container more: a peer takes 400 MB before it holds a layer",
            # A process with torch and hivemind has 280 MB before it holds any weight, and its network daemon 60 MB.
            fatal=free < 512 * 2**20,
        )


def _gpu_problems(gpu: GpuFound, wants_cuda: bool) -> Iterator[Problem]:
    """Check, in this order, the bus, the driver, torch's build and torch's error. Yield only the first fault."""
    if gpu.torch_version == "":
        yield Problem(
            code="torch-broken",
            sentence=f"torch cannot be loaded: {gpu.torch_error}",
            remedy="install it again: `pip install --force-reinstall torch`",
        )
    elif gpu.usable or gpu.present is None:
        return
    elif not gpu.present:
        if wants_cuda:
            yield Problem(
                code="no-gpu",
                sentence="no GPU of NVIDIA's is in this machine, and --device asks for one",
                remedy="leave --device away to compute on the CPU; in a container, pass the GPU through (`--gpus all`)",
            )
    elif gpu.driver == "":
        yield Problem(
            code="no-driver",
            sentence="this machine has an NVIDIA GPU, but its driver is not loaded",
            remedy="install the driver and restart: `sudo ubuntu-drivers install`, or NVIDIA's own for your system",
            fatal=wants_cuda,
        )
    elif gpu.torch_cuda == "":
        yield Problem(
            code="torch-without-cuda",
            sentence=f"torch {gpu.torch_version} was built without CUDA, so that the GPU in this machine stays idle",
            remedy="install the CUDA build: `pip install --force-reinstall torch --index-url` with the address that "
            "pytorch.org shows for your system",
            fatal=wants_cuda,
        )
    elif gpu.usable == 0:
        yield Problem(
            code="cuda-unusable",
            sentence=f"torch cannot use the GPU with driver {gpu.driver or 'unknown'}: "
            f"{gpu.torch_error or 'without a reason'}",
            remedy=f"upgrade the driver to one that supports CUDA {gpu.torch_cuda}, or restart after an upgrade of it",
            fatal=wants_cuda,
        )


def _disk_problems(machine: MachineFound) -> Iterator[Problem]:
    free = machine.disk_free_bytes
    if free is not None and free < 2 * 2**30:
        yield Problem(
            code="disk-full",
            sentence=f"the disk of {machine.folder} has only {free / 1e6:,.0f} MB left",
            remedy="make room: a peer keeps snapshots of what it holds; or give it another folder with --state-dir",
            fatal=free < DISK_BYTES_MIN,
        )
    if machine.folder_error and (free is None or free >= DISK_BYTES_MIN):
        yield Problem(
            code="disk-not-writable",
            sentence=f"nothing can be written to {machine.folder}: {machine.folder_error}",
            remedy="give this user the right to, or name another folder with --state-dir",
        )


# --- the network ---


def _network_problems(findings: Findings) -> Iterator[Problem]:
    network = findings.network
    if network.daemon_error:
        yield Problem(
            code="network-daemon",
            sentence=f"the network part of shoal does not start on this machine: {network.daemon_error}",
            remedy="give another port with --listen, or free it; if it is not about a port, run again with --verbose",
        )
        return
    if network.online is False:
        yield Problem(
            code="offline",
            sentence="this machine has no network: no interface has an address that leads anywhere",
            remedy="plug it in or connect to the Wi-Fi, and try again",
        )
        return
    reached = [peer for peer in network.peers if peer.speaks]
    if network.addresses and not reached:
        yield _nobody_answers(network)
        return
    if reached and all(peer.mute for peer in reached):
        yield Problem(
            code="mute",
            side="host",
            sentence=f"the peers of the invite take connections and answer nothing ({reached[0].mute})",
            remedy="their process hangs, is suspended or far too busy: ask the host to look, or another member for an "
            "invite (`shoal invite`)",
        )
        return
    yield from _run_problems(findings, reached)
    yield from _clock_problems(findings, reached)
    yield from _reachability_problems(network, reached)


# --- nobody answers ---


def _nobody_answers(network: NetworkFound) -> Problem:
    """Return why no address of the invite leads to a peer, judged by the address that came closest to success."""
    by_dial = {dial: [address for address in network.addresses if address.dial is dial] for dial in Dial}
    if answering := by_dial[Dial.ANSWERS]:
        return Problem(
            code="bootstrap-down",
            side="host",
            sentence=f"the peers of the invite are gone: somebody else answers at {_places(answering)}",
            remedy="ask for a fresh invite: any member's `shoal invite` prints one",
        )
    if refusing := by_dial[Dial.REFUSED]:
        return Problem(
            code="bootstrap-down",
            side="host",
            sentence=f"the peers of the invite are not up: nothing listens on {_places(refusing)}",
            remedy="ask the host to start it again, or any member for a fresh invite (`shoal invite`)",
        )
    if named := by_dial[Dial.NO_NAME]:
        names = ", ".join(sorted({address.host for address in named}))
        return Problem(
            code="dns",
            side="you" if all(_ip(address) is None for address in network.addresses) else "host",
            sentence=f"the name {names} leads to no address",
            remedy="see whether this machine resolves other names (`getent hosts python.org`): if it does, the host "
            "must put the name right; if not, this machine's DNS is at fault",
        )
    if all(_is_private(address) for address in network.addresses):
        return Problem(
            code="nat-without-relay",
            side="host",
            sentence=f"the invite has only addresses of the host's own network ({_places(network.addresses)}): the "
            "host is behind a router (NAT), and no relay leads to it",
            remedy="join from that network; or let the host's router forward a port, and the host start with "
            "`--listen :4001 --announce PUBLIC-ADDRESS:4001` and send a fresh invite",
        )
    if by_dial[Dial.SILENT]:
        port = by_dial[Dial.SILENT][0].port
        return Problem(
            code="port-closed",
            side="host",
            sentence=f"nothing comes back from {_places(by_dial[Dial.SILENT])}: a firewall or a router keeps the port "
            "closed, or the machine is off",
            remedy=f"the host must let TCP port {port} in (firewall, and forwarding on the router), or be switched on; "
            "a network that lets nothing out but web pages does the same on your side",
        )
    return Problem(
        code="no-route",
        side="you",
        sentence=f"this machine's network knows no way to {_places(network.addresses)}",
        remedy="check the network connection, a VPN, and whether it has IPv6 if the addresses are of that kind",
    )


def _places(addresses: Sequence[AddressFound]) -> str:
    return ", ".join(dict.fromkeys(f"{address.host} port {address.port}" for address in addresses))


def _ip(address: AddressFound) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.host)
    except ValueError:
        return None


def _is_private(address: AddressFound) -> bool:
    ip = _ip(address)
    return ip is not None and not ip.is_global


# --- somebody answers ---


def _run_problems(findings: Findings, reached: Sequence[PeerFound]) -> Iterator[Problem]:
    """Yield problems with protocol version, run, invite and spec, and one if the run has two swarms."""
    invite = findings.invite
    if invite is None or not reached:
        return
    versions = {peer.protocol_version for peer in reached if peer.protocol_version is not None}
    if versions and PROTOCOL_VERSION not in versions:
        yield _other_version(max(versions), next(peer.shoal for peer in reached if peer.shoal or peer.protocol_version))
        return
    if False in (answers := {peer.is_in_run for peer in reached}) and True not in answers:
        yield Problem(
            code="wrong-run",
            side="host",
            sentence=f"the peers of the invite are up, but do not take part in its run {invite.run}: the host has "
            "started another one since",
            remedy="ask for a fresh invite: any member's `shoal invite` prints one",
        )
        return
    if findings.network.refused:
        yield Problem(
            code="not-let-in",
            side="host",
            sentence=f"the run does not let a holder of this invite in: {printable(findings.network.refused)}",
            remedy="ask the host for another invite (`shoal invite new` there)",
        )
        return
    if findings.network.record_found is False:
        yield Problem(
            code="no-record",
            side="host",
            sentence="the peers of the invite are up and in this run, but its spec is not on the directory",
            remedy="try again in half a minute: the host may just have started; if it stays so, its clock is off "
            "(`shoal doctor` there says it)",
        )
    if (split := split_of(findings.network.statuses)) is not None:
        yield split


def _other_version(theirs: int, shoal: str) -> Problem:
    newer = theirs > PROTOCOL_VERSION
    called = f" (shoal {shoal})" if shoal else ""
    return Problem(
        code="protocol-version",
        side="you" if newer else "host",
        sentence=f"the run speaks protocol version {theirs}{called}, this shoal speaks {PROTOCOL_VERSION}: "
        f"{'ours' if newer else 'theirs'} is the older one",
        remedy="upgrade shoal here" if newer else "the host must upgrade and start anew, or you install their version",
    )


def _clock_problems(findings: Findings, reached: Sequence[PeerFound]) -> Iterator[Problem]:
    ahead_s = sorted(peer.ahead_s for peer in reached if peer.ahead_s is not None)
    if not ahead_s:
        return
    middle_s = statistics.median(ahead_s)
    far_off = abs(middle_s) > CLOCK_S_MAX
    if far_off or abs(middle_s) > 1.0:
        # If only one other clock is known, it is the wrong one if a time service keeps ours.
        theirs = findings.machine.clock_synchronised is True and len(ahead_s) == 1
        how = f"{abs(middle_s):.1f} s {'ahead of' if middle_s > 0 else 'behind'}"
        whose = f"the host's clock is {abs(middle_s):.1f} s {'behind' if middle_s > 0 else 'ahead of'} ours"
        yield Problem(
            code="clock",
            side="host" if theirs else "you",
            sentence=f"{whose}, which a time service keeps" if theirs else f"this machine's clock is {how} the others'",
            remedy=("the host must switch" if theirs else "switch") + " the time service on: "
            "`sudo timedatectl set-ntp true`, or `sudo chronyc makestep`",
            fatal=far_off,
        )
        return
    odd = [peer for peer in reached if peer.ahead_s is not None and abs(peer.ahead_s - middle_s) > CLOCK_S_MAX]
    for peer in odd:
        yield Problem(
            code="clock",
            side="host",
            sentence=f"the clock of peer {peer.peer[-8:]} is {abs(peer.ahead_s or 0.0):.1f} s off: the others refuse "
            "its records",
            remedy="its owner must switch the time service on: `sudo timedatectl set-ntp true`",
            fatal=False,
        )


def _reachability_problems(network: NetworkFound, reached: Sequence[PeerFound]) -> Iterator[Problem]:
    """Yield a problem, not a fatal one, if peers can reach us neither directly nor over a relay: we can dial them."""
    called_back = [peer.called_back for peer in reached if peer.called_back is not None]
    if not called_back or any(called_back) or network.relayed:
        return
    port = network.port or 4001
    own = [ipaddress.ip_address(address) for address in network.own_addresses]
    version = 4 if any(ip.version == 4 for ip in own) else 6
    if not any(ip.is_global for ip in own if ip.version == version):
        yield Problem(
            code="nat-without-relay",
            sentence=f"nobody can connect to this machine: it is behind a router (NAT) that lets nothing in to port "
            f"{port}, and no relay leads around it",
            remedy="let the router forward TCP port 4001 here and join with `--listen :4001 --announce "
            "PUBLIC-ADDRESS:4001`; without that you work only with peers that can be reached",
            fatal=False,
        )
    else:
        yield Problem(
            code="port-closed",
            sentence=f"nobody can connect to this machine: a firewall keeps port {port} closed",
            remedy="open one, such as `sudo ufw allow 4001/tcp`, and join with `--listen :4001`",
            fatal=False,
        )


# --- two swarms ---


def members_of(status: SwarmStatus) -> set[PeerID]:
    return {peer.peer for peer in status.peers}


def split_of(statuses: Sequence[SwarmStatus]) -> Problem | None:
    """Return a problem if two of these statuses, all of one run, have different coordinators and share no member.

    Such a split arises when members join by invites of peers that do not know each other, or when the two sides of a
    network partition do not notice its end. `split_watch.py` calls this function.
    """
    told = [status for status in statuses if status.peers]
    for one, other in itertools.combinations(told, 2):
        if one.coordinator != other.coordinator and not members_of(one) & members_of(other):
            return Problem(
                code="two-swarms",
                side="host",
                sentence=f"this run is trained by two swarms that do not know each other: {_called(one)}, and "
                f"{_called(other)}",
                remedy="let one peer leave and join again with an invite that names peers of both (`shoal invite` of "
                "either); what the smaller swarm has trained since is lost",
                fatal=False,
            )
    return None


def _called(status: SwarmStatus) -> str:
    count = len(members_of(status))
    return f"{count} peer{'' if count == 1 else 's'} around {status.coordinator[-8:]} (term {status.term})"


# --- what is well ---


def _fine(findings: Findings, wrong: set[str]) -> Iterator[str]:
    machine, network = findings.machine, findings.network
    if machine.folder and not wrong & {"disk-full", "disk-not-writable"} and machine.disk_free_bytes is not None:
        yield f"disk: {machine.disk_free_bytes / 1e9:.0f} GB free in {machine.folder}"
    if machine.memory_free_bytes is not None and "memory" not in wrong:
        yield f"memory: {machine.memory_free_bytes / 1e9:.1f} GB free"
    if machine.gpu.usable:
        yield f"GPU: {machine.gpu.usable}, driver {machine.gpu.driver or 'unknown'}, torch {machine.gpu.torch_version}"
    elif machine.gpu.present is False and not findings.wants_cuda:
        yield "GPU: none of NVIDIA's, so this machine computes on its CPU"
    if network.online and not network.daemon_error:
        yield f"network: up, {', '.join(network.own_addresses[:3])}"
    reached = [peer for peer in network.peers if peer.speaks and not peer.mute]
    if reached:
        yield f"peers: {len(reached)} of the invite's answer"
    offsets = [abs(peer.ahead_s) for peer in reached if peer.ahead_s is not None]
    if offsets and "clock" not in wrong:
        yield f"clock: within {max(offsets):.1f} s of theirs"
    if reached and findings.invite and not wrong & {"protocol-version", "wrong-run"}:
        yield f"run: {findings.invite.run}, protocol {PROTOCOL_VERSION}"
    if any(peer.called_back for peer in reached):
        yield f"port: others can connect to this machine on {network.port}"


# --- as text, as JSON ---

_SIDES = {"you": "on this machine", "host": "at the host's", "nobody": "in between"}


def lines(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis as lines for a person: problems, then the checks that passed."""
    told = [line for problem in diagnosis.problems for line in problem_lines(problem)]
    told += [f"ok       {line}" for line in diagnosis.fine]
    if not diagnosis.problems:
        told.append("nothing is wrong that shoal can see")
    return told


def problem_lines(problem: Problem) -> list[str]:
    mark = "PROBLEM" if problem.fatal else "beware "
    return [f"{mark}  {problem.sentence} ({_SIDES[problem.side]})", f"         do this: {problem.remedy}"]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis for scripts. `main` is the code of the first fatal problem; null if there is none."""
    return {
        "main": diagnosis.main.code if diagnosis.main else None,
        "problems": [msgspec.to_builtins(problem) for problem in diagnosis.problems],
        "fine": list(diagnosis.fine),
    }
