"""Each colour of the pages that text is written in can be read on each ground that it stands on (WCAG 2.2, 1.4.3)."""

import re
from importlib.resources import files

import pytest

GROUNDS = ("page", "card", "raised", "panel")
LEAST = 4.5
LEAST_OF_A_MARK = 3.0
"""Dots and lines that carry a meaning (WCAG 2.2, 1.4.11)."""

PAGES = {
    "live": files("shoal.deploy.dashboard").joinpath("static/style.css").read_text(),
    "simulation": files("shoal.deploy.simulate").joinpath("page/page.css").read_text(),
}


def luminance(color: str) -> float:
    shares = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def themes(css: str) -> list[dict[str, str]]:
    """The colours of each block that sets a page's colours."""
    blocks = re.findall(r"\{([^{}]*--page:[^{}]*)\}", css)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", block)) for block in blocks]


@pytest.mark.parametrize("css", PAGES.values(), ids=PAGES)
def test_text_can_be_read_in_each_theme(css: str) -> None:
    written = set(re.findall(r"(?<![\w-])color: var\(--([\w-]+)\)", css)) - set(GROUNDS)
    assert {"ink", "quiet"} <= written
    assert len(themes(css)) >= 2
    for theme in themes(css):
        for name in sorted(written):
            for ground in theme.keys() & set(GROUNDS):
                assert contrast(theme[name], theme[ground]) >= LEAST, (name, ground, theme[name])


def test_the_marks_of_states_can_be_seen_in_each_theme() -> None:
    css = PAGES["live"]
    marks = set(re.findall(r"\.state \{ fill: var\(--([\w-]+)\)", css))
    assert {"training", "fetching", "silent", "spare"} <= marks
    for theme in themes(css):
        for name in sorted(marks):
            assert contrast(theme[name], theme["raised"]) >= LEAST_OF_A_MARK, (name, theme[name])
