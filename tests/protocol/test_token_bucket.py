import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.token_bucket import RateLimits, TokenBucket


class Clock:
    def __init__(self, now_s=0.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


@given(
    rate=st.floats(1.0, 1e9),
    sizes=st.lists(st.integers(1, 10_000_000), min_size=1, max_size=50),
    pauses_s=st.lists(st.floats(0.0, 5.0), min_size=50, max_size=50),
)
def test_no_more_than_rate_burst_and_one_message_pass_in_any_time(rate, sizes, pauses_s):
    clock = Clock(100.0)
    bucket, passed = TokenBucket(rate, clock), [(0.0, 0)]
    for size, pause_s in zip(sizes, pauses_s, strict=False):
        clock.now_s += pause_s
        clock.now_s += bucket.wait_s()
        bucket.take(size)
        passed.append((clock.now_s - 100.0, size))
    for first in range(1, len(passed)):
        since_s, total = passed[first][0], 0
        for at_s, size in passed[first:]:
            assert total <= (rate * (at_s - since_s) + bucket.burst) * (1 + 1e-6) + 1.0
            total += size


@given(rate=st.floats(1e3, 1e9), size=st.floats(0.01, 100.0))
def test_who_always_has_something_to_send_gets_the_whole_rate(rate, size):
    clock, sent = Clock(), 0.0
    bucket = TokenBucket(rate, clock)
    size *= bucket.burst
    while clock.now_s < 1.0:
        clock.now_s += bucket.wait_s()
        bucket.take(size)
        sent += size
    clock.now_s += bucket.wait_s()
    assert sent == pytest.approx(rate * clock.now_s + bucket.burst, rel=1e-6, abs=2.0)


def test_what_cannot_wait_is_paid_by_what_follows():
    clock = Clock()
    bucket = TokenBucket(1000.0, clock)
    bucket.take(600.0)
    assert bucket.wait_s() == pytest.approx(0.5)
    bucket.take(1000.0)
    assert bucket.wait_s() == pytest.approx(1.5)
    clock.now_s = 1.5
    assert bucket.wait_s() == 0.0
    clock.now_s = 1.0
    assert bucket.wait_s() == 0.0, "a clock does not take back what it gave"


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="cannot fill"):
        TokenBucket(rate, Clock())
    if rate != math.inf:
        with pytest.raises(ValueError, match="above 0"):
            RateLimits(upload_bytes_per_s=rate)
