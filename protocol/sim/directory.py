"""The `Directory` port in virtual time: the behaviour of a DHT, without its nodes.

A record takes a few network latencies to be published, is then visible to every peer, and expires. If the network is
cut, both sides keep the records from before the cut, and see each other's new records once the cut heals.

As in hivemind, a record's expiry time is by the publisher's clock, and each reader compares it with the reader's clock.
The nodes that store records have the right time. A peer with a slow clock publishes records that expire early or are
refused as expired. A peer with a fast clock publishes records that it cannot replace once its clock is corrected, and
sees other peers' records as expired. Measured on hivemind 1.1.12: a record stamped 30 s ahead, or 4 s behind, is kept
and read by all; a record stamped behind by more than its lifetime is refused.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from shoal.protocol.limits import RECORD_BYTES_MAX, RECORD_EXPIRES_S_MAX
from shoal.protocol.sim.clock import Agenda
from shoal.protocol.sim.machine import Machine
from shoal.protocol.sim.paths import Cuts
from shoal.protocol.sim.stream import NetworkCard
from shoal.protocol.sim.trace import Kind, Trace

STORE_LATENCIES = 6
"""One-way latencies in a store: two round trips to find the nodes nearest to the key, and one to send the record."""
GET_LATENCIES = 4
"""One-way latencies in a read: one round trip to find a node that has the key, and one to read the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    value: bytes
    publisher_place: int
    stored_at_s: float
    expires_at_s: float


class Records:
    """The records of all nodes together: key -> subkey -> versions, oldest first."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self._held: dict[str, dict[str, list[_Record]]] = {}

    def add(self, key: str, subkey: str, record: _Record) -> bool:
        """Add a record and return True. Return False if the publisher sees one of this subkey that expires later."""
        versions = self._held.setdefault(key, {}).setdefault(subkey, [])
        shown = self._newest(versions, record.publisher_place, record.stored_at_s)
        if shown is not None and shown.expires_at_s > record.expires_at_s:
            return False
        if not self._cuts:
            versions.clear()  # during a cut, some readers may still see an older version
        versions.append(record)
        return True

    def visible(self, key: str, reader_place: int, now_s: float, *, reads_at_s: float) -> dict[str, bytes]:
        """Return the unexpired records that a reader sees; `reads_at_s` is the present time by the reader's clock."""
        subkeys = self._held.get(key, {})
        shown: dict[str, bytes] = {}
        for subkey, versions in list(subkeys.items()):
            record = self._newest(versions, reader_place, now_s)
            if record is not None and record.expires_at_s > reads_at_s:
                shown[subkey] = record.value
            elif all(record.expires_at_s <= now_s for record in versions):
                del subkeys[subkey]
        return shown

    def _newest(self, versions: list[_Record], reader_place: int, now_s: float) -> _Record | None:
        if len(versions) == 1 and not self._cuts:  # nearly always; a read may check a thousand records
            return versions[0] if versions[0].expires_at_s > now_s else None
        for record in sorted(versions, key=lambda record: record.expires_at_s, reverse=True):
            cut_since_s = self._cuts.since_s(record.publisher_place, reader_place)
            if record.expires_at_s > now_s and (cut_since_s is None or record.stored_at_s <= cut_since_s):
                return record
        return None


class SimDirectory:
    """One peer's access to `records`. `latency_s` is the one-way latency to a typical node."""

    def __init__(
        self, card: NetworkCard, machine: Machine, records: Records, agenda: Agenda, trace: Trace, *, latency_s: float
    ) -> None:
        self._card = card
        self._machine = machine
        self._records = records
        self._agenda = agenda
        self._trace = trace
        self._latency_s = latency_s

    async def store(self, key: str, subkey: str, value: bytes, *, expires_in_s: float) -> bool:
        """Publish a record; return True if the nodes kept it. Raises: ValueError: its size or lifetime is invalid."""
        if len(value) > RECORD_BYTES_MAX:
            raise ValueError(f"a record of {len(value)} bytes is larger than the {RECORD_BYTES_MAX} that nodes accept")
        if not 0 < expires_in_s <= RECORD_EXPIRES_S_MAX:
            raise ValueError(f"a record cannot expire in {expires_in_s} s")
        value = bytes(value)
        if not self._card.is_up:
            await self._card.came_up.wait()
        expires_at_s = self._agenda.now_s() + self._machine.clock_ahead_s + expires_in_s
        daemon = self._card.num_daemons_died
        await asyncio.sleep(STORE_LATENCIES * self._latency_s)
        now_s = self._agenda.now_s()
        if not self._card.is_alive or daemon != self._card.num_daemons_died or expires_at_s <= now_s:
            return False
        self._record(Kind.RECORD_STORED, key, subkey, value)
        record = _Record(value=value, publisher_place=self._card.place, stored_at_s=now_s, expires_at_s=expires_at_s)
        return self._records.add(key, subkey, record)

    async def get(self, key: str) -> Mapping[str, bytes]:
        if not self._card.is_up:
            await self._card.came_up.wait()
        daemon = self._card.num_daemons_died
        await asyncio.sleep(GET_LATENCIES * self._latency_s)
        self._record(Kind.RECORD_READ, key, "", b"")
        if daemon != self._card.num_daemons_died:
            return {}
        now_s = self._agenda.now_s()
        return self._records.visible(key, self._card.place, now_s, reads_at_s=now_s + self._machine.clock_ahead_s)

    def _record(self, kind: Kind, key: str, subkey: str, value: bytes) -> None:
        digest = xxhash.xxh3_64_intdigest(b"\0".join((key.encode(), subkey.encode(), value)))
        self._trace.add(self._agenda.now_s(), kind, self._card.number, -1, len(value), digest)
