"""Limits the records that one DHT node of the directory stores, so that the node can always answer.

hivemind sends no reply of more than 4 MiB: the requester would wait in vain, and then forget the node. So the bytes of
a key's records are limited, and existing records stay until they expire, however much a stranger tries to store.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

from shoal.protocol.limits import KEY_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """Rule for the records under one key."""

    accept: Callable[[str, bytes], bool]
    """(subkey, value) -> True if the record may be stored, forwarded and read. It is called for every record."""
    bytes_max: int = KEY_BYTES_MAX
    """Most bytes of all records under the key together, as they are in a reply."""


KeyRules = Mapping[bytes, KeyRule]
"""A key's id in the DHT -> the rule for its records; records of other keys are refused."""


class RecordStore(DHTLocalStorage):  # type: ignore[misc]
    """The records of one DHT node, in place of hivemind's own store, which has three holes.

    In hivemind's store a key's records have no limit; a search adds other nodes' answers to this node's records; and
    each renewal of a record keeps the former expiry in memory until that time.
    """

    def __init__(self, rules: KeyRules | None = None, *, keys_max: int | None = None) -> None:
        super().__init__(maxsize=keys_max)
        self._rules = rules

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store a record. Return False if the existing record does not expire earlier, or if there is no room."""
        held = super().get(key)
        if held is not None and isinstance(held.value, DictionaryDHTValue):
            records = held.value
        else:
            records = DictionaryDHTValue()
            records.data = _Measured()
        records._remove_outdated()  # expired records make room
        others_bytes = records.data.num_bytes - records.data.bytes_of(subkey)
        if others_bytes + _wire_bytes(subkey, value) > self._bytes_max(key.to_bytes()):
            return False
        if not records.store(subkey, value, expiration_time):
            return False
        super().store(key, records, records.latest_expiration_time)
        _drop_ghosts(records)
        _drop_ghosts(self)
        return True

    def get(self, key: Any) -> Any:
        """Return a copy of the records of `key`, since the caller adds other nodes' answers to the result."""
        held = super().get(key)
        if held is None or not isinstance(held.value, DictionaryDHTValue):
            return held
        copy = DictionaryDHTValue()
        copy.data = dict(held.value.data)
        copy.expiration_heap = list(held.value.expiration_heap)
        copy.key_to_heap = dict(held.value.key_to_heap)
        copy.latest_expiration_time = held.value.latest_expiration_time
        return ValueWithExpiration(copy, held.expiration_time)

    def _bytes_max(self, key: bytes) -> int:
        rule = self._rules.get(key) if self._rules is not None else None
        return rule.bytes_max if rule is not None else KEY_BYTES_MAX


class NothingCached(DHTLocalStorage):  # type: ignore[misc]
    """Caches nothing. Hole: a record that a stranger stores as `in_cache` hides real records that expire earlier."""

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return False

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        return False


class _Measured(dict[Any, Any]):
    """Subkey -> record, for one key; it counts the bytes that these records have in a reply."""

    num_bytes = 0

    def bytes_of(self, subkey: Any) -> int:
        record = self.get(subkey)
        return 0 if record is None else _wire_bytes(subkey, record.value)

    def __setitem__(self, subkey: Any, record: Any) -> None:
        self.num_bytes += _wire_bytes(subkey, record.value) - self.bytes_of(subkey)
        super().__setitem__(subkey, record)

    def __delitem__(self, subkey: Any) -> None:
        self.num_bytes -= self.bytes_of(subkey)
        super().__delitem__(subkey)


def _wire_bytes(subkey: str, value: bytes) -> int:
    # In a reply a record takes 24 more bytes: a list of three, two lengths of up to five bytes, and the expiry.
    return 24 + len(subkey.encode()) + len(value)


def _drop_ghosts(storage: Any) -> None:
    if len(storage.expiration_heap) > 64 + 2 * len(storage.data):
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
