"""A peer's identity: one Ed25519 key, which libp2p uses for TLS and this program for signatures.

The libp2p PeerID of an Ed25519 key contains the public key: it is the identity multihash of the protobuf-encoded key
(libp2p specs, peer-ids). So the PeerID alone, which libp2p authenticates, is enough to check a signature.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import NewType

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.protocol.errors import LocalError

PeerID = NewType("PeerID", str)
"""A libp2p peer ID in Base58, such as `12D3KooW…`; it contains the peer's public key."""

# identity multihash (code 0x00, length 0x24) of PublicKey{type: Ed25519 = 1, data: 32 bytes}
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
# PrivateKey{type: Ed25519 = 1, data: 64 bytes}, the file format of libp2p's daemon
_KEY_FILE_PREFIX = bytes.fromhex("08011240")


class Identity:
    """A private key with its public key and PeerID; `seed` is the Ed25519 seed, 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != 32:
            raise ValueError(f"an Ed25519 seed has 32 bytes, not {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        self.peer_id: PeerID = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> "Identity":
        return cls(os.urandom(32))

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Read the key file at `path`, or create it (mode 0600).

        Raises: LocalError: the file is no Ed25519 key in libp2p's format, or cannot be read or written.
        """
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            identity = cls.generate()
            identity.save(path)
            return identity
        except OSError as error:
            raise LocalError(f"cannot read {path}: {error.strerror or error}") from error
        if len(raw) == 68 and raw.startswith(_KEY_FILE_PREFIX):
            identity = cls(raw[4:36])
            if raw[36:] == identity.public_key:  # else a flipped bit would give us another identity
                return identity
        raise LocalError(f"{path} is not a shoal identity: move it away and a new one will be made")

    def save(self, path: Path) -> None:
        """Write the key file atomically (mode 0600); durable on return. Raises: LocalError: it cannot be written."""
        beside = path.with_name(f"{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_KEY_FILE_PREFIX + self._seed + self.public_key)
                file.flush()
                os.fsync(descriptor)
            os.replace(beside, path)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)  # an owner that loses its key file has lost its run
            finally:
                os.close(folder)
        except OSError as error:
            raise LocalError(f"cannot write the key file {path}: {error.strerror or error}") from error

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`: 64 bytes, deterministic (RFC 8032)."""
        return self._key.sign(data)


def peer_id_of(public_key: bytes) -> PeerID:
    return PeerID(str(base58.b58encode(_PEER_ID_PREFIX + public_key), "ascii"))


def public_key_of(peer_id: PeerID) -> bytes:
    """Return the 32-byte Ed25519 key inside `peer_id`. Raises: ValueError: not the PeerID of an Ed25519 key."""
    raw = bytes(base58.b58decode(peer_id))
    if len(raw) != 38 or not raw.startswith(_PEER_ID_PREFIX):
        raise ValueError(f"{peer_id!r} is not the PeerID of an Ed25519 key")
    return raw[6:]


@lru_cache(maxsize=4096)
def _verifier(peer_id: PeerID) -> Ed25519PublicKey:
    """Return the public key in a PeerID. Cached, as decoding Base58 takes half as long as checking a signature."""
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))


def verify(peer_id: PeerID, signature: bytes, data: bytes) -> bool:
    """True if `peer_id` signed `data`. Never raises, whatever the network sent."""
    try:
        _verifier(peer_id).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
