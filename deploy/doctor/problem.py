"""A problem is one thing that is wrong, said to a person who did not ask for a lesson."""

from typing import Literal

import msgspec

Side = Literal["you", "host", "nobody"]
"""Who can mend it: whoever asked the doctor; whoever hosts the run or sent the invite; nobody in particular."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    """A name for scripts, such as `clock`; the README lists all."""
    side: Side
    sentence: str
    """What is wrong. One line, no full stop."""
    remedy: str
    """What the person can do about it."""
    fatal: bool = True
    """Whether nobody can join while the problem lasts; otherwise things are slower, or may go wrong later."""
