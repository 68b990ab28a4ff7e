"""Sends tokens to their experts and back, and multiplies by the experts' matrices. `reference.py` has the arithmetic.

    groups = group(chosen_NK, num_experts)
    x_PD = permute(x_ND, groups)                              # rows sorted by expert
    y_PR = grouped_matmul(x_PD, weights, groups.offset_E)     # each expert's rows times its matrix
    y_ND = combine(y_PR, weight_NK, groups)                   # back, weighted

The last three functions are differentiable in all floating-point tensors. The tensors' device selects the
implementation.
"""

from shoal.kernels.dispatch.differentiable import combine, grouped_matmul, grouped_matmul_transposed, permute
from shoal.kernels.dispatch.groups import Groups, counts, group

__all__ = ["Groups", "combine", "counts", "group", "grouped_matmul", "grouped_matmul_transposed", "permute"]
