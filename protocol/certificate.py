"""Certificates of versions: a majority of the places of a group has signed what the group's layers are at a version.
Pure.

A number proves nothing: anybody can put a snapshot on its disk and claim that it is the newest. So each member of a
group signs the digests of its layers at every version of which snapshots are written, and when a layout ends
(`Attested`, in its heartbeats). The next plan carries what a majority of a group has signed (`Certified`), and its
voters check the signatures; so a live plan is the run's table of the versions that may be gone back to, layer by layer.
Whoever fetches such a version takes no layer with another digest.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec
from blake3 import blake3

from shoal.protocol.identity import PeerID

JURY = 15
"""Members that sign for a larger group, drawn by lot: their signatures travel with a plan."""
_ENCODER = msgspec.msgpack.Encoder()

Proofs = tuple[tuple[str, str], ...]
"""(layer, `LayerState.proof`) of all layers of a group, in their order."""


def root_of(proofs: Iterable[tuple[str, str]]) -> str:
    """One digest of the (layer, digest) of all layers of a group, in their order."""
    return blake3(_ENCODER.encode(tuple(proofs))).hexdigest(length=16)


def state_body(*, era: int, version: int, root: str) -> bytes:
    """What a holder signs, as a `state` statement. The layers' names are in the root."""
    return _ENCODER.encode((era, version, root))


class Attested(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, dict=True):
    """One member's word that its group's layers have these digests at a version to which it has stepped."""

    era: int
    version: int
    proofs: Proofs
    signature: bytes
    """Its `state` statement of `body`."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The group's layers."""
        return tuple(key for key, _ in self.proofs)

    @cached_property
    def body(self) -> bytes:
        return _body(self.era, self.version, self.proofs)


class Certified(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, dict=True):
    """What a group's layers are at a version, by the word of a majority of its places."""

    era: int
    version: int
    proofs: Proofs
    signatures: tuple[tuple[int, bytes], ...] = ()
    """(position among the group's jury under the plan before, its `state` statement). Empty in later plans: the voters
    of the first one have checked them."""

    @property
    def age(self) -> tuple[int, int]:
        """(era, version): the higher is newer."""
        return self.era, self.version

    @property
    def keys(self) -> tuple[str, ...]:
        """The group's layers."""
        return tuple(key for key, _ in self.proofs)

    @cached_property
    def bare(self) -> "Certified":
        """The same without signatures."""
        return msgspec.structs.replace(self, signatures=()) if self.signatures else self

    @cached_property
    def body(self) -> bytes:
        return _body(self.era, self.version, self.proofs)


def _body(era: int, version: int, proofs: Proofs) -> bytes:
    return state_body(era=era, version=version, root=root_of(proofs))


def jury(members: Sequence[PeerID], lot: str) -> tuple[PeerID, ...]:
    """The members whose signatures certify a version of their group. Args: lot: nobody can choose it."""
    if len(members) <= JURY:
        return tuple(members)
    return tuple(sorted(members, key=lambda peer: blake3(f"{lot}/{peer}".encode()).digest())[:JURY])


def layers_at(certified: Iterable[Certified], age: tuple[int, int]) -> dict[str, str]:
    """Layer -> the digest that it has at (era, version), of the layers of which that is certified."""
    return {key: proof for entry in certified if entry.age == age for key, proof in entry.proofs}
