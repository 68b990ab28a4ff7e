"""Real peers that stop as a whole go on with the commands of the day before; `tests/soak/stops.py` has every order."""

import json
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.process


def committed(command: Any) -> list[int]:
    """The steps whose commits a process has told, in order."""
    whole, _, _ = command.output.rpartition("\n")
    found = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
    return [event["report"]["step"] for event in found if event["event"] == "Committed"]


def test_a_run_goes_on_where_it_was_with_the_commands_of_yesterday(world: Any) -> None:
    """The host gets Ctrl-C, the volunteer is logged out; no snapshot was due before."""
    spec = world.spec(100_000)
    spec.write_text(spec.read_text().replace("snapshot_interval_steps = 5", "snapshot_interval_steps = 0"))
    for name in ("host", "guest"):
        (world.folder / name).mkdir(mode=0o755)
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json", "--limit", "compute_share=0.1", "--state-dir")
    hosting = ("host", spec, *common, world.folder / "host")
    host = world.shoal(*hosting)
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    joining = ("join", invite, *common, world.folder / "guest")
    guest = world.shoal(*joining)
    world.until(lambda: min(len(committed(host)), len(committed(guest))) >= 3)

    had = min(committed(host)[-1], committed(guest)[-1]) + 1
    host.process.send_signal(signal.SIGINT)
    guest.process.send_signal(signal.SIGHUP)
    assert (host.wait(60), guest.wait(60)) == (0, 0)
    assert "saved" in host.output
    assert "saved" in guest.output
    # Both folders were there before, open to everybody, as an older shoal or a person makes them.
    places = [world.folder / name for name in ("host", "guest", "state/shoal")]
    written = [path for place in places for path in (place, *place.rglob("*"))]
    assert any(path.name.endswith(".safetensors") for path in written)
    assert [path for path in written if path.lstat().st_mode & 0o077] == [], "for others to read"

    first = world.shoal(*joining)
    first.line('{"event":"Note","text":"no other peer of the run is up yet')
    again = first, world.shoal(*hosting)
    world.until(lambda: all(committed(command) for command in again))
    assert min(committed(command)[0] for command in again) >= had
