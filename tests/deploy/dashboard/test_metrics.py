"""What Prometheus scrapes, and what the Grafana board asks of it."""

import json
import re
from pathlib import Path

import pytest

from pretend_swarm import Pretend
from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.metrics import render_metrics
from shoal.deploy.record.report import Joined, LimitsNow, Status
from shoal.protocol.messages import Comparison

BOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "shoal.json"
_SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (-?[0-9.e+-]+)')
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Families by name, as a scraper would read them: every sample after its HELP and TYPE."""
    families: dict[str, list[tuple[dict[str, str], float]]] = {}
    lines = iter(text.removesuffix("\n").split("\n"))
    for line in lines:
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in families, f"{name} comes twice"
            assert next(lines) in (f"# TYPE {name} gauge", f"# TYPE {name} counter")
            families[name] = []
            continue
        found = _SAMPLE.fullmatch(line)
        assert found, line
        assert found[1] == name
        families[name].append((dict(_LABEL.findall(found[2] or "")), float(found[3])))
    return families


@pytest.fixture
def crowded() -> dict[str, list[tuple[dict[str, str], float]]]:
    pretend = Pretend(peers=6, stages=3, experts=4)
    feed = Feed(pretend.facts(), title="", wall_minus_clock_s=0.0)
    pretend.begin(feed, 200.0, history_s=120)
    return parsed(render_metrics(feed.view(200.0)))


def test_before_anything_is_heard_there_is_something_to_scrape(feed):
    families = parsed(render_metrics(feed.view(0.0)))
    assert families["shoal_step"] == [({}, 0.0)]
    assert "shoal_loss" not in families
    assert "shoal_self_busy_ratio" not in families


def test_the_run_its_stages_its_peers_and_this_one(feed, make_status, make_peer, make_contribution, id_of):
    feed.take(Joined(peer=id_of("a"), name="peer-a", invite=""), 0.0)
    peers = make_peer("a", 0), make_peer("b", 1, share=0.5), make_peer("c", 1, share=0.5, seen_s_ago=9.0)
    feed.take(Status(status=make_status(*peers, validation_loss=3.5, validation_step=8)), 0.0)
    feed.take(make_contribution("a", limits=LimitsNow(paused=True)), 0.0)
    families = parsed(render_metrics(feed.view(2.0)))
    assert families["shoal_loss"] == [({}, 3.25)]
    assert families["shoal_validation_loss"] == [({}, 3.5)]
    assert families["shoal_status_age_seconds"] == [({}, 2.0)]
    assert families["shoal_stage_replicas"] == [({"stage": "0"}, 1.0), ({"stage": "1"}, 1.0)]
    assert {labels["state"]: count for labels, count in families["shoal_peers"]}["silent"] == 1.0
    assert families["shoal_peer_share"][1] == ({"peer": 8 * "b", "name": "peer-b", "stage": "1"}, 0.5)
    assert families["shoal_self_microbatches_total"] == [({}, 40.0)]
    assert families["shoal_self_paused"] == [({}, 1.0)]
    assert families["shoal_self_limited"] == [({"by": "pause"}, 1.0)]


def test_what_was_foreseen_stands_beside_what_is_seen(feed, make_status, make_peer):
    told = Comparison(12_400.0, "", seen_tokens_per_s=11_900.0, steps=40)
    feed.take(Status(status=make_status(make_peer("a", 0), comparison=told)), 0.0)
    families = parsed(render_metrics(feed.view(0.0)))
    assert families["shoal_foreseen_tokens_per_second"] == [({}, 12_400.0)]
    assert families["shoal_seen_tokens_per_second"] == [({}, 11_900.0)]


def test_experts_have_their_replicas_and_their_load(crowded):
    replicas, loads = crowded["shoal_expert_replicas"], crowded["shoal_expert_load"]
    assert [labels for labels, _ in replicas] == [
        {"stage": str(stage), "expert": str(expert)} for stage in range(3) for expert in range(4)
    ]
    assert all(1.0 <= count <= 2.0 for _, count in replicas)
    assert sum(load for labels, load in loads if labels["stage"] == "1") == pytest.approx(4.0, abs=0.01)


def test_a_name_cannot_forge_a_sample(feed, make_status, make_peer):
    evil = 'x"} 1\nshoal_step 99\n\\'
    feed.take(Status(status=make_status(make_peer("a", name=evil), name=evil)), 0.0)
    families = parsed(render_metrics(feed.view(0.0)))
    assert families["shoal_step"] == [({}, 10.0)]


def test_the_board_asks_only_for_metrics_that_there_are(crowded):
    board = json.loads(BOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"shoal_[a-z_]+", target["expr"])
    }
    assert len(asked) >= 15
    assert asked <= set(crowded)


def test_the_board_asks_its_data_source_and_nothing_else():
    board = json.loads(BOARD.read_text())
    assert board["__inputs"][0]["pluginId"] == "prometheus"
    sources = {json.dumps(panel["datasource"]) for panel in board["panels"] if "targets" in panel}
    assert sources == {json.dumps({"type": "prometheus", "uid": "${DS_PROMETHEUS}"})}
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in board["panels"]]
    assert all(x + w <= 24 for x, _, w, _ in places)
    assert len(set(places)) == len(places)
