"""What real peers send for a microbatch and for a step, beside what the formats of the wire say.

    wire_bytes.py                                  # bf16, 8 bits, six and four
    wire_bytes.py --wires int8,int8,hadamard4

Two peers as `shoal host` and `shoal join` start them, on this machine. First each holds a stage: one sends activations
and the targets of their tokens, the other gradients. Then both hold the only stage: each sends half of its sum of
gradients and half of the mean. Bytes are those of whole frames with their headers (`tests/lib/counted_peer.py`). The
goal is a ratio of 0.98 to 1.02.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from shoal.peer.model.layout import num_parameters
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.spec_file import load_spec
from shoal.protocol.wire_format import tensor_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
import counted_peer

from peer_processes import start_peer

SPEC = """
name = "bytes"
[model]
dim = 256
num_layers = 2
num_heads = 4
num_kv_heads = 4
ffn_dim = 512
context = 256
[training]
steps = {steps}
microbatches_per_step = 4
microbatch_size = 4
s_max = 1
synchronous_steps = 2
validation_interval_steps = 0
[swarm]
stages = {stages}
min_peers = 2
heartbeat_s = 0.5
term_s = 3600.0
snapshot_interval_steps = 0
snapshot_interval_s = 0
[wire]
activations = "{forth}"
activation_gradients = "{back}"
gradients = "{sums}"
"""
OPTIONS = ("--device", "cpu", "--limit", "nice=0")
COUNTED = (counted_peer.__file__,)
WIRES = ("bf16,bf16,bf16", "int8,int8,hadamard4", "hadamard6,hadamard6,int8", "hadamard4,hadamard6,hadamard3")


def sent(folder: Path, wire: str, *, stages: int, steps: int) -> tuple[RunSpec, Counter[str], Counter[str]]:
    """Returns: the spec; frames and bytes of both peers in the whole run, by kind of message."""
    forth, back, sums = wire.split(",")
    spec_file = folder / "run.toml"
    spec_file.write_text(SPEC.format(steps=steps, stages=stages, forth=forth, back=back, sums=sums))
    os.environ[counted_peer.VARIABLE] = str(folder / "counts")
    peers = [start_peer(folder, "host", "host", str(spec_file), *OPTIONS, program=COUNTED)]
    try:
        while not all(peer.has_ended for peer in peers):
            for event in peers[0].fresh():
                if event["event"] == "Ready" and len(peers) == 1:
                    peers.append(start_peer(folder, "member", "join", event["invite"], *OPTIONS, program=COUNTED))
            time.sleep(0.05)
    finally:
        for peer in peers:
            peer.kill()
    frames, nbytes = Counter[str](), Counter[str]()
    for file in folder.glob("counts-*.json"):
        for kind, (num, size) in json.loads(file.read_text()).items():
            frames[kind] += num
            nbytes[kind] += size
    return load_spec(spec_file), frames, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wires", nargs="*", metavar="FORTH,BACK,SUMS", default=WIRES)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for wire in options.wires:
        with tempfile.TemporaryDirectory(prefix="shoal-bytes-") as name:
            spec, frames, nbytes = sent(Path(name), wire, stages=2, steps=options.steps)
        tokens = spec.training.microbatch_size * spec.model.context
        forth = spec.wire.forward[-1]
        labels_bytes, numel = 4 * tokens, tokens * spec.model.dim
        expected = tensor_bytes(forth, numel) + labels_bytes
        _tell(wire, "forth", nbytes["Activation"] / frames["Activation"], expected, "a microbatch")
        expected = tensor_bytes(spec.wire.backward_of(forth), numel)
        _tell(wire, "back", nbytes["Gradient"] / frames["Gradient"], expected, "a microbatch")
        with tempfile.TemporaryDirectory(prefix="shoal-bytes-") as name:
            spec, frames, nbytes = sent(Path(name), wire, stages=1, steps=options.steps)
        expected = 2 * tensor_bytes(spec.wire.sums[-1], num_parameters(spec.model))
        _tell(wire, "sums", (nbytes["ReducePart"] + nbytes["GatherPart"]) / options.steps, expected, "a step")


def _tell(wire: str, what: str, nbytes: float, expected: float, each: str) -> None:
    ratio = nbytes / expected
    print(f"{wire:30} {what:6} {nbytes:11,.0f} bytes {each}, {expected:11,.0f} by the format: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
