from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.peer.replica.work_queue import WorkQueue


def book(
    *, steps: int = 10, M: int = 3, s_max: int = 0, interval: int = 0, validation: int = 2, synchronous: int = 0
) -> WorkQueue:
    return WorkQueue(
        steps=steps,
        microbatches=M,
        s_max=s_max,
        validation_interval=interval,
        validation_microbatches=validation,
        synchronous_steps=synchronous,
    )


def indices(*values: int) -> Indices:
    return sum(1 << value for value in values)


def test_microbatches_are_granted_in_order_and_once() -> None:
    made = book()
    assert made.grant(2) == [Microbatch(0, 0), Microbatch(0, 1)]
    assert made.grant(2) == [Microbatch(0, 2)]
    assert made.grant(2) == []
    made.reach(1)
    assert made.grant(2) == [Microbatch(1, 0), Microbatch(1, 1)]


def test_of_each_step_no_more_is_granted_than_is_due() -> None:
    made = book(s_max=1)
    assert made.left == {0: 3, 1: 3}
    assert made.grant(9, {0: 1, 1: 2}) == [Microbatch(0, 0), Microbatch(1, 0), Microbatch(1, 1)]
    assert made.grant(1, {0: 2, 1: 1}) == [Microbatch(0, 1)]
    assert made.grant(9, {}) == []
    assert made.left == {0: 1, 1: 1}


def test_s_max_lets_the_next_steps_be_granted() -> None:
    assert book(M=1, s_max=2).grant(9) == [Microbatch(0, 0), Microbatch(1, 0), Microbatch(2, 0)]


def test_none_of_the_synchronous_steps_is_granted_before_its_version_is_there() -> None:
    made = book(M=1, s_max=2, synchronous=2)
    assert made.admissible == 2, "steps 0 and 2"
    made = book(M=1, s_max=1, synchronous=2)
    assert made.grant(9) == [Microbatch(0, 0)]
    assert made.admissible == 0
    made.reach(1)
    assert made.grant(9) == [Microbatch(1, 0), Microbatch(2, 0)]


def test_no_step_beyond_the_last_is_granted() -> None:
    made = book(steps=2, M=1, s_max=5)
    assert made.grant(9) == [Microbatch(0, 0), Microbatch(1, 0)]
    made.reach(2)
    assert made.grant(9) == []
    assert made.admissible == 0


def test_what_others_hold_is_not_granted() -> None:
    made = book(s_max=1)
    made.take(0, indices(1))
    made.take(1, indices(0, 2))
    made.take(0, indices(0))
    assert made.grant(9) == [Microbatch(0, 2), Microbatch(1, 1)]


def test_a_word_about_a_committed_step_is_not_kept() -> None:
    made = book()
    made.reach(2)
    made.take(1, indices(0, 1, 2))
    assert made._taken == {}


def test_validation_is_granted_first_and_once_a_version() -> None:
    made = book(interval=2)
    made.reach(0)
    assert made.grant(3) == [Microbatch(0, -1), Microbatch(0, -2), Microbatch(0, 0)]
    made.reach(0)
    made.reach(1)
    assert not [m for m in made.grant(9) if m.validates]
    made.reach(2)
    assert made.grant(1) == [Microbatch(2, -1)]
    assert made.grant(1) == [Microbatch(2, -2)]


def test_the_last_version_is_validated_whatever_the_interval() -> None:
    made = book(steps=3, interval=2)
    made.reach(3)
    assert made.grant(9) == [Microbatch(3, -1), Microbatch(3, -2)]


def test_a_later_lead_does_not_validate_an_old_version_again() -> None:
    """Its weights are gone: the loss of newer ones would be reported as that of the old version."""
    mate = book(interval=4)
    mate.reach(0)  # the lead grants this validation, not we
    mate.reach(1)
    assert not [m for m in mate.grant(9) if m.validates]


def test_what_is_left_of_a_validation_is_not_granted_at_the_next_version() -> None:
    made = book(interval=4, s_max=1)
    made.reach(0)
    assert made.grant(1) == [Microbatch(0, -1)]
    made.reach(1)
    assert made.grant(1) == [Microbatch(1, 0)]


def test_no_interval_is_no_validation() -> None:
    made = book(steps=3, interval=0)
    made.reach(0)
    made.reach(3)
    assert made.grant(9) == []


def test_an_old_version_heard_of_late_opens_nothing_again() -> None:
    made = book(M=1, interval=1)
    made.reach(3)
    made.grant(9)
    made.reach(2)
    assert made.version == 3
    assert made.grant(9) == []


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(1, 7)),
        st.tuples(st.just("reach"), st.just(0)),
        st.tuples(st.just("take"), st.integers(0, 31)),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(0, 3), st.integers(1, 5), st.integers(0, 3), st.integers(1, 5))
def test_each_is_granted_once_never_beyond_s_max_and_counted_rightly(
    events: list[tuple[str, int]], s_max: int, M: int, interval: int, steps: int
) -> None:
    made = book(steps=steps, M=M, s_max=s_max, interval=interval)
    made.reach(0)
    held: set[Microbatch] = set()
    validated: list[Microbatch] = []
    version = 0
    for kind, value in events:
        if kind == "reach" and version < steps:
            version += 1
            made.reach(version)
        elif kind == "take":
            step = version + value % (s_max + 1)
            if step < steps:
                held |= {Microbatch(step, i) for i in range(M) if value >> i & 1}
                made.take(step, value & (1 << M) - 1)
        elif kind == "grant":
            admissible = made.admissible
            granted = made.grant(value)
            assert len(granted) == min(value, admissible)
            assert made.admissible == admissible - len(granted)
            training = [m for m in granted if not m.validates]
            assert training == sorted(training)
            assert held.isdisjoint(training)
            assert all(version <= m.step <= min(version + s_max, steps - 1) and m.index < M for m in training)
            held |= set(training)
            fresh = [m for m in granted if m.validates]
            assert all(m.step == version and (version % interval == 0 or version == steps) for m in fresh)
            validated += fresh
    assert len(set(validated)) == len(validated)
    assert all(step >= version for step in made._taken)


def test_a_halt_lets_what_has_begun_be_granted_to_its_end_and_no_more() -> None:
    made = book(s_max=1)
    made.grant(4)  # all of step 0, one of step 1
    assert made.halt(at_once=False) == 2
    assert made.grant(10) == [Microbatch(1, 1), Microbatch(1, 2)]
    made.reach(1)
    made.reach(2)
    assert made.grant(10) == []
    made.go_on()
    assert made.grant(1) == [Microbatch(2, 0)]


def test_a_halt_at_once_gives_up_the_step_that_has_begun_and_keeps_those_that_are_whole() -> None:
    made = book(s_max=1)
    made.grant(4)
    assert made.halt(at_once=True) == 1
    assert made.grant(10) == []
    made.go_on()
    assert made.grant(10) == [Microbatch(1, 1), Microbatch(1, 2)]


def test_a_halt_that_is_asked_for_again_stays_where_it_is_or_comes_sooner() -> None:
    made = book(s_max=1)
    made.grant(1)
    assert made.halt(at_once=False) == 1
    assert made.halt(at_once=True) == 0
    assert made.halt(at_once=False) == 0, "another leaver cannot put off what has been said"


def test_nothing_begun_halts_here() -> None:
    made = book()
    made.reach(4)
    assert made.halt(at_once=False) == made.halt(at_once=True) == 4


@given(
    M=st.integers(1, 4),
    s_max=st.integers(0, 2),
    counts=st.lists(st.integers(1, 5), max_size=8),
    at_once=st.booleans(),
)
def test_every_step_before_the_halt_is_granted_whole_and_none_after_it(
    M: int, s_max: int, counts: list[int], at_once: bool
) -> None:
    made = book(steps=6, M=M, s_max=s_max)
    granted: set[Microbatch] = set()

    def commit() -> None:
        while all(Microbatch(made.version, i) in granted for i in range(M)) and made.version < 6:
            made.reach(made.version + 1)

    for count in counts:
        granted.update(made.grant(count))
        commit()
    halts_at = made.halt(at_once=at_once)
    assert made.version <= halts_at <= 6
    while more := made.grant(1):
        assert not at_once or halts_at > more[0].step
        granted.update(more)
        commit()
    assert made.version == halts_at


def test_no_step_is_granted_from_the_version_on_at_which_the_layout_ends() -> None:
    made = book(M=1, s_max=2)
    made.cutover_version = 2
    assert made.admissible == 2
    assert made.grant(9) == [Microbatch(0, 0), Microbatch(1, 0)]
    made.reach(2)
    assert (made.admissible, made.grant(9)) == (0, [])
    made.cutover_version = 0
    assert made.grant(9) == [Microbatch(2, 0), Microbatch(3, 0), Microbatch(4, 0)], "it does not end after all"


def test_the_version_at_which_the_layout_ends_is_validated_by_the_next_one() -> None:
    made = book(M=1, interval=2, validation=1)
    made.cutover_version = 4
    made.reach(2)
    assert Microbatch(2, -1) in made.grant(9)
    made.reach(4)
    assert made.grant(9) == []
    after = book(M=1, interval=2, validation=1)
    after.reach(4)
    assert Microbatch(4, -1) in after.grant(9)


def test_what_is_not_known_of_the_last_version_is_validated_again() -> None:
    made = book(steps=4, M=1, interval=2, validation=3)
    made.reach(2)
    made.grant(9)
    made.validate_again({})
    assert made.grant(9) == [], "a later version will be validated"
    made.reach(4)
    assert made.grant(9) == [Microbatch(4, -1), Microbatch(4, -2), Microbatch(4, -3)]
    made.validate_again({1: 0.5})
    assert made.grant(9) == [Microbatch(4, -1), Microbatch(4, -3)]
    never = book(steps=4, M=1)
    never.reach(4)
    never.validate_again({})
    assert never.grant(9) == []
