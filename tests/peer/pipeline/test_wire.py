"""B samples   T tokens   D width"""

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.peer.data.labels import IGNORED, Labels, weight_of
from shoal.peer.model.subspace import Subspace
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.wire import ActivationWire
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import VOCABULARY_MAX
from shoal.protocol.spec import RunSpec, WireSpec

CPU = torch.device("cpu")
PEER = PeerID("somebody")
SHAPE_BTD = (2, 32, 32)
MICROBATCH = Microbatch(7, 3)


@pytest.fixture
def wire(tiny_spec: RunSpec) -> Callable[[str], ActivationWire]:
    def make(form: str) -> ActivationWire:
        spec = msgspec.structs.replace(tiny_spec, wire=WireSpec(activations=form))  # type: ignore[arg-type]
        return ActivationWire(spec)

    return make


def random_BTD(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(SHAPE_BTD, generator=torch.Generator().manual_seed(0))


def targets_BT() -> Tensor:
    return torch.randint(256, SHAPE_BTD[:2], generator=torch.Generator().manual_seed(1))


def labels() -> Labels:
    return Labels(targets_BT=targets_BT())


@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp32", 4), ("bf16", 2)])
def test_a_payload_is_the_tensor_then_its_targets(
    wire: Callable[[str], ActivationWire], dtype: str, element_bytes: int
) -> None:
    made = wire(dtype)
    assert made.activation_bytes == made.gradient_bytes == 2 * 32 * 32 * element_bytes
    assert made.targets_bytes == 2 * 32 * 4
    assert len(made.encode_activation(random_BTD(), labels())) == made.activation_bytes + made.targets_bytes
    assert len(made.encode_gradient(random_BTD(), MICROBATCH, 1)) == made.gradient_bytes


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_fp32_arrives_bit_for_bit(wire: Callable[[str], ActivationWire], scale: float) -> None:
    made, sent = wire("fp32"), random_BTD(scale)
    x_BTD, got = made.decode_activation(made.encode_activation(sent, labels()), CPU)
    assert torch.equal(x_BTD, sent)
    assert torch.equal(got.targets_BT, targets_BT())
    assert torch.equal(made.decode_gradient(made.encode_gradient(sent, MICROBATCH, 1), CPU), sent)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_bf16_arrives_rounded_to_the_nearest_and_its_targets_exactly(
    wire: Callable[[str], ActivationWire], scale: float
) -> None:
    made, sent = wire("bf16"), random_BTD(scale)
    x_BTD, got = made.decode_activation(made.encode_activation(sent, labels()), CPU)
    assert x_BTD.dtype == torch.float32
    assert torch.equal(x_BTD, sent.bfloat16().float())
    assert ((x_BTD - sent).abs() <= sent.abs() * 2**-8).all()
    assert got.targets_BT.dtype == torch.int64
    assert torch.equal(got.targets_BT, targets_BT())
    assert torch.equal(made.decode_gradient(made.encode_gradient(sent, MICROBATCH, 1), CPU), x_BTD)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_not_finite_stays_so(wire: Callable[[str], ActivationWire], dtype: str) -> None:
    """The stage that gets it must be able to see that something went wrong."""
    made, sent = wire(dtype), random_BTD()
    sent[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    got = made.decode_gradient(made.encode_gradient(sent, MICROBATCH, 1), CPU)[0, 0, :3]
    assert got.isnan().tolist() == [True, False, False]
    assert got.isinf().tolist() == [False, True, True]


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview, lambda b: memoryview(b"x" + b)[1:]])
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_any_buffer_at_any_offset_is_read_alike(
    wire: Callable[[str], ActivationWire], container: Callable[[bytearray], bytes]
) -> None:
    made = wire("fp32")
    payload = container(made.encode_activation(random_BTD(), labels()))
    x_BTD, got = made.decode_activation(payload, CPU)
    assert torch.equal(x_BTD, random_BTD())
    assert torch.equal(got.targets_BT, targets_BT())


def test_what_was_decoded_does_not_change_with_the_buffer_it_came_in(wire: Callable[[str], ActivationWire]) -> None:
    made = wire("fp32")
    payload = made.encode_activation(random_BTD(), labels())
    x_BTD, got = made.decode_activation(payload, CPU)
    payload[:] = bytes(len(payload))
    assert torch.equal(x_BTD, random_BTD())
    assert torch.equal(got.targets_BT, targets_BT())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("off_by", [-1, 1, 4, -256, 10**6])
def test_another_size_is_refused_and_its_sender_named(
    wire: Callable[[str], ActivationWire], dtype: str, off_by: int
) -> None:
    made = wire(dtype)
    activation_bytes = made.activation_bytes + made.targets_bytes
    made.check_activation(bytes(activation_bytes), PEER)
    made.check_gradient(bytes(made.gradient_bytes), PEER)
    for check, size in ((made.check_activation, activation_bytes), (made.check_gradient, made.gradient_bytes)):
        with pytest.raises(RemoteError, match=f"{size + off_by} bytes") as caught:
            check(bytes(size + off_by), PEER)
        assert caught.value.peer_id == PEER


def test_an_empty_payload_is_no_activation_and_no_gradient(wire: Callable[[str], ActivationWire]) -> None:
    made = wire("bf16")
    for check in (made.check_activation, made.check_gradient):
        with pytest.raises(RemoteError):
            check(b"", PEER)


@pytest.mark.parametrize(
    ("form", "bits", "bits_back", "error", "error_back"),
    [
        ("int8", 8.25, 8.25, 0.01, 0.02),
        ("hadamard6", 6.25, 6.25, 0.03, 0.05),
        ("hadamard5", 5.25, 6.25, 0.07, 0.05),
        ("hadamard4", 4.25, 6.25, 0.14, 0.05),
        ("hadamard3", 3.25, 6.25, 0.3, 0.05),
    ],
)
def test_in_few_bits_it_arrives_near_and_its_gradient_by_chance(
    wire: Callable[[str], ActivationWire], form: str, bits: float, bits_back: float, error: float, error_back: float
) -> None:
    made, sent = wire(form), random_BTD()
    assert (made.activation_bytes, made.gradient_bytes) == (bits * sent.numel() / 8, bits_back * sent.numel() / 8)
    x_BTD, got = made.decode_activation(made.encode_activation(sent, labels()), CPU)
    assert (x_BTD - sent).square().mean().sqrt() < error
    assert torch.equal(got.targets_BT, targets_BT())
    back = made.encode_gradient(sent, MICROBATCH, 1)
    assert (made.decode_gradient(back, CPU) - sent).square().mean().sqrt() < error_back
    assert made.encode_gradient(sent, MICROBATCH, 1) == back, "whoever computes it again sends the same bytes"
    for microbatch, layer in ((Microbatch(7, 4), 1), (Microbatch(8, 3), 1), (MICROBATCH, 2)):
        assert made.encode_gradient(sent, microbatch, layer) != back


@pytest.mark.parametrize("masks", [True, False])
def test_labels_arrive_with_what_is_not_learnt_where_documents_begin_and_the_weight(
    tiny_spec: RunSpec, masks: bool
) -> None:
    data = msgspec.structs.replace(tiny_spec.data, format="chat", source="x.jsonl", document_masks=masks)
    made = ActivationWire(msgspec.structs.replace(tiny_spec, data=data, wire=WireSpec(activations="fp32")))
    assert made.targets_bytes == 2 * 32 * 4 + 4
    generator = torch.Generator().manual_seed(2)
    begins_BT = torch.rand(SHAPE_BTD[:2], generator=generator) < 0.2
    learnt_BT = torch.rand(SHAPE_BTD[:2], generator=generator) < 0.5
    sent = Labels(
        targets_BT=targets_BT().where(learnt_BT, IGNORED),
        begins_BT=begins_BT if masks else None,
        counted=int(learnt_BT.sum()),
        weight=weight_of(3, 7, 8),
    )
    x_BTD, got = made.decode_activation(made.encode_activation(random_BTD(), sent), CPU)
    assert torch.equal(x_BTD, random_BTD())
    assert torch.equal(got.targets_BT, sent.targets_BT)
    assert (got.counted, got.weight) == (sent.counted, sent.weight)
    assert got.begins_BT is None if not masks else torch.equal(got.begins_BT, begins_BT)
    largest = Labels(targets_BT=torch.full(SHAPE_BTD[:2], VOCABULARY_MAX - 1), begins_BT=sent.begins_BT)
    _, got = made.decode_activation(made.encode_activation(random_BTD(), largest), CPU)
    assert torch.equal(got.targets_BT, largest.targets_BT)


@pytest.fixture
def subspace_spec(tiny_spec: RunSpec) -> RunSpec:
    """5 numbers in the place of 32."""
    model = msgspec.structs.replace(tiny_spec.model, subspace=5)
    return msgspec.structs.replace(tiny_spec, model=model, wire=WireSpec(activations="fp32"))


def test_of_a_subspace_few_numbers_travel_and_all_comes_back(subspace_spec: RunSpec) -> None:
    made, subspace = ActivationWire(subspace_spec), Subspace.of(subspace_spec, CPU)
    assert (made.activation_bytes, made.gradient_bytes, made.targets_bytes) == (4 * 64 * 5, 4 * 64 * 5, 4 * (64 + 2))
    text_BT1 = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))
    tokens_BT, targets_BT = text_BT1[:, :-1], text_BT1[:, 1:]
    sent_BTD = subspace.restored(random_BTD()[..., :5], tokens_BT)
    payload = made.encode_activation(sent_BTD, Labels(targets_BT=targets_BT, tokens_BT=tokens_BT))
    made.check_activation(payload, PEER)
    x_BTD, got = made.decode_activation(payload, CPU)
    torch.testing.assert_close(x_BTD, sent_BTD)
    assert got.tokens_BT is not None
    assert torch.equal(got.tokens_BT, tokens_BT)
    assert torch.equal(got.targets_BT, targets_BT)
    again = made.encode_activation(x_BTD, got)
    torch.testing.assert_close(made.decode_activation(again, CPU)[0], sent_BTD)
    gradient = made.encode_gradient(random_BTD(), MICROBATCH, 1)
    made.check_gradient(gradient, PEER)
    wanted_BTD = subspace.gradient_restored(subspace.gradient_of_coordinates(random_BTD()))
    assert torch.equal(made.decode_gradient(gradient, CPU), wanted_BTD)


@pytest.mark.parametrize("masks", [True, False])
def test_tokens_that_do_not_follow_from_the_targets_travel_themselves(subspace_spec: RunSpec, *, masks: bool) -> None:
    """The last word of a conversation is a target, and the token behind it begins another one."""
    data = msgspec.structs.replace(subspace_spec.data, format="chat", source="x.jsonl", document_masks=masks)
    made = ActivationWire(msgspec.structs.replace(subspace_spec, data=data))
    generator = torch.Generator().manual_seed(2)
    tokens_BT = torch.randint(256, SHAPE_BTD[:2], generator=generator)
    learnt_BT = torch.rand(SHAPE_BTD[:2], generator=generator) < 0.5
    begins_BT = torch.rand(SHAPE_BTD[:2], generator=generator) < 0.2
    sent = Labels(
        targets_BT=targets_BT().where(learnt_BT, IGNORED),
        begins_BT=begins_BT if masks else None,
        counted=int(learnt_BT.sum()),
        weight=weight_of(3, 7, 8),
        tokens_BT=tokens_BT,
    )
    sent_BTD = Subspace.of(subspace_spec, CPU).restored(random_BTD()[..., :5], tokens_BT)
    payload = made.encode_activation(sent_BTD, sent)
    made.check_activation(payload, PEER)
    x_BTD, got = made.decode_activation(payload, CPU)
    torch.testing.assert_close(x_BTD, sent_BTD)
    assert got.tokens_BT is not None
    assert torch.equal(got.tokens_BT, tokens_BT)
    assert torch.equal(got.targets_BT, sent.targets_BT)
    assert (got.counted, got.weight) == (sent.counted, sent.weight)
    assert got.begins_BT is None if not masks else torch.equal(got.begins_BT, begins_BT)


def test_where_plans_choose_a_payload_says_by_its_size_what_it_is_in(wire: Callable[[str], ActivationWire]) -> None:
    """Sender and receiver may have heard of different plans."""
    thin, receiver = wire("auto"), wire("auto")
    wide_payload = thin.encode_activation(random_BTD(), labels())
    thin.travel_as("int8", "int8")
    thin_payload = thin.encode_activation(random_BTD(), labels())
    assert len(wide_payload) > 1.5 * len(thin_payload)
    for payload, like in ((wide_payload, wire("bf16")), (thin_payload, wire("int8"))):
        receiver.check_activation(payload, PEER)
        assert bytes(payload) == bytes(like.encode_activation(random_BTD(), labels()))
        x_BTD, got = receiver.decode_activation(payload, CPU)
        assert torch.equal(x_BTD, like.decode_activation(payload, CPU)[0])
        assert torch.equal(got.targets_BT, targets_BT())
    gradient = thin.encode_gradient(random_BTD(), MICROBATCH, 1)
    assert bytes(gradient) == bytes(wire("int8").encode_gradient(random_BTD(), MICROBATCH, 1))
    receiver.check_gradient(gradient, PEER)
    assert torch.equal(receiver.decode_gradient(gradient, CPU), wire("int8").decode_gradient(gradient, CPU))
    with pytest.raises(RemoteError, match="this run's have 4352 or 2368"):
        receiver.check_activation(bytes(4000), PEER)


def test_each_side_of_a_stage_has_its_own_format(wire: Callable[[str], ActivationWire]) -> None:
    """A gradient goes back as the activations came, whatever those for the next stage leave in."""
    made, whole, thin = wire("auto"), wire("bf16"), wire("int8")
    for leaving, coming in ((whole, thin), (thin, whole)):
        made.travel_as("bf16" if leaving is whole else "int8", "int8" if coming is thin else "bf16")
        x_BTD = random_BTD()
        assert bytes(made.encode_activation(x_BTD, labels())) == bytes(leaving.encode_activation(x_BTD, labels()))
        gradient = made.encode_gradient(x_BTD, MICROBATCH, 1)
        assert bytes(gradient) == bytes(coming.encode_gradient(x_BTD, MICROBATCH, 1))
        assert len(gradient) == made.gradient_bytes == coming.gradient_bytes
