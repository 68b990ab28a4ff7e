"""The page in a real browser: Debian's chromium, driven by playwright.

One browser and one server for all of them. Everything else about the dashboard is tested without.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pretend_swarm import Pretend
from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.guard import Steering
from shoal.deploy.dashboard.server import Dashboard, DashboardServer
from shoal.deploy.record.report import Joined, LimitsNow, Note, Status

CHROMIUM = Path("/usr/bin/chromium")
WAIT_MS = 60_000
PAGE_BYTES_MAX = 300_000

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: apt-get install chromium")


class Served:
    """A dashboard on a thread with a loop of its own. What it shows, the test decides."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.url = ""
        self.steering = Steering()
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self) -> None:
        async def begin() -> None:
            dashboard = Dashboard(self.feed, now_s=time.monotonic, steering=self.steering)
            self._server = DashboardServer(dashboard, parse_address(f"127.0.0.1:{self._port}"))
            await self._server.start()

        self._run(begin())
        self.url = self._server.url
        self._port = int(self.url.rstrip("/").rpartition(":")[2])

    def take(self, report: Any) -> None:
        async def take() -> None:
            self.feed.take(report, time.monotonic())

        self._run(take())

    def stop(self) -> None:
        self._run(self._server.close())

    def end(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM))
        yield browser
        browser.close()


@pytest.fixture
def served(feed: Feed) -> Iterator[Served]:
    served = Served(feed)
    served.start()
    yield served
    served.end()


class Visit:
    """A page, and all that it asked for and complained of."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def until(self, script: str) -> None:
        """playwright's own way to wait would have the page evaluate a text, which its policy forbids."""
        deadline_s = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(script):
            assert time.monotonic() < deadline_s, f"still not {script}"
            self.page.wait_for_timeout(50)


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    visit = Visit(browser, viewport={"width": 1280, "height": 900})
    yield visit
    visit.context.close()


def test_it_loads_updates_and_asks_only_its_own_peer(served, visit, make_status, make_peer, id_of, two_peers):
    served.take(Joined(peer=id_of("a"), name="peer-a", invite=""))
    served.take(two_peers)
    visit.page.goto(served.url)
    visit.page.wait_for_selector("#picture .peer.me.lead, #picture .peer.me")
    assert visit.page.title() == "10 % · a-run"
    assert visit.page.inner_text("#loss") == "3.250"
    peers = make_peer("a", 0, version=23), make_peer("b", 1), make_peer("c", None)
    served.take(Status(status=make_status(*peers, step=23, loss=1.5, plan_sequence=2)))
    visit.until("document.querySelector('#loss').textContent === '1.500'")
    visit.until("document.querySelectorAll('#picture .peer').length === 3")
    assert "peer-c joined" in visit.page.inner_text("#changes")
    assert "v23" in visit.page.inner_text("#picture")
    assert visit.page.locator("#chart-loss canvas").count() == 1
    own = served.url.removeprefix("http://")
    assert len(visit.requests) > 8
    assert {url.partition("://")[2].partition("/")[0] + "/" for url in visit.requests} == {own}
    assert visit.complaints == []


def test_in_a_demo_each_peer_can_be_chosen(served, visit, two_peers, make_contribution, id_of):
    served.take(Joined(peer=id_of("a"), name="peer-a", invite=""))
    served.take(two_peers)
    visit.page.goto(served.url)
    for letter in "ab":
        served.take(make_contribution(letter, stage="ab".index(letter), busy=0.25 if letter == "a" else 0.75))
    visit.until("document.querySelector('#busy-text').textContent === '25 %'")
    visit.until("document.querySelectorAll('#whose option').length === 2")  # of whom nothing is known, nothing is shown
    visit.page.click(f"[data-peer='{id_of('b')}']")
    assert visit.page.inner_text("#busy-text") == "75 %"
    assert visit.page.inner_text("#mine-title") == "A peer"
    visit.page.select_option("#whose", id_of("a"))
    assert visit.page.inner_text("#busy-text") == "25 %"
    assert visit.complaints == []


def test_who_came_with_the_key_pauses_the_peer_and_resumes_it(
    served, visit, make_status, make_peer, two_peers, make_contribution, id_of
):
    paused = [False]

    def be(wanted: bool) -> Any:
        async def act() -> dict[str, Any]:
            paused[0] = wanted
            return {"paused": wanted, "reasons": []}

        return act

    def tell() -> None:
        served.take(make_contribution("a", limits=LimitsNow(paused=paused[0])))

    served.steering.hand(pause=be(True), resume=be(False))
    served.take(Joined(peer=id_of("a"), name="peer-a", invite=""))
    served.take(two_peers)
    tell()
    visit.page.goto(served.url)
    visit.until("document.querySelector('#busy-text').textContent === '50 %'")
    assert visit.page.locator("#pause").is_hidden(), "who has no key has no button"
    visit.page.goto("about:blank")
    visit.page.goto(f"{served.url}#{served.steering.key}")
    visit.until("document.querySelector('#pause').textContent === 'Pause'")
    assert "#" not in visit.page.url, "the key is in no address that one would pass on"
    with visit.page.expect_response("**/pause"):
        visit.page.click("#pause")
    assert paused == [True]
    tell()
    visit.until("document.querySelector('#pause').textContent === 'Resume'")
    visit.page.reload()
    visit.until("document.querySelector('#pause').textContent === 'Resume'")
    with visit.page.expect_response("**/resume"):
        visit.page.click("#pause")
    assert paused == [False]
    tell()
    visit.until("document.querySelector('#pause').textContent === 'Pause'")
    assert visit.complaints == []
    visit.page.evaluate("sessionStorage.setItem('shoal-key', 'another')")
    visit.page.reload()
    visit.page.click("#pause")
    visit.until("!document.querySelector('#refused').hidden")
    assert "the address that the peer has printed" in visit.page.inner_text("#refused")
    assert paused == [False]


def test_it_finds_its_peer_again(served, visit, make_status, make_peer, two_peers):
    served.take(two_peers)
    visit.page.goto(served.url)
    visit.until("document.body.dataset.link === 'live'")
    served.stop()
    visit.until("document.body.dataset.link === 'lost'")
    assert visit.page.inner_text("#loss") == "3.250", "what was known stays"
    served.take(Status(status=make_status(make_peer("a"), step=30, loss=2.0)))
    served.start()
    visit.until("document.body.dataset.link === 'live'")
    visit.until("document.querySelector('#loss').textContent === '2.000'")
    points = visit.page.evaluate("document.querySelector('#chart-loss .u-legend').textContent")
    assert "2.000" in points
    # The browser asks for the tab's icon when it likes: the server may have gone, or go while it answers.
    refused = "net::ERR_INCOMPLETE_CHUNKED_ENCODING", "net::ERR_CONNECTION_REFUSED", "net::ERR_CONNECTION_RESET"
    errors = [text for text in visit.complaints if not any(words in text for words in refused)]
    assert errors == [], "the browser itself complains of the connections that failed, and nothing else"


def test_what_peers_say_is_never_markup(served, visit, make_status, make_peer):
    evil = "<img src=x onerror=alert(1)><b>x</b>"
    peers = make_peer("a", 0, name=evil, device=evil), make_peer("b", 1)
    served.take(Status(status=make_status(*peers, name=evil, plan_reason=evil)))
    served.take(Note(text=evil))
    visit.page.goto(served.url)
    visit.page.wait_for_selector("#picture .peer")
    visit.page.hover("#picture .peer")
    assert evil in visit.page.inner_text("#tip")
    assert evil in visit.page.inner_text("#changes")
    assert visit.page.locator("img:not([src$='icon.svg'])").count() == 0
    assert visit.page.locator("#changes b, #tip img, #everyone b").count() == 0
    assert visit.complaints == []


def test_light_and_dark_as_the_system_has_it_or_the_person(served, visit, two_peers):
    served.take(two_peers)
    background = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        visit.page.emulate_media(color_scheme=scheme)
        visit.page.goto(served.url)
        seen[scheme] = visit.page.evaluate(background)
    assert seen["light"] != seen["dark"]
    visit.page.click("#theme")
    assert visit.page.inner_text("#theme") == "light"
    assert visit.page.evaluate(background) == seen["light"]
    visit.page.reload()
    assert visit.page.evaluate(background) == seen["light"], "it is remembered"
    assert visit.complaints == []


@pytest.mark.parametrize(("peers", "stages"), [(6, 3), (200, 12)])
def test_on_a_phone_nothing_is_wider_than_the_phone(browser, peers, stages):
    pretend = Pretend(peers=peers, stages=stages, experts=4)
    feed = Feed(pretend.facts(), title="", wall_minus_clock_s=time.time() - time.monotonic())
    pretend.begin(feed, time.monotonic(), history_s=60)
    served, visit = Served(feed), Visit(browser, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    served.start()
    try:
        visit.page.goto(served.url)
        visit.page.wait_for_selector("#picture .peer")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 360
        shown = visit.page.locator("#picture .peer:not(.gone)").count()
        assert shown == len(feed.view(time.monotonic()).peers)
        cells = visit.page.locator("#picture .expert")
        assert cells.count() == 4 * stages
        first = feed.view(time.monotonic()).experts[0]
        assert cells.first.locator("text").text_content() == str(first.replicas)
        assert "times the usual load, held by " in cells.first.locator("title").text_content()
        visit.page.tap("#picture .peer.me")
        assert "(this peer)" in visit.page.inner_text("#tip")
        assert visit.complaints == []
    finally:
        visit.context.close()
        served.end()


def test_the_page_is_small(served, visit, two_peers):
    served.take(two_peers)
    sizes: list[int] = []
    visit.page.on("response", lambda answer: sizes.append(len(answer.body())))
    visit.page.goto(served.url)
    visit.page.wait_for_selector("#picture .peer")
    visit.until("document.body.dataset.link === 'live'")
    update = len(msgspec.json.encode(served.feed.view(time.monotonic())))
    assert 60_000 < sum(sizes) + update < PAGE_BYTES_MAX
