"""Keeps the run spec in the directory (a DHT): the owner signs the spec, and every peer of the run stores a copy.

Any peer can store the owner's signed record again, so the run can be joined after its host has left. Each peer uses its
own subkey, so overwriting one copy does not touch the others.

A continued run has several revisions of its spec under one name, and the newest is valid. Copies of older revisions, in
the directory and on disks, do no harm. A peer that learns of a newer revision restarts under it.
"""

import asyncio
import contextlib
import logging

import msgspec

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.envelope import seal, unseal
from shoal.protocol.errors import RemoteError, RunNotFound, SpecError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite
from shoal.protocol.messages import SpecRecord
from shoal.protocol.ports import Directory
from shoal.protocol.spec import RunSpec, decode_spec, encode_spec, run_id

logger = logging.getLogger(__name__)

FIND_S = 20.0
"""Seconds to look for a run: a node that has just joined the directory may find nothing in it for a moment."""
REFRESH_S = 300.0
_ASK_AGAIN_S = 0.5


def record_key(run: str) -> str:
    return f"shoal/{run}/spec"


def seal_spec(identity: Identity, spec: RunSpec) -> bytes:
    """Return `spec` as a record that `identity`, the run's owner, has signed."""
    body = msgspec.msgpack.encode(SpecRecord(spec=encode_spec(spec)))
    return seal(identity, "record", run=run_id(spec, identity.peer_id), term=0, sequence=0, body=body)


def open_spec(record: bytes, *, run: str, owner: PeerID, source: PeerID) -> RunSpec:
    """Verify a record that `source` stored, and return its spec.

    Raises: RemoteError: the owner did not sign the record, or its spec is not the one after which the run is named.
    """
    envelope = unseal(record, "record", run=run, source=source, relayed=True)
    if envelope.sender != owner:
        raise RemoteError(source, "stored a run spec that the run's owner did not sign")
    try:
        spec = decode_spec(msgspec.msgpack.decode(envelope.body, type=SpecRecord).spec)
    except (msgspec.DecodeError, UnicodeDecodeError, SpecError) as error:
        raise RemoteError(source, f"stored a run spec that cannot be read ({error})") from error
    if run_id(spec, owner) != run:
        raise RemoteError(source, "stored a run spec that is not the one of this run")
    return spec


def is_newer(spec: RunSpec, than: RunSpec) -> bool:
    """True if `spec` has the higher revision. An owner that lost its folder may have made two specs of one revision:
    then the spec with more steps wins, else the one with the greater bytes, so that all peers choose the same."""
    return _rank(spec) > _rank(than)


def _rank(spec: RunSpec) -> tuple[int, int, bytes]:
    return spec.revision, spec.training.steps, encode_spec(spec)


Found = tuple[RunSpec, bytes]
"""(a run's spec, the record in which the owner has signed it)."""


async def fetch_spec(directory: Directory, invite: Invite, *, timeout_s: float, known: Found | None = None) -> Found:
    """Find the newest spec of the invite's run, with its record.

    Args: known: the spec on this peer's disk. It counts only if the directory has a copy of some revision: without any
    copy, no peer of the run is in reach.
    Raises: RunNotFound: no copy was found in time; the sentence says whether anything else was found.
    """
    refused = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found, refused = await _look(directory, invite.run, invite.owner)
                if found is not None:
                    return known if known is not None and is_newer(known[0], found[0]) else found
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError as error:
        raise RunNotFound(
            f"nobody at the invite's addresses has the run {invite.run}{refused}: "
            "is the host up, and is this its latest invite?"
        ) from error


async def _look(directory: Directory, run: str, owner: PeerID) -> tuple[Found | None, str]:
    """Return (the newest spec in the directory with its record, or None; why a record there is invalid, or "")."""
    found: Found | None = None
    refused = ""
    for subkey, record in sorted((await directory.get(record_key(run))).items()):
        try:
            spec = open_spec(record, run=run, owner=owner, source=PeerID(subkey))
        except RemoteError as error:
            refused = f" ({error})"
            continue
        if found is None or is_newer(spec, found[0]):
            found = spec, record
    return found, refused


class SpecKeeper:
    """Stores a run's record in the directory periodically, and looks for a newer one.

    Without the record nobody can join, so no failure of the directory may end `keep`.

    Args: found: the spec with which this peer started, and the spec's record; owner: the run's owner.
    """

    def __init__(self, directory: Directory, endpoint: Endpoint, found: Found, owner: PeerID) -> None:
        self._directory, self._endpoint, self._owner = directory, endpoint, owner
        self._spec, self._record = found
        self._hurry = asyncio.Event()
        self.newer: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        """Gets the spec and record of a newer revision than `found`'s, as soon as this peer hears of one."""

    def hurry(self) -> None:
        """Look for a newer revision now, because another peer uses one."""
        self._hurry.set()

    async def keep(self) -> None:
        """Store the record and look for a newer one until cancelled. Retries get rarer: a directory without room for
        another copy has enough copies."""
        again_s = _ASK_AGAIN_S
        while True:
            try:
                await self._look()
                stored = await self._directory.store(
                    record_key(self._endpoint.run), self._endpoint.peer_id, self._record, expires_in_s=1800.0
                )
            except Exception as error:
                logger.warning("the directory did not accept the run's spec: %r", error)
                stored = False
            wait_s = REFRESH_S if stored else again_s
            again_s = _ASK_AGAIN_S if stored else min(2 * again_s, REFRESH_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._hurry.wait()
            if self._hurry.is_set():
                self._hurry.clear()
                await asyncio.sleep(_ASK_AGAIN_S)  # `hurry` may be called at every heartbeat

    async def _look(self) -> None:
        found, _ = await _look(self._directory, self._endpoint.run, self._owner)
        if found is not None and is_newer(found[0], self._spec):
            self._spec, self._record = found
            if not self.newer.done():
                self.newer.set_result(found)
