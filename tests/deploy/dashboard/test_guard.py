"""Who may read a dashboard: the person who opens it, and no page that this person has open elsewhere."""

import asyncio

import pytest
from starlette.testclient import TestClient

from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.guard import HEADERS
from shoal.deploy.dashboard.server import Dashboard
from viewers import looking, served

PATHS = ("/", "/metrics", "/state.json", "/static/main.js")
OWN_HOSTS = (
    "127.0.0.1:8640",
    "localhost:8640",
    "LOCALHOST",
    "[::1]:8640",
    "192.168.1.7",
    "10.0.0.1:80",
    "box.local:8640",
)
FOREIGN_HOSTS = ("evil.example:8640", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1", "box.local.evil")


@pytest.fixture
def dashboard(feed: Feed) -> Dashboard:
    return Dashboard(feed, now_s=lambda: 1.0, names=("box.local",))


@pytest.fixture
def client(dashboard: Dashboard) -> TestClient:
    return TestClient(dashboard.app, base_url="http://127.0.0.1:8640")


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_by_an_address_or_its_name_everything_is_there(client, dashboard, host):
    for path in PATHS:
        assert client.get(path, headers={"host": host}).status_code == 200, path

    async def scenario() -> None:
        headers = {"host": host, "origin": f"http://{host}"}
        async with served(dashboard) as server, looking(server.url, headers) as update:
            assert (await update())["view"]["name"] == "a-run"

    asyncio.run(scenario())


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_by_another_name_nothing_is(client, host):
    """DNS rebinding: the browser thinks that 127.0.0.1 is evil.example, and says so."""
    for path in (*PATHS, "/live"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 403, path
        assert "a-run" not in answer.text


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "https://localhost:8640", ""]
)
def test_a_page_of_another_origin_gets_nothing(client, origin):
    for path in (*PATHS, "/live"):
        assert client.get(path, headers={"origin": origin}).status_code == 403


def test_our_own_page_says_its_origin_and_gets_everything(client):
    assert client.get("/metrics", headers={"origin": "http://127.0.0.1:8640"}).status_code == 200


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("cross-site", "no-cors", 403),
        ("same-site", "cors", 403),
        ("cross-site", "navigate", 200),
        ("none", "navigate", 200),
    ],
)
def test_another_site_may_link_here_and_not_load_from_here(client, site, mode, status):
    answer = client.get("/", headers={"sec-fetch-site": site, "sec-fetch-mode": mode})
    assert answer.status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_there_is_nothing_to_do_but_read(client, method):
    assert client.request(method, "/state.json").status_code == 403


def test_every_answer_forbids_what_the_page_does_not_need(client):
    for path, host in (*((path, "127.0.0.1") for path in PATHS), ("/", "evil.example"), ("/nothing", "127.0.0.1")):
        answer = client.get(path, headers={"host": host})
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, (path, name)
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert "server" not in answer.headers


def test_the_policy_lets_nothing_run_but_our_own_files():
    rules = dict(rule.strip().split(" ", 1) for rule in HEADERS["Content-Security-Policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[what] for what in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/%2e%2e%2fguard.py"]
)
def test_files_outside_the_folder_are_not_served(client, path):
    assert client.get(path).status_code in (403, 404)
