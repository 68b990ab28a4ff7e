"""Computes the figures of a plan for its members: tokens a day, days to a goal, gigabytes a month, energy and price.

It is arithmetic on the predicted seconds of a step, and assumes that all members stay day and night, without failures.
Watts come from the scenario or are assumed; a peer with a stage draws them all the time. Pure.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from shoal.deploy.base.words import digits
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import RunSpec, TrainingSpec
from shoal.protocol.toml.defaults import TOKENS_PER_PARAMETER
from shoal.protocol.topology import Topology

WATTS_ASSUMED: Final = 350.0
"""The default power of a device: a GPU of 250 to 300 W at work, and its share of the machine."""
PRICE_KWH_ASSUMED: Final = 0.30
"""The default price of a kilowatt-hour: roughly that of household electricity in Europe, in euros."""
DAYS_A_MONTH: Final = 30.0
_SECONDS_A_DAY: Final = 86_400.0
_SUFFIXES: Final = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """The user's goal and price."""

    tokens: float | None = None
    """The goal in tokens from the command line; None: the user gave none, so the run's goal counts."""
    steps: int | None = None
    """The number of steps in the run file; None: it has none. Without `tokens` too, a goal is assumed (`_goal`)."""
    price_kwh: float | None = None
    """The price of a kilowatt-hour; None: `PRICE_KWH_ASSUMED`."""


def _goal(wishes: Wishes, spec: RunSpec, parameters: float) -> tuple[float, str, bool]:
    """Return (goal in tokens, where the goal comes from, True if it is assumed). A goal on the command line counts
    first, then the run's explicit number of steps, then an assumption.

    The assumed goal is 20 tokens a parameter for training from scratch. A run that begins with trained weights needs
    fewer tokens: those of the default number of steps.
    """
    if wishes.tokens is not None:
        return wishes.tokens, "", False
    if wishes.steps is not None:
        return float(wishes.steps * spec.tokens_per_step), f"the run's {wishes.steps:,} steps", False
    if spec.adapter is not None or spec.initial.digests:
        usual = TrainingSpec().steps
        why = f"{usual:,} steps, as a fine-tuning run that does not say; --tokens says another goal"
        return float(usual * spec.tokens_per_step), why, True
    why = f"{TOKENS_PER_PARAMETER:.0f} tokens a parameter; --tokens says another goal"
    return TOKENS_PER_PARAMETER * parameters, why, True


class MemberFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a class: the devices with a stage that have the same region (or else name) and power."""

    name: str
    members: int
    """The number of devices of this class that hold a stage."""
    up_gb_month: tuple[float, float]
    """The least and the largest upload of a member, in 10^9 bytes in `DAYS_A_MONTH` days."""
    down_gb_month: tuple[float, float]
    """The least and the largest download of a member, in 10^9 bytes in `DAYS_A_MONTH` days."""
    watts: float
    watts_are_assumed: bool


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    tokens_per_day: float
    goal_tokens: float
    goal_is_assumed: bool
    goal_why: str
    days_to_goal: float
    members: tuple[MemberFigures, ...]
    kwh_per_day: float
    """The energy of all devices that hold a stage, in kWh a day."""
    kwh_per_billion_tokens: float
    price_kwh: float
    price_is_assumed: bool
    cost_per_billion_tokens: float
    cost_to_goal: float


def figures_of(
    topology: Topology,
    watts: Sequence[float | None],
    wishes: Wishes,
    spec: RunSpec,
    *,
    parameters: float,
    tokens_per_s: float,
    step_s: float,
    sent_bytes: dict[int, float],
    received_bytes: dict[int, float],
) -> Figures:
    """Compute the figures of a plan.

    Args:
        watts: [N], the power of each device; None: unknown.
        parameters: the number of parameters of the model.
        sent_bytes, received_bytes: bytes per step by device, only for devices with a stage.
    """
    goal_tokens, goal_why, goal_is_assumed = _goal(wishes, spec, parameters)
    per_day = tokens_per_s * _SECONDS_A_DAY
    price = PRICE_KWH_ASSUMED if wishes.price_kwh is None else wishes.price_kwh
    drawn = {device: watts[device] or WATTS_ASSUMED for device in sent_bytes}
    kwh_per_day = sum(drawn.values()) / 1e3 * 24.0
    kwh_per_billion = kwh_per_day / per_day * 1e9
    steps_a_month = DAYS_A_MONTH * _SECONDS_A_DAY / step_s

    def span(devices: Sequence[int], of: dict[int, float]) -> tuple[float, float]:
        amounts = [of[device] * steps_a_month / 1e9 for device in devices]
        return min(amounts), max(amounts)

    classes: dict[tuple[str, float], list[int]] = {}
    for device in sorted(sent_bytes):
        classes.setdefault((topology.regions[device] or topology.names[device], drawn[device]), []).append(device)
    return Figures(
        tokens_per_day=per_day,
        goal_tokens=goal_tokens,
        goal_is_assumed=goal_is_assumed,
        goal_why=goal_why,
        days_to_goal=goal_tokens / per_day,
        members=tuple(
            MemberFigures(
                name=name,
                members=len(devices),
                up_gb_month=span(devices, sent_bytes),
                down_gb_month=span(devices, received_bytes),
                watts=each,
                watts_are_assumed=any(watts[device] is None for device in devices),
            )
            for (name, each), devices in classes.items()
        ),
        kwh_per_day=kwh_per_day,
        kwh_per_billion_tokens=kwh_per_billion,
        price_kwh=price,
        price_is_assumed=wishes.price_kwh is None,
        cost_per_billion_tokens=kwh_per_billion * price,
        cost_to_goal=kwh_per_billion * price * goal_tokens / 1e9,
    )


def parse_tokens(text: str) -> float:
    """Return the number that `20B`, `1.5T`, `300M` or `2e10` stands for. Raises: LocalError: it is no number."""
    body, suffix = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        number = float(body.replace("_", "").replace(",", "")) * _SUFFIXES[suffix]
    except (ValueError, KeyError):
        number = math.nan
    if not 0.0 < number < math.inf:
        raise LocalError(f"--tokens {text}: say a number of tokens, as in 20B, 300M or 1.5T")
    return number


def said_tokens(number: float) -> str:
    """Return a number of tokens or parameters in words: `20 B`, `1.5 T`."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= 0.9995 * scale:  # three digits are shown
            return f"{digits(number / scale)} {suffix}"
    return f"{number:.0f}"


def said_days(days: float) -> str:
    """Return a duration in words: `34 days`, `5.2 hours`, `12 minutes`, `12 years`."""
    if days < 1.0 / 24.0:
        return f"{days * 1_440.0:.2g} minutes"
    if days < 2.0:
        return f"{digits(days * 24.0)} hours"
    return f"{digits(days)} days" if days < 1_000.0 else f"{digits(days / 365.25)} years"


def said_gigabytes(span: tuple[float, float]) -> str:
    """Format (least, largest) gigabytes: `1,200 to 3,400`, or `1,200` if they are equal."""
    least, most = (f"{value:,.0f}" if value >= 10.0 else f"{value:.2g}" for value in span)
    return least if least == most else f"{least} to {most}"


def said_regions(devices: Sequence[int], topology: Topology) -> str:
    """Return the number of devices in each region: `4 Tokyo, 2 Seoul`."""
    regions = [topology.regions[device] or "elsewhere" for device in devices]
    return ", ".join(f"{regions.count(region)} {region}" for region in dict.fromkeys(regions))


def lines_of(figures: Figures) -> list[tuple[str, str]]:
    """Return (label, value) lines for people, without the members' figures."""
    goal = f" ({figures.goal_why})" if figures.goal_why else ""
    price = f"{figures.price_kwh:g} a kWh" + (" (assumed; --price-kwh)" if figures.price_is_assumed else "")
    return [
        ("tokens a day", said_tokens(figures.tokens_per_day)),
        (f"to {said_tokens(figures.goal_tokens)} tokens", f"{said_days(figures.days_to_goal)}{goal}"),
        (
            "energy",
            f"{digits(figures.kwh_per_day)} kWh a day, {digits(figures.kwh_per_billion_tokens)} kWh a billion tokens",
        ),
        (
            "its price",
            f"{digits(figures.cost_per_billion_tokens)} a billion tokens, {digits(figures.cost_to_goal)} to the goal, "
            f"at {price}",
        ),
    ]
