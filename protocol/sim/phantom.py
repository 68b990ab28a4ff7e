"""A payload with a size and no content."""

from shoal.protocol.errors import LocalError


class Phantom:
    """Takes the place of a payload of `nbytes` bytes in a world without tensors. Phantoms of one size are equal."""

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
