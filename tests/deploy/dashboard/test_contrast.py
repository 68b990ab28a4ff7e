"""Whether the text of the pages can be read: contrast as WCAG 2.1 counts it, 4.5 to 1 for text (criterion 1.4.3)."""

import re
from itertools import pairwise

import pytest

from shoal.deploy.record.html_page import PAGE, STATIC

LEAST = 4.5
STYLE = (STATIC / "style.css").read_text(encoding="utf-8") + (PAGE / "page.css").read_text(encoding="utf-8")
THEMES = re.findall(r":root[^{]*\{([^}]*)\}", STYLE)
GROUNDS = ("page", "card", "raised")


def colours(theme: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", theme))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i, _ in pairwise((1, 3, 5, 7))]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_as_the_standard_counts_it() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark", "auto"])
def test_all_text_stands_out_from_what_is_behind_it(theme: str) -> None:
    known = colours(theme)
    texts = set(re.findall(r"[{;]\s*color: var\(--(\w+)\)", STYLE)) | {"ink"}
    inverse = re.findall(r"background: var\(--ink\); color: var\(--(\w+)\)", STYLE)
    assert {"quiet", "accent", "training", "fetching", "silent", "me"} <= texts
    found = {(text, ground): contrast(known[text], known[ground]) for text in texts - {*inverse} for ground in GROUNDS}
    found |= {(text, "ink"): contrast(known[text], known["ink"]) for text in inverse}
    assert {pair: round(ratio, 2) for pair, ratio in found.items() if ratio < LEAST} == {}
