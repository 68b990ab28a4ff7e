"""Decides which records a run's directory (a DHT) accepts. Each node checks a record before it stores, forwards or
reads the record.

A run's name is the hash of its spec and owner, so everybody can check a copy of the spec. Under the key of the spec
nodes accept only valid copies, so nobody can crowd them out. Any other record is a peer's signed statement about
itself, under its ID.
"""

from collections.abc import Mapping
from functools import lru_cache, partial

from shoal.coordinator.discovery import peers_key, plan_key
from shoal.deploy.state.spec_record import record_key
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
"""The most bytes of all copies of the spec: about 250 copies. Further peers cannot store theirs, and try later."""
_HEADS_BYTES_MAX = 256 * 1024
"""Room for heads: a head is a coordinator's record of its newest plan's number, and lasts two minutes. Records of all
keys must fit into one message, because a DHT node sends them together to a new node that is closer to the keys."""
_NOTICE_BYTES_MAX = 4 * 1024
"""The most bytes of an advert or a head: eight addresses of 256 characters, and as much again for everything else."""


def record_rules(gate: Gate) -> Mapping[str, KeyRule]:
    """Return {key: rule for the records under this key} for a `LiveDirectory`, the same for all peers of the run."""
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
    """True if `run`, a name made by hashing spec and owner, belongs to this encoded spec and this owner."""
    try:
        check_depth(spec)
        return run_id(decode_spec(spec), owner) == run
    except (TooDeep, SpecError):
        return False
