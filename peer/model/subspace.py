"""A residual stream in which layers write into one subspace only, so that k numbers a token describe it.

    x = fixed[v] + U c        x: the D numbers of a token v in the residual stream; c: its k coordinates
    c = (k / D) U^T (x - fixed[v])

U [D, k], the same in all layers, and fixed [V, D] are functions of the run's seed: not trained, sent or stored. Apart
from fixed[v], every addend of x is U times k numbers: the embedding e[v], and the results of the output and down
projections (their matrices have k rows instead of D). So v and c determine x up to rounding. Likewise, earlier stages
need only U^T dL/dx, k numbers, of the gradient of x.

Source: Ramasinghe et al., "Protocol Models: Scaling Decentralized Training with Communication-Efficient Model
Parallelism", 2025, arXiv 2506.01260. There full matrices are projected after each step, and the subspace turns slowly.
Here, as in later runs of the paper's authors, the k rows themselves are trained, and U is constant.

U^T U = (D / k) I, so that a row of U has the norm 1 (on average, if m below does not divide k). A matrix with k rows
then has the same initial scale, the same steps and the same effect on a channel of x as in a dense model. With an
orthonormal U the model learns less (`MEASURED.md`).

**The same bits on every machine.** With D = P m, P the largest power of two in D:

    U[i, j] = sign[i] H[i mod P, column[j div m]] R[i div P, j mod m] sqrt(m / k)

H is Sylvester's Hadamard matrix [P, P], R = I - 2/m [m, m] a reflection: their Kronecker product is sqrt(P) times an
orthogonal matrix. The elements of U have two magnitudes, made in float64 from one square root and rounded once. `sign`
and the order of the columns come from the seed. fixed[v] is D signs (1 or -1) from a hash of v: exact in bfloat16, too.

B samples   T tokens   D width   k numbers of a subspace   W words of 32 bits
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from torch.nn import functional

from shoal.kernels.words import shifted, signed
from shoal.peer.model.layout import layer_layout
from shoal.protocol.layers import EMBED, HEAD
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import EMBEDDING_MATRIX

BASIS: Final = "subspace.basis"
"""The name of the subspace's basis U [D, k] in a layer's dict of tensors."""
KEY: Final = "subspace.key"
"""The name of the hash key from which tokens' fixed vectors are made, int32 [2], in the embedding's dict of tensors."""
_WORD: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class Subspace:
    """The basis U of one run's subspace, and the hash key from which fixed vectors of tokens are made, on a device."""

    basis_DK: Tensor
    """float32."""
    key_2: Tensor
    """int32."""

    @classmethod
    def of(cls, spec: RunSpec, device: torch.device) -> "Subspace":
        """Return the subspace of a run that has one; cached by device."""
        return _made(spec.seed, spec.model.dim, spec.model.subspace, device)

    def coordinates(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        """Return the coordinates c of x, float32 [B, T, k]."""
        return self._scaled((x_BTD.float() - self._fixed(tokens_BT)) @ self.basis_DK)

    def restored(self, c_BTK: Tensor, tokens_BT: Tensor) -> Tensor:
        """Return x, float32 [B, T, D], from its coordinates c, float32 [B, T, k]."""
        return self._fixed(tokens_BT) + functional.linear(c_BTK, self.basis_DK)

    def gradient_of_coordinates(self, grad_BTD: Tensor) -> Tensor:
        """Convert dL/dx to dL/dc, float32 [B, T, k]."""
        return grad_BTD.float() @ self.basis_DK

    def gradient_restored(self, grad_BTK: Tensor) -> Tensor:
        """Convert dL/dc to dL/dx, float32 [B, T, D]. The result lacks the part of dL/dx outside the subspace."""
        return self._scaled(functional.linear(grad_BTK, self.basis_DK))

    def _fixed(self, tokens_BT: Tensor) -> Tensor:
        return _signs(tokens_BT, self.key_2, len(self.basis_DK), torch.float32)

    def _scaled(self, x: Tensor) -> Tensor:
        D, k = self.basis_DK.shape
        return x * (k / D)


def constants_of(spec: RunSpec, key: str, *, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return name -> tensor for the constants of a subspace model that layer `key` needs beside its parameters."""
    if not spec.model.subspace or key == HEAD:
        return {}
    subspace = Subspace.of(spec, device)
    basis = {BASIS: _narrowed(subspace, dtype)}
    return basis | {KEY: subspace.key_2} if key == EMBED else basis


def fixed_vectors(params: Mapping[str, Tensor], tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fixed vector of each token, [B, T, D]. Args: params: the embedding's tensors, with the hash key."""
    return _signs(tokens_BT, params[KEY], len(params[BASIS]), dtype)


def whole_layer(spec: RunSpec, key: str, param_N: Tensor) -> Tensor:
    """Convert a layer's parameters to those of the model without a subspace, `spec.model.whole`, which other programs
    can read: embedding and projections are multiplied by the basis U. Parameters and result are float32 on the CPU."""
    plain, tensors = layer_layout(spec.model.whole, key), layer_layout(spec.model, key).views(param_N)
    if not spec.model.subspace or key == HEAD:
        return param_N
    subspace = Subspace.of(spec, torch.device("cpu"))
    for name, shape in zip(plain.names, plain.shapes, strict=True):
        if name == EMBEDDING_MATRIX:
            token_1V = torch.arange(spec.model.vocab_size)[None]
            tensors[name] = subspace.restored(tensors[name], token_1V)[0]
        elif tensors[name].shape != shape:
            tensors[name] = subspace.basis_DK @ tensors[name]
    return plain.flatten(tensors)


@lru_cache(maxsize=8)
def _made(seed: int, dim: int, k: int, device: torch.device) -> Subspace:
    words = np.frombuffer(blake3(f"{seed} subspace fixed".encode()).digest(length=8), np.dtype("<i4"))
    key_2 = torch.from_numpy(words.astype(np.int32))
    return Subspace(_basis(seed, dim, k).to(device), key_2.to(device))


@lru_cache(maxsize=8)
def _narrowed(subspace: Subspace, dtype: torch.dtype) -> Tensor:
    """Return the basis U in `dtype`; cached, because each forward asks for it in each layer."""
    return subspace.basis_DK.to(dtype)


def _basis(seed: int, dim: int, k: int) -> Tensor:
    power = dim & -dim
    m = dim // power
    drawn_P = np.frombuffer(blake3(f"{seed} subspace columns".encode()).digest(length=8 * power), np.dtype("<u8"))
    order_P = np.argsort(drawn_P, kind="stable")
    bytes_of_rows = np.frombuffer(blake3(f"{seed} subspace rows".encode()).digest(length=-(-dim // 8)), np.uint8)
    negative_D = np.unpackbits(bytes_of_rows)[:dim]
    row_D, column_K = np.arange(dim), np.arange(k)
    # An element of H is -1 where its row index and its column index have an odd number of 1-bits in common.
    common_DK = (row_D % power)[:, None] & order_P[column_K // m]
    odd_DK = negative_D[:, None] ^ (np.bitwise_count(common_DK) & np.uint8(1))
    reflected_DK = ((row_D // power)[:, None] == column_K % m) - 2.0 / m
    basis_DK = np.where(odd_DK, -1.0, 1.0) * reflected_DK * math.sqrt(m / k)
    return torch.from_numpy(basis_DK.astype(np.float32))


def _signs(tokens_BT: Tensor, key_2: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return pseudo-random signs [B, T, dim]: bit e of word w of a token's hash decides sign 32 w + e. Every integer is
    a valid token here.

    Source of the hash: Wellons, "Prospecting for Hash Functions", 2018: triple32. The token and one half of the key are
    added before the hash's first round, the word's number and the other half of the key before its second.
    """
    first, second = key_2
    word_W = torch.arange(-(-dim // _WORD), dtype=torch.int32, device=tokens_BT.device)
    h_BT1 = (tokens_BT.to(torch.int32) + first).unsqueeze(-1)
    h_BT1 = (h_BT1 ^ shifted(h_BT1, 17)) * signed(0xED5AD4BB)
    h_BTW = h_BT1 + (word_W * signed(0x9E3779B9) + second)  # an odd multiplier spreads the words
    h_BTW = (h_BTW ^ shifted(h_BTW, 11)) * signed(0xAC4C1B51)
    h_BTW = (h_BTW ^ shifted(h_BTW, 15)) * signed(0x31848BAB)
    h_BTW = h_BTW ^ shifted(h_BTW, 14)
    byte_4 = torch.arange(0, _WORD, 8, dtype=torch.int32, device=tokens_BT.device)
    byte_BTW4 = (h_BTW.unsqueeze(-1) >> byte_4) & 255
    # Look up eight signs at a time: computing each sign by itself would dominate the cost of an embedding.
    return functional.embedding(byte_BTW4, _signs_of_bytes(tokens_BT.device, dtype)).flatten(-3)[..., :dim]


@lru_cache(maxsize=8)
def _signs_of_bytes(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return [256, 8]: -1 where a bit of a byte is 1, else 1."""
    bit_8 = torch.arange(8)
    return (1 - 2 * ((torch.arange(256)[:, None] >> bit_8) & 1)).to(device, dtype)
