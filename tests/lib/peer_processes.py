"""Real peers for what is run by hand: `shoal host` and `shoal join` as processes with folders of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPEC = """
name = "{name}"
[model]
dim = 64
num_layers = {layers}
num_heads = 4
num_kv_heads = 2
ffn_dim = 176
context = 64
[data]
source = "python-library"
tokens_max = 200000
[training]
steps = 1000000
microbatches_per_step = 8
microbatch_size = 4
[optimizer]
warmup_steps = 10
[swarm]
stages = {stages}
min_peers = {peers}
snapshot_interval_steps = 0
"""
"""A small run that does not end. A setting of the swarm may follow."""


@dataclass(slots=True, eq=False, kw_only=True)
class PeerProcess:
    """One `shoal host` or `shoal join` in one life."""

    name: str
    popen: subprocess.Popen[bytes]
    output: Path
    log: Path
    began_s: float = field(default_factory=time.monotonic)
    _read: int = 0

    def fresh(self) -> list[dict[str, Any]]:
        """What it has reported since the last call."""
        with self.output.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]

    @property
    def has_ended(self) -> bool:
        return self.popen.poll() is not None

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


def start_peer(
    folder: Path, name: str, *words: str, life: str = "", program: Sequence[str] = ("-m", "shoal.deploy.cli")
) -> PeerProcess:
    """Start `shoal WORDS…` with its state in `folder/name`, and its output and its log in `folder`. The invite of
    `join INVITE` goes to its standard input.

    Args:
        life: tells the outputs of several lives of one peer from each other.
        program: what Python runs in place of `shoal`.
    """
    given = ""
    if words[0] == "join":
        given, words = f"{words[1]}\n", ("join", "-", *words[2:])
    output, log = (folder / f"{life}{name}.{kind}" for kind in ("out", "log"))
    own = {
        "XDG_STATE_HOME": str(folder / name),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(folder / "cache")),
    }
    common = ("--name", name, "--json", "--threads", "1", "--listen", "127.0.0.1:0")
    with output.open("wb") as stdout, log.open("wb") as stderr:
        popen = subprocess.Popen(
            [sys.executable, *program, *words, *common],
            env=os.environ | own,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=deliver_signals,
        )
    assert popen.stdin is not None
    popen.stdin.write(given.encode())
    popen.stdin.close()
    return PeerProcess(name=name, popen=popen, output=output, log=log)


def deliver_signals() -> None:
    """A shell starts what runs in its background with SIGINT ignored, `nohup` with SIGHUP; children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
