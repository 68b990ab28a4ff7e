"""Patches hivemind 1.1.12 against its known holes, before the first DHT node or daemon starts.

Without these patches any stranger on the DHT, or a badly timed timeout, can do the damage that the functions here name
after "Hole:".
"""

import asyncio
import functools
import io
import logging
import math
import os
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]
from google.protobuf.message import Message
from google.protobuf.proto import serialize_length_prefixed
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p.p2p_daemon_bindings import control as daemon_control
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hivemind.utils.auth import AuthorizerBase
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from shoal.protocol.depth import TUPLE_EXT, TooDeep, check_depth
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import RECORD_BYTES_MAX, RECORD_EXPIRES_S_MAX
from shoal.protocol.live.record_store import KeyRules
from shoal.protocol.membership import AccessLevel, Members

_NESTED_LOADS_MAX = 2
"""Most nested calls of `loads`. An honest list of records needs two: for the list, and for the extension type in it."""
_SUBKEY_BYTES_MAX = 256

_nesting = threading.local()


def install() -> None:
    """Patch hivemind in this process: its message decoders and DHT stores then refuse harmful input.

    Call it before a node or daemon starts. Safe to call twice.
    """
    if getattr(MSGPackSerializer.loads, "__func__", None) is not _guarded_loads:
        MSGPackSerializer.loads = classmethod(_guarded_loads)
        MSGPackSerializer._decode_ext_types = classmethod(_guarded_ext(MSGPackSerializer._decode_ext_types.__func__))
        TimedStorage.store = _keep_the_later(TimedStorage.store)
        DHTProtocol._validate_dictionary = _keep_the_valid
        DHTProtocol.call_find = _lapse_with_the_records(DHTProtocol.call_find)
        for name in ("rpc_ping", "rpc_store", "rpc_find"):
            setattr(DHTProtocol, name, _for_members(getattr(DHTProtocol, name)))
        daemon_control.write_pbmsg = write_message
        _keep_quiet()


async def write_message(stream: asyncio.StreamWriter, message: Message) -> None:
    """Write the length of `message`, as a varint, and `message` itself in one write. hivemind writes the length byte by
    byte and then the message: three system calls, and the daemon wakes up for each (`MEASURED.md`)."""
    buffer = io.BytesIO()
    serialize_length_prefixed(message, buffer)
    stream.write(buffer.getvalue())
    await stream.drain()


def _keep_quiet() -> None:
    """Hole: hivemind prints tracebacks by itself. We turn its log off, unless HIVEMIND_LOGLEVEL is set."""
    if "HIVEMIND_LOGLEVEL" not in os.environ:
        use_hivemind_log_handler("nowhere")
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)


def _guarded_loads(cls: Any, buf: bytes) -> object:
    """Decode msgpack as `MSGPackSerializer.loads` does, but raise TooDeep if values or extension types nest too deep.
    Hole: hivemind decodes nested extension types by recursion in C (for type 0x50 it calls `loads` again), so a message
    of 937 bytes crashes the process."""
    nested = getattr(_nesting, "loads", 0)
    if nested >= _NESTED_LOADS_MAX:
        raise TooDeep(f"extension types nest deeper than {_NESTED_LOADS_MAX}")
    check_depth(buf)
    _nesting.loads = nested + 1
    try:
        return msgpack.loads(buf, ext_hook=cls._decode_ext_types, raw=False)
    finally:
        _nesting.loads = nested


def _guarded_ext(decode: Callable[[Any, int, bytes], object]) -> Callable[[Any, int, bytes], object]:
    """Let `decode` take only the extension types of records: tuples and type 0x50, a dictionary. Hole: a stranger's
    bytes can make an object of any registered type; type 0x51 would look names up in torch."""

    def decode_known(cls: Any, type_code: int, data: bytes) -> object:
        if type_code not in (TUPLE_EXT, 0x50):
            raise TooDeep(f"extension type {type_code} has no place in a record")
        return decode(cls, type_code, data)

    return decode_known


def _keep_the_later(store: Callable[..., bool]) -> Callable[..., bool]:
    """Make `store` refuse copies that do not expire later. Hole: it refuses older copies, but takes their expiry."""

    def store_later(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
        held = self.data.get(key)
        if held is not None and not self.frozen and held.expiration_time >= expiration_time:
            return False
        return store(self, key, value, expiration_time)

    return store_later


def _keep_the_valid(self: Any, key_bytes: bytes, dictionary: Any) -> bool:
    """Drop the invalid records of a reply; return True if others are left. Hole: one invalid record makes hivemind drop
    the whole reply, even if it only expires a second too late by the requester's slow clock."""
    if self.record_validator is None:
        return True
    dictionary.maxsize = math.inf  # the sender may send a value of any type, and a search that compares it may not end
    with dictionary.freeze():
        for subkey, (value, expiration_time) in tuple(dictionary.items()):
            record = DHTRecord(key_bytes, self.serializer.dumps(subkey), value, expiration_time)
            if not self.record_validator.validate(record):
                del dictionary[subkey]
    return bool(dictionary.data)


def _lapse_with_the_records(call_find: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Let a reply expire with its records. Hole: hivemind trusts a stated expiry, and asks no other node until then."""

    async def find(self: Any, peer: Any, keys: Any) -> Any:
        found = await call_find(self, peer, keys)
        return found and {key: (_lapsing(held), nearest) for key, (held, nearest) in found.items()}

    return find


def _lapsing(held: Any) -> Any:
    """Return the reply, with an expiry equal to the latest of its records' expiries; None if there is no record."""
    if held is None or not isinstance(held.value, DictionaryDHTValue):
        return None
    expirations = [record.expiration_time for _, record in held.value.items()]
    return ValueWithExpiration(held.value, max(expirations)) if expirations else None


class NotAMemberError(Exception):
    """Tells the caller only that it was refused: hivemind sends an exception's text to the caller."""


def _for_members(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Let `answer` serve only peers with a certificate. Hole: a DHT node shows strangers all members and records."""

    @functools.wraps(answer)
    async def answer_members(self: Any, request: Any, context: Any) -> Any:
        pass_ = self.authorizer
        if isinstance(pass_, MemberPass) and not pass_.lets_in(request, PeerID(context.remote_id.to_base58())):
            raise NotAMemberError
        return await answer(self, request, context)

    return answer_members


class MemberPass(AuthorizerBase):  # type: ignore[misc]
    """Sends our certificate with each DHT request, and checks the requester's certificate.

    hivemind has access tokens for this; we only use one bytes field of the token message.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def lets_in(self, request: Any, peer: PeerID) -> bool:
        try:
            self._members.show(peer, request.auth.client_access_token.signature)
        except RemoteError:
            return False
        return self._members.access_level(peer) >= AccessLevel.OBSERVER

    async def sign_request(self, request: Any, service_public_key: object) -> None:
        request.auth.client_access_token.signature = self._members.certificate

    async def validate_request(self, request: Any) -> bool:
        return True  # `lets_in` has checked the requester

    async def sign_response(self, response: Any, request: Any) -> None:
        pass

    async def validate_response(self, response: Any, request: Any) -> bool:
        return True  # each record in the reply proves its own origin


class RecordGate(RecordValidatorBase):  # type: ignore[misc]
    """Accepts only our kind of record: a subkey (string) and a value (bytes), both small, for at most two hours.

    Holes: a record without a subkey replaces all subkeys under its key; sizes and expiry have no limit.

    Args:
        rules: key -> rule for its records; records of other keys are refused. None: any record under any key.
    """

    def __init__(self, rules: KeyRules | None = None) -> None:
        self._rules = rules

    def validate(self, record: DHTRecord) -> bool:
        seconds_left = record.expiration_time - time.time()
        if not math.isfinite(seconds_left) or seconds_left > RECORD_EXPIRES_S_MAX:
            return False
        subkey = _subkey(record.subkey)
        value = _value(record.value)
        if subkey is None or value is None:
            return False
        if self._rules is None:
            return True
        rule = self._rules.get(record.key)
        return rule is not None and rule.accept(subkey, value)


def _subkey(packed: bytes) -> str | None:
    # fixstr, str 8, str 16 (msgpack specification, "formats"); other bytes must not reach a decoder
    if not 0 < len(packed) <= _SUBKEY_BYTES_MAX or not (0xA0 <= packed[0] <= 0xBF or packed[0] in (0xD9, 0xDA)):
        return None
    try:
        unpacked = msgpack.loads(packed, raw=False)
    except (ValueError, msgpack.UnpackException):
        return None
    return unpacked if isinstance(unpacked, str) else None


def _value(packed: bytes) -> bytes | None:
    for head, layout in ((b"\xc4", ">B"), (b"\xc5", ">H")):  # bin 8, bin 16
        at = 1 + struct.calcsize(layout)
        if packed[:1] == head and len(packed) >= at and struct.unpack_from(layout, packed, 1)[0] == len(packed) - at:
            return packed[at:] if len(packed) - at <= RECORD_BYTES_MAX else None
    return None


class _Unanswered(dict[Any, asyncio.Future[Any]]):
    """hivemind's table of open calls, without cancelled ones. Hole: if an answer arrives in the turn of the event loop
    that cancels its call, the only task that reads answers raises and ends, and no call is answered again."""

    def __contains__(self, call_id: object) -> bool:
        future = self.get(call_id)
        return future is not None and not future.done()


class _Running(dict[Any, asyncio.Task[Any]]):
    """Call -> task that answers it, until it ends. Hole: a cancelled call's task stays in hivemind's table for ever."""

    def __setitem__(self, call_id: Any, task: asyncio.Task[Any]) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self.pop(call_id, None))


def mend_control(control: Any) -> None:
    """Patch a `ControlClient` (hivemind's connection to a daemon) by `_Unanswered`, `_Running`, `_take_stream`."""
    control._pending_calls = _Unanswered(control._pending_calls)
    control._handler_tasks = _Running()
    control._handler = functools.partial(_take_stream, control._handler)


def admit(control: Any, admits: Callable[[PeerID], Awaitable[bool]]) -> None:
    """Drop requests of peers that `admits` rejects. Hole: in hivemind every request reaches its handler."""
    handle = control._handle_persistent_request

    async def handle_admitted(call_id: Any, request: Any) -> None:
        if await admits(PeerID(HivemindPeerID(request.peer).to_base58())):
            await handle(call_id, request)

    control._handle_persistent_request = handle_admitted


async def _take_stream(take: Callable[..., Awaitable[None]], reader: Any, writer: Any) -> None:
    """Let hivemind `take` a stream; close the stream on an error. Hole: a stream that no handler takes, or that ends
    with its daemon before the first message, raises in a task that nobody awaits, and asyncio prints a traceback."""
    try:
        await take(reader, writer)
    except (OSError, EOFError, daemon_control.DispatchFailure):
        writer.close()
