"""Whether a peer keeps to its limits while it trains, by what its network card has sent and received.

Two peers, a stage each, in two network namespaces that a virtual cable joins; the second has the limit. Counted are the
bytes of the cable's own statistics, Ethernet headers included, so the share is of all that there is: frames, calls,
acknowledgements, TLS, the directory. Needs root, `ip`, and a machine that can send more than the limit.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPEC = """
name = "rates"
[model]
dim = 128
num_layers = 2
num_heads = 2
num_kv_heads = 1
ffn_dim = 128
context = 128
[optimizer]
warmup_steps = 2
[training]
steps = 100000
microbatches_per_step = 16
microbatch_size = 8
s_max = 1
validation_interval_steps = 0
[swarm]
stages = 2
min_peers = 2
"""
CABLE = ("shoalrate0", "shoalrate1")
ADDRESSES = ("10.86.40.1", "10.86.40.2")
ETHERNET_BYTES = 14
"""Of each packet; a limit is on IP packets."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    names = (f"shoal-rate-a-{os.getpid()}", f"shoal-rate-b-{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", CABLE[0], "netns", names[0], "type", "veth", "peer", "name", CABLE[1], "netns", names[1])
        for name, end, address in zip(names, CABLE, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "dev", end, "gso_max_segs", "1")  # packets as on a real cable, not of 64 KiB
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def shoal(namespace: str, folder: Path, *arguments: str, stdin: str = "") -> "subprocess.Popen[str]":
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "shoal.deploy.cli", *arguments, "--reports"]
    environment = os.environ | {"XDG_STATE_HOME": str(folder / namespace), "XDG_CONFIG_HOME": str(folder / namespace)}
    with (folder / f"{namespace}.log").open("w") as log, (folder / f"{namespace}.jsonl").open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=log, text=True, env=environment)
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.close()
    return process


def counters(namespace: str, device: str) -> dict[str, int]:
    text = subprocess.run(
        ["ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device], check=True, capture_output=True, text=True
    ).stdout
    stats = json.loads(text)[0]["stats64"]
    return {
        "sent": stats["tx"]["bytes"] - ETHERNET_BYTES * stats["tx"]["packets"],
        "received": stats["rx"]["bytes"] - ETHERNET_BYTES * stats["rx"]["packets"],
    }


def measure(limit: str, *, seconds: float, folder: Path) -> dict[str, Any]:
    """Mbit/s of the limited peer, over `seconds` from its first megabytes on."""
    (folder / "run.toml").write_text(SPEC)
    with two_namespaces() as (a, b), contextlib.ExitStack() as ending:
        listen = [f"/ip4/{address}/tcp/0" for address in ADDRESSES]
        host = shoal(a, folder, "host", str(folder / "run.toml"), "--listen", listen[0], "--threads", "1")
        ending.callback(end, host)
        while not (invite := said(folder / f"{a}.jsonl", "Ready", "invite")):
            alive(host, folder)
        joiner = shoal(
            b, folder, "join", "-", "--listen", listen[1], "--threads", "1", "--limit", limit, stdin=f"{invite[0]}\n"
        )
        ending.callback(end, joiner)
        begin = counters(b, CABLE[1])
        while sum(counters(b, CABLE[1]).values()) - sum(begin.values()) < 4e6:
            alive(joiner, folder)
        before, began_s = counters(b, CABLE[1]), time.monotonic()
        time.sleep(seconds)
        after, took_s = counters(b, CABLE[1]), time.monotonic() - began_s
        steps = said(folder / f"{a}.jsonl", "Committed", "report")
    rates = {f"{what}_mbit_s": round((after[what] - before[what]) * 8 / took_s / 1e6, 3) for what in after}
    return {"limit": limit, "seconds": round(took_s, 1), "steps": steps[-1]["step"] if steps else 0, **rates}


def said(path: Path, event: str, field: str) -> list[Any]:
    """This field of all events of a kind so far."""
    lines = path.read_text().splitlines(keepends=True)
    return [found[field] for line in lines if line.endswith("\n") and (found := json.loads(line))["event"] == event]


def alive(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Wait a little. Raises: SystemExit: it has ended."""
    time.sleep(1.0)
    if process.poll() is not None:
        logs = "".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
        raise SystemExit(f"a peer has ended:\n{logs}")


def end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", action="append", help="as for `shoal join`; default: 5 Mbit/s up, then 5 down")
    parser.add_argument("--seconds", type=float, default=60.0)
    chosen = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("network namespaces need root")
    for limit in chosen.limit or ["upload_mbit_s=5", "download_mbit_s=5"]:
        with tempfile.TemporaryDirectory(prefix="shoal-rate-", ignore_cleanup_errors=True) as folder:
            print(json.dumps(measure(limit, seconds=chosen.seconds, folder=Path(folder))), flush=True)


if __name__ == "__main__":
    main()
