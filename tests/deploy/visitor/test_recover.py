"""What `shoal recover` finds out, says and refuses; swarms that are recovered are in `tests/coordinator`."""

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from open_gate import OpenGate, everybody
from typer.testing import CliRunner

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.driver import Callbacks, Coordination
from shoal.coordinator.store import PlanStore
from shoal.deploy import cli
from shoal.deploy.state.spec_record import record_key, seal_spec
from shoal.deploy.visitor.recover import Found, _mandated, _remember, assess, find_owner
from shoal.deploy.visitor.recover_view import as_json, headline, situation_table
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, make_invite, parse_invite
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.loop import LoopClock
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.messages import Advert, Heartbeat, Standing
from shoal.protocol.plan import Member, Plan, SignedPlan, Stage, sign_plan
from shoal.protocol.sim.disk import PowerCut, SimDisk
from shoal.protocol.spec import RunSpec, SwarmSpec, run_id

RUN = "0123456789abcdef"
PEERS = sorted((Identity(bytes([number] * 32)) for number in range(8)), key=lambda identity: identity.peer_id)
OWNER = PEERS[0].peer_id


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plan_of(members: list[Identity], *, term: int = 3, sequence: int = 7) -> SignedPlan:
    stage = Stage(0, 6, tuple(Member(peer.peer_id, 1.0, 1.0) for peer in members))
    signer = members[0]
    plan = Plan(
        run=RUN, term=term, sequence=sequence, previous="", coordinator=signer.peer_id, stages=(stage,), reason="drawn"
    )
    return sign_plan(signer, plan)


def advert_of(name: str = "somebody", **says: Any) -> Advert:
    usual: dict[str, Any] = {
        "device": "cpu",
        "flop_per_s": 1e9,
        "memory_bytes": 1 << 34,
        "upload_bytes_per_s": 1.0,
        "download_bytes_per_s": 1.0,
        "addresses": (),
        "has_data": True,
    }
    return Advert(name=name, **(usual | says))


def found(peer: Identity, plan: SignedPlan | None, *, advert: Advert | None = None, **says: Any) -> Found:
    usual: dict[str, Any] = {"term": 3, "era": 0, "stage": 0, "version": 40, "synced": True}
    standing = Standing(live=plan.link if plan else b"", **(usual | says))
    return Found(peer=peer.peer_id, advert=advert or advert_of(), standing=standing, plan=plan)


def test_what_is_left_of_a_run() -> None:
    old, last = plan_of(PEERS[:4], sequence=6), plan_of(PEERS[:7])
    situation = assess(
        [found(PEERS[2], last, term=5, version=41), found(PEERS[1], old), found(PEERS[7], None, stage=None, version=0)],
        OWNER,
    )
    assert situation.base == last
    assert [each.peer for each in situation.found] == [PEERS[index].peer_id for index in (1, 2, 7)]
    assert situation.missing == tuple(PEERS[index].peer_id for index in (0, 3, 4, 5, 6))
    assert (situation.term_max, situation.version) == (5, 41)
    assert situation.coordinator(1005) == PEERS[2].peer_id, "who obeys the last plan"
    assert headline(situation) == "2 of the 7 members of plan 7 (term 3) are in reach"


def test_a_plan_that_one_peer_has_made_up_is_not_what_the_owner_mandates() -> None:
    last, forged = plan_of(PEERS[:7]), plan_of([PEERS[7]], term=1 << 40)
    situation = assess([found(PEERS[1], last), found(PEERS[2], last), found(PEERS[7], forged, term=1 << 60)], OWNER)
    assert situation.base == last
    assert situation.coordinator(situation.term) in {PEERS[1].peer_id, PEERS[2].peer_id}
    assert situation.term == 1003, "nor does a term that nobody can have promised count"


def test_versions_of_another_era_are_not_compared() -> None:
    last = plan_of(PEERS[:7])
    assert assess([found(PEERS[2], last, era=1, version=90), found(PEERS[3], last)], OWNER).version == 40


def test_the_unwilling_are_not_mandated_unless_nobody_else_is_there() -> None:
    last = plan_of(PEERS[:7])
    unwilling = advert_of(willing_to_coordinate=False)
    first = assess([found(PEERS[1], last, advert=unwilling), found(PEERS[2], last)], OWNER)
    assert {first.coordinator(term) for term in range(20)} == {PEERS[2].peer_id}
    alone = assess([found(PEERS[1], last, advert=unwilling)], OWNER)
    assert alone.coordinator(9) == PEERS[1].peer_id


@pytest.mark.parametrize(
    ("here", "members", "complaint"),
    [
        ([], 7, "no peer of the run is in reach"),
        ([1, 2, 3, 4], 7, "nothing to recover: 4 of the 7 members"),
        ([0, 1], 4, "nothing to recover: 2 of the 4 members"),
    ],
    ids=["nobody", "a majority", "half of four, with the owner"],
)
def test_when_there_is_nothing_to_recover(here: list[int], members: int, complaint: str) -> None:
    last = plan_of(PEERS[:members])
    with pytest.raises(LocalError, match=complaint):
        assess([found(PEERS[index], last) for index in here], OWNER)


def test_a_run_without_a_plan_is_not_recovered() -> None:
    with pytest.raises(LocalError, match="has no plan yet"):
        assess([found(PEERS[1], None)], OWNER)


def test_half_of_four_without_the_owner_is_recovered() -> None:
    last = plan_of(PEERS[:4])
    assert assess([found(PEERS[index], last) for index in (2, 3)], OWNER).missing


def test_what_is_shown_escapes_strangers_names() -> None:
    situation = assess([found(PEERS[1], plan_of(PEERS[:7]), advert=advert_of("[red]ana"))], OWNER)
    table = situation_table(situation)
    assert table.row_count == 7
    assert any("[red]ana" in str(cell) for cell in table.columns[1].cells)  # as it is: no markup
    line = json.loads(msgspec.json.encode(as_json(situation, None)))
    assert (line["term"], line["sequence"], line["reset"]) == (3, 7, None)
    assert len(line["missing"]) == 6


def test_the_owners_key_is_found_among_the_hosted_runs(tmp_path: Path) -> None:
    for name, identity in zip("abc", PEERS, strict=False):
        identity.save(tmp_path / name / "identity.key")
    invite = Invite(PROTOCOL_VERSION, RUN, PEERS[1].peer_id, ())
    identity, folder = find_owner(invite, sorted(tmp_path.glob("*")))
    assert (identity.peer_id, folder) == (PEERS[1].peer_id, tmp_path / "b")
    with pytest.raises(LocalError, match="is not on this machine"):
        find_owner(Invite(PROTOCOL_VERSION, RUN, PEERS[5].peer_id, ()), sorted(tmp_path.glob("*")))


def test_a_full_disk_does_not_lose_what_was_mandated() -> None:
    disk = SimDisk(random.Random(0))
    assert _mandated(disk, RUN) == 0
    _remember(disk, RUN, 7)
    disk.limit(1)
    with pytest.raises(LocalError, match=r"cannot write .*No space left"):
        _remember(disk, RUN, 1007)
    assert _mandated(disk, RUN) == 7
    disk.limit(None)
    _remember(disk, RUN, 1007)
    assert _mandated(disk, RUN) == 1007


@pytest.mark.parametrize("seed", range(8))
def test_a_power_cut_leaves_the_last_mandated_term_or_the_new_one(seed: int) -> None:
    for after in range(12):
        disk = SimDisk(random.Random(seed))
        _remember(disk, RUN, 7)
        disk.cut_power(after=after)
        try:
            _remember(disk, RUN, 1007)
        except PowerCut:
            assert _mandated(disk.crash(), RUN) in (7, 1007)
        else:
            assert _mandated(disk.crash(), RUN) == 1007
            break
    else:
        pytest.fail("the cut came before the end every time")


def complaint(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, ["recover", *(str(argument) for argument in arguments)])
    assert result.exit_code == cli.EXIT_USER_ERROR, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_only_the_owner_recovers(tmp_path: Path) -> None:
    invite = make_invite(RUN, OWNER, (f"/ip4/127.0.0.1/tcp/9/p2p/{OWNER}",))
    assert "is not on this machine" in complaint(invite)
    PEERS[3].save(tmp_path / "host" / "identity.key")
    assert "is not on this machine" in complaint(invite, "--state-dir", tmp_path / "host")


def test_without_an_invite_a_run_must_be_up() -> None:
    assert "no run is up on this machine" in complaint()


class Stub:
    """A peer on libp2p that trains nothing."""

    def __init__(self, identity: Identity, transport: LiveTransport, directory: LiveDirectory, spec: RunSpec) -> None:
        self.endpoint = Endpoint(identity, transport, run=run_id(spec, OWNER), gate=OpenGate())
        self.coordination = Coordination(
            endpoint=self.endpoint,
            directory=directory,
            clock=LoopClock(),
            spec=spec,
            owner=OWNER,
            allocator=GreedyAllocator(),
            store=PlanStore(),
            heartbeat=self.heartbeat,
            callbacks=Callbacks(on_plan=lambda _: None),
            rng=random.Random(1),
        )

    def heartbeat(self) -> Heartbeat:
        live = self.coordination.plan
        return Heartbeat(
            advert=advert_of(addresses=self.endpoint.transport.addresses()),
            plan_sequence=live.plan.sequence if live else 0,
            plan_digest=live.digest if live else "",
            stage=0 if live else None,
            version=0,
            synced=live is not None,
            draining=False,
        )


@contextlib.asynccontextmanager
async def stub(folder: Path, identity: Identity, spec: RunSpec, initial: tuple[str, ...]) -> AsyncIterator[Stub]:
    async with contextlib.AsyncExitStack() as stack:
        run = run_id(spec, OWNER)
        transport = await LiveTransport.start(
            identity, members=everybody(run), state_dir=folder, listen=("/ip4/127.0.0.1/tcp/0",), initial_peers=initial
        )
        stack.push_async_callback(transport.close)
        directory = await LiveDirectory.start(transport)
        stack.push_async_callback(directory.close)
        made = Stub(identity, transport, directory, spec)
        stack.push_async_callback(made.coordination.close, False)
        await made.coordination.start()
        record = seal_spec(PEERS[0], spec)
        await directory.store(record_key(run), identity.peer_id, record, expires_in_s=600.0)
        yield made


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a condition of a foreign process
            await asyncio.sleep(0.05)


@pytest.mark.process
def test_the_command_recovers_a_run_whose_host_is_gone(tmp_path: Path) -> None:
    """A swarm of two whose owner's process died: the one that is left may not go on by itself."""
    spec = RunSpec(swarm=SwarmSpec(stages=1, min_peers=2, heartbeat_s=0.5, term_s=600.0))
    PEERS[0].save(tmp_path / "hosted" / "identity.key")
    for name in ("host", "peer"):
        (tmp_path / name).mkdir()

    async def shoal_recover(invite: str, *options: str) -> tuple[int | None, str, str]:
        arguments = ("-m", "shoal.deploy.cli", "recover", invite, "--state-dir", str(tmp_path / "hosted"), *options)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as host_stack:
            host = await host_stack.enter_async_context(stub(tmp_path / "host", PEERS[0], spec, ()))
            addresses = host.endpoint.transport.addresses()
            async with stub(tmp_path / "peer", PEERS[1], spec, addresses) as peer:
                await until(lambda: peer.coordination.plan is not None)
                invite = make_invite(host.endpoint.run, OWNER, peer.endpoint.transport.addresses())
                assert parse_invite(invite)
                code, _, err = await shoal_recover(invite, "--yes")
                assert code == cli.EXIT_USER_ERROR, err
                assert "nothing to recover: 2 of the 2 members" in err
                await host_stack.aclose()  # without a word
                code, out, err = await shoal_recover(invite, "--yes", "--json")
                assert code == 0, err
                told = json.loads(out)
                assert told["missing"] == [OWNER]
                assert told["reset"]["coordinator"] == PEERS[1].peer_id
                assert told["reset"]["following"] == [PEERS[1].peer_id]
                assert peer.coordination.plan is not None
                assert peer.coordination.plan.plan.members == (PEERS[1].peer_id,)
                assert peer.coordination.plan.plan.term == told["reset"]["term"]

    asyncio.run(main())
