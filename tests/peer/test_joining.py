"""Where a replica's first state comes from: decided by the plan and by what this peer has begun before."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.encoding.vectors import VECTORS
from shoal.peer.group.catching_up import Answer
from shoal.peer.handoff.fetcher import StateFetcher
from shoal.peer.handoff.relay import Relay
from shoal.peer.membership.joining import Joining
from shoal.peer.model.layout import stage_layer_keys
from shoal.peer.model.state import LayerState, StageState, initial_state
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.messages import StateOffer
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run
from shoal.protocol.spec import RunSpec

ME, MATE, OTHER, NEWCOMER = (Identity.generate().peer_id for _ in range(4))


@dataclass
class Scene:
    """A replica of the first layer; `fetched` is what it asked for, (holders, version, stored era)."""

    spec: RunSpec
    monkeypatch: pytest.MonkeyPatch
    may_begin: bool = True
    group_peers: tuple[PeerID, ...] = (MATE,)
    """Those that hold the state."""
    joining: tuple[PeerID, ...] = ()
    """Those that are about to fetch it too."""
    unreachable: tuple[PeerID, ...] = ()
    silent_for: int = 0
    newcomer: PeerID | None = None
    """In the plan from when somebody was first asked in vain."""
    goes_on: bool = False
    """The others have made a step by when somebody was first asked in vain."""
    mates_version: int = 7
    carries: tuple[str, ...] = ()
    """Layers that it has kept since the layout before."""
    wanted: list[tuple[str, ...]] = field(default_factory=list)
    group_version: int = 0
    fetched: list[tuple[tuple[PeerID, ...], int, int]] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    """When it asked for each of them."""
    taken: list[int] = field(default_factory=list)
    replayed_from: list[PeerID] = field(default_factory=list)
    """Whom it asked for what its mates have committed meanwhile."""
    committed: int = 0
    """The version that its mates have reached, all of whose steps they give."""
    learner: Any = None
    """What it may be meanwhile."""
    has_state: bool = False
    """A state has come already, and the steps since have not."""

    def join(self, plan: Plan) -> list[int]:
        """Returns: the versions that it took over."""
        keys = stage_layer_keys(self.spec.model, 0, 1)

        async def fetch(
            fetcher: StateFetcher,
            holders: Sequence[PeerID],
            *,
            version: int = -1,
            stored_era: int = -1,
            is_witnessed: Callable[[StateOffer], bool] | None = None,
            known: Mapping[str, LayerState] | None = None,
            expected: Mapping[str, str] | None = None,
            relay: Relay | None = None,
            carriers: Sequence[PeerID] = (),
        ) -> StageState:
            assert (is_witnessed is not None) == (version < 0), "only what a group trains has been signed"
            self.wanted.append(fetcher._keys)
            self.asked_s.append(asyncio.get_running_loop().time())
            self.fetched.append((tuple(holders), version, stored_era))
            if len(self.fetched) <= self.silent_for:
                raise Unreachable(ME, "nobody is there")
            layers = initial_state(self.spec, keys, torch.device("cpu")).layers
            return StageState(version=self.mates_version if version < 0 else version, layers=layers)

        async def take_over(state: StageState) -> None:
            self.taken.append(state.version)
            self.group_version = state.version

        async def fetch_mean(mate: PeerID, step: int) -> Answer:
            self.replayed_from.append(mate)
            if mate in self.unreachable:
                raise Unreachable(mate, "is gone")
            if step >= self.committed:
                return "nothing"
            self.group_version = step + 1
            joining.stepped()
            return "taken"

        async def compute(kind: str, work: Any, *, flop: float) -> Any:
            return SimpleNamespace(value=work())

        self.monkeypatch.setattr(StateFetcher, "fetch", fetch)
        scene = self

        class Core:
            me, stage = ME, 0
            group_peers = (*self.group_peers, *self.joining)
            holders = self.group_peers
            joining = self.joining

            @property
            def version(self) -> int:
                return scene.group_version

        class Member:
            group = Core()

            @property
            def plan(self) -> Plan:
                """The newest."""
                if not scene.fetched:
                    return plan
                spares = () if scene.newcomer is None else (scene.newcomer,)
                return msgspec.structs.replace(plan, spares=spares, not_started=plan.not_started and not scene.goes_on)

        async def nothing(era: int, version: int, members: Any) -> Mapping[str, LayerState]:
            return {}

        kept = {key: initial_state(self.spec, (key,), torch.device("cpu")).layers[key] for key in self.carries}
        at = plan.restore_era, plan.restore_version
        layers = SimpleNamespace(
            inbox=SimpleNamespace(endpoint=SimpleNamespace(peer_id=ME), compute=None, vectors=VECTORS),
            archive=SimpleNamespace(begin_era=lambda era, group: self.may_begin),
            retained=SimpleNamespace(read=lambda era, version: kept if (era, version) == at else {}),
            ahead=SimpleNamespace(ended=nothing),
            server=SimpleNamespace(sharing=lambda group_peers: Relay(group_peers, vectors=VECTORS)),
        )
        services = SimpleNamespace(
            endpoint=SimpleNamespace(peer_id=ME), compute=SimpleNamespace(run=compute), layers=layers
        )
        joining = Joining(
            cast(Any, services),
            cast(Any, Member()),
            Arithmetic(self.spec, None, torch.device("cpu")).runtime(0, 1),
            cast(Any, SimpleNamespace(fetch=fetch_mean)),
            take_over=take_over,
        )

        async def main() -> None:
            if self.has_state:
                joining._runtime.load(initial_state(self.spec, keys, torch.device("cpu")))
            await asyncio.wait_for(joining.run(plan, self.learner), 60.0)

        run(main())
        return self.taken


def plan(*, not_started: bool, restore_version: int = 0, restore_era: int = 0) -> Plan:
    members = tuple(Member(peer, 1.0, 1.0) for peer in (ME, MATE))
    return Plan(
        run="run",
        term=1,
        sequence=1,
        previous="",
        coordinator=ME,
        stages=(Stage(0, 1, members), Stage(1, 2, (Member(OTHER, 1.0, 1.0),))),
        era=restore_era + 1,
        restore_version=restore_version,
        restore_era=restore_era,
        not_started=not_started,
    )


@pytest.fixture
def scene(tiny_spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tiny_spec, monkeypatch)


def test_the_first_era_begins_with_the_seed_and_asks_nobody(scene: Scene) -> None:
    assert scene.join(plan(not_started=True)) == [0]
    assert scene.fetched == []


def test_a_later_era_begins_with_the_snapshots_of_any_member_ourselves_first(scene: Scene) -> None:
    assert scene.join(plan(not_started=True, restore_version=40, restore_era=2)) == [40]
    assert scene.fetched == [((ME, MATE, OTHER), 40, 2)]


def test_snapshots_that_are_not_there_yet_are_waited_for(scene: Scene) -> None:
    scene.silent_for = 3
    assert scene.join(plan(not_started=True, restore_version=40)) == [40]
    assert len(scene.fetched) == 4


def test_whoever_hears_of_a_layout_before_its_holders_asks_again_soon_and_then_more_rarely(scene: Scene) -> None:
    scene.silent_for = 6
    scene.join(plan(not_started=True, restore_version=40))
    waited_s = [after_s - before_s for before_s, after_s in itertools.pairwise(scene.asked_s)]
    assert waited_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_in_an_era_under_way_the_state_is_the_mates(scene: Scene) -> None:
    assert scene.join(plan(not_started=False, restore_version=40)) == [7]
    assert scene.fetched == [((MATE,), -1, -1)]


def test_who_comes_later_with_a_copy_is_asked_for_it(scene: Scene) -> None:
    scene.silent_for = 1
    scene.newcomer = NEWCOMER
    assert scene.join(plan(not_started=True, restore_version=40)) == [40]
    assert [holders for holders, _, _ in scene.fetched] == [(ME, MATE, OTHER), (ME, MATE, OTHER, NEWCOMER)]


def test_who_comes_too_late_for_the_beginning_asks_its_mates(scene: Scene) -> None:
    scene.silent_for, scene.goes_on, scene.mates_version = 2, True, 41
    assert scene.join(plan(not_started=True, restore_version=40, restore_era=2)) == [41]
    assert scene.fetched == [((ME, MATE, OTHER), 40, 2), ((MATE,), -1, -1), ((MATE,), -1, -1)]


def test_who_comes_by_the_beginning_late_replays_what_its_mates_have_committed_since(scene: Scene) -> None:
    scene.committed = 42
    assert scene.join(plan(not_started=True, restore_version=40, restore_era=2)) == [40]
    assert scene.group_version == 42


def test_who_begins_does_not_wait_for_mates_who_cannot_be_reached(scene: Scene) -> None:
    scene.unreachable = (MATE,)
    assert scene.join(plan(not_started=True, restore_version=40, restore_era=2)) == [40]


@pytest.mark.parametrize("restore_version", [0, 40])
def test_who_has_begun_this_era_before_asks_its_mates(scene: Scene, restore_version: int) -> None:
    scene.may_begin = False
    assert scene.join(plan(not_started=True, restore_version=restore_version)) == [7]


def test_a_state_that_is_older_than_ours_is_not_taken(scene: Scene) -> None:
    scene.group_version = 9
    assert scene.join(plan(not_started=False)) == []


def test_those_who_join_together_replay_from_different_holders(scene: Scene) -> None:
    others = sorted(Identity.generate().peer_id for _ in range(3))
    scene.group_peers, scene.joining = (MATE, OTHER), tuple(others)
    scene.join(plan(not_started=False))
    expected = sorted([ME, *others]).index(ME) % 2
    assert scene.replayed_from == [scene.group_peers[expected]]


def test_another_holder_is_asked_where_one_cannot_be_reached(scene: Scene) -> None:
    scene.group_peers, scene.unreachable = (MATE, OTHER), (MATE,)
    assert scene.join(plan(not_started=False)) == [7]
    assert scene.replayed_from == [MATE, OTHER]
    assert len(scene.fetched) == 1


def test_what_a_replica_carries_from_the_last_layout_it_does_not_ask_for(scene: Scene) -> None:
    scene.carries = ("embed", "layers.0")
    assert scene.join(plan(not_started=True, restore_version=40, restore_era=2)) == [40]
    assert scene.fetched == []


def test_a_replica_that_carries_a_part_asks_for_the_rest(scene: Scene) -> None:
    scene.carries = ("layers.0",)
    assert scene.join(plan(not_started=True, restore_version=40, restore_era=2)) == [40]
    assert scene.fetched == [((ME, MATE, OTHER), 40, 2)]
    assert scene.wanted == [("embed",)]


class Light:
    """A light member that is not worth being, or one whose state has come at version 9."""

    def __init__(self, scene: Scene, *, is_worth_it: bool) -> None:
        self._scene, self._is_worth_it = scene, is_worth_it
        self.num_begun = 0

    async def begin(self) -> bool:
        self.num_begun += 1
        return self._is_worth_it

    async def run(self) -> StageState:
        keys = stage_layer_keys(self._scene.spec.model, 0, 1)
        return StageState(version=9, layers=initial_state(self._scene.spec, keys, torch.device("cpu")).layers)


@pytest.mark.parametrize("is_worth_it", [True, False])
def test_the_mates_state_comes_to_a_light_member_or_at_once(scene: Scene, is_worth_it: bool) -> None:
    scene.learner = Light(scene, is_worth_it=is_worth_it)
    assert scene.join(plan(not_started=False, restore_version=40)) == ([9] if is_worth_it else [7])
    assert len(scene.fetched) == (0 if is_worth_it else 1)
    assert scene.learner.num_begun == 1


def test_who_has_a_state_and_lacks_steps_becomes_no_light_member(scene: Scene) -> None:
    scene.learner, scene.has_state = Light(scene, is_worth_it=True), True
    assert scene.join(plan(not_started=False, restore_version=40)) == [7]
    assert scene.learner.num_begun == 0


def test_what_an_era_begins_with_is_fetched_whole(scene: Scene) -> None:
    scene.learner = Light(scene, is_worth_it=True)
    assert scene.join(plan(not_started=True, restore_version=40, restore_era=2)) == [40]
    assert scene.learner.num_begun == 0
