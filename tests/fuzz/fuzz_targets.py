"""What is fuzzed byte by byte: each target takes bytes, makes something nearly valid of them, and hands it to one door.

A target returns if the door answered as its documentation says, with a value or with the error that is named there.
Whatever else is raised is a finding.
"""

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from random import Random
from types import UnionType
from typing import Any, get_args

import msgspec
from blake3 import blake3
from newest_snapshot import read_newest

from fuzz_choices import Choices
from fuzz_values import Known, make, make_tables, toml

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from tiny_run import tiny_spec

from shoal.deploy.run.directory_rules import record_rules
from shoal.deploy.simulate.scenario import ScenarioFile, find_scenario
from shoal.deploy.state.spec_record import open_spec, seal_spec
from shoal.peer.disk.snapshot import _Manifest, write_snapshot
from shoal.peer.disk.snapshot_name import MANIFEST, SnapshotName
from shoal.peer.model.layout import all_layer_keys, init_layer
from shoal.peer.model.state import LayerState
from shoal.protocol import messages
from shoal.protocol.access import Gate, Verdict
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.envelope import CHECKSUM_BYTES, SIGNATURE_BYTES, Domain, Envelope, seal, unseal
from shoal.protocol.errors import InviteError, LocalError, RemoteError, ShoalError
from shoal.protocol.frames import CreditWindow, FrameAssembler, FrameType, decode_credit, encode_frame
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import PREFIX, Invite, InviteKey, make_invite, parse_invite
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.membership import AccessLevel, Certificate, Excluded, Members, certify, delegate, open_certificate
from shoal.protocol.plan import Mandate, Plan, PlanShape, open_link, open_plan, plan_flaw, sign_mandate, sign_plan
from shoal.protocol.ports import CallHandler, FrameHandler
from shoal.protocol.sim.disk import SimDisk
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec, encode_spec, run_id
from shoal.protocol.toml.spec_file import load_spec
from shoal.protocol.topology import NetworkFile
from shoal.protocol.wire_format import AUTO_ACTIVATIONS, AUTO_SUMS

LAYERS = 4
EXPERTS = 4
SOMEBODY = [Identity(bytes([number]) * 32) for number in range(6)]
OWNER, VICTIM = SOMEBODY[0], SOMEBODY[1]
SPEC = tiny_spec(steps=1000, peers=4, stages=2)
RUN = run_id(SPEC, OWNER.peer_id)
_DOMAINS: Sequence[Domain] = ("call", "reply", "record", "plan", "mandate", "hello")


@cache
def invite_keys() -> tuple[InviteKey, ...]:
    """What the owner has given out: to train, to look on, for a while."""
    terms: tuple[tuple[int, int, bool], ...] = ((0, 0, True), (0, 0, False), (2_000_000_000, 5, True))
    return tuple(
        InviteKey(seed, delegate(OWNER, Identity(seed).public_key, run=RUN, expires_s=at, seats=seats, may_train=train))
        for seed, (at, seats, train) in zip((b"a" * 32, b"b" * 32, b"c" * 32), terms, strict=True)
    )


@cache
def certificate_of(member: PeerID, number: int = 0) -> bytes:
    """A sound one."""
    key = invite_keys()[number]
    return certify(Identity(key.seed), key.delegation, member, run=RUN)


def nearly_certificate(choices: Choices, member: PeerID) -> bytes:
    """Mostly sound; else changed, another's, or made up."""
    if not choices.chance(4):
        return certificate_of(member, choices.below(3))
    if choices.below(2):
        return choices.flip(certificate_of(choices.pick(SOMEBODY).peer_id, choices.below(3)))
    seen: Known = {
        "key": [Identity(key.seed).public_key for key in invite_keys()],
        "delegation": [msgspec.to_builtins(key.delegation, builtin_types=(bytes,)) for key in invite_keys()],
        "signature": [invite_keys()[0].delegation.signature, bytes(64)],
        "proof": [bytes(CHECKSUM_BYTES), bytes(SIGNATURE_BYTES)],
    }
    try:
        return make(choices, Certificate, seen)
    except OverflowError:
        return b""


@cache
def known() -> Known:
    """Field name -> what stands there in life."""
    peers = [somebody.peer_id for somebody in SOMEBODY]
    plan = sign_plan(OWNER, _plain_plan())
    spec_record = seal_spec(OWNER, SPEC)
    return {
        "run": [RUN],
        "peer": peers,
        "coordinator": peers,
        "leader": [*peers, ""],
        "silent": [peers[:2], []],
        "term": [1, 2, 3],
        "sequence": [1, 2, 3],
        "plan_sequence": [1, 2],
        "plan_digest": [plan.digest],
        "digest": ["0" * 32, plan.digest],
        "previous": ["", plan.digest],
        "stage": [0, 1],
        "version": [0, 1, 2],
        "step": [0, 1, 2],
        "index": [0, 1, 5],
        "era": [0, 0, 0, 1],
        "plan": [plan.envelope, plan.link],
        "live": [plan.link, b""],
        "accepted": [plan.envelope, b""],
        "predecessor": [plan.link, b""],
        "mandate": [b"", _mandate(plan.digest)],
        "spec": [encode_spec(SPEC), spec_record],
        "layer": [f"layers.{index}" for index in range(LAYERS)] + ["embed", "head"],
        "indices": [b"\x3f", b"\x00", b"\xff" * 8],
        "claimed": [b"", b"\x3f"],
        "addresses": [["/ip4/127.0.0.1/tcp/4001/p2p/" + peers[0]]],
        "protocol_version": [PROTOCOL_VERSION],
    }


def _mandate(previous: str) -> bytes:
    mandate = Mandate(override_epoch=1, term=3, coordinator=VICTIM.peer_id, previous=previous)
    return sign_mandate(OWNER, mandate, run=RUN)


def _plain_plan() -> Plan:
    stages = [[0, 2, [[SOMEBODY[1].peer_id, 1.0, 1.0, 0]]], [2, LAYERS, [[SOMEBODY[2].peer_id, 1.0, 1.0, 0]]]]
    return msgspec.convert(
        {"run": RUN, "term": 1, "sequence": 1, "previous": "", "coordinator": OWNER.peer_id, "stages": stages}, Plan
    )


# --- the wire ---


def frames(data: bytes) -> None:
    """A stream of frames, some of them damaged, put together piece by piece."""
    choices = Choices(data)
    stream = b""
    for sequence in range(choices.below(4) + 1):
        kind = FrameType.HELLO if sequence == 0 else choices.pick((FrameType.DATA, FrameType.DATA, FrameType.CREDIT))
        meta = choices.take(8) if kind is FrameType.CREDIT else choices.take(choices.below(64))
        payload = choices.take(choices.below(200)) if kind is FrameType.DATA else b""
        frame = b"".join(encode_frame(kind, sequence + choices.chance(20), meta, payload))
        stream += choices.flip(frame)
    window = CreditWindow(choices.pick((1 << 20, 100)))
    assembler = FrameAssembler(VICTIM.peer_id, window=window)
    try:
        while stream:
            room = assembler.buffer()
            assert len(room), "the assembler waits for nothing"
            part = stream[: min(len(room), 1 + choices.below(300))]
            stream = stream[len(part) :]
            room[: len(part)] = part
            frame_read = assembler.advance(len(part))
            if frame_read is not None and frame_read.type is FrameType.CREDIT:
                window.give_back(decode_credit(frame_read, VICTIM.peer_id), VICTIM.peer_id)
    except RemoteError:
        return
    assert window.outstanding_bytes >= 0


def envelopes(data: bytes) -> None:
    """A sealed call whose bytes are changed, or that is not what its seal says."""
    choices = Choices(data)
    sender = choices.pick(SOMEBODY)
    domain = choices.pick(_DOMAINS)
    if choices.chance(3):
        raw = make(choices, Envelope, known() | {"sender": [somebody.peer_id for somebody in SOMEBODY]})
    else:
        run = RUN if not choices.chance(8) else choices.take(40).hex()
        sequence = choices.pick((0, 1, 2**63, 2**64 - 1))
        raw = seal(sender, domain, run=run, term=choices.below(4), sequence=sequence, body=choices.take(80))
    try:
        opened = unseal(
            choices.flip(raw), choices.pick(_DOMAINS), run=RUN, source=sender.peer_id, relayed=bool(choices.below(2))
        )
    except RemoteError:
        return
    assert opened.run == RUN


def certificates(data: bytes) -> None:
    """What somebody shows to be let in."""
    choices = Choices(data)
    member = choices.pick(SOMEBODY).peer_id
    shown = choices.flip(nearly_certificate(choices, member))
    members = Members(RUN, OWNER.peer_id, wall_s=lambda: 1.9e9 + choices.below(1 << 32))
    with contextlib.suppress(RemoteError):
        open_certificate(shown, run=RUN, owner=OWNER.peer_id, member=member)
    with contextlib.suppress(RemoteError):
        members.show(member, shown)
    members.why_not_enter(member, [somebody.peer_id for somebody in SOMEBODY])
    members.exclude(Excluded({choices.take(32), choices.pick(SOMEBODY).public_key}))
    sound = {certificate_of(member, number) for number in range(len(invite_keys()))}
    if members.access_level(member) > AccessLevel.STRANGER and member != OWNER.peer_id:
        assert shown in sound or msgspec.msgpack.encode(msgspec.msgpack.decode(shown)) in sound, "a forged certificate"


class _Ear:
    """A transport that only remembers who listens."""

    on_call: CallHandler
    on_frame: FrameHandler

    def __init__(self, peer_id: PeerID) -> None:
        self.peer_id = peer_id

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        self.on_call, self.on_frame = on_call, on_frame


def members_of(union: UnionType) -> tuple[type[msgspec.Struct], ...]:
    return get_args(union)


class _MembersGate(Gate):
    """Lets every member send everything, as under a plan that makes all of them mates."""

    def __init__(self) -> None:
        super().__init__(Members(RUN, OWNER.peer_id), VICTIM.peer_id)

    def verdict(self, source: PeerID, kind: type) -> Verdict:
        return Verdict.ALLOWED if self.members.access_level(source) is AccessLevel.MEMBER else Verdict.REFUSED


@cache
def _endpoint() -> _Ear:
    ear = _Ear(VICTIM.peer_id)
    endpoint = Endpoint(VICTIM, ear, run=RUN, gate=_MembersGate())  # type: ignore[arg-type]

    async def answer(source: PeerID, message: Any) -> msgspec.Struct:
        return messages.Done()

    async def take(source: PeerID, meta: Any, payload: Any) -> None:
        pass

    for kind in members_of(messages.Message):
        endpoint.on(kind, answer)
    for kind in members_of(messages.FrameMeta):
        endpoint.on_frame(kind, take)
    return ear


_numbers = itertools.count(1)


def _finish(work: Coroutine[Any, Any, Any]) -> Any:
    """Run what never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the door waits for something")


def calls(data: bytes) -> None:
    """A call of any kind, through an endpoint that answers every kind."""
    choices = Choices(data)
    source = choices.pick(SOMEBODY)
    body = choices.flip(make(choices, choices.pick(members_of(messages.Message)), known()))
    number = 0 if choices.chance(50) else next(_numbers)
    shown = nearly_certificate(choices, source.peer_id) if choices.below(2) else b""
    request = choices.flip(seal(source, "call", run=RUN, term=1, sequence=number, body=body, certificate=shown))
    try:
        reply = _finish(_endpoint().on_call(source.peer_id, request))
    except RemoteError:
        return  # a stranger gets no answer
    unseal(reply, "reply", run=RUN, source=VICTIM.peer_id)


def frame_metas(data: bytes) -> None:
    """The header of a tensor frame of any kind, through an endpoint that takes every kind."""
    choices = Choices(data)
    meta = choices.flip(make(choices, choices.pick(members_of(messages.FrameMeta)), known()))
    try:
        _finish(_endpoint().on_frame(choices.pick(SOMEBODY).peer_id, meta, b""))
    except RemoteError:
        return


def plans(data: bytes) -> None:
    """A signed plan; of one that passes, everything that is asked of plans."""
    choices = Choices(data)
    raw = make_plan(choices, known(), layers=LAYERS, peers=[somebody.peer_id for somebody in SOMEBODY])
    signer = choices.pick(SOMEBODY)
    experts = choices.pick((0, EXPERTS))
    shape = PlanShape(num_layers=LAYERS, num_experts=experts, activations=AUTO_ACTIVATIONS, sums=AUTO_SUMS)
    try:
        head = msgspec.msgpack.decode(raw, type=dict[str, Any])
        term, sequence = int(head.get("term", 0)), int(head.get("sequence", 0))
        envelope = seal(signer, "plan", run=RUN, term=term, sequence=sequence, body=choices.flip(raw))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return  # the attacker's own program
    with contextlib.suppress(RemoteError):
        open_link(choices.flip(msgspec.msgpack.encode((envelope, None))), source=VICTIM.peer_id)
    try:
        opened = open_plan(envelope, run=RUN, owner=OWNER.peer_id, source=VICTIM.peer_id, shape=shape)
    except RemoteError:
        return
    plan = opened.plan
    assert plan_flaw(plan, shape) is None
    before = _plain_plan()
    plan.dropped_since(before)
    before.dropped_since(plan)
    for peer in (*plan.members, VICTIM.peer_id):
        plan.groups_of(peer)
        plan.stage_of(peer)
        plan.since_of(peer)
    for group in range(len(plan.stages) + len(plan.experts) + 1):
        plan.sums_of(group)
    if plan.formats is not None:
        assert plan.formats.sentence
    msgspec.msgpack.encode(plan)


def make_plan(choices: Choices, seen: Known, *, layers: int, peers: Sequence[PeerID], stages: int = 0) -> bytes:
    """The bytes of a plan, which in one case of two covers the layers with members of its own.

    Args:
        stages: how many it then has; 0: any number.
    """
    fields = make_tables(choices, Plan, seen)
    if choices.below(2):
        order = list(peers)
        Random(choices.below(1 << 16)).shuffle(order)
        count = stages or 1 + choices.below(layers)
        cuts = [layers * index // count for index in range(count + 1)]
        made = [
            [first, last, [[order.pop(), 1.0, 1.0, 0] for _ in range(min(len(order), 1 + choices.below(2)))]]
            for first, last in itertools.pairwise(cuts)
        ]
        fields |= {"run": seen["run"][0], "stages": made, "spares": order[: choices.below(3)]}
        fields |= {"restore_era": 0, "restore_version": 0, "mandate": b""}
        if not choices.chance(4):
            fields |= {"rollbacks": 0, "ends_at": 0, "following": []}
        elif choices.below(2):
            whole = [0, layers, [member for _, _, members in made for member in members]]
            fields |= {"rollbacks": 0, "ends_at": 1 + choices.below(100), "following": [whole]}
        if not choices.chance(4):
            fields["experts"] = []
        if fields.get("formats"):
            fields["formats"] = [["bf16"] * (count - 1), ["int8"] * count]
    try:
        return msgspec.msgpack.encode(fields)
    except (OverflowError, TypeError):
        return b"\xc0"


# --- the directory ---


@cache
def _gate() -> tuple[Any, list[bytes]]:
    from hivemind.dht.routing import DHTID

    from shoal.protocol.live.hivemind_guard import RecordGate

    rules = {
        DHTID.generate(source=key).to_bytes(): rule
        for key, rule in record_rules(Gate(Members(RUN, OWNER.peer_id), VICTIM.peer_id)).items()
    }
    return RecordGate(rules), [*rules, b"\x01" * 20]


def records(data: bytes) -> None:
    """A record of the directory, through the gate that every node has."""
    from hivemind.dht.validation import DHTRecord

    choices = Choices(data)
    gate, keys = _gate()
    signer = choices.pick(SOMEBODY)
    body = choices.flip(make(choices, choices.pick(members_of(messages.Record)), known()))
    shown = nearly_certificate(choices, signer.peer_id)
    sequence = choices.below(4)
    value = choices.flip(seal(signer, "record", run=RUN, term=0, sequence=sequence, body=body, certificate=shown))
    if choices.chance(4):
        value = seal_spec(OWNER, SPEC)
    subkey = choices.flip(msgspec.msgpack.encode(signer.peer_id))
    expires_s = time.time() + choices.pick((60.0, 0.0, -1.0, 1e300, float("inf"), float("nan"), 7000.0))
    gate.validate(DHTRecord(choices.pick(keys), subkey, choices.flip(msgspec.msgpack.encode(value)), expires_s))


def directory_bytes(data: bytes) -> None:
    """What hivemind decodes of a stranger's bytes, behind our guards."""
    import msgpack
    from hivemind.utils.serializer import MSGPackSerializer

    from shoal.protocol.live import hivemind_guard

    hivemind_guard.install()
    choices = Choices(data)
    value: Any = choices.rest()
    for _ in range(choices.below(3)):
        value = msgpack.ExtType(choices.pick((0x40, 0x50, 0x51)), msgpack.packb(value))
    try:
        MSGPackSerializer.loads(choices.flip(msgpack.packb(value)) if data[:1] < b"\x80" else data)
    except (ValueError, TypeError, msgpack.UnpackException, UnicodeDecodeError, AssertionError):
        return  # hivemind answers any exception with an error


def spec_records(data: bytes) -> None:
    """The run's spec as somebody stored it."""
    choices = Choices(data)
    spec = msgspec.msgpack.encode(make_tables(choices, RunSpec, {}))
    body = make(choices, messages.SpecRecord, {"spec": [choices.flip(spec), choices.flip(encode_spec(SPEC))]})
    signer = choices.pick((OWNER, OWNER, VICTIM))
    record = seal(signer, "record", run=RUN, term=0, sequence=0, body=body)
    try:
        open_spec(record, run=RUN, owner=OWNER.peer_id, source=VICTIM.peer_id)
    except RemoteError:
        return


# --- files ---


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="shoal-fuzz-"))


def run_specs(data: bytes) -> None:
    """A run file: an error of one line, or a spec."""
    choices = Choices(data)
    text = toml(choices, make_tables(choices, RunSpec, {"source": ["notes/"]}))
    path = _folder() / "run.toml"
    path.write_bytes(text)
    try:
        load_spec(path)
    except ShoalError as error:
        _one_line(error)


def networks(data: bytes) -> None:
    """A network file: an error of one line, or a swarm."""
    choices = Choices(data)
    size = 1 + choices.below(4)
    tables = make_tables(choices, NetworkFile, {})
    for name in ("latency_ms", "bandwidth_gbps"):
        if not choices.chance(6):
            tables[name] = [[float(choices.below(50)) for _ in range(size)] for _ in range(size)]
    for name in ("devices", "device_regions", "latency_s", "bandwidth_bits_per_s"):
        if not choices.chance(6):
            tables.pop(name, None)
    path = _folder() / "network.json"
    path.write_bytes(choices.flip(_json(tables)))
    try:
        find_scenario(str(path))
    except ShoalError as error:
        _one_line(error)


def scenarios(data: bytes) -> None:
    """A scenario file: an error of one line, or a scenario."""
    choices = Choices(data)
    seen: Known = {"count": [1, 2, 3], "file": ["", "", "network.json"], "trace": ["none.csv"]}
    path = _folder() / "scenario.toml"
    path.write_bytes(toml(choices, make_tables(choices, ScenarioFile, seen)))
    try:
        find_scenario(str(path))
    except ShoalError as error:
        _one_line(error)


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError):
        return b"{}"


def _one_line(error: ShoalError) -> None:
    assert str(error), "an error without a word"
    assert "\n" not in str(error), f"an error of several lines: {error}"


@cache
def _invites() -> list[str]:
    places = ["/ip4/10.0.0.1/tcp/4001", "/ip6/::1/tcp/1", "/dns4/example.org/tcp/4001"]
    return [
        make_invite(RUN, OWNER.peer_id, [f"{place}/p2p/{VICTIM.peer_id}" for place in places[:n]], key)
        for n in (1, 2, 3)
        for key in (None, invite_keys()[n - 1])
    ]


def invites(data: bytes) -> None:
    """What a person pastes, with a checksum that fits in one case of two."""
    import base58

    choices = Choices(data)
    text = choices.pick(_invites())
    if choices.below(2):
        raw = bytes(base58.b58decode(text.removeprefix(PREFIX)))
        body = choices.flip(choices.flip(raw[:-4]))
        text = PREFIX + base58.b58encode(body + blake3(body).digest(length=4)).decode()
    else:
        text = choices.flip(text.encode()).decode("utf-8", "replace")
    try:
        invite = parse_invite(text)
    except InviteError as error:
        _one_line(error)
        return
    assert isinstance(invite, Invite)
    try:
        again = invite.encode()
    except ValueError:
        return
    assert parse_invite(again).run == invite.run


_SNAPSHOTS = PurePosixPath("run", "snapshots")
_SMALL = ModelSpec(dim=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=12, context=8)


@cache
def _written() -> dict[str, bytes]:
    """The files of a sound snapshot, by name."""
    disk = SimDisk(Random(0))
    layers = {}
    for key in all_layer_keys(_SMALL):
        param = init_layer(_SMALL, key, 1)
        layers[key] = LayerState(param_N=param, moment1_N=param / 3, moment2_N=param.square())
    path = write_snapshot(
        disk, _SNAPSHOTS, run=RUN, version=7, layers=layers, spec=RunSpec(model=_SMALL, swarm=SwarmSpec(stages=1))
    )
    return {name: disk.read(path / name) for name in disk.list(path)}


def snapshots(data: bytes) -> None:
    """A snapshot whose files are changed and whose digests were made to fit, as malice would."""
    choices = Choices(data)
    files = dict(_written())
    manifest = msgspec.json.decode(files.pop(MANIFEST))
    if choices.below(2):
        name = choices.pick(sorted(files))
        files[name] = _flip_head(choices, files[name])
    for name in tuple(files):
        if choices.chance(30):
            del files[name]
    manifest["files"] = {name: blake3(content).hexdigest() for name, content in files.items()}
    seen: Known = {"layer": manifest["layers"], "run": [RUN], "format": [manifest["format"]]}
    for name, odd in make_tables(choices, _Manifest, seen).items():
        if choices.chance(8):
            manifest[name] = odd
    for section in ("model", "optimizer"):
        if choices.chance(6) and isinstance(manifest["spec"], dict):
            manifest["spec"][section] = make_tables(choices, RunSpec, {}).get(section, {})
    files[MANIFEST] = choices.flip(_json(manifest))
    disk = SimDisk(Random(0))
    folder = _SNAPSHOTS / str(SnapshotName(RUN, 0, 7, blake3(files[MANIFEST]).hexdigest()[:16]))
    disk.make_folder(folder)
    for name, content in files.items():
        disk.write(folder / name, content)
    with contextlib.suppress(LocalError):
        read_newest(disk, _SNAPSHOTS, RUN, on_damage=lambda damage: None)


def _flip_head(choices: Choices, data: bytes) -> bytes:
    """Safetensors: eight bytes of length, a header of JSON, numbers."""
    length = int.from_bytes(data[:8], "little")
    header, numbers = data[8 : 8 + length], data[8 + length :]
    if choices.below(2):
        header = choices.flip(choices.flip(header))
    size = choices.pick((len(header), len(header), 0, 2**63, 2**64 - 1, len(header) + 1))
    return size.to_bytes(8, "little") + header + (numbers if not choices.chance(4) else numbers[:-1])


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        frames,
        envelopes,
        certificates,
        calls,
        frame_metas,
        plans,
        records,
        directory_bytes,
        spec_records,
        run_specs,
        networks,
        scenarios,
        invites,
        snapshots,
    )
}
