import asyncio
import dataclasses
import gc
import math
import os
import subprocess
import sys
import time

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hivemind.proto import dht_pb2
from hivemind.utils import timed_storage
from hivemind.utils.serializer import MSGPackSerializer

from shoal.protocol.depth import TooDeep
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import RECORD_BYTES_MAX, RECORD_EXPIRES_S_MAX
from shoal.protocol.live import hivemind_guard
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.loop import run
from shoal.protocol.live.record_store import KeyRule


@pytest.fixture(autouse=True)
def _installed():
    hivemind_guard.install()


def nested(type_code: int, depth: int) -> bytes:
    """An extension in an extension in an extension. 234 deep in tuples is 937 bytes."""
    packed = msgpack.packb([])
    for _ in range(depth):
        packed = msgpack.packb(msgpack.ExtType(type_code, b"\x91" + packed if type_code == 0x50 else packed))
    return packed


@pytest.mark.parametrize("type_code", [0x40, 0x50])
@pytest.mark.parametrize("depth", [20, 234, 20_000])
def test_nested_extension_types_are_refused(type_code, depth):
    with pytest.raises(TooDeep):
        MSGPackSerializer.loads(nested(type_code, depth))


def test_the_nesting_is_counted_again_after_a_refusal():
    with pytest.raises(TooDeep):
        MSGPackSerializer.loads(nested(0x50, 20))
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps((1, (2, "three")))) == (1, (2, "three"))


def test_what_hivemind_itself_says_passes():
    records = DictionaryDHTValue()
    records.store("sub", MSGPackSerializer.dumps(b"value"), time.time() + 60)
    again = MSGPackSerializer.loads(MSGPackSerializer.dumps(records))
    assert again.get("sub").value == MSGPackSerializer.dumps(b"value")


def test_other_registered_types_are_not_built_from_the_network():
    with pytest.raises(TooDeep, match="no place in a record"):
        MSGPackSerializer.loads(msgpack.packb(msgpack.ExtType(0x51, MSGPackSerializer.dumps({"dtype": "x"}))))


def test_installing_twice_wraps_once():
    before = MSGPackSerializer.loads.__func__
    hivemind_guard.install()
    assert MSGPackSerializer.loads.__func__ is before


def test_an_older_copy_of_a_record_does_not_shorten_its_life(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: now_s)
    storage = timed_storage.TimedStorage()
    assert storage.store("key", "new", 1100.0)
    assert not storage.store("key", "old", 1010.0)
    now_s = 1050.0
    storage.store("another", "wakes the cleaner", 1100.0)
    assert storage.get("key").value == "new"


def record(subkey: object, value: object, seconds: float = 60.0) -> DHTRecord:
    return DHTRecord(b"key", MSGPackSerializer.dumps(subkey), MSGPackSerializer.dumps(value), time.time() + seconds)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 32_767, RECORD_BYTES_MAX])
def test_the_gate_lets_our_records_in(size):
    assert hivemind_guard.RecordGate().validate(record("peer", bytes(size)))


@pytest.mark.parametrize(
    "stranger",
    [
        lambda: record(None, b"no subkey: would replace all others under the key"),
        lambda: record(7, b"value"),
        lambda: record(b"bytes", b"value"),
        lambda: record(["list"], b"value"),
        lambda: record("s" * 300, b"value"),
        lambda: record("peer", "a string"),
        lambda: record("peer", [1, 2, 3]),
        lambda: record("peer", bytes(RECORD_BYTES_MAX + 1)),
        lambda: record("peer", b"value", RECORD_EXPIRES_S_MAX + 60.0),
        lambda: record("peer", b"value", math.inf),
        lambda: record("peer", b"value", math.nan),
        lambda: DHTRecord(b"key", b"", MSGPackSerializer.dumps(b"value"), time.time() + 60),
        lambda: DHTRecord(b"key", b"\xd9\xff", MSGPackSerializer.dumps(b"value"), time.time() + 60),
        lambda: DHTRecord(b"key", b"\xa2\xff\xfe", MSGPackSerializer.dumps(b"value"), time.time() + 60),
        lambda: DHTRecord(b"key", MSGPackSerializer.dumps("peer"), b"\xc4\x02x", time.time() + 60),
        lambda: DHTRecord(b"key", MSGPackSerializer.dumps("peer"), b"\xc4", time.time() + 60),
        lambda: DHTRecord(b"key", MSGPackSerializer.dumps("peer"), b"", time.time() + 60),
    ],
)
def test_the_gate_keeps_other_records_out(stranger):
    assert not hivemind_guard.RecordGate().validate(stranger())  # made now: its expiry counts from now


def test_the_gate_asks_whoever_knows_the_records():
    gate = hivemind_guard.RecordGate({b"key": KeyRule(accept=lambda subkey, value: value == subkey.encode())})
    assert gate.validate(record("mine", b"mine"))
    assert not gate.validate(record("mine", b"yours"))
    assert not gate.validate(dataclasses.replace(record("mine", b"mine"), key=b"another key"))


def dictionary(**seconds: float) -> DictionaryDHTValue:
    """A record by each name, and when it lapses."""
    records = DictionaryDHTValue()
    for subkey, seconds_left in seconds.items():
        records.store(subkey, MSGPackSerializer.dumps(b"value"), time.time() + seconds_left)
    return MSGPackSerializer.loads(MSGPackSerializer.dumps(records))


def protocol() -> DHTProtocol:
    made = DHTProtocol(_initialized_with_create=True)
    made.record_validator = hivemind_guard.RecordGate()
    return made


def test_a_record_that_is_not_valid_does_not_take_the_others_along():
    records = dictionary(good=60.0, late=RECORD_EXPIRES_S_MAX + 60.0, other=50.0)
    records.maxsize = "a word"
    assert protocol()._validate_dictionary(b"key", records)
    assert {subkey for subkey, _ in records.items()} == {"good", "other"}
    assert records.maxsize == math.inf
    assert not protocol()._validate_dictionary(b"key", dictionary(late=RECORD_EXPIRES_S_MAX + 60.0))


def test_a_reply_lapses_with_its_records_whatever_it_says():
    replies = {
        "honest": (timed_storage.ValueWithExpiration(dictionary(a=60.0, b=30.0), time.time() + 60.0), {}),
        "for ever": (timed_storage.ValueWithExpiration(dictionary(a=60.0, b=30.0), math.inf), {}),
        "empty": (timed_storage.ValueWithExpiration(dictionary(), math.inf), {"near": "by"}),
        "regular": (timed_storage.ValueWithExpiration(b"no dictionary", math.inf), {}),
        "nothing": (None, {}),
    }

    async def find(self, peer, keys):
        return replies if peer == "there" else None

    wrapped = hivemind_guard._lapse_with_the_records(find)
    found = asyncio.run(wrapped(None, "there", list(replies)))
    for said in ("honest", "for ever"):
        value, _ = found[said]
        assert value.expiration_time == value.value.get("a").expiration_time
    assert found["empty"] == (None, {"near": "by"})
    assert found["regular"] == found["nothing"] == (None, {})
    assert asyncio.run(wrapped(None, "gone", [])) is None


def test_an_answer_to_a_call_just_cancelled_is_nobodys():
    async def main():
        control = ControlClient(None, _initialized_with_create=True)
        hivemind_guard.mend_control(control)
        control._pending_calls["waiting"] = asyncio.Future()
        control._pending_calls["cancelled"] = asyncio.Future()
        control._pending_calls["cancelled"].cancel()
        assert "waiting" in control._pending_calls
        assert "cancelled" not in control._pending_calls

    asyncio.run(main())


def test_a_cancelled_handler_is_not_remembered():
    async def main():
        control = ControlClient(None, _initialized_with_create=True)
        hivemind_guard.mend_control(control)
        control._handler_tasks["call"] = asyncio.create_task(asyncio.Event().wait())
        control._handler_tasks["call"].cancel()
        await asyncio.gather(*control._handler_tasks.values(), return_exceptions=True)
        await asyncio.sleep(0)
        assert not control._handler_tasks

    asyncio.run(main())


NODE = """
import asyncio, sys
from pathlib import Path
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.loop import run
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members

async def on_call(source, request):
    return request

async def on_frame(source, meta, payload):
    pass

async def main():
    members = Members("run", PeerID(""), is_open=True)
    transport = await LiveTransport.start(
        Identity.generate(), members=members, state_dir=Path(sys.argv[1]), use_relay=False
    )
    transport.serve(on_call=on_call, on_frame=on_frame)
    directory = await LiveDirectory.start(transport)
    print(transport.addresses()[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await directory.close()
    await transport.close()

run(main())
"""


@pytest.mark.process
def test_a_live_node_survives_the_payloads_that_end_hiveminds(tmp_path, live_peer):
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, str(tmp_path / "node")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    async def main(address: str):
        peer = PeerID(address.rpartition("/")[2])
        transport, _ = await live_peer("attacker", initial_peers=(address,))
        directory = await LiveDirectory.start(transport)
        stub = directory._node.protocol.get_stub(HivemindPeerID.from_base58(peer))
        for payload in (nested(0x40, 234), nested(0x40, 20_000), nested(0x50, 400), nested(0x50, 20_000)):
            for subkey, value in ((b"", payload), (payload, MSGPackSerializer.dumps(b"value"))):
                request = dht_pb2.StoreRequest(
                    keys=[os.urandom(20)],
                    subkeys=[subkey],
                    values=[value],
                    expiration_time=[time.time() + 60],
                    in_cache=[False],
                )
                # either the gate refuses the record, or its decoder raises and the node says so
                outcome = await asyncio.gather(stub.rpc_store(request, timeout=30), return_exceptions=True)
                assert "TooDeep" in repr(outcome) or "store_ok: false" in repr(outcome)
                assert node.poll() is None
                assert await transport.call(peer, b"still there?", timeout_s=30) == b"still there?"
        assert await directory.store("key", "sub", b"value", expires_in_s=60)
        assert await directory.get("key") == {"sub": b"value"}
        await directory.close()
        await transport.close()

    try:
        run(main(node.stdout.readline().strip()))
    finally:
        node.communicate(timeout=30)
    assert node.returncode == 0


QUIET = """
import logging, sys
from shoal.protocol.live import hivemind_guard
hivemind_guard.install()
try:
    raise EOFError("the daemon ended")
except EOFError:
    logging.getLogger("hivemind.p2p.p2p_daemon").warning("Exception while receiving requests:", exc_info=True)
    logging.getLogger("hivemind.dht.node").error("failed", exc_info=True)
"""


@pytest.mark.parametrize(("asked", "is_quiet"), [({}, True), ({"HIVEMIND_LOGLEVEL": "INFO"}, False)])
def test_hivemind_writes_no_traceback_to_a_terminal_unless_it_is_asked_to(asked, is_quiet):
    environment = {name: value for name, value in os.environ.items() if name != "HIVEMIND_LOGLEVEL"} | asked
    told = subprocess.run([sys.executable, "-c", QUIET], env=environment, capture_output=True, text=True, check=True)
    assert ("Traceback" not in told.stderr) is is_quiet


def test_a_stream_whose_daemon_ends_before_its_first_message_is_closed_and_no_error(tmp_path):
    async def main():
        unawaited = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unawaited.append(context))
        control = ControlClient(None, _initialized_with_create=True)
        hivemind_guard.mend_control(control)
        path = str(tmp_path / "client.sock")
        async with await asyncio.start_unix_server(control._handler, path):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"\x05")  # the length of a message that does not come
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        gc.collect()
        assert unawaited == []

    run(main())
