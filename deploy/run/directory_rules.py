"""Decides which records may stand in a run's directory: a node asks before it keeps, hands on or reads one.

A run spec proves itself, whoever stored it: the run is named after the hash of the spec and its owner. So all that can
be found there is the spec, and nobody can crowd it out. The other records are what a peer says of itself, under its own
name, signed by it and with its certificate.
"""

from collections.abc import Mapping
from functools import lru_cache, partial

from shoal.coordinator.discovery import peers_key, plan_key
from shoal.deploy.run.spec_record import record_key
from shoal.protocol.access import Gate
from shoal.protocol.depth import TooDeep, check_depth
from shoal.protocol.endpoint import open_signed_record
from shoal.protocol.errors import RemoteError, SpecError
from shoal.protocol.identity import PeerID
from shoal.protocol.live.record_store import KeyRule
from shoal.protocol.messages import AdvertRecord, PlanHead, SpecRecord
from shoal.protocol.seals import SEALS
from shoal.protocol.spec import decode_spec, run_id

_COPIES_BYTES_MAX = 256 * 1024
"""The bytes of some 250 copies of the spec. The peers beyond them find that there is no room, and try again later."""
_HEADS_BYTES_MAX = 256 * 1024
"""Only coordinators post one, for two minutes. All keys together must fit one message: a node that finds itself further
from them than a new one hands it all that it holds."""
_NOTICE_BYTES_MAX = 4 * 1024
"""One advert or head: eight addresses of 256 characters, and half as much beside them."""


def record_rules(gate: Gate) -> Mapping[str, KeyRule]:
    """The rules of what `LiveDirectory` accepts, which are the same on all peers of the run."""
    run = gate.members.run
    return {
        record_key(run): KeyRule(accept=partial(_is_spec, gate), bytes_max=_COPIES_BYTES_MAX),
        peers_key(run): KeyRule(accept=partial(_is_own, gate, AdvertRecord)),
        plan_key(run): KeyRule(accept=partial(_is_own, gate, PlanHead), bytes_max=_HEADS_BYTES_MAX),
    }


def _is_own(gate: Gate, kind: type, subkey: str, value: bytes) -> bool:
    if len(value) > _NOTICE_BYTES_MAX:
        return False
    try:
        signer, record = open_signed_record(SEALS, gate, gate.members.run, value, PeerID(subkey))
    except RemoteError:
        return False
    return signer == subkey and isinstance(record, kind)


def _is_spec(gate: Gate, subkey: str, value: bytes) -> bool:
    try:
        signer, record = open_signed_record(SEALS, gate, gate.members.run, value, PeerID(subkey))
    except RemoteError:
        return False
    return isinstance(record, SpecRecord) and _makes(gate.members.run, signer, record.spec)


@lru_cache(maxsize=16)
def _makes(run: str, owner: PeerID, spec: bytes) -> bool:
    """Whether `run` is the owner's run of this spec."""
    try:
        check_depth(spec)
        return run_id(decode_spec(spec), owner) == run
    except (TooDeep, SpecError):
        return False
