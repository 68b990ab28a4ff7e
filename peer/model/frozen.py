"""Weights that are not trained: layers of the base (the pretrained model), as stored, and with adapters.

A quantised matrix is decoded anew for each product, in forward and backward, so only its bytes stay in memory.

B samples   T tokens   D width   N elements of a layer   Y bytes of a layer   R rows and C columns of a matrix   K rank
P rows of tokens, sorted by expert   E experts
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shoal.kernels import codec, nf4
from shoal.kernels.dispatch import grouped_matmul, grouped_matmul_transposed
from shoal.peer.model.layout import init_layer, layer_layout
from shoal.protocol.spec import AdapterSpec, BaseFormat, RunSpec
from shoal.protocol.tensors import adapter_names, base_bytes, magnitude_name, stored_tensors

_PLAIN: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
_INT8: Final = codec.FORMATS["int8"]
_CHUNK: Final = 1 << 22
"""Numbers of an int8 matrix decoded to float32 at a time; a whole number of tiles."""


def adapter_of(spec: RunSpec) -> AdapterSpec:
    """Return the run's adapter settings; the run must have some."""
    assert spec.adapter is not None, "the run trains all weights"
    return spec.adapter


def stored_base(spec: RunSpec, key: str, flat_N: Tensor) -> Tensor:
    """Encode a layer's parameters, float32 [N], in the formats of the run's base. The bytes are the same on every
    machine; they are returned as float32 [Y / 4], because peers send them as they send a layer's state."""
    model, base = spec.model, adapter_of(spec).base
    views = layer_layout(model, key).views(flat_N)
    stored_Y = torch.zeros(base_bytes(model, base, key), dtype=torch.uint8)
    for name, _, form, first, end in stored_tensors(model, base, key):
        stored_Y[first:end] = _encoded(views[name], form)
    return stored_Y.view(torch.float32)


def seed_base(spec: RunSpec, key: str) -> Tensor:
    """Return a layer of a base model made from the run's seed, in the stored form that `stored_base` returns."""
    return stored_base(spec, key, init_layer(spec.model, key, spec.seed))


def base_numel(spec: RunSpec, key: str) -> int:
    """Return the number of float32 elements in the result of `stored_base`."""
    return base_bytes(spec.model, adapter_of(spec).base, key) // torch.float32.itemsize


def _encoded(x: Tensor, form: BaseFormat) -> Tensor:
    x = x.detach().to("cpu", torch.float32).contiguous()
    if form == "nf4":
        return nf4.encode(x)
    if form == "int8":
        return codec.encode(x, _INT8)
    return x.to(_PLAIN[form]).reshape(-1).view(torch.uint8)


class FrozenMatrix:
    """One matrix of the base, held as its stored bytes, uint8."""

    __slots__ = ("_form", "_norms_R", "_stored_Y", "shape")

    def __init__(self, stored_Y: Tensor, shape: tuple[int, ...], form: BaseFormat) -> None:
        self._stored_Y = stored_Y
        self._form = form
        self._norms_R: Tensor | None = None
        self.shape = shape

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [rows, columns], without a copy if it is stored in `dtype`."""
        if self._form in _PLAIN:
            return self._stored_Y.view(_PLAIN[self._form]).view(self.shape).to(dtype)
        numel = math.prod(self.shape)
        if self._form == "nf4":
            return nf4.decode(self._stored_Y, numel, dtype).view(self.shape)
        dense_N = torch.empty(numel, dtype=dtype, device=self._stored_Y.device)
        for first in range(0, numel, _CHUNK):
            count = min(_CHUNK, numel - first)
            tiles = slice(first // codec.TILE, -(-(first + count) // codec.TILE))
            dense_N[first : first + count] = codec.decode_tiles(self._stored_Y, numel, _INT8, tiles)[:count]
        return dense_N.view(self.shape)

    def row_norms(self) -> Tensor:
        """Return each row's Euclidean norm, float32 [rows]; computed once."""
        if self._norms_R is None:
            self._norms_R = self.dense(torch.float32).norm(dim=1)
        return self._norms_R

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows with the indices `index`: [..., columns] of `dtype`."""
        if self._form in _PLAIN:
            return functional.embedding(index, self._stored_Y.view(_PLAIN[self._form]).view(self.shape)).to(dtype)
        columns = self.shape[1]
        if self._form != "int8" or columns % codec.TILE:
            return functional.embedding(index, self.dense(dtype))
        # Decode only the tiles of these rows: an embedding is often the largest matrix.
        of_row = columns // codec.TILE
        tiles = (index.reshape(-1, 1) * of_row + torch.arange(of_row, device=index.device)).flatten()
        found = codec.decode_tiles(self._stored_Y, math.prod(self.shape), _INT8, tiles)
        return found.view(*index.shape, columns).to(dtype)

    def times(self, x: Tensor) -> Tensor:
        """Return x W^T, where W is this matrix: [..., columns] -> [..., rows]."""
        if self._form in _PLAIN and _PLAIN[self._form] == x.dtype:
            return functional.linear(x, self.dense(x.dtype))
        product: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    """x W^T. The backward decodes the matrix again: a dense copy would take as much memory as a trained matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: FrozenMatrix) -> Tensor:
        ctx.matrix = matrix
        return functional.linear(x, matrix.dense(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        matrix: FrozenMatrix = ctx.matrix
        return grad @ matrix.dense(grad.dtype), None


class _GroupedProduct(torch.autograd.Function):
    """x W^T with one matrix for each expert, applied to that expert's rows: [P, columns] -> [P, rows]."""

    @staticmethod
    def forward(ctx: Any, x_PC: Tensor, offset_E: Tensor, matrices: Sequence[FrozenMatrix]) -> Tensor:
        ctx.offset_E, ctx.matrices = offset_E, matrices
        return grouped_matmul(x_PC, [matrix.dense(x_PC.dtype) for matrix in matrices], offset_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PR: Tensor) -> tuple[Tensor, None, None]:
        dense = [matrix.dense(grad_PR.dtype) for matrix in ctx.matrices]
        return grouped_matmul_transposed(grad_PR, dense, ctx.offset_E), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenLayer:
    """One layer of the base on a device."""

    matrices: Mapping[str, FrozenMatrix]
    vectors: Mapping[str, Tensor]
    """Norms and biases, in `dtype`."""
    dtype: torch.dtype
    """The dtype in which forward and backward compute."""

    @classmethod
    def of(cls, spec: RunSpec, key: str, stored: Tensor, *, device: torch.device, dtype: torch.dtype) -> "FrozenLayer":
        """Load a layer. Args: stored: the layer's stored bytes as float32, the result of `stored_base`."""
        stored_Y = stored.to(device).view(torch.uint8)
        matrices: dict[str, FrozenMatrix] = {}
        vectors: dict[str, Tensor] = {}
        for name, shape, form, first, end in stored_tensors(spec.model, adapter_of(spec).base, key):
            if len(shape) == 1:
                vectors[name] = stored_Y[first:end].view(_PLAIN[form]).to(dtype)
            else:
                matrices[name] = FrozenMatrix(stored_Y[first:end], shape, form)
        return cls(matrices=matrices, vectors=vectors, dtype=dtype)


def adapted_row_norms(norm_R: Tensor, wa_RK: Tensor, a_KC: Tensor, b_RK: Tensor, *, scale: float) -> Tensor:
    """Return the norms of the rows of W + scale B A, float32 [rows], without making that sum.

    For rows w of W and b of B the squared norm is |w|^2 + 2 scale w A^T b + scale^2 b A A^T b. `norm_R` has |w| of each
    row; `wa_RK` is W A^T.
    """
    wa_RK, a_KC, b_RK = wa_RK.float(), a_KC.float(), b_RK.float()
    between_R, beyond_R = (wa_RK * b_RK).sum(1), (b_RK @ (a_KC @ a_KC.T) * b_RK).sum(1)
    return (norm_R.square() + 2 * scale * between_R + scale**2 * beyond_R).clamp_min(1e-24).sqrt()  # no division by 0


class AdaptedLayer(dict[str, Tensor]):
    """A layer with adapters in the form that `llama.py` takes: a dict of the adapters and of the base's norms and
    biases, with methods that multiply by the base's matrices or return them.

    Args:
        adapters: autograd leaves by name: A, B, and with "dora" also the magnitudes m; may be empty.
        scale: the factor of B A.
    """

    def __init__(self, frozen: FrozenLayer, adapters: Mapping[str, Tensor], *, scale: float) -> None:
        super().__init__(frozen.vectors)
        self.update(adapters)
        self._frozen = frozen
        self._scale = scale

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply the projection `name` with its adapter and its bias, if any: [..., columns] -> [..., rows]."""
        matrix, (a, b), magnitude = self._frozen.matrices[name + ".weight"], adapter_names(name), magnitude_name(name)
        if magnitude in self:
            y = self._with_magnitudes(matrix, x, self[a], self[b], self[magnitude])
        else:
            y = matrix.times(x)
        bias = self.get(name + ".bias")
        if bias is not None:
            y = y + bias
        if a in self and magnitude not in self:
            y = y + functional.linear(functional.linear(x, self[a]), self[b]) * self._scale
        return y

    def _with_magnitudes(self, matrix: FrozenMatrix, x: Tensor, a_KC: Tensor, b_RK: Tensor, m_R: Tensor) -> Tensor:
        """Return W' x, where W' is W + scale B A with its rows scaled to the norms |w| + m: [..., columns] ->
        [..., rows]."""
        # The norms need W A^T: append A to x as K more tokens, and one product gives both W x and W A^T.
        rows = math.prod(x.shape[:-1])
        both = matrix.times(torch.cat([x.reshape(rows, -1), a_KC.detach()]))
        y = both[:rows].view(*x.shape[:-1], -1) + functional.linear(functional.linear(x, a_KC), b_RK) * self._scale
        times_R = (matrix.row_norms() + m_R) / adapted_row_norms(
            matrix.row_norms(), both[rows:].detach().T, a_KC.detach(), b_RK.detach(), scale=self._scale
        )
        # Multiply by 1 + (t - 1): bfloat16 would round t = 1.001 to 1.
        return y + y * (times_R - 1).to(y.dtype)

    def grouped(self, names: Sequence[str], x_PC: Tensor, offset_E: Tensor) -> Tensor:
        """Multiply each expert's rows by its frozen matrix in `names`: [P, columns] -> [P, rows], differentiable in
        `x_PC`. Args: offset_E: int64 [E + 1], the first row of each expert, then P."""
        matrices = [self._frozen.matrices[name] for name in names]
        product: Tensor = _GroupedProduct.apply(x_PC, offset_E, matrices)  # type: ignore[no-untyped-call]
        return product

    def rows(self, name: str, index: Tensor) -> Tensor:
        return self._frozen.matrices[name].rows(index, self._frozen.dtype)

    def matrix(self, name: str) -> Tensor:
        """Return the matrix `name`, which has no gradient."""
        return self._frozen.matrices[name].dense(self._frozen.dtype)


def linear(params: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Apply the projection `name` with its bias and adapter, if any: [..., columns] -> [..., rows]."""
    if isinstance(params, AdaptedLayer):
        return params.linear(name, x)
    return functional.linear(x, params[name + ".weight"], params.get(name + ".bias"))
