"""Keep what a failed fetch has received of a layer, for the next one."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Unfinished:
    """Part of a layer, usable by a fetch of the same layer at the same version under the same digest.

    It is not checked against the digest: the fetch that completes the layer does that.
    """

    version: int
    digest: str
    """The layer's, as most holders named it."""
    tensors: tuple[Tensor, Tensor, Tensor]
    """Parameters and moments at full length; filled where a range is `here`."""
    here: set[tuple[int, int]] = field(default_factory=set)
    """(Tensor, first element) of the ranges that have arrived."""
