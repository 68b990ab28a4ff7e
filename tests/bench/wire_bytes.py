"""What real peers send for a microbatch and for a step, beside what the formats of the wire say.

    wire_bytes.py                                  # bf16, 8 bits, six and four
    wire_bytes.py --wires int8,int8,hadamard4

Two peers as `shoal host` and `shoal join` start them, on this machine. First each holds a stage: one sends activations
and the targets of their tokens, the other gradients. Then both hold the only stage: each sends half of its sum of
gradients and half of the mean. Bytes are those of whole frames, headers and all, by the peers' own count, from an early
step to the last. Probes of the link between the two are among them, and copies of state that neighbours keep for each
other, which are small here: the first model has few parameters and long microbatches, the second many and short ones.
The goal is a ratio of 0.98 to 1.02.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shoal.peer.model.layout import num_parameters
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.spec_file import load_spec
from shoal.protocol.wire_format import tensor_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from peer_processes import start_peer

SPEC = """
name = "bytes"
[model]
{model}
[training]
steps = {steps}
microbatches_per_step = {microbatches}
microbatch_size = {samples}
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
SMALL = {"dim": 64, "num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "ffn_dim": 128, "context": 1024}
LARGE = {"dim": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "ffn_dim": 1408, "context": 32}
OPTIONS = ("--device", "cpu", "--limit", "nice=0")
WIRES = ("bf16,bf16,bf16", "int8,int8,hadamard4", "hadamard6,hadamard6,int8", "hadamard4,hadamard6,hadamard3")


def sent(folder: Path, wire: str, *, is_cut: bool, steps: int) -> tuple[RunSpec, dict[int, list[tuple[float, int]]]]:
    """Args: is_cut: into two stages of the small model; else two members hold the large one.

    Returns: the spec, and by stage what each of its members has sent since an early moment: (bytes, microbatches).
    """
    forth, back, sums = wire.split(",")
    spec_file = folder / "run.toml"
    model = "\n".join(f"{name} = {value}" for name, value in (SMALL if is_cut else LARGE).items())
    shape = (
        {"stages": 2, "microbatches": 32, "samples": 8} if is_cut else {"stages": 1, "microbatches": 4, "samples": 1}
    )
    spec_file.write_text(SPEC.format(model=model, steps=steps, forth=forth, back=back, sums=sums, **shape))
    peers = [start_peer(folder, "host", "host", str(spec_file), *OPTIONS)]
    told: dict[str, list[dict[str, Any]]] = {}
    try:
        while not peers[-1].has_ended:
            for peer in peers:
                for event in peer.fresh():
                    if event["event"] == "Ready" and len(peers) == 1:
                        peers.append(start_peer(folder, "member", "join", event["invite"], *OPTIONS))
                    if event["event"] == "Contribution" and event["synced"]:
                        told.setdefault(peer.name, []).append(event)
            time.sleep(0.05)
    finally:
        for peer in peers:
            peer.kill()
    found: dict[int, list[tuple[float, int]]] = {}
    for events in told.values():
        first, last = events[len(events) // 4], events[-1]
        grown = (
            last["sent_bytes_total"] - first["sent_bytes_total"],
            last["microbatches_total"] - first["microbatches_total"],
        )
        found.setdefault(last["stage"], []).append(grown)
    return load_spec(spec_file), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wires", nargs="*", metavar="FORTH,BACK,SUMS", default=WIRES)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for wire in options.wires:
        with tempfile.TemporaryDirectory(prefix="shoal-bytes-") as name:
            spec, found = sent(Path(name), wire, is_cut=True, steps=options.steps)
        training, forth, sums = spec.training, spec.wire.forward[-1], spec.wire.sums[-1]
        back = spec.wire.backward_of(forth)
        tokens = training.microbatch_size * spec.model.context
        labels = 4 * tokens
        expected = (tensor_bytes(forth, tokens * spec.model.dim) + labels, tensor_bytes(back, tokens * spec.model.dim))
        for stage, what in enumerate(("forth", "back")):
            ((nbytes, microbatches),) = found[stage]
            _tell(wire, what, nbytes / microbatches, expected[stage], "a microbatch")
        with tempfile.TemporaryDirectory(prefix="shoal-bytes-") as name:
            spec, found = sent(Path(name), wire, is_cut=False, steps=2 * options.steps)
        nbytes, microbatches = (sum(column) for column in zip(*found[0], strict=True))
        a_step = nbytes / microbatches * training.microbatches_per_step
        _tell(wire, "sums", a_step, 2 * tensor_bytes(sums, num_parameters(spec.model)), "a step")


def _tell(wire: str, what: str, nbytes: float, expected: float, each: str) -> None:
    print(
        f"{wire:32} {what:6} {nbytes:12,.0f} bytes {each}, {expected:12,.0f} by the format: {nbytes / expected:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
