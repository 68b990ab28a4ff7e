import pytest

from shoal.kernels.codec import FORMATS
from shoal.protocol.wire_format import tensor_bytes


@pytest.mark.parametrize("numel", [0, 1, 64, 65, 1000])
def test_a_codecs_payload_is_as_long_as_the_protocol_says(numel):
    assert {name: tensor_bytes(name, numel) for name in FORMATS} == {
        name: form.payload_bytes(numel) for name, form in FORMATS.items()
    }
    assert (tensor_bytes("fp32", numel), tensor_bytes("bf16", numel)) == (4 * numel, 2 * numel)
