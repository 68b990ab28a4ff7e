from shoal.deploy.manners.core import QUIET_S, Manners, Seen
from shoal.deploy.manners.limits import Limits


def seen(minute=0, idle_s=None, others=None):
    return Seen(minute=minute, input_idle_s=idle_s, others_share=others)


def test_nothing_speaks_against_computing_until_somebody_says_so():
    manners = Manners(limits=Limits())
    manners.look(seen(idle_s=0.0, others=1.0), now_s=0.0)
    assert manners.reasons(now_s=0.0) == ()
    manners.ask("owner", "asked")
    manners.ask("terminal", "Ctrl-Z")
    manners.take_back("owner", "nobody")
    assert manners.reasons(now_s=0.0) == ("Ctrl-Z",)


def test_the_owners_word_ends_and_the_hours_still_hold():
    manners = Manners(limits=Limits(hours="22:00-07:00"))
    manners.ask("owner", "asked")
    assert manners.reasons(now_s=0.0) == ("asked",), "nobody has looked at the clock yet"
    manners.look(seen(minute=8 * 60), now_s=0.0)
    manners.take_back("owner")
    assert manners.reasons(now_s=0.0) == ("outside the hours 22:00-07:00, until 22:00",)
    manners.look(seen(minute=22 * 60), now_s=0.0)
    assert manners.reasons(now_s=0.0) == ()


def test_somebody_at_the_keyboard_pauses_until_they_have_been_away_for_long_enough():
    manners = Manners(limits=Limits(only_when_idle=True, idle_minutes=5.0))
    for idle_s, reasons in ((0.0, 1), (299.0, 1), (301.0, 0)):
        manners.look(seen(idle_s=idle_s), now_s=0.0)
        assert len(manners.reasons(now_s=0.0)) == reasons


def test_other_programs_on_the_device_pause_until_it_has_been_quiet():
    manners = Manners(limits=Limits(only_when_idle=True))
    manners.look(seen(others=0.5), now_s=10.0)
    manners.look(seen(others=0.0), now_s=15.0)
    assert manners.reasons(now_s=15.0) == ("other programs use the device",)
    assert manners.reasons(now_s=10.0 + QUIET_S) == ()


def test_what_cannot_be_known_is_told_and_is_no_reason():
    manners = Manners(limits=Limits(only_when_idle=True))
    assert manners.unknowable == ()
    manners.look(seen(), now_s=0.0)
    assert len(manners.unknowable) == 2
    assert manners.reasons(now_s=0.0) == ()
    manners.look(seen(idle_s=1e6, others=0.0), now_s=0.0)
    assert manners.unknowable == ()
