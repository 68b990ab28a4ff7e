"""What the coordinator makes of what peers say they measured."""

import pytest

from shoal.coordinator.survey import Survey
from shoal.peer.model.flop import job_flop
from shoal.protocol.identity import PeerID
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec

SPEED = 2e12


@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_one_device_is_as_fast_in_the_last_stage_as_in_another(make_heartbeat, make_plan, keep):
    """The last stage's figure is of its whole job, the others' of a forward."""
    model = ModelSpec(vocab_size=64, dim=32, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=64, context=16)
    spec = RunSpec(model=model, training=TrainingSpec(keep=keep))
    survey = Survey(spec)
    plan = make_plan([["a"], ["b"]], coordinator="a").plan
    survey.obey(plan)
    forward = [sum(survey._workload.layer_flop[s.first_layer : s.last_layer]) for s in plan.stages]
    loss = job_flop(forward[1], recomputes=spec.training.recomputes).loss
    for _ in range(20):
        for stage, (peer, flop) in enumerate((("a", forward[0]), ("b", loss))):
            says = {"plan_sequence": plan.sequence, "stage": stage, "forward_s": flop / SPEED}
            survey.hear(PeerID(peer), make_heartbeat(peer, **says))
    speeds = survey._speeds.speeds({PeerID("a"): 1.0, PeerID("b"): 1.0}, seen="ab")
    assert speeds == pytest.approx({"a": SPEED, "b": SPEED})
