"""What Triton makes of the kernels for a card, without one: exact divisions, and nothing fused."""

from pathlib import Path

from shoal.kernels.codec import FORMATS
from twins import said_of_a_card

COMPILE = """
import json, re
from collections import Counter
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shoal.kernels.codec import triton_codec as twins
from shoal.kernels.codec.formats import FORMATS, TILE

TYPES = {"x_N": "*fp32", "scale_T": "*i16", "code_B": "*u8"}
made = {}
for name, form in FORMATS.items():
    constants = {"LEVELS": form.levels, "BITS": form.bits, "ROTATED": form.is_rotated, "BY_CHANCE": True,
                 "SIZE": TILE, "TILES": twins.TILES}
    for kernel in (twins.encode_kernel, twins.decode_kernel):
        said = {key: value for key, value in constants.items() if key in kernel.arg_names}
        types = {arg: "constexpr" if arg in said else TYPES.get(arg, "i32") for arg in kernel.arg_names}
        done = compile(ASTSource(kernel, types, said), target=GPUTarget("cuda", 90, 32),
                       options={"num_warps": 4, "enable_fp_fusion": False})
        found = Counter(re.findall(r"^\\s+(?:@\\S+ )?([a-z][\\w.:]*)", done.asm["ptx"], re.MULTILINE))
        made[f"{kernel.__name__} {name}"] = [found, done.metadata.shared]
print(json.dumps(made))
"""

SHARED_BYTES_MAX = 48 * 1024
"""A block's, on any card."""


def test_divisions_are_exact_and_nothing_is_fused_on_a_card(tmp_path: Path) -> None:
    made = said_of_a_card(COMPILE, tmp_path)
    assert len(made) == 2 * len(FORMATS)
    for name, (found, shared_bytes) in made.items():
        assert shared_bytes <= SHARED_BYTES_MAX, name
        assert not [what for what in found if what.startswith(("div.full", "div.approx", "rcp.approx"))], name
        is_product = "hadamard" in name  # its sums are of whole numbers, and exact in any order
        assert is_product or not [what for what in found if what.startswith("fma") and what.endswith("f32")], name
        if name.startswith("encode"):
            assert found["div.rn.f32"] > 0
