"""Pausing from the page: for who has the key, and for nobody else."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.guard import KEY_HEADER, Steering
from shoal.deploy.dashboard.server import Dashboard
from viewers import looking, served

BASE = "http://127.0.0.1:8640"


class Peer:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.is_paused, self.told = False, 0

    async def pause(self) -> Mapping[str, Any]:
        return self._be(True)

    async def resume(self) -> Mapping[str, Any]:
        return self._be(False)

    def _be(self, paused: bool) -> Mapping[str, Any]:
        self.is_paused = paused
        self.told += 1
        return {"paused": paused, "reasons": ["you asked for it"] if paused else []}


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def steering(peer: Peer) -> Steering:
    steering = Steering()
    steering.hand(pause=peer.pause, resume=peer.resume)
    return steering


@pytest.fixture
def client(feed: Feed, steering: Steering) -> TestClient:
    return TestClient(Dashboard(feed, now_s=lambda: 1.0, steering=steering).app, base_url=BASE)


def test_with_the_key_a_peer_is_paused_and_resumed(client, peer, steering):
    headers = {KEY_HEADER: steering.key, "origin": BASE, "sec-fetch-site": "same-origin"}
    assert client.post("/pause", headers=headers).json() == {"paused": True, "reasons": ["you asked for it"]}
    assert peer.is_paused
    assert client.post("/resume", headers=headers).json() == {"paused": False, "reasons": []}
    assert not peer.is_paused


@pytest.mark.parametrize("key", ["", "x", "é"])
def test_without_it_nothing_happens_and_the_remedy_is_said(client, peer, key):
    answer = client.post("/pause", headers={KEY_HEADER: key.encode("latin-1")} if key else {})
    assert answer.status_code == 403
    assert "the address that the peer has printed" in answer.text
    assert peer.told == 0


@pytest.mark.parametrize(
    "says",
    [
        {"origin": "http://evil.example"},
        {"host": "evil.example:8640"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
    ],
)
def test_a_page_of_another_site_can_do_nothing_even_if_it_knew_the_key(client, peer, steering, says):
    answer = client.post("/pause", headers={KEY_HEADER: steering.key} | says)
    assert answer.status_code == 403
    assert peer.told == 0
    assert client.options("/pause", headers={"origin": "http://evil.example"}).status_code == 403, "no preflight either"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_link_does_nothing(client, peer, steering, method):
    assert client.request(method, "/pause", headers={KEY_HEADER: steering.key}).status_code in (403, 405)
    assert peer.told == 0


def first_update(dashboard: Dashboard) -> Any:
    async def scenario() -> Any:
        async with served(dashboard) as server, looking(server.url) as update:
            return await update()

    return asyncio.run(scenario())


def test_where_there_is_nothing_to_pause_it_says_so(feed):
    steering = Steering()
    dashboard = Dashboard(feed, now_s=lambda: 1.0, steering=steering)
    client = TestClient(dashboard.app, base_url=BASE)
    assert client.post("/pause", headers={KEY_HEADER: steering.key}).status_code == 409
    assert first_update(dashboard)["steers"] is False


def test_every_peer_has_a_key_of_its_own_that_it_tells_no_page(client, feed, steering):
    assert Steering().key != steering.key
    assert len(steering.key) >= 20
    for path in ("/", "/state.json", "/metrics", "/static/steering.js"):
        assert steering.key not in client.get(path).text
    update = first_update(Dashboard(feed, now_s=lambda: 1.0, steering=steering))
    assert update["steers"] is True
    assert steering.key not in json.dumps(update)
