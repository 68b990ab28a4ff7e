"""Nobody votes for a plan that contradicts what it knows. Each of these plans went live when voters did not judge."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from shoal.coordinator import proposer
from shoal.coordinator.allocate.interface import Beginning, Layout
from shoal.coordinator.voting import ANSWER_HEARTBEATS, ASKED_MAX, UNMET_MIN, Acquaintance, Judge
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Holding, Ping, Standing

# --- a coordinator that proposes anything, among honest members ---


def layout_of(plan, **changes):
    return replace(Layout(stages=plan.stages, spares=plan.spares, reason="because I can"), **changes)


def alone(plan, me, **_):
    """It drops all others."""
    stages = tuple(
        msgspec.structs.replace(stage, members=(msgspec.structs.replace(plan.stages[0].members[0], peer=me),))
        for stage in plan.stages[:1]
    )
    whole = msgspec.structs.replace(stages[0], last_layer=plan.stages[-1].last_layer)
    return layout_of(plan, stages=(whole,), spares=(), beginning=Beginning(era=plan.era + 1))


def from_the_seed(plan, **_):
    return layout_of(plan, beginning=Beginning(era=plan.era + 1))


def from_a_version_of_its_own(plan, **_):
    return layout_of(plan, beginning=Beginning(era=plan.era + 1, version=4800, from_era=plan.era))


def with_shares_of_1e17(plan, me, **_):
    def grasp(member):
        return msgspec.structs.replace(member, share=1e17) if member.peer == me else member

    return layout_of(
        plan, stages=tuple(msgspec.structs.replace(s, members=tuple(map(grasp, s.members))) for s in plan.stages)
    )


def with_forty_invented_spares(plan, **_):
    return layout_of(plan, spares=(*plan.spares, *(Identity(bytes([n, 7] * 16)).peer_id for n in range(40))))


def without_one(plan, others, **_):
    out = others[-1]
    stages = [
        msgspec.structs.replace(s, members=tuple(m for m in s.members if m.peer != out) or plan.stages[0].members[:1])
        for s in plan.stages
    ]
    return layout_of(plan, stages=tuple(stages), spares=tuple(p for p in plan.spares if p != out))


PLANS = {
    alone: "itself",
    from_the_seed: "goes back to version 0",
    from_a_version_of_its_own: "goes back to version 4800",
    with_shares_of_1e17: "times apart",
    with_forty_invented_spares: "has not met 40",
    without_one: "it drops",
}


@pytest.fixture
def anything_goes(monkeypatch):
    """An honest proposer would mend such shares."""
    monkeypatch.setattr(proposer, "APART_MAX", float("inf"))


@pytest.mark.sim
@pytest.mark.usefixtures("anything_goes")
@pytest.mark.parametrize("evil", PLANS, ids=lambda evil: evil.__name__)
def test_an_honest_member_does_not_vote_for_it(run_swarm, evil):
    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(5.0)  # everybody has said that it holds its state
        leader = swarm.coordinator
        others = [peer for peer in swarm.alive() if peer is not leader]
        for one in others:
            for other in others:
                if one is not other:
                    other.port.spawn(one.coordination._endpoint.ask(other.peer_id, Ping(), Ping))
        await asyncio.sleep(0.5)
        live, core = leader.coordination.plan, leader.coordination.core
        layout = evil(live.plan, me=leader.peer_id, others=[peer.peer_id for peer in others])

        async def propose():
            for command in core._proposer.propose(live, layout, swarm.world.now_s()):
                leader.coordination._carry_out(command)
            return core._proposer._ballot.plan

        offered = await leader.port.spawn(propose())
        said = []
        for _ in range(40):
            await asyncio.sleep(0.1)
            now_s = swarm.world.now_s()
            said += [text for peer in others for text in peer.coordination.core.view.refusals.tell(now_s)]
            voted = [peer.coordination.core.chain.accepted for peer in others]
            assert offered.digest not in [plan.digest for plan in voted if plan is not None]
            assert all(peer.coordination.plan.digest != offered.digest for peer in swarm.alive())
        assert any(PLANS[evil] in text and f"refused plan {offered.plan.sequence}: " in text for text in said), said
        assert any("refused plan" in risk for risk in leader.coordination.status().risks), "and the coordinator says it"

    run_swarm(scenario, min_peers=6)


# --- what is honest is never refused: one rule at a time ---

GROUPS = [["a", "b"], ["c", "d"]]


def standing_of(**says):
    usual = {"live": b"", "term": 1, "era": 0, "stage": None, "version": 0, "synced": False}
    return Standing(**(usual | says))


@pytest.fixture
def judged(make_plan, make_heartbeat):
    """judged(groups, told, …): what `a` says of the next plan, after it was told these standings."""

    def go(groups, told=None, *, heard="", excluded="", unmet=(), leaves=False, live=None, own=None, kept=None, **says):
        live = live or make_plan(GROUPS, coordinator="c", spares=("e",))
        plan = make_plan(groups, coordinator="c", order=(1, 2), base=live, **says)
        judge = Judge(me="a", heartbeat_s=1.0, revision=0, name_of=str.upper)
        knows = Acquaintance(heard=frozenset(heard), excluded=frozenset(excluded), unmet=frozenset(unmet))
        asked = judge.questions(plan, live.plan, knows, 0.0)
        assert judge.is_waiting(0.0) == bool(asked)
        assert not judge.is_waiting(ANSWER_HEARTBEATS), "silence is no objection"
        for peer, standing in (told or {}).items():
            judge.told(peer, standing)
        assert judge.questions(plan, live.plan, knows, 0.1) == (), "once"
        own = make_heartbeat("a", **(own or {}))
        return set(asked), judge.flaw(plan, live.plan, knows, own=own, leaves=leaves, **(kept or {}))

    return go


STAYS, LEAVES = standing_of(), standing_of(leaves=True)


@pytest.mark.parametrize(
    ("knows", "told", "asked", "flaw"),
    [
        ({"heard": "e"}, {"e": STAYS}, {"e"}, "it drops E, which A hears"),
        ({"heard": "e"}, {"e": LEAVES}, {"e"}, ""),
        ({"heard": "e"}, {"e": standing_of(revision=1)}, {"e"}, ""),  # it trains to another end
        ({"heard": "e"}, {"e": None}, {"e"}, ""),  # it died a moment ago
        ({"heard": "e"}, {}, {"e"}, ""),
        ({}, {"e": STAYS}, set(), ""),  # nobody has heard it: the coordinator knows better
        ({"heard": "e", "excluded": "e"}, {"e": STAYS}, set(), ""),
    ],
)
def test_a_member_may_be_dropped_that_does_not_say_that_it_stays(judged, knows, told, asked, flaw):
    assert judged(GROUPS, told, **knows) == (asked, flaw)


def test_only_who_leaves_or_is_excluded_votes_for_a_plan_without_itself(judged):
    without = [["b"], ["c", "d"]]
    assert judged(without, spares=("e",))[1] == "it drops A itself"
    assert judged(without, spares=("e",), leaves=True)[1] == ""
    assert judged(without, spares=("e",), excluded="a")[1] == ""


HOLDS_0, HOLDS_1 = (standing_of(stage=stage, version=7, synced=True) for stage in (0, 1))
OWN = {"stage": 0, "version": 7, "synced": True}


@pytest.mark.parametrize(
    ("says", "told", "own", "is_refused"),
    [
        ({}, {"c": HOLDS_1}, OWN, True),
        ({}, {"b": HOLDS_0, "d": HOLDS_1}, {}, True),
        ({}, {"b": HOLDS_0, "c": standing_of(stage=1, version=7), "d": None}, OWN, False),  # stage 1 has lost its state
        ({}, {}, OWN, False),
        ({}, {"c": standing_of(stage=1, version=7, synced=True, era=3)}, OWN, False),
        # A whole snapshot is ahead of what a stage holds: the stage began the era again without being told to.
        ({"restore_version": 7}, {"b": HOLDS_0, "d": standing_of(stage=1, version=2, synced=True)}, OWN, False),
        ({"restore_version": 99}, {"c": standing_of(stage=1, version=99, synced=True), "d": HOLDS_1}, OWN, True),
    ],
)
def test_a_plan_goes_back_only_where_state_is_lost(judged, says, told, own, is_refused):
    asked, flaw = judged(GROUPS, told, own=own, spares=("e",), era=1, **says)
    assert asked == {"b", "c", "d"}
    assert flaw.endswith("and every stage still has its state") is is_refused


def on_disk(version, *layers):
    return {"holdings": (Holding(era=0, version=version, layers=layers),)}


@pytest.mark.parametrize(
    ("says", "told", "own", "flaw"),
    [
        ({}, {"c": standing_of(**on_disk(35, "y"))}, on_disk(35, "x"), "version 0, and version 35 is on the disks"),
        ({"restore_version": 28}, {"c": standing_of(**on_disk(35, "x", "y"))}, {}, "version 28, and version 35 is on"),
        ({"restore_version": 35}, {"c": standing_of(**on_disk(35, "x", "y"))}, {}, ""),
        ({}, {"c": standing_of(**on_disk(35, "y"))}, {}, ""),  # the disk of x has gone, too
        ({}, {"c": standing_of(**on_disk(28, "x"))}, on_disk(35, "y"), ""),
        ({}, {"c": None}, on_disk(35, "y"), ""),
    ],
)
def test_a_plan_begins_at_the_newest_certified_version_while_it_is_on_disks(judged, says, told, own, flaw):
    kept = {"newest": (0, 35), "layers": frozenset("xy")}
    found = judged(GROUPS, told, own=own, spares=("e",), era=1, kept=kept, **says)[1]
    assert (flaw in found) if flaw else found == ""


def test_the_end_of_a_layout_is_no_way_back(judged, make_plan):
    live = make_plan(GROUPS, coordinator="c", spares=("e",), cutover_version=9, next_layout=())
    says = {"era": 1, "restore_version": 9, "restore_era": 0, "spares": ("e",)}
    assert judged(GROUPS, {"c": HOLDS_1}, live=live, own=OWN, **says) == (set(), "")


def test_many_newcomers_at_once_are_met_first(judged):
    few, many = (tuple(f"new{n}" for n in range(number)) for number in (UNMET_MIN, 40))
    assert judged(GROUPS, spares=("e", *few), unmet=few)[1] == ""
    assert judged(GROUPS, spares=("e", *many), unmet=many)[1] == "A has not met 40 of its 45 members"
    assert judged(GROUPS, spares=("e", *many), unmet=many[:20])[1] == ""


def test_no_voter_asks_a_thousand(make_plan):
    live = make_plan([[f"p{n}" for n in range(1000)]], coordinator="p0")
    plan = make_plan([["p0", "p1"]], coordinator="p0", order=(1, 2), base=live)
    judge = Judge(me="p1", heartbeat_s=1.0, revision=0, name_of=str)
    assert len(judge.questions(plan, live.plan, Acquaintance(heard=frozenset(live.plan.members)), 0.0)) == ASKED_MAX


@pytest.mark.sim
def test_a_member_that_claims_any_speed_makes_no_honest_plan_unfit(run_swarm):
    async def scenario(swarm):
        await swarm.begin(5)
        await swarm.add("snail", flop_per_s=1e-300, upload_bytes_per_s=0.0)
        await swarm.until(
            lambda: all(len(peer.plan.members) == 6 for peer in swarm.alive() if peer.coordination.plan), within_s=20.0
        )
        await asyncio.sleep(5.0)
        assert not any(peer.coordination.core.view.refusals.tell(swarm.world.now_s()) for peer in swarm.alive())
        shares = [[member.share for member in stage.members] for stage in swarm.coordinator.plan.stages]
        assert min(min(group) / max(group) for group in shares) < 1e-5, "else nothing was at stake"

    run_swarm(scenario, min_peers=5)
