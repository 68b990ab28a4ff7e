"""What Triton makes of the kernel for a card, without one: products that are rounded once, and nothing fused."""

from pathlib import Path

from twins import said_of_a_card

COMPILE = """
import json, re
from collections import Counter
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shoal.kernels.nf4 import triton_nf4 as twins
from shoal.kernels.codec.formats import TILE

kernel = twins.decode_kernel
TYPES = {"scale_T": "*i16", "code_B": "*u8", "level_L": "*fp32"}
made = []
for narrow in (False, True):
    said = {"NARROW": narrow, "SIZE": TILE, "TILES": twins.TILES}
    types = TYPES | {"x_N": "*i16" if narrow else "*fp32"}
    types = {arg: "constexpr" if arg in said else types.get(arg, "i32") for arg in kernel.arg_names}
    done = compile(ASTSource(kernel, types, said), target=GPUTarget("cuda", 80, 32),
                   options={"num_warps": 4, "enable_fp_fusion": False})
    made.append(Counter(re.findall(r"^\\s+(?:@\\S+ )?([a-z][\\w.:]*)", done.asm["ptx"], re.MULTILINE)))
print(json.dumps(made))
"""


def test_each_product_is_rounded_once(tmp_path: Path) -> None:
    made = said_of_a_card(COMPILE, tmp_path)
    assert len(made) == 2
    for found in made:
        assert any(what.startswith("mul") and what.endswith("f32") for what in found)
        assert not [what for what in found if what.startswith("fma")]
