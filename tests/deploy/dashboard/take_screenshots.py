"""Takes the pictures of `deploy/dashboard/README.md`: `python take_screenshots.py [FOLDER [NAME…]]`.

Those of six peers are of six real ones: `shoal demo`, some minutes after it began. Two hundred are pretended. Needs
Debian's chromium, and pillow to make the files small.
"""

import contextlib
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parents[3] / "deploy" / "dashboard" / "screenshots"
PRETEND = Path(__file__).parents[2] / "lib" / "pretend_swarm.py"
CHROMIUM = "/usr/bin/chromium"
STATIC = FOLDER.parent / "static"
COLORS = 255
STRIPE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    name: str
    pretends: tuple[str, ...] = ()
    """Arguments of a pretended swarm; none: a real one."""
    width: int
    height: int
    dark: bool
    phone: bool = False


CROWD = ("--peers", "200", "--stages", "12", "--seed", "5", "--churn", "4")
SHOTS = (
    Shot(name="6-desktop-light", width=1280, height=1180, dark=False),
    Shot(name="6-desktop-dark", width=1280, height=1180, dark=True),
    Shot(name="6-phone-light", width=390, height=1500, dark=False, phone=True),
    Shot(name="6-phone-dark", width=390, height=1500, dark=True, phone=True),
    Shot(name="200-desktop-light", pretends=CROWD, width=1280, height=1260, dark=False),
    Shot(name="200-phone-dark", pretends=CROWD, width=390, height=1500, dark=True, phone=True),
)
STEPS = 60
"""Of the real run, before a picture is taken: curves, and a coordinator or two."""
PATIENCE_S = 1800.0


@contextlib.contextmanager
def a_process(
    *arguments: str, stdout: int = subprocess.PIPE, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, *arguments]
    with subprocess.Popen(argv, stdout=stdout, text=True, env=environment) as server:
        try:
            yield server
        finally:
            server.terminate()


@contextlib.contextmanager
def pretended(arguments: tuple[str, ...]) -> Iterator[str]:
    """Where its page is."""
    with a_process(str(PRETEND), *arguments, "--dashboard", "127.0.0.1:0") as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()


@contextlib.contextmanager
def real() -> Iterator[str]:
    """Where the page of a demo is that has made `STEPS` steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_STATE_HOME": folder}
        demo = ("-m", "shoal.deploy.cli", "demo", "--dashboard", f"127.0.0.1:{port}")
        with a_process(*demo, stdout=subprocess.DEVNULL, environment=environment):
            url, begun_s = f"http://127.0.0.1:{port}/", time.monotonic()
            while (step := step_of(url)) < STEPS:
                assert time.monotonic() - begun_s < PATIENCE_S, f"step {step} after {PATIENCE_S:.0f} s"
                time.sleep(1.0)
            yield url


def step_of(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}state.json", timeout=30) as answer:
            return int(json.load(answer)["step"])
    except OSError:
        return -1


def palette_of(picture: Image.Image) -> Image.Image:
    """Few colours, among them those that matter though few pixels have them: the page's own, light and dark."""
    named = sorted(set(re.findall(r": (#[0-9a-f]{6});", (STATIC / "style.css").read_text())))
    stripes = Image.new("RGB", (picture.width, picture.height + STRIPE * len(named)))
    stripes.paste(picture.convert("RGB"))
    for index, color in enumerate(named):
        y = picture.height + STRIPE * index
        stripes.paste(Image.new("RGB", (picture.width, STRIPE), color), (0, y))
    return stripes.quantize(COLORS, Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.NONE)


def take(browser: Browser, shot: Shot, url: str, folder: Path) -> None:
    context = browser.new_context(
        viewport={"width": shot.width, "height": shot.height},
        color_scheme="dark" if shot.dark else "light",
        device_scale_factor=1.5 if shot.phone else 1,
        has_touch=shot.phone,
        is_mobile=shot.phone,
    )
    page = context.new_page()
    page.on("console", lambda message: sys.stderr.write(f"{shot.name}: {message.text}\n"))
    page.on("pageerror", lambda error: sys.stderr.write(f"{shot.name}: {error}\n"))
    page.goto(url, timeout=120_000)
    page.wait_for_selector("#picture .peer", timeout=120_000)
    page.wait_for_selector("#chart-stale .u-legend", timeout=120_000)
    page.wait_for_timeout(1500)  # for the animations to end
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled", timeout=120_000)))
    context.close()
    small = picture.convert("RGB").quantize(palette=palette_of(picture), dither=Image.Dither.NONE)
    small.save(folder / f"{shot.name}.png", optimize=True)


def main(folder: Path, wanted: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        shots = [shot for shot in SHOTS if not wanted or shot.name in wanted]
        for pretends, together in itertools.groupby(shots, key=lambda shot: shot.pretends):
            with pretended(pretends) if pretends else real() as url:
                for shot in together:
                    take(browser, shot, url, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, sys.argv[2:])
