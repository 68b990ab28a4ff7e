"""What the coordinator makes of what peers say they measured."""

import pytest

from shoal.coordinator.allocate.interface import MeasuredPeer
from shoal.coordinator.allocate.measured import JOB_VARIANCE
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.cost.workload import layer_costs
from shoal.coordinator.era import CheckpointCatalog
from shoal.peer.model.flop import job_flop
from shoal.protocol.identity import PeerID
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec, TrainingSpec

SPEED = 2e12


@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_one_device_is_as_fast_in_the_last_stage_as_in_another(make_heartbeat, make_plan, keep):
    """The last stage's figure is of its whole job, the others' of a forward."""
    model = ModelSpec(vocab_size=64, dim=32, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=64, context=16)
    spec = RunSpec(model=model, training=TrainingSpec(keep=keep))
    view = ClusterView("run", spec)
    plan = make_plan([["a"], ["b"]], coordinator="a").plan
    view.obey(plan, 0.0)
    forward = [sum(view.workload.layer_flop[s.first_layer : s.last_layer]) for s in plan.stages]
    loss = job_flop(spec, forward[1]).loss
    for _ in range(20):
        for stage, (peer, flop) in enumerate((("a", forward[0]), ("b", loss))):
            says = {"plan_sequence": plan.sequence, "stage": stage, "forward_s": flop / SPEED}
            view.hear(PeerID(peer), make_heartbeat(peer, **says), 0.0)
    assert [view.roster.at(PeerID(name)).speed.value for name in "ab"] == pytest.approx([SPEED, SPEED])


def test_of_placed_experts_a_forward_that_is_told_has_none(make_heartbeat, make_plan):
    model = ModelSpec(num_layers=4, num_experts=4)
    view = ClusterView("run", RunSpec(model=model, swarm=SwarmSpec(expert_slots=2)))
    plan = make_plan([["a"], ["b"]], coordinator="a").plan
    view.obey(plan, 0.0)
    costs = layer_costs(model, with_experts=False)
    flop = view.workload.tokens_per_microbatch * sum(costs[slice(*plan.stages[0].layers)])
    for _ in range(20):
        says = {"plan_sequence": plan.sequence, "stage": 0, "forward_s": flop / SPEED}
        view.hear(PeerID("a"), make_heartbeat("a", **says), 0.0)
    assert view.roster.at(PeerID("a")).speed.value == pytest.approx(SPEED)


def peers_with(memory_bytes, names):
    return tuple(
        MeasuredPeer(
            peer=PeerID(name), flop_per_s=1e12, upload_bytes_per_s=1e7, memory_bytes=memory_bytes, has_data=True
        )
        for name in names
    )


def test_a_run_says_how_much_memory_it_waits_for():
    model = ModelSpec(dim=2048, num_layers=16, num_heads=16, num_kv_heads=8, ffn_dim=5632)
    view = ClusterView("run", RunSpec(model=model))
    assert view.shortage(peers_with(8_000_000_000, "a")) == (
        "waiting for peers with 12.6 GB of memory in all: the model takes 20.6 GB while it trains, and the one "
        "peer has 8.0 GB"
    )
    assert "the 2 peers have 16.0 GB" in view.shortage(peers_with(8_000_000_000, "ab"))
    assert view.shortage(peers_with(8_000_000_000, "abc")) == ""


@pytest.mark.parametrize(("stages", "wanted"), [("auto", [None, None, None]), (2, [None, 2, 2])])
def test_a_layout_is_to_have_the_number_of_stages_as_soon_as_there_are_so_many_peers(stages, wanted):
    view = ClusterView("run", RunSpec(swarm=SwarmSpec(stages=stages)))
    made = [
        view.snapshot(peers_with(1, names), None, CheckpointCatalog.of(()), 0.0, knows_network=False)
        for names in ("a", "ab", "abc")
    ]
    assert [snapshot.num_stages for snapshot in made] == wanted


@pytest.mark.parametrize(("flop_per_s", "runs_ahead"), [(60e9, False), (600e9, True)])
def test_a_first_plan_is_made_for_the_steps_that_fill_its_life(make_heartbeat, make_advert, flop_per_s, runs_ahead):
    """Six homes at 60 GFLOP/s by their probes take 1.7 s a step at best, and took 10 s: the first 80, synchronous
    steps are longer than the ten minutes for which a layout is expected to last."""
    model = ModelSpec(dim=128, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=352, context=128)
    training = TrainingSpec(steps=1000, microbatches_per_step=128, microbatch_size=4, synchronous_steps=80)
    view = ClusterView("run", RunSpec(model=model, training=training))
    for name in "abcdef":
        view.hear(PeerID(name), make_heartbeat(name, advert=make_advert(name, flop_per_s=flop_per_s)), 0.0)
    assert 80 * view.step_s_at_best(0.0) < 300.0, "by the seconds at best alone, steps run ahead in both"
    assert view.runs_ahead(0.0) is runs_ahead


def test_a_report_that_heartbeats_repeat_makes_a_speed_no_more_certain(make_heartbeat, make_plan):
    """Microbatches of six seconds: after 16 heartbeats a second apart there are hardly three of them."""
    plan = make_plan([["a"], ["b"]], coordinator="a").plan

    def variance(forward_s):
        view = ClusterView("run", RunSpec())
        view.obey(plan, 0.0)
        says = {"plan_sequence": plan.sequence, "stage": 0, "forward_s": forward_s}
        for second in range(16):
            view.hear(PeerID("a"), make_heartbeat("a", **says), float(second))
        return view.roster.at(PeerID("a")).speed.variance(16.0)

    assert variance(2.0) > JOB_VARIANCE > 2.0 * variance(0.02)
