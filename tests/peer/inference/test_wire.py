"""Questions to the model as bytes between stages."""

import msgspec
import pytest
import torch

from shoal.peer.inference.wire import InferenceWire, StageInput
from shoal.peer.model.subspace import Subspace
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import InferenceInput
from shoal.protocol.spec import RunSpec

B, T, K = 2, 3, 5
SOURCE = PeerID("stage before")


def in_subspace(spec: RunSpec) -> RunSpec:
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, subspace=K))


def header(*, stage: int) -> InferenceInput:
    return InferenceInput(
        stage=stage,
        first_layer=stage,
        entry=SOURCE,
        serial=1,
        way=0,
        session=0,
        version=0,
        rows=B,
        length=T,
        position=0,
        has_targets=True,
        has_begins=False,
    )


def question(spec: RunSpec, tokens_BT: torch.Tensor) -> StageInput:
    """An activation that lies in the subspace of `spec`, and what is asked of it."""
    coordinates_BTK = torch.randn(B, T, K, generator=torch.Generator().manual_seed(1))
    x_BTD = Subspace.of(spec, torch.device("cpu")).restored(coordinates_BTK, tokens_BT)
    return StageInput(x=x_BTD, tokens_BT=tokens_BT, targets_BT=tokens_BT.roll(-1, 1), begins_BT=None)


def test_in_a_subspace_few_numbers_a_token_travel_and_say_all_of_the_activation(tiny_spec: RunSpec) -> None:
    spec = in_subspace(tiny_spec)
    wire, asked = InferenceWire(spec), question(spec, torch.arange(B * T).view(B, T))
    payload = wire.encode(asked.x, asked)
    assert len(payload) == B * T * (4 * K + 4 + 4), "coordinates, token and target of each token"
    wire.check_input(header(stage=1), payload, SOURCE)
    got = wire.decode(header(stage=1), payload)
    torch.testing.assert_close(got.x, asked.x, rtol=0, atol=1e-5)
    assert asked.tokens_BT is not None
    assert asked.targets_BT is not None
    assert got.tokens_BT is not None
    assert got.targets_BT is not None
    assert torch.equal(got.tokens_BT, asked.tokens_BT)
    assert torch.equal(got.targets_BT, asked.targets_BT)


def test_a_token_that_the_model_does_not_know_is_refused_at_a_later_stage_of_a_subspace_too(
    tiny_spec: RunSpec,
) -> None:
    spec = in_subspace(tiny_spec)
    wire, asked = InferenceWire(spec), question(spec, torch.zeros(B, T, dtype=torch.int64))
    payload = wire.encode(asked.x, asked)
    at = 4 * K * B * T
    payload[at : at + 4] = spec.model.vocab_size.to_bytes(4, "little")
    with pytest.raises(RemoteError, match="names a token outside the vocabulary"):
        wire.check_input(header(stage=1), payload, SOURCE)
