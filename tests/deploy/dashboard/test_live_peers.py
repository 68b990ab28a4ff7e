"""A demo and a volunteer of it, both with a dashboard: real processes."""

import json
import re
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from shoal.deploy.dashboard.metrics import CONTENT_TYPE

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_a_volunteer_joins_a_demo_shows_the_same_run_coordinates_and_leaves(world: Any) -> None:
    """One swarm for all of it: each takes half a minute of two cores to come up."""
    there, report = ("--dashboard", "127.0.0.1:0"), ("--json", world.folder / "report.jsonl")
    demo = world.shoal("demo", "--spec", world.spec(100_000), "--peers", 2, "--stages", 2, *there, *report)
    url = demo.line("dashboard: ").split()[1]
    assert httpx.get(url).status_code == 200
    invite = demo.line("shoal join ").split()[2]

    def state(of: str) -> dict[str, Any]:
        return dict(httpx.get(f"{of}state.json").json())

    world.until(lambda: state(url)["step"] > 0)
    options = "--name", "volunteer", "--data", world.text, "--listen", "127.0.0.1:0"
    volunteer = world.shoal("join", invite, *options, *there)
    own_url, _, key = volunteer.line("dashboard: ").split()[1].partition("#")

    def trains(of: str, names: set[str]) -> Callable[[], bool]:
        def holds() -> bool:
            view = state(of)
            here = {peer["name"] for peer in view["peers"] if peer["state"] == "training"}
            return here == names and view["step"] > 0 and view["loss"] is not None

        return holds

    everybody = {"peer-1", "peer-2", "volunteer"}
    world.until(trains(url, everybody))
    world.until(trains(own_url, everybody))
    world.until(lambda: state(own_url)["mine"]["microbatches_total"] > 0)
    shown, own = state(url), state(own_url)
    assert own["run"] == shown["run"]
    assert own["mine"]["name"] == "volunteer"
    assert 0.0 < own["mine"]["busy"] <= 1.0
    assert shown["mine"]["name"] == "peer-1"
    assert [other["name"] for other in shown["others"]] == ["peer-2"]
    assert any(measured for *_, measured in shown["links"])
    assert "first plan: 2 peers on 2 stages" in [change["text"] for change in own["changes"]], "from before it came"
    assert "volunteer joined" in [change["text"] for change in shown["changes"]]

    scraped = httpx.get(f"{own_url}metrics")
    assert scraped.headers["content-type"] == CONTENT_TYPE
    assert f'shoal_run_info{{run="{own["run"]}",name="small"}} 1' in scraped.text
    assert "shoal_self_flops" in scraped.text

    assert all(
        len(key) > 20 and key not in httpx.get(f"{own_url}{path}").text for path in ("", "state.json", "metrics")
    )
    world.until(lambda: httpx.post(f"{own_url}pause", headers={"x-shoal-key": key}).json()["paused"])
    world.until(lambda: state(own_url)["mine"]["limited_by"]["kind"] == "pause")
    assert httpx.post(f"{url}pause", headers={"x-shoal-key": key}).status_code == 403, "a demo's own page steers nobody"
    assert not httpx.post(f"{own_url}resume", headers={"x-shoal-key": key}).json()["paused"]
    world.until(trains(own_url, everybody))

    watch = world.shoal("status", invite, "--watch", "--json")

    def seen() -> list[dict[str, Any]]:
        """What the watch has been told: a line an answer."""
        whole, _, _ = watch.output.rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    world.until(lambda: len(seen()) >= 3)
    told = seen()
    assert told[0]["run"] == own["run"]
    assert [line["step"] for line in told] == sorted(line["step"] for line in told)

    def version() -> int:
        peers = seen()[-1]["peers"]
        return max((p["version"] for p in peers if p["name"] == "volunteer" and p["synced"]), default=0)

    world.until(version)
    before = version()
    world.until(lambda: version() > before)  # it takes part in the commits of its stage
    its_terms = re.compile(r"^step .* term \d+, coordinator volunteer$", re.MULTILINE)
    world.until(lambda: its_terms.search(volunteer.output))
    volunteer.process.send_signal(signal.SIGINT)
    assert volunteer.wait(60) == 0, world.logs()
    assert "leaving" in volunteer.output
    world.until(trains(url, {"peer-1", "peer-2"}))
    world.until(lambda: "volunteer left" in [change["text"] for change in state(url)["changes"]])

    world.until(lambda: {p["name"] for p in seen()[-1]["peers"] if p["stage"] is not None} == {"peer-1", "peer-2"})
    watch.process.send_signal(signal.SIGINT)
    assert watch.wait(60) == 130, watch.errors
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130, demo.output + world.logs()
    assert not world.ours()
    steps, _, _ = world.report()
    assert [line["step"] for line in steps] == list(range(len(steps))), "steps went with a coordinator from outside"
    assert len(steps) > before
    assert all(line["loss"] is not None for line in steps)
