import pytest

from shoal.kernels.codec import FORMATS
from shoal.protocol.wire_format import Formats, tensor_bytes


@pytest.mark.parametrize("numel", [0, 1, 64, 65, 1000])
def test_a_codecs_payload_is_as_long_as_the_protocol_says(numel):
    assert {name: tensor_bytes(name, numel) for name in FORMATS} == {
        name: form.payload_bytes(numel) for name, form in FORMATS.items()
    }
    assert (tensor_bytes("fp32", numel), tensor_bytes("bf16", numel)) == (4 * numel, 2 * numel)


@pytest.mark.parametrize(
    ("formats", "said"),
    [
        (Formats.same("bf16", "int8", 1), "reductions travel in int8"),
        (Formats.same("bf16", "int8", 3), "activations travel in bf16, reductions in int8"),
        (
            Formats(("bf16", "int8", "bf16"), ("hadamard4", "int8", "hadamard4", "hadamard4")),
            "activations travel in bf16 (int8 after stage 1), reductions in hadamard4 (int8 in stage 1)",
        ),
        (
            Formats(("int8",) * 6, ("int8", "int8", "hadamard4", "hadamard4", "hadamard4", "int8", "int8")),
            "activations travel in int8, reductions in int8 (hadamard4 in stage 2-4)",
        ),
        (
            Formats(("bf16", "int8", "bf16", "int8", "bf16"), ("int8",) * 6),
            "activations travel in bf16 (int8 after stage 1, 3), reductions in int8",
        ),
        (Formats((), ()), "reductions travel in nothing"),
    ],
)
def test_people_read_one_value_where_all_stages_have_the_same_and_else_where_others_are(formats, said):
    assert formats.sentence == said
