"""The run spec on the directory: signed by the owner, kept there by whoever takes part.

Every copy is the owner's own envelope, so any peer may store it again and the run can be joined after its host has
left. Each stores it under its own subkey: whoever overwrites one with rubbish has not touched the others.
"""

import asyncio
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

EXPIRES_S = 1800.0
REFRESH_S = 300.0
_ASK_AGAIN_S = 0.5


def record_key(run: str) -> str:
    return f"shoal/{run}/spec"


def seal_spec(identity: Identity, spec: RunSpec) -> bytes:
    """The record of `identity`'s own run."""
    body = msgspec.msgpack.encode(SpecRecord(spec=encode_spec(spec)))
    return seal(identity, "record", run=run_id(spec, identity.peer_id), term=0, sequence=0, body=body)


def open_spec(record: bytes, *, run: str, owner: PeerID, source: PeerID) -> RunSpec:
    """Verify a record that `source` stored.

    Raises: RemoteError: not signed by the owner, or not the spec that the run is named after.
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


async def fetch_spec(directory: Directory, invite: Invite, *, timeout_s: float) -> tuple[RunSpec, bytes]:
    """Find the invite's run.

    Returns: the spec and the record it came in.
    Raises: RunNotFound: nobody has it in time; the sentence says whether anything else was found.
    """
    refused = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                for subkey, record in sorted((await directory.get(record_key(invite.run))).items()):
                    try:
                        return open_spec(record, run=invite.run, owner=invite.owner, source=PeerID(subkey)), record
                    except RemoteError as error:
                        refused = f" ({error})"
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError as error:
        raise RunNotFound(
            f"nobody at the invite's addresses has the run {invite.run}{refused}: "
            "is the host up, and is this its latest invite?"
        ) from error


async def keep_spec(directory: Directory, endpoint: Endpoint, record: bytes) -> None:
    """Store the record now and again for as long as this runs. A store that fails is tried again soon, then later and
    later: where the key is full, others' copies are there.

    Without the record nobody can join, so no failure of the directory may end this.
    """
    again_s = _ASK_AGAIN_S
    while True:
        try:
            stored = await directory.store(record_key(endpoint.run), endpoint.peer_id, record, expires_in_s=EXPIRES_S)
        except Exception as error:
            logger.warning("the directory did not take the run's spec: %r", error)
            stored = False
        await asyncio.sleep(REFRESH_S if stored else again_s)
        again_s = _ASK_AGAIN_S if stored else min(2 * again_s, REFRESH_S)
