"""What Triton makes of the kernel for a card, without one: its compiler and the assembler come with it."""

from pathlib import Path

from twins import said_of_a_card

COMPILE = """
import json, re
from collections import Counter
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shoal.kernels.optimizer.triton_advance import BLOCK, advance_kernel

def operations(**flags):
    names = advance_kernel.arg_names
    constants = {**flags, "BLOCK": BLOCK}
    types = {name: "*fp32" if name.endswith("_N") else "i32" if name.startswith("num") else "fp32" for name in names}
    types |= {name: "constexpr" for name in constants}
    # As in a call with a layer whose size is a multiple of 16 and tensors that begin where torch puts them.
    aligned = [(i,) for i, name in enumerate(names) if name.endswith("_N") or name == "numel"]
    source = ASTSource(advance_kernel, types, constants, {place: [["tt.divisibility", 16]] for place in aligned})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    return Counter(re.findall(r"^\\s+(?:@\\S+ )?([a-z][\\w.]*)", made.asm["ptx"], re.MULTILINE)), len(made.asm["cubin"])

flags = {"sgd": (False, False), "adamw": (True, False), "nadam": (True, True)}
print(json.dumps({
    f"{name} {steps}": operations(STEPS=steps, ADAPTS=adapts, NESTEROV=nesterov)
    for name, (adapts, nesterov) in flags.items() for steps in (False, True)
}))
"""


def test_each_element_is_moved_once_sixteen_bytes_at_a_time_and_nothing_is_contracted(tmp_path: Path) -> None:
    made = said_of_a_card(COMPILE, tmp_path)
    assert len(made) == 6
    for key, (operations, cubin_bytes) in made.items():
        name, steps = key.split()
        assert cubin_bytes > 0
        assert not [operation for operation in operations if operation.startswith("fma")], key
        moments = 1 if name == "sgd" else 2
        # 8 elements a thread: two vectors of four float32.
        tensors_in, tensors_out = (2 + moments, 1 + moments) if steps == "True" else (1 + moments, 1)
        assert operations["ld.global.v4.b32"] == 2 * tensors_in, key
        assert operations["st.global.v4.b32"] == 2 * tensors_out, key
        assert sum(n for operation, n in operations.items() if operation.startswith(("ld.global", "st.global"))) == (
            operations["ld.global.v4.b32"] + operations["st.global.v4.b32"]
        )
        assert operations.get("sqrt.rn.f32", 0) == (0 if name == "sgd" else 8), key
        assert operations.get("div.rn.f32", 0) == (0 if name == "sgd" else 8), key
