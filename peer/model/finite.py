"""Detection and removal of numbers that are not finite.

Reading a number from a GPU (`bool`, `float`) waits for all queued work. So the answers stay on the device until a job's
end, which waits for its payload anyway. On a CPU reading costs nothing and can save a pass over the numbers.
"""

from torch import Tensor


def finite(values: Tensor) -> Tensor:
    """Return whether all elements are finite, bool []. A finite sum proves it in a tenth of the time; else each element
    is tested, since a sum may overflow."""
    of_sum = values.sum().isfinite()
    if values.is_cpu:
        return of_sum if bool(of_sum) else values.isfinite().all()
    return of_sum | values.isfinite().all()


def zero_unless(keep: Tensor, values: Tensor) -> Tensor:
    """Set `values` to zero in place unless `keep`, bool [], is true. Returns: `values`."""
    if values.is_cpu:
        return values if bool(keep) else values.zero_()
    return values.masked_fill_(~keep, 0.0)
