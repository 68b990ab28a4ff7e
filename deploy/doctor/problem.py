"""Defines a problem: one fault, in words for a person without background."""

from typing import Literal

import msgspec

Side = Literal["you", "host", "nobody"]
"""The side that can fix it: the doctor's user; the run's host or the invite's sender; nobody in particular."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    """A name for scripts, such as `clock`; the README lists them."""
    side: Side
    sentence: str
    """The fault, in one line without a full stop."""
    remedy: str
    fatal: bool = True
    """True if it keeps this machine out; false if things are only slower or may fail later."""
