"""Encrypts a stream that a third peer carries, or a lane beside the network daemon's connection (`lane.py`): a peer in
between can cut the stream, but neither read nor change it. Pure.

    opener                                       other end
    X   32 B                      ->
                                  <-   Y, sign(other, "carried-to", X, Y)    96 B
    sign(opener, "carried-from", X, Y)  ->                                   64 B
    records                       <->  records

X and Y are public X25519 keys made for this stream. Each end signs with the Ed25519 key of its PeerID. The signed
statement contains the run, both peers, the opener, the stream's purpose and both keys, and has a different topic for
each end. So a carrier cannot insert its own key, replay an older message, or return an end's message to that end.

A record is a length (4 B, authenticated) and the ChaCha20-Poly1305 ciphertext of up to 64 KiB. Each direction has its
own key, and both ends count the records: a changed, missing, repeated or moved record cannot be decrypted. An empty
record shows that its sender is alive. If a stream ends between two records, the carrier may have cut it.

Source: Canetti and Krawczyk, "Analysis of Key-Exchange Protocols and Their Use for Building Secure Channels", 2001
    (ePrint 2001/040), section 5.1, protocol SIG-DH (ISO/IEC 9798-3); HKDF, RFC 5869; ChaCha20-Poly1305, RFC 8439.
"""

import struct
from collections.abc import Iterator
from typing import Final, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.ports import Payload
from shoal.protocol.statement import Topic, sign_statement, statement_holds

KEY_BYTES: Final = 32
RECORD_BYTES_MAX: Final = 64 * 1024
"""Most plaintext bytes of one record."""
_TAG_BYTES: Final = 16
_LENGTH: Final = struct.Struct(">I")
_NONCE: Final = struct.Struct(">4xQ")

Purpose = Literal["frames", "calls", "lane"]


class Channel:
    """Encrypts the bytes that one end sends, and decrypts those that it receives."""

    def __init__(self, peer: PeerID, *, sends: bytes, receives: bytes) -> None:
        self.peer = peer
        self._sends, self._receives = ChaCha20Poly1305(sends), ChaCha20Poly1305(receives)
        self._num_sent = self._num_opened = 0

    def seal(self, data: Payload) -> Iterator[bytes]:
        """Encrypt `data`. Yield its records in order; for empty data, one empty record."""
        view = memoryview(data).cast("B")
        for start in range(0, max(1, len(view)), RECORD_BYTES_MAX):
            plain = view[start : start + RECORD_BYTES_MAX]
            head = _LENGTH.pack(len(plain) + _TAG_BYTES)
            yield head + self._sends.encrypt(_NONCE.pack(self._num_sent), plain, head)
            self._num_sent += 1

    def open(self, received: bytearray) -> Iterator[bytes]:
        """Remove the complete records from the front of `received`, and yield their plaintext.

        Raises: RemoteError: these are not the other end's records in the order in which it sent them.
        """
        while len(received) >= _LENGTH.size:
            head = bytes(received[: _LENGTH.size])
            (sealed_bytes,) = _LENGTH.unpack(head)
            if not _TAG_BYTES <= sealed_bytes <= RECORD_BYTES_MAX + _TAG_BYTES:
                raise RemoteError(self.peer, "sent a stream that was changed on the way")
            end = _LENGTH.size + sealed_bytes
            if len(received) < end:
                return
            sealed = bytes(received[_LENGTH.size : end])
            del received[:end]
            try:
                plain = self._receives.decrypt(_NONCE.pack(self._num_opened), sealed, head)
            except InvalidTag as error:
                raise RemoteError(self.peer, "sent a stream that was changed on the way") from error
            self._num_opened += 1
            yield plain


class Handshake:
    """One end's part of the key exchange of one stream.

    Args:
        peer: the expected peer at the other end.
        opens: True if this end has opened the stream.
        part_of: in a lane's handshake the name of the lane's frame stream, which both ends sign; else empty.
    """

    def __init__(
        self, identity: Identity, peer: PeerID, *, run: str, purpose: Purpose, opens: bool, part_of: bytes = b""
    ) -> None:
        self._identity, self._peer, self._run, self._purpose, self._opens = identity, peer, run, purpose, opens
        self._part_of = part_of
        self._private = X25519PrivateKey.generate()
        self.key: bytes = self._private.public_key().public_bytes_raw()
        """This end's ephemeral public key, which the other end needs."""

    def sign(self, other_key: bytes) -> bytes:
        topic: Topic = "carried-from" if self._opens else "carried-to"
        return sign_statement(self._identity, topic, run=self._run, body=self._said(other_key))

    def finish(self, other_key: bytes, signature: bytes) -> Channel:
        """Return the encrypted channel. Raises: RemoteError: invalid key, or the peer did not sign this exchange."""
        topic: Topic = "carried-to" if self._opens else "carried-from"
        said = self._said(other_key)
        if not statement_holds(self._peer, signature, topic, run=self._run, body=said):
            raise RemoteError(self._peer, "is not at the other end of a sealed stream, or signed another exchange")
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(other_key))
        except ValueError as error:  # a key of small order
            raise RemoteError(self._peer, "sent an invalid key") from error
        digest = Hash(SHA256())
        digest.update(msgspec.msgpack.encode((self._run, said)))
        keys = HKDF(SHA256(), length=2 * KEY_BYTES, salt=digest.finalize(), info=b"shoal carried stream").derive(secret)
        of_opener, of_other = keys[:KEY_BYTES], keys[KEY_BYTES:]
        if self._opens:
            return Channel(self._peer, sends=of_opener, receives=of_other)
        return Channel(self._peer, sends=of_other, receives=of_opener)

    def _said(self, other_key: bytes) -> bytes:
        ends = ((self._identity.peer_id, self.key), (self._peer, other_key))
        opener, other = ends if self._opens else ends[::-1]
        return msgspec.msgpack.encode((self._purpose, opener, other, self._part_of))
