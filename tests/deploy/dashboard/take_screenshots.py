"""Takes the pictures of `deploy/dashboard/README.md`: `python take_screenshots.py [FOLDER [NAME…]]`.

Needs Debian's chromium, and pillow to make the files small.
"""

import io
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parents[3] / "deploy" / "dashboard" / "screenshots"
CHROMIUM = "/usr/bin/chromium"
STATIC = FOLDER.parent / "static"
COLORS = 255
STRIPE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    name: str
    arguments: tuple[str, ...]
    """Of the pretend swarm."""
    width: int
    height: int
    dark: bool
    phone: bool = False


SIX = ("--peers", "6", "--stages", "3", "--seed", "3")
CROWD = ("--peers", "200", "--stages", "12", "--seed", "5", "--churn", "4")
SHOTS = (
    Shot(name="6-desktop-light", arguments=SIX, width=1280, height=1180, dark=False),
    Shot(name="6-desktop-dark", arguments=SIX, width=1280, height=1180, dark=True),
    Shot(name="6-phone-light", arguments=SIX, width=390, height=1500, dark=False, phone=True),
    Shot(name="6-phone-dark", arguments=SIX, width=390, height=1500, dark=True, phone=True),
    Shot(name="200-desktop-light", arguments=CROWD, width=1280, height=1260, dark=False),
    Shot(name="200-phone-dark", arguments=CROWD, width=390, height=1500, dark=True, phone=True),
)


def palette_of(picture: Image.Image) -> Image.Image:
    """Few colours, among them those that matter though few pixels have them: the page's own, light and dark."""
    named = sorted(set(re.findall(r": (#[0-9a-f]{6});", (STATIC / "style.css").read_text())))
    stripes = Image.new("RGB", (picture.width, picture.height + STRIPE * len(named)))
    stripes.paste(picture.convert("RGB"))
    for index, color in enumerate(named):
        y = picture.height + STRIPE * index
        stripes.paste(Image.new("RGB", (picture.width, STRIPE), color), (0, y))
    return stripes.quantize(COLORS, Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.NONE)


def take(browser: Browser, shot: Shot, folder: Path) -> None:
    argv = [sys.executable, "-m", "shoal.deploy.dashboard.pretend", *shot.arguments, "--dashboard", "127.0.0.1:0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
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
            page.goto(server.stdout.readline().strip(), timeout=120_000)
            page.wait_for_selector("#picture .peer", timeout=120_000)
            page.wait_for_selector("#chart-stale .u-legend", timeout=120_000)
            page.wait_for_timeout(1500)  # for the animations to end
            picture = Image.open(io.BytesIO(page.screenshot(animations="disabled", timeout=120_000)))
            context.close()
        finally:
            server.terminate()
    small = picture.convert("RGB").quantize(palette=palette_of(picture), dither=Image.Dither.NONE)
    small.save(folder / f"{shot.name}.png", optimize=True)


def main(folder: Path, wanted: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        for shot in SHOTS:
            if not wanted or shot.name in wanted:
                take(browser, shot, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, sys.argv[2:])
