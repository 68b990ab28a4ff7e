"""Version certificates: a majority of a group signs the digests of its layers at one version. Pure.

A version number alone proves nothing: anybody can claim to have the newest snapshot. So each member signs the digests
of its group's layers at every snapshot version and at a layout's last version, and sends the signature in its
heartbeats (`Attested`). The next plan contains the digests that a majority of a group has signed (`Certified`), and the
peers that vote on the plan check the signatures. A live plan, one that won its vote, therefore lists for each layer the
versions that the run may restore. A peer that fetches such a version rejects a layer with another digest.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec
from blake3 import blake3

from shoal.protocol.identity import PeerID

JURY = 15
"""Most members that sign for one group, since plans carry the signatures; larger groups draw this many by lot."""
_ENCODER = msgspec.msgpack.Encoder()

Proofs = tuple[tuple[str, str], ...]
"""One (key of the layer, digest of the layer's state) for each layer of a group, in the layers' order."""


def root_of(proofs: Iterable[tuple[str, str]]) -> str:
    """Return one digest over a group's ordered (layer, digest) pairs."""
    return blake3(_ENCODER.encode(tuple(proofs))).hexdigest(length=16)


def state_body(*, era: int, version: int, root: str) -> bytes:
    """Return the bytes that a holder signs to attest its state. Args: root: the digest that `root_of` returns."""
    return _ENCODER.encode((era, version, root))


class _Proven(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, dict=True):
    era: int
    version: int
    proofs: Proofs

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the group's layers."""
        return tuple(key for key, _ in self.proofs)

    @cached_property
    def body(self) -> bytes:
        """The bytes that each member of the group's jury signs."""
        return state_body(era=self.era, version=self.version, root=root_of(self.proofs))


class Attested(_Proven, frozen=True):
    """One member's signed claim that its group's layers have these digests at a committed version."""

    signature: bytes


class Certified(_Proven, frozen=True):
    """Digests of a group's layers at a version, signed by a majority of the group."""

    signatures: tuple[tuple[int, bytes], ...] = ()
    """(position in the group's `jury` under the previous plan, that member's signature of `body`) of each signer. Only
    the first plan with this certificate carries them, for its voters to check; later plans leave them out."""

    @property
    def age(self) -> tuple[int, int]:
        """(era, version): training generation, and committed steps in it; a greater pair is newer."""
        return self.era, self.version

    @cached_property
    def bare(self) -> "Certified":
        """This entry without signatures, as later plans carry it."""
        return msgspec.structs.replace(self, signatures=()) if self.signatures else self


def jury(members: Sequence[PeerID], lot: str) -> tuple[PeerID, ...]:
    """Return the members that sign for their group. Args: lot: seeds the draw; a string that no member can choose."""
    if len(members) <= JURY:
        return tuple(members)
    return tuple(sorted(members, key=lambda peer: blake3(f"{lot}/{peer}".encode()).digest())[:JURY])


def layers_at(certified: Iterable[Certified], age: tuple[int, int]) -> dict[str, str]:
    """Return layer -> certified digest at `age`, (era, version); layers without a certified digest are left out."""
    return {key: proof for entry in certified if entry.age == age for key, proof in entry.proofs}
