"""The emulated internet keeps what it promises: round trips, rates, queues, loss, NATs, cables, addresses; no peers."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from internet.emulator import Internet, Line, PathBetween, Refused, why_not

WHY_NOT = why_not()
pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

ECHO = """
import json, socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", int(sys.argv[1])))
print("up", flush=True)
while True:
    data, who = s.recvfrom(2048)
    s.sendto(json.dumps(who).encode(), who)
"""
PING = """
import json, socket, sys, time
to, times = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", int(sys.argv[4]) if len(sys.argv) > 4 else 0))
s.settimeout(0.4)
took, seen = [], None
for _ in range(times):
    began = time.perf_counter()
    s.sendto(b"?", to)
    try:
        seen = json.loads(s.recv(2048))
        took.append(1e3 * (time.perf_counter() - began))
    except TimeoutError:
        pass
print(json.dumps({"ms": sorted(took), "seen": seen}))
"""
SINK = """
import socket, time
s = socket.create_server(("0.0.0.0", 9000))
print("up", flush=True)
c, _ = s.accept()
count, began = 0, None
while data := c.recv(1 << 18):
    began = began or time.perf_counter()
    count += len(data)
print(8e-6 * count / (time.perf_counter() - began), flush=True)
"""
SOURCE = """
import socket, sys, time
c = socket.create_connection((sys.argv[1], 9000))
until = time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < until:
    c.sendall(bytes(1 << 16))
"""


MAP = """
import socket, struct, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1)
s.connect((sys.argv[1], 5351))
s.send(bytes([0, 0]))
print(socket.inet_ntoa(s.recv(99)[8:12]))
s.send(struct.pack("!BBHHHI", 0, 2, 0, 9000, 9000, 3600))
print(struct.unpack("!BBHIHHI", s.recv(99))[5])
s.send(bytes([2, 0]) + bytes(22))
print(struct.unpack("!BBHI", s.recv(99))[2])
"""
REACH = """
import socket, sys
c = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)
c.sendall(b"?")
print(c.recv(9).decode())
"""
GREET = """
import socket
s = socket.create_server(("0.0.0.0", 9000))
print("up", flush=True)
while True:
    c, who = s.accept()
    c.recv(1)
    c.sendall(b"hello")
"""


def lab(lines, hosts=None, *, ms=10.0):
    return Internet(lines, hosts or {name: name for name in lines}, lambda a, b: PathBetween(ms))


def python(program, *words):
    return [sys.executable, "-c", program, *map(str, words)]


async def echo(net, host, port=7000):
    process = await net.start(host, python(ECHO, port))
    assert await process.stdout.readline() == b"up\n"


async def ping(net, host, to, *, times=5, port=7000, own_port=0):
    return json.loads(await net.run(host, python(PING, to, port, times, own_port)))


async def mbps(net, source, sink, to, *, seconds=1.5):
    receiver = await net.start(sink, python(SINK))
    assert await receiver.stdout.readline() == b"up\n"
    await net.run(source, python(SOURCE, to, seconds))
    return float(await receiver.stdout.readline())


def test_round_trips_are_those_of_path_and_last_miles():
    async def main():
        async with lab({"a": Line(last_mile_ms=5), "b": Line(last_mile_ms=10)}, ms=20.0) as net:
            await echo(net, "b")
            return await ping(net, "a", "20.0.2.10", times=20)

    took_ms = asyncio.run(main())["ms"]
    assert len(took_ms) == 20
    assert 70.0 <= took_ms[0] <= 75.0, "2 * (5 + 20 + 10) ms, and what two processes take"


def test_uplink_and_downlink_carry_their_rates_and_can_change():
    async def main():
        async with lab({"a": Line(up_mbps=20, down_mbps=100), "b": Line()}) as net:
            before = await mbps(net, "a", "b", "20.0.2.10")
            await net.set("a", "up_mbps", 5)
            after = await mbps(net, "a", "b", "20.0.2.10", seconds=2.0)
            down = await mbps(net, "b", "a", "20.0.1.10")
            return before, after, down, await net.stats("a")

    before, after, down, stats = asyncio.run(main())
    assert 16.0 <= before <= 20.0
    assert 3.5 <= after <= 5.0
    assert 70.0 <= down <= 100.0
    assert stats.up_bytes > 3e6
    assert stats.down_bytes > 8e6


def test_a_queue_delays_up_to_its_length_and_then_drops():
    async def main():
        async with lab({"a": Line(up_mbps=5, queue_ms=300), "b": Line()}) as net:
            await echo(net, "b")
            sending = asyncio.create_task(mbps(net, "a", "b", "20.0.2.10", seconds=2.5))
            await asyncio.sleep(1.5)
            behind = await ping(net, "a", "20.0.2.10", times=3)
            await sending
            return behind, await net.stats("a")

    behind, stats = asyncio.run(main())
    assert behind["ms"]
    assert 120.0 < behind["ms"][-1] < 400.0
    assert stats.up_dropped > 0


def test_loss_is_drawn_at_both_ends():
    async def main():
        async with lab({"a": Line(loss=0.1), "b": Line()}, ms=0.1) as net:
            await echo(net, "b")
            reply = await ping(net, "a", "20.0.2.10", times=100)
            return len(reply["ms"]), await net.stats("a")

    came_back, stats = asyncio.run(main())
    assert 65 <= came_back <= 95, "0.9 ** 2 of 100"
    assert came_back + stats.lost == 100


@pytest.mark.parametrize("nat", ["full-cone", "address-restricted", "port-restricted", "symmetric"])
def test_nats_map_and_filter_by_their_kind(nat):
    """`a` speaks from its port 7000 to port 7000 of `b` and of `c`; then `b` speaks to it from another port."""

    async def main():
        async with lab({"a": Line(nat=nat), "b": Line(), "c": Line()}, ms=1.0) as net:
            for host in "bc":
                await echo(net, host)
            seen = [(await ping(net, "a", to, own_port=7000))["seen"] for to in ("20.0.2.10", "20.0.3.10")]
            await echo(net, "a")
            return seen, await ping(net, "b", "20.0.1.10", port=seen[0][1], times=1, own_port=7001)

    seen, from_another_port = asyncio.run(main())
    assert {ip for ip, _ in seen} == {"20.0.1.10"}
    ports = [port for _, port in seen]
    if nat == "symmetric":
        assert ports[0] != ports[1]
    else:
        assert ports == [7000, 7000]
    assert bool(from_another_port["ms"]) == (nat in ("full-cone", "address-restricted"))


def test_a_full_cone_lets_strangers_in_and_others_do_not():
    async def main(nat):
        async with lab({"a": Line(nat=nat), "b": Line(), "c": Line()}, ms=1.0) as net:
            await echo(net, "b")
            await ping(net, "a", "20.0.2.10", own_port=7000)
            await echo(net, "a")
            return (await ping(net, "c", "20.0.1.10", times=1))["ms"], (await net.stats("a")).refused

    let_in, _ = asyncio.run(main("full-cone"))
    kept_out, refused = asyncio.run(main("address-restricted"))
    assert let_in
    assert not kept_out
    assert refused == 1


def test_hosts_of_one_home_share_its_line_and_meet_inside():
    async def main():
        lines = {"home": Line(nat="port-restricted", up_mbps=10), "b": Line()}
        async with lab(lines, {"x": "home", "y": "home", "b": "b"}) as net:
            for host in "by":
                await echo(net, host)
            inside = await ping(net, "x", "192.168.0.11")
            outside = [await ping(net, host, "20.0.2.10", own_port=7001) for host in "xy"]
            return inside, [each["seen"] for each in outside]

    inside, seen = asyncio.run(main())
    assert inside["ms"][0] < 5.0
    assert [ip for ip, _ in seen] == ["20.0.1.10"] * 2
    assert seen[0][1] == 7001
    assert seen[1][1] != 7001, "the port is taken by the other host"


def test_cables_pairs_and_addresses():
    async def main():
        async with lab({"a": Line(), "b": Line(), "c": Line()}, ms=1.0) as net:
            for host in "abc":
                await echo(net, host)

            async def reach(host, to):
                return bool((await ping(net, host, to, times=1))["ms"])

            found = {"at first": await reach("a", "20.0.2.10")}
            await net.cut("b")
            found["cut"] = await reach("a", "20.0.2.10")
            await net.heal("b")
            await net.sever("a", "b")
            found["severed"] = await reach("a", "20.0.2.10")
            found["another"] = await reach("c", "20.0.2.10")
            await net.join("a", "b")
            found["joined"] = await reach("a", "20.0.2.10")
            address = await net.address("b")
            found["old address"] = await reach("a", "20.0.2.10")
            found["new address"] = await reach("a", address)
            return found

    found = asyncio.run(main())
    assert [what for what, reached in found.items() if not reached] == ["cut", "severed", "old address"]


def test_nothing_is_left_whatever_happens():
    pids = []

    async def main():
        async with lab({"a": Line(), "b": Line()}) as net:
            await echo(net, "a")
            pids.append(net.router_pid)
            pids.extend(process.pid for process in net._running)
            with pytest.raises(Refused, match="no field"):
                await net.set("a", "colour", 1.0)
            raise KeyError("an error of whoever uses it")

    with contextlib.suppress(KeyError):
        asyncio.run(main())
    assert len(pids) == 2
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


KILLED = """
import asyncio, os, signal
from internet.emulator import Internet, Line, PathBetween

async def main():
    async with Internet({"a": Line()}, {"a": "a"}, lambda a, b: PathBetween(1.0)) as net:
        inside = await net.start("a", ["sleep", "600"])
        print(net.router_pid, inside.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_a_program_that_is_killed():
    lab = Path(__file__).parents[1]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env=os.environ | {"PYTHONPATH": str(lab)}, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = [int(pid) for pid in killed.stdout.split()]
    assert len(left) == 2
    deadline_s = time.monotonic() + 10.0
    while any(is_alive(pid) for pid in left):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("nat", ["port-restricted", "symmetric"])
def test_a_router_opens_a_port_for_who_asks_it_by_nat_pmp(nat):
    async def main():
        lines = {"home": Line(nat=nat, maps_ports=True), "b": Line()}
        async with lab(lines, {"n1": "home", "n2": "home", "b": "b"}, ms=1.0) as net:
            greets = await net.start("n1", python(GREET))
            assert await greets.stdout.readline() == b"up\n"
            with pytest.raises(Refused, match="status 1"):
                await net.run("b", python(REACH, "20.0.1.10", 9000))
            outside, port, other_version = (await net.run("n1", python(MAP, "192.168.0.1"))).split()
            _, second, _ = (await net.run("n2", python(MAP, "192.168.0.1"))).split()
            said = await net.run("b", python(REACH, outside, port))
            return outside, port, second, other_version, said.strip()

    outside, port, second, other_version, said = asyncio.run(main())
    assert (outside, port, said) == ("20.0.1.10", "9000", "hello")
    assert second != port, "the port was taken"
    assert other_version == "1", "a newer protocol is not spoken here"


def test_a_line_without_a_nat_has_one_host():
    async def main():
        async with lab({"a": Line()}, {"x": "a", "y": "a"}):
            pass

    with pytest.raises(Refused, match="needs a NAT"):
        asyncio.run(main())
