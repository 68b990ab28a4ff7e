import subprocess
import sys

import pytest
import torch
from torch import Tensor

from shoal.peer.model.backward import backward


def graph(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """(leaves, two outputs of different shapes)."""
    generator = torch.Generator().manual_seed(seed)
    x_RC, w_CD = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 5), (5, 2)))
    y_RD = (x_RC @ w_CD).tanh()
    return [x_RC, w_CD], [y_RD, (x_RC * 2).sum(0)]


def test_gradients_are_bit_for_bit_those_of_torch() -> None:
    gradients = [torch.randn(3, 2), torch.randn(5)]
    leaves, outputs = graph(0)
    backward(outputs, gradients)
    wanted, others = graph(0)
    torch.autograd.backward(others, gradients)
    assert all(torch.equal(leaf.grad, want.grad) for leaf, want in zip(leaves, wanted, strict=True))  # type: ignore[arg-type]


def test_a_gradient_of_another_shape_is_refused() -> None:
    _, outputs = graph(0)
    with pytest.raises(RuntimeError, match="shape"):
        backward(outputs[:1], [torch.randn(2, 3)])


def test_it_does_not_import_sympy() -> None:
    program = (
        "import sys, torch\n"
        "from shoal.peer.model.backward import backward\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "backward([x * 2], [torch.ones(3)])\n"
        "print(x.grad.tolist(), 'sympy' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[2.0, 2.0, 2.0] False"
