"""A payload that has a size and no content."""

from shoal.protocol.errors import LocalError


class Phantom:
    """Stands for `nbytes` bytes in a world whose peers move no tensors: links charge for it, nobody can read it.

    Equal to any other phantom of its size, as two unread buffers would be.
    """

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise LocalError(f"a phantom cannot have {nbytes} bytes")
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Phantom) and other.nbytes == self.nbytes

    def __hash__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"Phantom({self.nbytes})"
