"""Every diagnosis, from findings that call for it, and none where they do not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.deploy.doctor.diagnosis import as_json, diagnose, lines
from shoal.deploy.doctor.findings import (
    AddressFound,
    Dial,
    Findings,
    GpuFound,
    MachineFound,
    NetworkFound,
    PeerFound,
)
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.messages import SwarmStatus
from statuses import peer_status, swarm_status

PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(6)]
RUN = "0123456789abcdef"
INVITE = Invite(PROTOCOL_VERSION, RUN, PEERS[0], (f"/ip4/84.12.33.7/tcp/4001/p2p/{PEERS[0]}",))


def address(dial: Dial, host: str = "84.12.33.7", peer: int = 0) -> AddressFound:
    return AddressFound(peer=PEERS[peer], host=host, port=4001, dial=dial)


def peer(number: int = 0, **changes: Any) -> PeerFound:
    good = PeerFound(
        peer=PEERS[number],
        speaks=True,
        protocol_version=PROTOCOL_VERSION,
        shoal="0.1.0",
        is_in_run=True,
        ahead_s=0.1,
        called_back=True,
    )
    return replace(good, **changes)


def status(*members: int) -> SwarmStatus:
    peers = tuple(peer_status(PEERS[member]) for member in members)
    return swarm_status(coordinator=PEERS[members[0]], term=3, stages=((0, 1),), peers=peers, elapsed_s=1.0)


GPU = GpuFound(present=True, driver="570.1", torch_version="2.13.0", torch_cuda="12.8", usable=1)
MACHINE = MachineFound(
    gpu=GPU,
    clock_synchronised=True,
    folder="/state",
    disk_free_bytes=100 * 10**9,
    memory_free_bytes=8 * 10**9,
)
NETWORK = NetworkFound(
    online=True,
    own_addresses=("192.168.1.5",),
    port=40001,
    addresses=(address(Dial.ANSWERS),),
    peers=(peer(),),
    statuses=(status(0, 1),),
    record_found=True,
)
WELL = Findings(machine=MACHINE, network=NETWORK, invite=INVITE)


def network(**changes: Any) -> Findings:
    return replace(WELL, network=replace(NETWORK, **changes))


def machine(**changes: Any) -> Findings:
    return replace(WELL, machine=replace(MACHINE, **changes))


def gpu(*, wants_cuda: bool = False, **changes: Any) -> Findings:
    return replace(machine(gpu=replace(GPU, **changes)), wants_cuda=wants_cuda)


def unreached(*addresses: AddressFound) -> Findings:
    return network(addresses=addresses, peers=(), statuses=(), record_found=None)


LAN = "192.168.77.2"
CASES = [
    # (name, findings, code, side, fatal, words of the sentence or remedy)
    (
        "ahead",
        network(peers=(peer(ahead_s=12.4), peer(1, ahead_s=12.0))),
        "clock",
        "you",
        True,
        ["12.2 s ahead", "set-ntp"],
    ),
    ("behind", network(peers=(peer(ahead_s=-5.0), peer(1, ahead_s=-4.0))), "clock", "you", True, ["4.5 s behind"]),
    (
        "one other, and ours is not kept",
        replace(network(peers=(peer(ahead_s=-5.0),)), machine=replace(MACHINE, clock_synchronised=False)),
        "clock",
        "you",
        True,
        ["this machine's clock is 5.0 s behind"],
    ),
    (
        "one other, and ours is kept",
        network(peers=(peer(ahead_s=7.0),)),
        "clock",
        "host",
        True,
        ["host's clock is 7.0 s behind"],
    ),
    ("a little", network(peers=(peer(ahead_s=2.0), peer(1, ahead_s=2.0))), "clock", "you", False, ["2.0 s ahead"]),
    (
        "one of several",
        network(peers=(peer(), peer(1, ahead_s=-9.0), peer(2))),
        "clock",
        "host",
        False,
        [PEERS[1][-8:], "9.0 s off"],
    ),
    (
        "our dns",
        unreached(address(Dial.NO_NAME, "train.example.org")),
        "dns",
        "you",
        True,
        ["train.example.org", "getent"],
    ),
    (
        "their dns",
        unreached(address(Dial.NO_NAME, "train.example.org"), address(Dial.SILENT)),
        "dns",
        "host",
        True,
        ["train.example.org"],
    ),
    ("silent", unreached(address(Dial.SILENT)), "port-closed", "host", True, ["84.12.33.7 port 4001", "TCP port 4001"]),
    (
        "only private",
        unreached(address(Dial.SILENT, LAN), address(Dial.NO_ROUTE, "10.9.9.9")),
        "nat-without-relay",
        "host",
        True,
        [f"{LAN} port 4001", "--announce"],
    ),
    ("no route", unreached(address(Dial.NO_ROUTE, "2001:470::9")), "no-route", "you", True, ["2001:470::9", "IPv6"]),
    (
        "refused",
        unreached(address(Dial.REFUSED)),
        "bootstrap-down",
        "host",
        True,
        ["nothing listens on 84.12.33.7", "shoal invite"],
    ),
    (
        "somebody else",
        network(peers=(PeerFound(peer=PEERS[0]),), statuses=(), record_found=None),
        "bootstrap-down",
        "host",
        True,
        ["somebody else answers", "fresh invite"],
    ),
    (
        "suspended",
        network(
            peers=(PeerFound(peer=PEERS[0], speaks=True, mute="no answer in 10 s"),), statuses=(), record_found=None
        ),
        "mute",
        "host",
        True,
        ["answer nothing (no answer in 10 s)", "suspended"],
    ),
    (
        "newer",
        network(peers=(peer(protocol_version=PROTOCOL_VERSION + 1, shoal="0.9"),), statuses=(), record_found=None),
        "protocol-version",
        "you",
        True,
        [f"version {PROTOCOL_VERSION + 1} (shoal 0.9)", "upgrade shoal here"],
    ),
    (
        "older",
        network(peers=(peer(protocol_version=PROTOCOL_VERSION - 1),), statuses=(), record_found=None),
        "protocol-version",
        "host",
        True,
        ["theirs is the older", "host must upgrade"],
    ),
    (
        "other run",
        network(peers=(peer(is_in_run=False),), statuses=(), record_found=None),
        "wrong-run",
        "host",
        True,
        [RUN, "fresh invite"],
    ),
    (
        "not let in",
        network(refused="you are \x1b[2Jexcluded", statuses=(), record_found=None),
        "not-let-in",
        "host",
        True,
        ["does not let a holder of this invite in: you are ?[2Jexcluded", "shoal invite new"],
    ),
    ("no record", network(record_found=False), "no-record", "host", True, ["not on the directory"]),
    ("offline", network(online=False, own_addresses=()), "offline", "you", True, ["no network"]),
    (
        "port taken",
        network(daemon_error="cannot listen on 0.0.0.0 port 4001: address already in use"),
        "network-daemon",
        "you",
        True,
        ["address already in use", "--listen"],
    ),
    (
        "we behind a router",
        network(peers=(peer(called_back=False), peer(1, called_back=None))),
        "nat-without-relay",
        "you",
        False,
        ["port 40001", "--announce"],
    ),
    (
        "our firewall",
        network(own_addresses=("84.1.2.3", "192.168.0.2"), peers=(peer(called_back=False),)),
        "port-closed",
        "you",
        False,
        ["firewall keeps port 40001 closed"],
    ),
    (
        "two swarms",
        network(statuses=(status(0, 1), status(2, 3, 4))),
        "two-swarms",
        "host",
        False,
        ["2 peers around", "3 peers around", "shoal invite"],
    ),
    ("no driver", gpu(driver="", usable=0), "no-driver", "you", False, ["driver is not loaded"]),
    ("no driver, asked", gpu(driver="", usable=0, wants_cuda=True), "no-driver", "you", True, ["install the driver"]),
    ("cpu torch", gpu(torch_cuda="", usable=0), "torch-without-cuda", "you", False, ["built without CUDA"]),
    (
        "old driver",
        gpu(usable=0, torch_error="the driver is too old", wants_cuda=True),
        "cuda-unusable",
        "you",
        True,
        ["570.1", "the driver is too old", "CUDA 12.8"],
    ),
    ("no gpu, asked", gpu(present=False, usable=0, wants_cuda=True), "no-gpu", "you", True, ["--device", "--gpus all"]),
    ("broken torch", gpu(torch_version="", torch_error="libcudart.so"), "torch-broken", "you", True, ["libcudart.so"]),
    (
        "full",
        machine(disk_free_bytes=10 * 10**6, folder_error="no space left"),
        "disk-full",
        "you",
        True,
        ["10 MB", "/state"],
    ),
    ("nearly full", machine(disk_free_bytes=10**9), "disk-full", "you", False, ["1,000 MB", "--state-dir"]),
    (
        "read-only",
        machine(folder_error="read-only file system"),
        "disk-not-writable",
        "you",
        True,
        ["/state", "read-only file system"],
    ),
    ("no memory", machine(memory_free_bytes=300 * 10**6), "memory", "you", True, ["300 MB"]),
    ("little memory", machine(memory_free_bytes=900 * 10**6), "memory", "you", False, ["900 MB"]),
]


@pytest.mark.parametrize(
    ("findings", "code", "side", "fatal", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_is_wrong_is_named(findings: Findings, code: str, side: str, fatal: bool, words: list[str]) -> None:
    diagnosis = diagnose(findings)
    (problem,) = diagnosis.problems
    assert (problem.code, problem.side, problem.fatal) == (code, side, fatal)
    text = f"{problem.sentence} {problem.remedy}"
    assert [word for word in words if word not in text] == []
    assert diagnosis.main == (problem if fatal else None)
    assert not problem.sentence.endswith(".")
    assert "\n" not in text


def test_where_all_is_well_nothing_is_said_but_that() -> None:
    diagnosis = diagnose(WELL)
    assert diagnosis.problems == ()
    told = "\n".join(lines(diagnosis))
    for word in ("disk: 100 GB", "GPU: 1", "clock: within 0.1 s", f"run: {RUN}", "on 40001", "nothing is wrong"):
        assert word in told


def test_what_was_not_looked_at_is_not_diagnosed() -> None:
    assert diagnose(Findings()).problems == ()
    assert diagnose(Findings(invite=INVITE)).problems == ()


def test_a_cause_hides_its_symptoms() -> None:
    dead = unreached(address(Dial.NO_ROUTE))
    offline = replace(dead, network=replace(dead.network, online=False))
    assert [problem.code for problem in diagnose(offline).problems] == ["offline"]
    other = network(peers=(peer(is_in_run=False, called_back=None),), record_found=False, statuses=())
    assert [problem.code for problem in diagnose(other).problems] == ["wrong-run"]


def test_what_keeps_us_out_comes_first() -> None:
    findings = replace(
        network(record_found=False, peers=(peer(called_back=False),)),
        machine=replace(MACHINE, memory_free_bytes=900 * 10**6),
    )
    diagnosis = diagnose(findings)
    assert [problem.code for problem in diagnosis.problems] == ["no-record", "memory", "nat-without-relay"]
    assert diagnosis.main is diagnosis.problems[0]
    assert as_json(diagnosis)["main"] == "no-record"
    assert lines(diagnosis)[0].startswith("PROBLEM  ")


def test_a_relay_makes_up_for_a_router() -> None:
    assert diagnose(network(peers=(peer(called_back=False),), relayed=True)).problems == ()


def test_one_peer_that_lives_is_enough() -> None:
    some = (address(Dial.SILENT), address(Dial.ANSWERS, "84.12.33.8", peer=1))
    assert diagnose(network(addresses=some, peers=(peer(1),))).problems == ()


def test_every_diagnosis_has_a_line_in_the_readme() -> None:
    import shoal.deploy.doctor as package

    (folder,) = package.__path__
    text = (Path(folder) / "README.md").read_text()
    assert [case[2] for case in CASES if f"`{case[2]}`" not in text] == []
