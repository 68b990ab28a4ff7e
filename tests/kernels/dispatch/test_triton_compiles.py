"""What Triton makes of the kernels for a card, without one: its compiler and the assembler come with it."""

from pathlib import Path

from twins import said_of_a_card

COMPILE = """
import json, re
from collections import Counter
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shoal.kernels.dispatch import triton_dispatch as twins

def operations(kernel, pointer, tile, **constants):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    wide = {"offset_E": "*i64", "row_NK": "*i64", "choice_P": "*i64", "token_P": "*i64", "weight_P": "*fp32",
            "weight_NK": "*fp32", "dot_P": "*fp32"}
    out = "*i16" if constants.get("NARROW") else pointer
    types = {name: wide.get(name, out if name in ("y_PW", "out_ERC", "out_PD", "out_ND") else pointer)
             for name in kernel.arg_names}
    numbers = ("num_experts", "width", "height", "terms")
    types |= {name: "i32" for name in kernel.arg_names if name in numbers or name.startswith("stride")}
    types |= {name: "constexpr" for name in constants}
    # As in a call: tensors begin where torch puts them, widths are multiples of 16, and so are their strides.
    aligned = [(i,) for i, name in enumerate(kernel.arg_names) if types[name][0] == "*" or types[name] == "i32"]
    for one in ("stride_term",):
        if one in kernel.arg_names:
            types[one], constants[one] = "constexpr", 1  # a number that is 1 is compiled in
            aligned.remove((kernel.arg_names.index(one),))
    source = ASTSource(kernel, types, constants, {place: [["tt.divisibility", 16]] for place in aligned})
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    found = Counter(re.findall(r"^\\s+(?:@\\S+ )?([a-z][\\w.:]*)", made.asm["ptx"], re.MULTILINE))
    return [found, made.metadata.shared, len(made.asm["cubin"])]

made = {}
for dtype, pointer in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
    tile = twins.TILES[dtype]
    constants = dict(EXPERTS=8, GROUP=twins.GROUP, ROWS=tile.rows, COLUMNS=tile.columns, TERMS=tile.terms,
                     PRECISION="ieee", WIDEN=False, NARROW=dtype == torch.bfloat16, BLOCK=1024, CHOICES=2,
                     WEIGHTED=True)
    for kernel in (twins.matmul_kernel, twins.outer_kernel, twins.spread_kernel, twins.gather_kernel):
        made[f"{kernel.__name__} {pointer}"] = operations(kernel, pointer, tile, **constants)
print(json.dumps(made))
"""

SHARED_BYTES_MAX = 227 * 1024
"""A block's, on an H100."""


def test_products_are_the_tensor_cores_and_nothing_is_too_large_for_a_card(tmp_path: Path) -> None:
    made = said_of_a_card(COMPILE, tmp_path)
    assert len(made) == 8
    for key, (operations, shared_bytes, cubin_bytes) in made.items():
        assert cubin_bytes > 0
        assert shared_bytes <= SHARED_BYTES_MAX, key
        assert not [operation for operation in operations if operation.startswith("atom")], key
        tensor_cores = [operation for operation in operations if operation.startswith(("wgmma.mma", "mma.sync"))]
        is_product = key.startswith(("matmul", "outer"))
        assert bool(tensor_cores) == (is_product and key.endswith("bf16")), key
        assert not is_product or tensor_cores or any(operation.startswith("fma") for operation in operations), key
        if key.endswith("bf16"):  # rounded by hand: nobody else rounds
            assert not [operation for operation in operations if operation.startswith("cvt.rn.bf16")], key
