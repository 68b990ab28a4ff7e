import time

from shoal.deploy.manners.watching import ProcessorUse, input_idle_s, parse_pmon

PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1234     C     60     20      -      -      -      -    python3
    0       2345     G     25      3      -      -      -      -    Xorg
    0       3456     C      -      -      -      -      -      -    idle
    0          -     -      -      -      -      -      -      -    -
"""


def test_what_others_do_on_a_gpu_leaves_out_what_is_ours():
    assert parse_pmon(PMON, ours=[1234]) == 0.25
    assert parse_pmon(PMON, ours=[]) == 0.85
    assert parse_pmon("", ours=[]) == 0.0


def test_our_own_work_is_not_that_of_others():
    use = ProcessorUse()
    began_s = time.process_time()
    while time.process_time() - began_s < 0.05:
        pass
    share = use.others_share()
    assert share is None or 0.0 <= share <= 1.0


def test_a_machine_that_says_nothing_of_its_keyboard_is_unknown():
    idle_s = input_idle_s()
    assert idle_s is None or idle_s >= 0.0
