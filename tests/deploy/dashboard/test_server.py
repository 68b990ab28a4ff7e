"""What the server says, without a browser."""

import asyncio
import contextlib

import httpx
import pytest
from starlette.testclient import TestClient

from pretend_swarm import Pretend
from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.dashboard.curves import POINTS_MAX
from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.server import STATIC, VIEWERS_MAX, Dashboard, DashboardServer
from shoal.protocol.errors import LocalError
from viewers import looking, served

BASE = "http://127.0.0.1:8640"
PAGE_BYTES_MAX = 300_000


@pytest.fixture
def dashboard(feed: Feed) -> Dashboard:
    return Dashboard(feed, now_s=lambda: 1.0)


def test_the_page_and_all_its_files_are_small_and_ask_nobody_else():
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < PAGE_BYTES_MAX
    for path in files:
        if "uplot" not in path.parts and path.suffix != ".svg":
            text = path.read_text().replace("http://www.w3.org/", "")
            assert "http:" not in text, path
            assert "//cdn" not in text
            assert "innerHTML" not in text


def test_what_is_not_ours_comes_with_its_licence():
    assert "MIT License" in (STATIC / "uplot" / "LICENSE").read_text()


def test_a_viewer_gets_all_points_first_and_then_what_came(dashboard, feed, make_status, make_peer, two_peers):
    from shoal.deploy.record.report import Status

    async def scenario() -> None:
        feed.take(two_peers, 0.0)
        async with served(dashboard) as server, looking(server.url) as update:
            first = await update()
            assert first["view"]["step"] == 10
            assert [point[1] for point in first["curves"]["points"]] == [10]
            feed.take(Status(status=make_status(make_peer("a"), step=12)), 1.0)
            second = await update()
            assert second["curves"]["first"] == 1
            assert [point[1] for point in second["curves"]["points"]] == [12]

    asyncio.run(scenario())


def test_after_points_were_merged_a_viewer_gets_all_of_them_again(dashboard, feed, make_status, make_peer):
    from shoal.deploy.record.report import Status

    for step in range(1, POINTS_MAX):
        feed.take(Status(status=make_status(make_peer("a"), step=step, steps=10_000)), float(step))

    async def scenario() -> None:
        async with served(dashboard) as server, looking(server.url) as update:
            first = (await update())["curves"]
            feed.take(Status(status=make_status(make_peer("a"), step=POINTS_MAX, steps=10_000)), float(POINTS_MAX))
            second = (await update())["curves"]
        assert (first["generation"], len(first["points"])) == (0, POINTS_MAX - 1)
        assert (second["generation"], second["first"], len(second["points"])) == (1, 0, POINTS_MAX // 2)

    asyncio.run(scenario())


def test_only_who_is_watched_wants_fresh_figures(feed):
    now = [0.0]
    dashboard = Dashboard(feed, now_s=lambda: now[0])
    client = TestClient(dashboard.app, base_url=BASE)
    assert not dashboard.is_watched
    client.get("/")
    assert not dashboard.is_watched
    client.get("/metrics")
    assert dashboard.is_watched
    now[0] = 61.0
    assert not dashboard.is_watched


def test_too_many_viewers_are_sent_away(dashboard):
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(served(dashboard))
            for _ in range(VIEWERS_MAX):
                update = await stack.enter_async_context(looking(server.url))
                await update()
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url))
            assert (await client.get("live")).status_code == 429

    asyncio.run(scenario())


def test_the_state_for_scripts_is_the_view(dashboard, feed, two_peers):
    feed.take(two_peers, 0.0)
    state = TestClient(dashboard.app, base_url=BASE).get("/state.json").json()
    assert [peer["name"] for peer in state["peers"]] == ["peer-a", "peer-b"]


def test_on_a_socket_it_serves_pages_and_viewers_and_ends_with_both(feed, two_peers):
    async def scenario() -> None:
        feed.take(two_peers, 0.0)
        dashboard = Dashboard(feed, now_s=lambda: 1.0)
        server = DashboardServer(dashboard, parse_address("127.0.0.1:0"))
        await server.start()
        async with looking(server.url) as update:
            await update()
            assert dashboard.is_watched
        while dashboard.is_watched:  # noqa: ASYNC110 (nobody is told when a viewer has gone)
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=server.url) as client:
            page = await client.get("/")
            assert page.status_code == 200
            assert "server" not in page.headers
            async with looking(server.url) as update:
                assert (await update())["view"]["step"] == 10
                await server.close()
                with pytest.raises(EOFError):
                    await update()
            with pytest.raises(httpx.ConnectError):
                await client.get("/", headers={"connection": "close"})

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_address_of_another_machine_is_refused_with_the_remedy():
    server = DashboardServer(Dashboard.__new__(Dashboard), parse_address("192.0.2.77:8640"))
    with pytest.raises(LocalError, match=r"cannot listen on 192.0.2.77:8640.*--dashboard 127.0.0.1:0"):
        asyncio.run(server.start())


def test_two_hundred_peers_fit_in_a_message_of_a_tenth_of_a_megabyte():
    pretend = Pretend(peers=200, stages=12)
    crowd = Feed(pretend.facts(), title="", wall_minus_clock_s=0.0)
    pretend.begin(crowd, 100.0, history_s=30)
    state = TestClient(Dashboard(crowd, now_s=lambda: 100.0).app, base_url=BASE).get("/state.json")
    assert len(state.json()["peers"]) >= 198
    assert len(state.content) < 100_000
