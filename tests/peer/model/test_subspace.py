"""Protocol Models (2506.01260): what layers write stays in one subspace, so that few numbers a token say all of it.

B samples   T tokens   D width   k numbers of a subspace   V vocabulary
"""

import math
import struct

import msgspec
import pytest
import torch
from blake3 import blake3
from torch import Tensor

from shoal.peer.model.layout import (
    EMBED,
    HEAD,
    all_layer_keys,
    init_layer,
    layer_layout,
    num_parameters,
    stage_layer_keys,
)
from shoal.peer.model.llama import Params, loss, rotary_tables, run_layers
from shoal.peer.model.subspace import BASIS, Subspace, constants_of, fixed_vectors, whole_layer
from shoal.protocol.spec import ModelSpec, RunSpec
from shoal.protocol.tensors import EMBEDDING_MATRIX

CPU = torch.device("cpu")
DENSE = ModelSpec(vocab_size=50, dim=48, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=40, context=16, subspace=7)
EXPERTS = msgspec.structs.replace(DENSE, num_experts=4, experts_per_token=2)
MODELS = pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
WIDTHS = [(64, 8), (96, 12), (96, 5), (768, 96), (1024, 160), (100, 13), (31, 30), (2, 1)]


def run_of(model: ModelSpec, seed: int = 5) -> RunSpec:
    return RunSpec(seed=seed, model=model)


def subspace_of(dim: int, k: int, seed: int = 5) -> Subspace:
    return Subspace.of(run_of(ModelSpec(dim=dim, num_heads=1, num_kv_heads=1, head_size=2, subspace=k), seed), CPU)


def digest(x: Tensor) -> str:
    return blake3(x.contiguous().numpy().tobytes()).hexdigest(length=8)


def tokens_BT(model: ModelSpec = DENSE) -> Tensor:
    return torch.randint(model.vocab_size, (2, model.context), generator=torch.Generator().manual_seed(1))


def params_of(spec: RunSpec, key: str) -> Params:
    """No norm is 1, and each matrix is a leaf."""
    layout = layer_layout(spec.model, key)
    noise_N = torch.randn(layout.numel, generator=torch.Generator().manual_seed(2))
    leaves = layout.leaves(init_layer(spec.model, key, spec.seed) + 0.1 * noise_N)
    return leaves | constants_of(spec, key, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(("dim", "k"), WIDTHS)
def test_columns_are_orthogonal_and_all_as_long(dim: int, k: int) -> None:
    basis_DK = subspace_of(dim, k).basis_DK.double()
    wanted_KK = torch.eye(k, dtype=torch.float64) * dim / k
    torch.testing.assert_close(basis_DK.T @ basis_DK, wanted_KK, rtol=0, atol=1e-6 * dim / k)


@pytest.mark.parametrize(("dim", "k"), [(64, 8), (96, 12), (768, 96), (1024, 160)])
def test_every_channel_is_written_as_much_as_in_a_dense_model(dim: int, k: int) -> None:
    rows_D = subspace_of(dim, k).basis_DK.norm(dim=1)
    assert ((rows_D - 1).abs() < 0.03).all()


def test_the_basis_is_the_same_bits_on_every_machine_and_another_with_another_seed() -> None:
    assert digest(subspace_of(96, 12).basis_DK) == "cb472b580ad8d7ef"
    assert digest(subspace_of(1024, 160).basis_DK) == "3437c3a61527eb58"
    assert digest(subspace_of(96, 12, seed=6).basis_DK) != digest(subspace_of(96, 12).basis_DK)


def fixed(model: ModelSpec, token_N: Tensor, dtype: torch.dtype = torch.float32, *, seed: int = 5) -> Tensor:
    constants = constants_of(run_of(model, seed), EMBED, device=CPU, dtype=dtype)
    return fixed_vectors(constants, token_N[None], dtype)[0]


def test_what_a_token_fixes_is_the_same_bits_on_every_machine_whatever_stands_beside_it() -> None:
    every_V = torch.arange(DENSE.vocab_size)
    whole_VD = fixed(DENSE, every_V)
    assert digest(whole_VD) == "63a7fab0ecbb1b02"
    assert torch.equal(fixed(DENSE, every_V[[31, 4]]), whole_VD[[31, 4]])
    assert not torch.equal(fixed(DENSE, every_V, seed=6), whole_VD)
    assert torch.equal(fixed(DENSE, every_V, torch.bfloat16).float(), whole_VD), "signs are exact"


@pytest.mark.parametrize(("dim", "k"), [(96, 12), (100, 13), (64, 8)])
def test_the_basis_is_what_its_formula_says_in_plain_numbers(dim: int, k: int) -> None:
    power = dim & -dim
    m = dim // power
    drawn = struct.unpack(f"<{power}Q", blake3(b"5 subspace columns").digest(length=8 * power))
    order = sorted(range(power), key=lambda column: drawn[column])
    signs = blake3(b"5 subspace rows").digest(length=-(-dim // 8))

    def element(i: int, j: int) -> float:
        is_odd = ((i % power & order[j // m]).bit_count() + (signs[i // 8] >> (7 - i % 8))) % 2
        return (-1) ** is_odd * ((i // power == j % m) - 2 / m) * math.sqrt(m / k)

    wanted = torch.tensor([[element(i, j) for j in range(k)] for i in range(dim)])
    assert torch.equal(subspace_of(dim, k).basis_DK, wanted)


def test_fixed_vectors_are_what_their_hash_says_in_plain_numbers() -> None:
    first, second = struct.unpack("<2I", blake3(b"5 subspace fixed").digest(length=8))

    def sign(token: int, place: int) -> float:
        h = (token + first) & 0xFFFFFFFF
        h = (h ^ h >> 17) * 0xED5AD4BB
        h = (h + place // 32 * 0x9E3779B9 + second) & 0xFFFFFFFF
        h = (h ^ h >> 11) * 0xAC4C1B51 & 0xFFFFFFFF
        h = (h ^ h >> 15) * 0x31848BAB & 0xFFFFFFFF
        return 1.0 - 2.0 * ((h ^ h >> 14) >> place % 32 & 1)

    wanted = torch.tensor([[sign(token, place) for place in range(DENSE.dim)] for token in range(DENSE.vocab_size)])
    assert torch.equal(fixed(DENSE, torch.arange(DENSE.vocab_size)), wanted)


def test_fixed_vectors_are_signs_as_far_apart_as_chance_puts_them() -> None:
    model = msgspec.structs.replace(DENSE, dim=1024, num_heads=16, num_kv_heads=16, head_size=2, vocab_size=2000)
    x_VD = fixed(model, torch.arange(model.vocab_size))
    assert set(x_VD.unique().tolist()) == {-1.0, 1.0}
    cosine_VV = (x_VD @ x_VD.T / model.dim).fill_diagonal_(0)
    assert cosine_VV.std() == pytest.approx(model.dim**-0.5, rel=0.02)
    assert cosine_VV.abs().max() < 6.5 * model.dim**-0.5
    cosine_DD = (x_VD.T @ x_VD / model.vocab_size).fill_diagonal_(0)
    assert cosine_DD.abs().max() < 6.5 * model.vocab_size**-0.5


def test_any_number_may_come_as_a_token() -> None:
    """A neighbour's payload says which tokens these are."""
    x_ND = fixed(DENSE, torch.tensor([-1, -(2**31), 2**31 - 1, 10**6]))
    assert (x_ND.abs() == 1).all()


def test_coordinates_and_the_token_give_everything_back() -> None:
    subspace = Subspace.of(run_of(DENSE), CPU)
    c_BTK = torch.randn(2, 16, 7, generator=torch.Generator().manual_seed(3))
    x_BTD = subspace.restored(c_BTK, tokens_BT())
    assert x_BTD.shape == (2, 16, 48)
    torch.testing.assert_close(subspace.coordinates(x_BTD, tokens_BT()), c_BTK)


def test_gradients_go_both_ways_as_autograd_takes_them() -> None:
    subspace = Subspace.of(run_of(DENSE), CPU)
    generator = torch.Generator().manual_seed(4)
    c_BTK = torch.randn(2, 16, 7, generator=generator, requires_grad=True)
    x_BTD = torch.randn(2, 16, 48, generator=generator, requires_grad=True)
    grad_BTD, grad_BTK = torch.randn(2, 16, 48, generator=generator), torch.randn(2, 16, 7, generator=generator)
    subspace.restored(c_BTK, tokens_BT()).backward(grad_BTD)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(c_BTK.grad, subspace.gradient_of_coordinates(grad_BTD))
    subspace.coordinates(x_BTD, tokens_BT()).backward(grad_BTK)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x_BTD.grad, subspace.gradient_restored(grad_BTK))


@MODELS
def test_between_layers_a_token_is_its_fixed_vector_and_what_is_in_the_subspace(model: ModelSpec) -> None:
    spec = run_of(model)
    keys = all_layer_keys(model)[:-1]
    params = {key: params_of(spec, key) for key in keys}
    rotary, subspace = rotary_tables(model), Subspace.of(spec, CPU)
    for end in range(1, len(keys) + 1):
        x_BTD = run_layers(model, keys[:end], params, tokens_BT(), rotary)
        again_BTD = subspace.restored(subspace.coordinates(x_BTD, tokens_BT()), tokens_BT())
        torch.testing.assert_close(again_BTD, x_BTD, rtol=0, atol=1e-5)


@MODELS
def test_a_cut_that_passes_coordinates_alone_changes_no_gradient(model: ModelSpec) -> None:
    """The stages before a cut have no use for what of dL/dx is outside the subspace."""
    spec = run_of(model)
    rotary, subspace, targets_BT = rotary_tables(model), Subspace.of(spec, CPU), tokens_BT().roll(-1, dims=1)

    def gradients(cut: int | None) -> list[Tensor]:
        params = {key: params_of(spec, key) for key in all_layer_keys(model)}
        x = tokens_BT()
        for index in range(model.num_layers):
            if index == cut:
                x = subspace.restored(subspace.coordinates(x, tokens_BT()), tokens_BT())
            x = run_layers(model, stage_layer_keys(model, index, index + 1), params, x, rotary)
        loss(x, targets_BT).backward()  # type: ignore[no-untyped-call]
        leaves = (tensor for named in params.values() for tensor in named.values())
        return [leaf.grad for leaf in leaves if leaf.requires_grad and leaf.grad is not None]

    whole = gradients(None)
    assert len(whole) == sum(len(layer_layout(model, key).names) for key in all_layer_keys(model))
    for cut in (1, 2):
        for with_cut, without in zip(gradients(cut), whole, strict=True):
            torch.testing.assert_close(with_cut, without, rtol=1e-4, atol=1e-6)


@MODELS
def test_what_writes_into_the_stream_has_k_rows_and_nothing_else_is_less(model: ModelSpec) -> None:
    less = {"o_proj", "down_proj", "w2"}
    for key in all_layer_keys(model):
        reduced, whole = layer_layout(model, key), layer_layout(model.whole, key)
        assert reduced.names == whole.names
        for name, shape, wide in zip(reduced.names, reduced.shapes, whole.shapes, strict=True):
            if name == EMBEDDING_MATRIX:
                assert shape == (50, 7)
            else:
                assert shape == ((7, *wide[1:]) if name.split(".")[-2] in less else wide)
    assert num_parameters(model) < num_parameters(model.whole)


@MODELS
def test_multiplied_out_it_is_the_whole_model_with_the_same_logits(model: ModelSpec) -> None:
    spec, keys = run_of(model), all_layer_keys(model)
    params = {key: params_of(spec, key) for key in keys}
    whole: dict[str, Params] = {}
    for key in keys:
        param_N = layer_layout(model, key).flatten({n: t for n, t in params[key].items() if not n.startswith("sub")})
        whole[key] = layer_layout(model.whole, key).views(whole_layer(spec, key, param_N))
    with torch.no_grad():
        wanted = run_layers(model, keys, params, tokens_BT(), rotary_tables(model))
        found = run_layers(model.whole, keys, whole, tokens_BT(), rotary_tables(model))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_layer_has_constants_only_where_there_is_a_subspace_and_none_at_the_head() -> None:
    spec = run_of(DENSE)
    assert constants_of(spec, HEAD, device=CPU, dtype=torch.float32) == {}
    assert constants_of(run_of(DENSE.whole), EMBED, device=CPU, dtype=torch.float32) == {}
    narrow = constants_of(spec, "layers.1", device=CPU, dtype=torch.bfloat16)
    assert [*narrow] == [BASIS]
    assert narrow[BASIS].dtype == torch.bfloat16
    assert not narrow[BASIS].requires_grad
