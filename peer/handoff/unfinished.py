"""What a fetch that failed has got of a layer, for the next one."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Unfinished:
    """Good for a fetch of the same layer at the same version, under the same digest. Nothing here has been compared
    with it: whoever ends the fetch does that, with the whole layer."""

    version: int
    digest: str
    """Of the layer, as most holders named it."""
    tensors: tuple[Tensor, Tensor, Tensor]
    """Parameters and moments, as long as the layer's; filled where a range is `here`."""
    here: set[tuple[int, int]] = field(default_factory=set)
    """(Tensor, first element) of the ranges that have come."""
