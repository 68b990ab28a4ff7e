"""How the policy plans with an allocator that searches."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from shoal.coordinator import replan_policy
from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator
from shoal.coordinator.allocate.measured import ODD_REPORTS
from shoal.coordinator.allocate.objective import Change, lacking_bytes
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.coordination_events import Searched
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.ledger import PATIENCE_HEARTBEATS
from shoal.coordinator.replan_policy import (
    END_PATIENCE_S,
    LOOKING_FOR_FIRST,
    ReplanPolicy,
)
from shoal.coordinator.search_schedule import (
    FIRST_PATIENCE_S,
    LINKS_PATIENCE_HEARTBEATS,
    REST_HEARTBEATS,
    SETTLE_HEARTBEATS,
    SearchJob,
)
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import held_keys, stage_layer_keys
from shoal.protocol.messages import CommitReport, Holding, LinkReport
from shoal.protocol.plan import Foreseen, Plan
from shoal.protocol.spec import RunSpec, SwarmSpec, TrainingSpec

SPEC = RunSpec(
    training=TrainingSpec(steps=100_000, microbatches_per_step=24),
    swarm=SwarmSpec(stages=3, min_peers=6, heartbeat_s=1.0, term_s=60.0),
)
GROUPS = [["a", "d"], ["b", "e"], ["c", "f"]]
STAGE_OF = {peer: stage for stage, group in enumerate(GROUPS) for peer in group}
SEARCHED_S = SETTLE_HEARTBEATS + 2.0


@dataclass
class Scripted(GreedyAllocator):
    """Finds what it is told to."""

    finds: Layout | None = None
    asked: list[object] = field(default_factory=list)

    def prepare(self):
        pass

    def search(self, snapshot, previous, *, seed):
        self.asked.append((snapshot, previous, seed))
        return self.finds, "searched"


@pytest.fixture
def allocator():
    return Scripted()


@pytest.fixture
def policy(allocator):
    return ReplanPolicy(ClusterView("run", SPEC), allocator)


@pytest.fixture
def live(make_plan):
    return make_plan(GROUPS, coordinator="a", not_started=False)


@pytest.fixture
def better(make_plan):
    stages = make_plan([["a", "d", "e"], ["b"], ["c", "f"]], coordinator="a").plan.stages
    return Layout(stages=stages, spares=(), reason="search: 1 move")


@pytest.fixture
def hear(policy, make_heartbeat):
    def everybody(peers="abcdef", *, now_s=0.0, **says):
        for peer in peers:
            links = tuple(LinkReport(other, 0.04, 1e7, 1e7, 3) for other in peers if other != peer)
            usual = {"version": 57, "synced": True, "stage": STAGE_OF.get(peer), "links": links}
            policy.view.hear(peer, make_heartbeat(peer, **(usual | says)), now_s)

    return everybody


def begin(policy, live, now_s=0.0):
    policy.obey(live.plan, now_s)
    policy.begin_term(live.plan, now_s, continuing=False, silent=None)


def answer(policy, allocator, job):
    layout, _ = allocator.search(job.snapshot, job.previous, seed=job.seed)
    return policy.searched(Searched(job=job, layout=layout, reason=""))


def test_the_first_plan_waits_for_a_search(policy, allocator, hear, better):
    hear(synced=False, stage=None)
    job, reason = policy.first_plan(0.0)
    assert isinstance(job, SearchJob)
    assert reason == LOOKING_FOR_FIRST
    assert job.previous is None
    assert job.snapshot.network is not None
    assert policy.first_plan(0.5) == (None, LOOKING_FOR_FIRST)
    allocator.finds = better
    assert answer(policy, allocator, job)
    draft, reason = policy.first_plan(1.0)
    assert draft == better
    assert reason == better.reason


def test_the_first_plan_waits_for_the_links(policy, allocator, hear):
    hear(synced=False, stage=None, links=())
    assert policy.first_plan(0.0) == (None, "measuring the links between 6 peers")
    asked = {peer: policy.view.probe(PeerID(peer), None, 0.0) for peer in "abcdef"}
    assert {len(others) for others in asked.values()} == {4}
    assert policy.view.probe(PeerID("a"), None, 0.5) != asked["a"], "each link is asked for once"
    hear("abcde", synced=False, stage=None)
    assert policy.first_plan(0.5)[0] is None
    hear(synced=False, stage=None)
    assert isinstance(policy.first_plan(1.0)[0], SearchJob)


def test_the_first_plan_does_not_wait_for_links_for_ever(policy, allocator, hear):
    hear(synced=False, stage=None, links=())
    assert policy.first_plan(0.0)[0] is None
    hear(now_s=LINKS_PATIENCE_HEARTBEATS, synced=False, stage=None, links=())
    assert isinstance(policy.first_plan(LINKS_PATIENCE_HEARTBEATS)[0], SearchJob)


def test_a_host_that_is_alone_does_not_wait_for_a_search_of_the_only_layout(allocator, make_heartbeat):
    policy = ReplanPolicy(ClusterView("run", RunSpec()), allocator)
    policy.view.hear("a", make_heartbeat("a"), 0.0)
    _, reason = policy.first_plan(0.0)
    assert (reason, allocator.asked) == ("first plan: 1 peer on 1 stage", [])


def test_the_first_plan_does_without_when_nothing_is_found_or_it_takes_too_long(policy, allocator, hear):
    hear(synced=False, stage=None)
    job, _ = policy.first_plan(0.0)
    hear(now_s=FIRST_PATIENCE_S, synced=False, stage=None)
    draft, reason = policy.first_plan(FIRST_PATIENCE_S)
    assert draft is not None
    assert reason.startswith("first plan: 6 peers")
    answer(policy, allocator, job)
    assert policy.first_plan(1.0)[0] is not None


def test_a_search_behind_a_change_makes_a_second_plan(policy, allocator, hear, live, better):
    begin(policy, live)
    hear()
    assert policy.next_plan(live.plan, 1.0, sequence=2) == (None, "")
    hear(now_s=SEARCHED_S)
    policy.next_plan(live.plan, 2.0, sequence=2)
    job, _ = policy.next_plan(live.plan, 2.0 + SETTLE_HEARTBEATS, sequence=2)
    assert job.previous == live.plan
    allocator.finds = better
    assert answer(policy, allocator, job)
    draft, reason = policy.next_plan(live.plan, SEARCHED_S + 1.0, sequence=2)
    assert draft == better
    assert draft.beginning is None
    assert reason == better.reason


@pytest.mark.parametrize("change", ["drains", "comes", "loses its state"])
def test_what_was_found_for_another_swarm_is_dropped(policy, allocator, hear, live, better, change):
    begin(policy, live)
    hear()
    policy.next_plan(live.plan, 1.0, sequence=2)
    policy.next_plan(live.plan, 2.0, sequence=2)
    hear(now_s=SEARCHED_S)
    job, _ = policy.next_plan(live.plan, SEARCHED_S, sequence=2)
    allocator.finds = better
    match change:
        case "drains":
            hear("b", now_s=SEARCHED_S, draining=True)
        case "comes":
            hear("g", now_s=SEARCHED_S, synced=False, stage=None)
        case "loses its state":
            hear("b", now_s=SEARCHED_S, synced=False)  # it alone was to keep stage 1
    answer(policy, allocator, job)
    draft, _ = policy.next_plan(live.plan, SEARCHED_S + 0.5, sequence=2)
    assert draft != better


def test_nothing_is_searched_before_the_first_commit(policy, hear, make_plan):
    live = make_plan(GROUPS, coordinator="a")
    begin(policy, live)
    for second in range(100):
        hear(version=0, now_s=float(second))
        found, _ = policy.next_plan(live.plan, float(second), sequence=2)
        assert not isinstance(found, SearchJob)


@pytest.mark.parametrize("reports", [1, ODD_REPORTS], ids=["it is not known yet how slow", "it is known"])
def test_a_search_waits_until_it_is_known_how_slow_a_link_has_become(policy, hear, make_heartbeat, live, reports):
    begin(policy, live)
    hear()
    for now_s in (1.0, 2.0):
        policy.next_plan(live.plan, now_s, sequence=2)
    hear(now_s=SEARCHED_S)
    slow = (LinkReport(PeerID("b"), 0.04, 1e5, 1e5, 3),)
    for _ in range(reports):
        policy.view.hear("a", make_heartbeat("a", stage=0, version=57, synced=True, links=slow), SEARCHED_S)
    begun = isinstance(policy.next_plan(live.plan, SEARCHED_S, sequence=2)[0], SearchJob)
    assert begun is (reports == ODD_REPORTS)
    if not begun:
        later_s = SEARCHED_S + REST_HEARTBEATS
        for peer in "abcdef":
            policy.view.hear(peer, make_heartbeat(peer, stage=STAGE_OF[peer], version=57, synced=True), later_s)
        assert isinstance(policy.next_plan(live.plan, later_s, sequence=2)[0], SearchJob), "it does not wait for ever"


# --- another division into stages ---


@pytest.fixture
def halves(make_plan):
    """Three layers a stage."""
    three, six = make_plan([["a", "d", "f"], ["b", "c"]], coordinator="a").plan.stages
    stages = (
        msgspec.structs.replace(three, last_layer=3),
        msgspec.structs.replace(six, first_layer=3, last_layer=6),
    )
    return Layout(stages=stages, spares=("e",), reason="search: 2 stages")


def found(policy, allocator, hear, live, layout):
    """A search has found `layout`. Returns: when."""
    begin(policy, live)
    hear()
    policy.next_plan(live.plan, 1.0, sequence=2)
    policy.next_plan(live.plan, 2.0, sequence=2)
    hear(now_s=SEARCHED_S)
    job, _ = policy.next_plan(live.plan, SEARCHED_S, sequence=2)
    allocator.finds = layout
    assert answer(policy, allocator, job)
    return SEARCHED_S + 0.5


def ending(make_plan, live, halves, *, cutover_version):
    plan = make_plan(GROUPS, coordinator="a", order=(1, 2), base=live, not_started=False)
    return msgspec.structs.replace(plan.plan, cutover_version=cutover_version, next_layout=halves.stages)


def carried(peer, version, *, era=0):
    stage = STAGE_OF[peer]
    return Holding(era=era, version=version, layers=stage_layer_keys(SPEC.model, 2 * stage, 2 * stage + 2))


def placed(*, num_experts):
    """The spec with so many experts of each layer, placed."""
    return msgspec.structs.replace(
        SPEC,
        model=msgspec.structs.replace(SPEC.model, num_experts=num_experts),
        swarm=msgspec.structs.replace(SPEC.swarm, expert_slots=num_experts),
    )


def hear_carried(policy, make_heartbeat, peers, *, version, now_s):
    for peer in peers:
        at = {"stage": STAGE_OF[peer], "version": version, "synced": True, "carried": carried(peer, version)}
        policy.view.hear(peer, make_heartbeat(peer, **at), now_s)


def price(monkeypatch, **fields):
    """Let the change to another layout cost so much."""
    usual = {
        "gain": 0.21,
        "trust": 0.5,
        "drain_s": 4.0,
        "stop_and_copy_s": 20.0,
        "precopy_s": 60.0,
        "meanwhile": 0.99,
    }
    change = Change(**{**usual, "meanwhile": 0.99, "residual_s": 5.0, **fields})
    monkeypatch.setattr(replan_policy, "next_layout_change", lambda snapshot, plan, following: change)


@pytest.fixture
def preparing(policy, allocator, hear, make_plan, live, halves, monkeypatch):
    """The members of the following layout are fetching what they lack. Returns: (the plan that says so, when)."""
    price(monkeypatch)
    now_s = found(policy, allocator, hear, live, halves)
    draft, reason = policy.next_plan(live.plan, now_s, sequence=2)
    assert (draft.stages, draft.spares, draft.next_layout) == (live.plan.stages, live.plan.spares, halves.stages)
    assert (draft.cutover_version, draft.beginning) == (0, None)
    assert reason == "search: 2 stages: its members fetch what they lack"
    plan = ending(make_plan, live, halves, cutover_version=0)
    policy.obey(plan, now_s)
    policy.settle(plan, now_s)
    return plan, now_s


def hear_fetching(policy, make_heartbeat, plan, unfetched_bytes, *, now_s):
    for peer in "abcdef":
        at = {"stage": STAGE_OF[peer], "version": 57, "synced": True, "unfetched_bytes": unfetched_bytes}
        policy.view.hear(peer, make_heartbeat(peer, plan_sequence=plan.sequence, **at), now_s)


def test_the_end_of_a_layout_is_set_when_everybody_has_what_it_lacked(policy, make_heartbeat, live, halves, preparing):
    plan, now_s = preparing
    assert policy.next_plan(plan, now_s, sequence=3) == (None, ""), "nobody has said that it knows of the plan"
    hear_fetching(policy, make_heartbeat, plan, 9_000, now_s=now_s + 1.0)
    assert policy.next_plan(plan, now_s + 1.0, sequence=3) == (None, "")
    hear_fetching(policy, make_heartbeat, plan, 0, now_s=now_s + 2.0)
    draft, reason = policy.next_plan(plan, now_s + 2.0, sequence=3)
    assert (draft.stages, draft.spares, draft.next_layout) == (live.plan.stages, live.plan.spares, halves.stages)
    assert draft.beginning is None
    assert draft.cutover_version > 57 + SPEC.training.s_max
    assert reason == f"another division into stages: at step {draft.cutover_version}"


def test_a_layout_ends_at_once_where_standing_still_costs_less_than_fetching_ahead(
    policy, allocator, hear, live, halves, monkeypatch
):
    price(monkeypatch, stop_and_copy_s=10.0)
    now_s = found(policy, allocator, hear, live, halves)
    draft, _ = policy.next_plan(live.plan, now_s, sequence=2)
    assert draft.next_layout == halves.stages
    assert draft.cutover_version > 57


@pytest.mark.parametrize(("part_left", "ends"), [(0.7, False), (0.9, True)])
def test_a_layout_ends_early_where_state_comes_more_slowly_than_foreseen(
    policy, make_heartbeat, halves, part_left, ends, preparing
):
    """Standing still costs 20 s, fetching ahead 5 s and a tenth of the time that it takes. A third of that is over."""
    plan, now_s = preparing
    lacking = lacking_bytes(Workload.of(SPEC), plan, halves.stages)
    for after_s in (1.0, END_PATIENCE_S):
        for peer in "abcdef":
            left = round(part_left * lacking.get(peer, 0.0))
            at = {"stage": STAGE_OF[peer], "version": 57, "synced": True, "unfetched_bytes": left}
            policy.view.hear(peer, make_heartbeat(peer, plan_sequence=plan.sequence, **at), now_s + after_s)
    draft, _ = policy.next_plan(plan, now_s + END_PATIENCE_S, sequence=3)
    assert (draft is not None and draft.cutover_version > 57) == ends


def test_a_layout_ends_though_nothing_comes_to_its_members_any_more(policy, make_heartbeat, preparing):
    plan, now_s = preparing
    for after_s, left in ((1.0, 9_000), (20.0, 5_000), (END_PATIENCE_S + 10.0, 5_000)):
        hear_fetching(policy, make_heartbeat, plan, left, now_s=now_s + after_s)
        assert policy.next_plan(plan, now_s + after_s, sequence=3) == (None, "")
    last_s = now_s + END_PATIENCE_S + 20.0
    hear_fetching(policy, make_heartbeat, plan, 5_000, now_s=last_s)
    draft, _ = policy.next_plan(plan, last_s, sequence=3)
    assert draft.cutover_version > 57


def test_a_coordinator_that_comes_back_looks_anew_at_what_its_members_lack(policy, make_heartbeat, preparing):
    plan, now_s = preparing
    hear_fetching(policy, make_heartbeat, plan, 3_000, now_s=now_s + 1.0)
    assert policy.next_plan(plan, now_s + 1.0, sequence=3) == (None, "")
    late_s = now_s + 2.0 * END_PATIENCE_S
    policy.begin_term(plan, late_s, continuing=True, silent=None)
    policy.settle(plan, late_s)
    hear_fetching(policy, make_heartbeat, plan, 3_000, now_s=late_s)
    assert policy.next_plan(plan, late_s, sequence=3) == (None, "")


def test_what_follows_is_called_off_if_a_member_leaves_while_others_fetch(policy, hear, make_heartbeat, preparing):
    plan, now_s = preparing
    hear_fetching(policy, make_heartbeat, plan, 9_000, now_s=now_s + 1.0)
    hear("d", now_s=now_s + 1.0, draining=True)
    draft, _ = policy.next_plan(plan, now_s + 1.0, sequence=3)
    assert (draft.cutover_version, draft.next_layout) == (0, ())


def test_nobody_waits_for_members_that_hold_all_they_will_hold(policy, allocator, hear, live):
    two = [msgspec.structs.replace(stage) for stage in live.plan.stages]
    a, d = two[0].members
    halves = [
        msgspec.structs.replace(two[0], last_layer=1, members=(a,)),
        msgspec.structs.replace(two[0], first_layer=1, members=(d,)),
    ]
    narrower = Layout(stages=(*halves, *two[1:]), spares=(), reason="search: 4 stages")
    now_s = found(policy, allocator, hear, live, narrower)
    draft, _ = policy.next_plan(live.plan, now_s, sequence=2)
    assert draft.cutover_version > 57


def test_nothing_is_divided_that_would_end_with_the_run(allocator, make_heartbeat, make_plan, live, halves):
    spec = msgspec.structs.replace(SPEC, training=msgspec.structs.replace(SPEC.training, steps=60))
    policy = ReplanPolicy(ClusterView("run", spec), allocator)

    def hear(*, now_s=0.0):
        for peer in "abcdef":
            at = {"stage": STAGE_OF[peer], "version": 58, "synced": True}
            policy.view.hear(peer, make_heartbeat(peer, **at), now_s)

    now_s = found(policy, allocator, hear, live, halves)
    draft, _ = policy.next_plan(live.plan, now_s, sequence=2)
    assert not isinstance(draft, Layout)


def test_a_run_whose_experts_are_placed_is_divided_as_any_other(allocator, make_heartbeat, live, halves):
    policy = ReplanPolicy(ClusterView("run", placed(num_experts=2)), allocator)

    def hear(*, now_s=0.0):
        for peer in "abcdef":
            at = {"stage": STAGE_OF[peer], "version": 58, "synced": True}
            policy.view.hear(peer, make_heartbeat(peer, **at), now_s)

    now_s = found(policy, allocator, hear, live, halves)
    draft, _ = policy.next_plan(live.plan, now_s, sequence=2)
    assert draft.next_layout == halves.stages


def test_the_next_layout_begins_once_every_stage_is_there_and_all_layers_are_carried(
    policy, make_heartbeat, make_plan, live, halves
):
    plan = ending(make_plan, live, halves, cutover_version=60)
    policy.obey(plan, 0.0)
    policy.begin_term(plan, 0.0, continuing=False, silent=None)
    hear_carried(policy, make_heartbeat, "abdef", version=60, now_s=1.0)
    policy.view.hear("c", make_heartbeat("c", stage=2, version=59, synced=True), 1.0)
    assert policy.next_plan(plan, 1.0, sequence=3) == (None, ""), "stage 2 has not come so far"
    policy.view.hear("c", make_heartbeat("c", stage=2, version=60, synced=True), 1.5)
    policy.view.hear("f", make_heartbeat("f", stage=2, version=60, synced=True), 1.5)
    late_s = 1.5 + PATIENCE_HEARTBEATS
    assert policy.next_plan(plan, 1.5, sequence=3) == (None, ""), "reports of the last step may be on their way"
    hear_carried(policy, make_heartbeat, "abde", version=60, now_s=late_s)
    assert policy.next_plan(plan, late_s, sequence=3) == (None, ""), "nobody carries the last stage's layers"
    hear_carried(policy, make_heartbeat, "c", version=60, now_s=late_s)
    assert policy.next_plan(plan, late_s, sequence=3) == (None, ""), "that c and f have the same nobody has said"
    late_s += PATIENCE_HEARTBEATS
    hear_carried(policy, make_heartbeat, "abcdef", version=60, now_s=late_s)
    draft, reason = policy.next_plan(plan, late_s, sequence=3)
    assert draft.stages == halves.stages
    assert draft.spares == ("e",)
    assert (draft.beginning.era, draft.beginning.version, draft.beginning.from_era) == (1, 60, 0)
    assert draft.cutover_version == 0
    assert reason == "3 stages became 2 at step 60: layers 0-3, 3-6"


def test_the_next_layout_begins_once_every_group_of_experts_has_compared_its_states(
    allocator, make_heartbeat, make_plan, live, halves
):
    """What a holder has that is there before its mates would die with it, and nobody would see whether they come to the
    same."""
    spec = placed(num_experts=2)
    policy = ReplanPolicy(ClusterView("run", spec), allocator)
    plan = ending(make_plan, live, halves, cutover_version=60)
    policy.obey(plan, 0.0)
    policy.begin_term(plan, 0.0, continuing=False, silent=None)

    def hear(now_s, *groups):
        """Everybody is at the end; these groups report it."""
        m = spec.training.microbatches_per_step
        usual = {"step": 59, "members": 2, "microbatches": m, "duplicates": 0, "given_up": 0, "tokens": 1}
        commits = tuple(CommitReport(stage=g, staleness_steps_mean=0.0, loss=None, digest="", **usual) for g in groups)
        carried = Holding(era=0, version=60, layers=held_keys(spec.model, placed=True))
        for peer in "abcdef":
            at = {"stage": STAGE_OF[peer], "version": 60, "synced": True, "carried": carried, "commits": commits}
            policy.view.hear(peer, make_heartbeat(peer, **at), now_s)

    hear(1.0, 0, 1, 2)
    assert policy.next_plan(plan, 1.0, sequence=3) == (None, ""), "no group of experts has reported"
    hear(1.1, 3, 4, 5, 7, 8)
    assert policy.next_plan(plan, 1.1, sequence=3) == (None, ""), "group 6 has not"
    hear(1.2, 6)
    draft, _ = policy.next_plan(plan, 1.2, sequence=3)
    assert draft.stages == halves.stages


def test_who_carries_a_version_of_another_era_does_not_count(policy, make_heartbeat, make_plan, live, halves):
    plan = ending(make_plan, live, halves, cutover_version=60)
    policy.obey(plan, 0.0)
    policy.begin_term(plan, 0.0, continuing=False, silent=None)
    for now_s in (1.0, 2.0, 4.0):
        hear_carried(policy, make_heartbeat, "abcdef", version=60, now_s=now_s)
        strange = carried("a", 60, era=3)
        for peer in "ad":
            at = {"stage": 0, "version": 60, "synced": True, "carried": strange}
            policy.view.hear(peer, make_heartbeat(peer, **at), now_s)
        draft, _ = policy.next_plan(plan, now_s, sequence=3)
        assert draft is None


def test_an_end_that_came_too_late_is_put_off_twice_as_far(
    policy, hear, make_plan, make_heartbeat, live, halves, preparing
):
    fetching, now_s = preparing
    hear_fetching(policy, make_heartbeat, fetching, 0, now_s=now_s)
    draft, _ = policy.next_plan(fetching, now_s, sequence=2)
    notice = draft.cutover_version - 57 - SPEC.training.s_max - 1
    plan = ending(make_plan, live, halves, cutover_version=draft.cutover_version)
    policy.obey(plan, now_s)
    far = draft.cutover_version + 3
    hear(version=far, now_s=now_s + 1.0)
    again, _ = policy.next_plan(plan, now_s + 1.0, sequence=3)
    assert again.next_layout == halves.stages
    assert again.cutover_version == far + SPEC.training.s_max + 1 + 2 * notice


@pytest.mark.parametrize(
    ("step_s", "times", "cutover_version"),
    [
        pytest.param(40.0, 3.0, 57, id="what has begun is made again"),
        pytest.param(40.0, 1.05, 58, id="hardly quicker: the step that has begun is ended, and no more"),
        pytest.param(40.0, 0.95, 60, id="slower, as far as is foreseen"),
        pytest.param(1.0, 3.0, 63, id="steps are short: all members have to know of it first"),
    ],
)
def test_a_slow_layout_ends_at_the_version_that_is(
    policy, make_heartbeat, monkeypatch, step_s, times, cutover_version, preparing
):
    """Args: times: what follows should be so many times quicker."""
    plan, now_s = preparing
    for step in range(50, 57):
        policy.view.ledger.pace.committed(0, step, SPEC.tokens_per_step, now_s - (56.5 - step) * step_s)

    def predict_step_time(stages, now_s):
        return Foreseen(100.0 * (times if len(stages) == 2 else 1.0), "compute", 0)

    monkeypatch.setattr(policy.view, "predict_step_time", predict_step_time)
    hear_fetching(policy, make_heartbeat, plan, 0, now_s=now_s)
    draft, _ = policy.next_plan(plan, now_s, sequence=2)
    assert draft.cutover_version == cutover_version


@pytest.mark.parametrize(("ahead", "more"), [(1, 1), (2, 0)], ids=["it may go on", "it waits for the others"])
def test_a_stage_that_waits_for_the_others_does_not_pass_the_end_with_their_next_commit(
    policy, make_heartbeat, monkeypatch, ahead, more, preparing
):
    """Steps took 10 s, and now the one under way has taken 40 s; a plan is known to everybody after 6 s.

    Args: ahead: how many versions the first stage is ahead of the others; more: how many it may make by then."""
    assert SPEC.training.s_max == 1
    plan, now_s = preparing
    for step in range(50, 57):
        policy.view.ledger.pace.committed(0, step, SPEC.tokens_per_step, now_s - 40.0 - (56 - step) * 10.0)

    def predict_step_time(stages, now_s):
        return Foreseen(SPEC.tokens_per_step / (10.0 if len(stages) == 2 else 30.0), "compute", 0)

    monkeypatch.setattr(policy.view, "predict_step_time", predict_step_time)
    hear_fetching(policy, make_heartbeat, plan, 0, now_s=now_s)
    policy.view.ledger.note_version(0, 57 + ahead)
    draft, _ = policy.next_plan(plan, now_s, sequence=2)
    assert draft.cutover_version == 57 + ahead + more


@pytest.mark.parametrize("change", ["leaves", "dies"])
def test_a_layout_does_not_end_if_a_member_goes(policy, hear, make_plan, live, halves, change):
    plan = ending(make_plan, live, halves, cutover_version=60)
    policy.obey(plan, 0.0)
    policy.begin_term(plan, 0.0, continuing=False, silent=None)
    hear(now_s=1.0)
    if change == "leaves":
        hear("d", now_s=1.5, draining=True)
        now_s = 2.0
    else:
        now_s = 30.0
        hear("abcef", now_s=now_s)
    draft, _ = policy.next_plan(plan, now_s, sequence=3)
    assert isinstance(draft, Layout)
    assert (draft.cutover_version, draft.next_layout, draft.beginning) == (0, (), None)


def test_a_layout_does_not_end_if_nothing_moves_any_more(policy, hear, make_plan, live, halves):
    plan = ending(make_plan, live, halves, cutover_version=60)
    policy.obey(plan, 0.0)
    policy.begin_term(plan, 0.0, continuing=False, silent=None)
    hear(version=59, now_s=END_PATIENCE_S - 1.0)
    assert policy.next_plan(plan, END_PATIENCE_S - 1.0, sequence=3) == (None, "")
    hear(version=59, now_s=END_PATIENCE_S)
    draft, reason = policy.next_plan(plan, END_PATIENCE_S, sequence=3)
    assert draft.stages == plan.stages
    assert (draft.cutover_version, draft.next_layout) == (0, ())
    assert reason == "the stages stay as they are: not all have come to step 60"


def test_no_end_is_announced_while_a_stage_cannot_certify_it(policy, allocator, hear, live, halves, monkeypatch):
    price(monkeypatch, stop_and_copy_s=10.0)
    now_s = found(policy, allocator, hear, live, halves)
    hear("d", now_s=now_s, synced=False, version=0)
    assert policy.next_plan(live.plan, now_s, sequence=2)[0] is None


def test_terms_do_not_lengthen_the_wait_for_the_end_of_a_layout(policy, hear, make_plan, live, halves):
    plan = ending(make_plan, live, halves, cutover_version=60)
    policy.obey(plan, 0.0)
    for version in range(56, 60):
        policy.view.ledger.pace.committed(0, version, SPEC.tokens_per_step, 0.1 * version)
    began_s = END_PATIENCE_S
    policy.begin_term(plan, began_s, continuing=False, silent=None)
    hear(version=59, now_s=began_s + 7.0)
    draft, reason = policy.next_plan(plan, began_s + 7.0, sequence=3)
    assert (draft.cutover_version, draft.next_layout) == (0, ())
    assert reason == "the stages stay as they are: not all have come to step 60"


def test_who_takes_over_gives_the_end_of_a_layout_as_much_time_as_who_announced_it(
    policy, hear, make_plan, live, halves
):
    """It knows of no commit, so for all it knows nothing has moved for ever."""
    plan = ending(make_plan, live, halves, cutover_version=60)
    policy.obey(plan, 0.0)
    began_s = 2.0 * END_PATIENCE_S
    policy.begin_term(plan, began_s, continuing=False, silent=None)
    hear(version=59, now_s=began_s + 1.0)
    assert policy.next_plan(plan, began_s + 1.0, sequence=3) == (None, "")
    hear(version=59, now_s=began_s + END_PATIENCE_S)
    draft, _ = policy.next_plan(plan, began_s + END_PATIENCE_S, sequence=3)
    assert (draft.cutover_version, draft.next_layout) == (0, ())


class Quiet:
    """Nine peers whose figures are noise around what is: heartbeats with links and seconds a forward. A third of the
    model fits in a device, and no more."""

    def __init__(self, make_advert, make_heartbeat, *, noise, seed):
        self.rng = random.Random(seed)
        self.advert = make_advert("small", memory_bytes=21_000_000)
        self.make_heartbeat, self.noise = make_heartbeat, noise
        self.peers = [f"p{number}" for number in range(9)]
        self.speeds = {peer: 1e10 * (1.0 + number % 3) for number, peer in enumerate(self.peers)}

    def noisy(self, figure):
        return figure * self.rng.uniform(1.0 - self.noise, 1.0 + self.noise)

    def links(self, peer, second):
        others = [other for other in self.peers if other != peer]
        told = [others[(4 * second + index) % len(others)] for index in range(4)]
        near = {other: int(other[1]) // 3 == int(peer[1]) // 3 for other in others}
        return tuple(
            LinkReport(
                peer=other,
                round_trip_s=self.noisy(0.01 if near[other] else 0.09),
                bytes_per_s=self.noisy(5e7 if near[other] else 2e6),
                received_bytes_per_s=self.noisy(5e7 if near[other] else 2e6),
                num_probes=3,
            )
            for other in told
        )

    def beat(self, peer, plan, flop_of, second):
        stage = plan.stage_of(peer) if plan else None
        last = plan is not None and stage == len(plan.stages) - 1
        flop = flop_of(stage) * (3.0 if last else 1.0) if stage is not None else 0.0
        return self.make_heartbeat(
            peer,
            advert=self.advert,
            plan_sequence=plan.sequence if plan else 0,
            stage=stage,
            version=second,
            synced=stage is not None,
            links=self.links(peer, second),
            forward_s=self.noisy(flop / self.speeds[peer]),
        )


@pytest.mark.sim
@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_a_quiet_hour_of_noisy_measurements_moves_nobody(make_advert, make_heartbeat, make_unsigned, noise):
    """Sixty terms by sixty coordinators, each of which hears figures that are off by up to 10 or 30 %."""
    quiet = Quiet(make_advert, make_heartbeat, noise=noise, seed=3)
    allocator = EvolutionaryAllocator()
    workload_flop = Workload.of(SPEC).layer_flop
    plan, plans, searches = None, [], []

    def flop_of(stage):
        return sum(workload_flop[plan.stages[stage].first_layer : plan.stages[stage].last_layer])

    policies = [ReplanPolicy(ClusterView("run", SPEC), allocator) for _ in range(4)]
    policy, second = policies[0], 0

    def search(job):
        layout, _ = allocator.search(job.snapshot, job.previous, seed=job.seed)
        searches.append(second)
        policy.searched(Searched(job=job, layout=layout, reason=""))

    def hear():
        for peer in quiet.peers:
            policy.view.hear(peer, quiet.beat(peer, plan, flop_of, second), float(second))

    while second < 4:
        hear()
        second += 1
    second = 0
    search(policy.first_plan(0.0)[0])
    draft, _ = policy.first_plan(0.0)
    plan = plan_after(None, draft, term=1)
    for second in range(1, 3600):
        if (second - 1) % 60 == 0:
            term = 1 + second // 60
            transfer = policy.hand_over(make_unsigned(plan), float(second)) if term > 1 else None
            policy = policies[term % len(policies)]
            plan = msgspec.structs.replace(plan, term=term, sequence=plan.sequence + 1, not_started=False)
            for each in policies:
                each.obey(plan, float(second))
            if transfer:
                policy.view.inherit(transfer)
            policy.begin_term(plan, float(second), continuing=False, silent=None)
        hear()
        found, reason = policy.next_plan(plan, float(second), sequence=plan.sequence + 1)
        if isinstance(found, Layout):
            plans.append((second, reason))
            plan = plan_after(plan, found, term=plan.term)
        if isinstance(found, SearchJob):
            search(found)
    assert [when for when, _ in plans if when > 2 * REST_HEARTBEATS] == [], plans
    assert len([when for when in searches if when > 120]) > 200


def plan_after(before, draft, *, term):
    return Plan(
        run="run",
        term=term,
        sequence=before.sequence + 1 if before else 1,
        previous="",
        coordinator=PeerID("p0"),
        stages=draft.stages,
        spares=draft.spares,
        not_started=before is None,
    )
