import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import timed_storage
from hivemind.utils.serializer import MSGPackSerializer

from shoal.protocol.limits import KEY_BYTES_MAX, RECORD_BYTES_MAX
from shoal.protocol.live import hivemind_guard
from shoal.protocol.live.record_store import KeyRule, NothingCached, RecordStore

KEY, OTHER = DHTID.generate(source="key"), DHTID.generate(source="other")


@pytest.fixture(autouse=True)
def _installed():
    hivemind_guard.install()


@pytest.fixture
def clock(monkeypatch):
    """`clock[0]` is the time."""
    now_s = [1000.0]
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: now_s[0])
    return now_s


def held(store: RecordStore, key: DHTID = KEY) -> dict[str, bytes]:
    found = store.get(key)
    return {} if found is None else {subkey: record.value for subkey, record in found.value.items()}


def test_what_is_there_first_stays_and_what_is_held_fits_a_reply(clock):
    store = RecordStore()
    assert store.store(KEY, b"honest", 1060.0, subkey="host")
    taken = [store.store(KEY, bytes(RECORD_BYTES_MAX), 2000.0, subkey=f"{n}") for n in range(200)]
    assert 60 < sum(taken) < 64
    assert taken == sorted(taken, reverse=True)
    assert held(store)["host"] == b"honest"
    assert KEY_BYTES_MAX - RECORD_BYTES_MAX < len(MSGPackSerializer.dumps(store.get(KEY).value)) <= KEY_BYTES_MAX
    assert store.store(KEY, b"renewed", 1090.0, subkey="host")
    assert store.store(OTHER, bytes(RECORD_BYTES_MAX), 2000.0, subkey="0")
    assert not store.store(KEY, bytes(RECORD_BYTES_MAX), 2000.0, subkey="host")
    assert held(store)["host"] == b"renewed"


def test_what_has_lapsed_makes_room(clock):
    store = RecordStore({KEY.to_bytes(): KeyRule(accept=lambda *_: True, bytes_max=1000)})
    assert store.store(KEY, bytes(900), 1010.0, subkey="short")
    assert not store.store(KEY, bytes(100), 1060.0, subkey="long")
    clock[0] = 1011.0
    assert store.store(KEY, bytes(900), 1060.0, subkey="long")
    assert list(held(store)) == ["long"]
    assert store.store(OTHER, bytes(5000), 1060.0, subkey="elsewhere")


def test_the_later_copy_of_a_record_is_kept(clock):
    store = RecordStore()
    assert store.store(KEY, b"new", 1060.0, subkey="a")
    assert not store.store(KEY, b"old", 1050.0, subkey="a")
    assert not store.store(KEY, b"lapsed", 999.0, subkey="b")
    assert held(store) == {"a": b"new"}
    clock[0] = 1061.0
    assert held(store) == {}


def test_a_search_adds_nothing_to_what_is_held(clock):
    store = RecordStore()
    store.store(KEY, b"ours", 1060.0, subkey="a")
    found = store.get(KEY).value
    assert isinstance(found, DictionaryDHTValue)
    found.store("b", b"of another node", 1090.0)
    assert held(store) == {"a": b"ours"}
    assert dict(found.items()).keys() == {"a", "b"}


def test_renewals_leave_nothing_behind(clock):
    store = RecordStore()
    for n in range(10_000):
        assert store.store(KEY, b"again and again", 2000.0 + n, subkey="a")
    assert len(store.expiration_heap) < 100
    assert len(store.data[KEY].value.expiration_heap) < 100
    clock[0] = 11_998.0
    assert held(store) == {"a": b"again and again"}
    clock[0] = 12_000.0
    assert held(store) == {}


def test_nothing_is_cached():
    cache = NothingCached()
    assert not cache.store(KEY, b"value", 1e12)
    assert not cache.store_subkey(KEY, "a", b"value", 1e12)
    assert cache.get(KEY) is None
