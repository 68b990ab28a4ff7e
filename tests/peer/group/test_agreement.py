from collections.abc import Sequence

import msgspec

from shoal.peer.pipeline.microbatch import bitmap_of
from shoal.peer.replica.agreement import MUTE_AT_THE_END_S, MUTE_S, UNCOMPARED_MAX, Agreement
from shoal.peer.replica.commands import CommitCommand, Report, Resync, Witness
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundMember, RoundStart

A, B, C = PeerID("a"), PeerID("b"), PeerID("c")


def agreement(me: PeerID = A) -> Agreement:
    return Agreement(me=me, stage=0, microbatches=2, tokens_per_microbatch=8, has_loss=True)


def round_of(step: int, members: Sequence[PeerID] = (A, B, C)) -> RoundStart:
    brought = [0b11, *[0] * (len(members) - 1)]
    return RoundStart(
        stage=0,
        step=step,
        attempt=1,
        members=tuple(
            RoundMember(peer=peer, bandwidth=1.0, indices=bitmap_of(indices))
            for peer, indices in zip(members, brought, strict=True)
        ),
        duplicates=0,
        given_up=0,
        loss_sum=3.0,
        staleness_sum=0.0,
    )


def conclude(
    made: Agreement, version: int, now_s: float, rounds: dict[int, RoundStart], *, has_ended: bool = False
) -> list[CommitCommand]:
    settled = made.settle(rounds, version, (), now_s=now_s, has_ended=has_ended)
    return [command for start in settled for command in made.conclude(start, (), in_plan=True)]


def test_a_commit_is_reported_once_everybody_has_spoken_and_says_the_mean_loss() -> None:
    made, rounds = agreement(), {0: round_of(0)}
    for peer in (A, B):
        made.heard(peer, 1, "d")
    assert conclude(made, 1, 0.0, rounds) == []
    made.heard(C, 1, "d")
    (report,) = conclude(made, 1, 0.0, rounds)
    assert isinstance(report, Report)
    assert (report.report.loss, report.report.dissenting, report.report.digest) == (1.5, 0, "d")


def test_a_member_that_does_not_speak_holds_the_report_up_for_a_while_only() -> None:
    made, rounds = agreement(), {0: round_of(0)}
    for peer in (A, B):
        made.heard(peer, 1, "d")
    assert conclude(made, 1, 10.0, rounds) == []
    assert made.next_s == 10.0 + MUTE_S
    assert conclude(made, 1, 10.0 + MUTE_S - 0.1, rounds) == []
    (report,) = conclude(made, 1, 10.0 + MUTE_S, rounds)
    assert isinstance(report, Report)


def test_a_member_that_does_not_speak_is_not_waited_for_once_the_layout_has_ended() -> None:
    made, rounds = agreement(), {0: round_of(0)}
    for peer in (A, B):
        made.heard(peer, 1, "d")
    assert conclude(made, 1, 10.0, rounds, has_ended=True) == []
    assert made.next_s == 10.0 + MUTE_AT_THE_END_S
    (report,) = conclude(made, 1, 10.0 + MUTE_AT_THE_END_S, rounds, has_ended=True)
    assert isinstance(report, Report)


def test_a_mute_member_holds_nobody_up_when_steps_are_short() -> None:
    made = agreement(me=B)
    rounds = {step: round_of(step) for step in range(UNCOMPARED_MAX + 2)}
    for step in rounds:
        for peer in (A, B):
            made.heard(peer, step + 1, f"d{step}")
    told = conclude(made, len(rounds), 0.0, rounds)
    assert [type(command) for command in told] == [Witness, Witness], "those that would be forgotten"
    assert made.next_s == MUTE_S


def test_without_a_majority_nobody_speaks_for_the_group() -> None:
    made, rounds = agreement(), {0: round_of(0)}
    made.heard(A, 1, "d")
    assert conclude(made, 1, 0.0, rounds) == []
    assert conclude(made, 1, 100.0, rounds) == []
    assert made.next_s == float("inf"), "there is nothing to wait for but their word"


def test_who_differs_fetches_the_state_and_is_counted() -> None:
    rounds = {0: round_of(0)}
    for me, expected in ((A, Report), (B, Witness), (C, Resync)):
        made = agreement(me)
        for peer, digest in ((A, "d"), (B, "d"), (C, "x")):
            made.heard(peer, 1, digest)
        (command,) = conclude(made, 1, 0.0, rounds)
        assert isinstance(command, expected)
        if isinstance(command, Report):
            assert command.report.dissenting == 1


def test_a_report_has_the_norm_of_the_gradient_that_the_reporter_stepped_with() -> None:
    for norm in (2.5, None):
        made, rounds = agreement(), {0: round_of(0, (A,))}
        made.stepped(1, "x", norm)
        (said,) = conclude(made, 1, 0.0, rounds)
        assert isinstance(said, Report)
        assert said.report.gradient_norm == norm


def test_nobody_waits_for_the_word_of_a_light_member_nor_counts_it() -> None:
    made, rounds = agreement(), {0: msgspec.structs.replace(round_of(0), learners=(C,))}
    made.heard(A, 1, "d")
    assert conclude(made, 1, 0.0, rounds) == []
    made.heard(B, 1, "d")
    (report,) = conclude(made, 1, 0.0, rounds)
    assert isinstance(report, Report)
    assert (report.report.members, report.report.dissenting) == (3, 0)


def test_who_alone_of_a_round_holds_the_state_reports_it() -> None:
    made, rounds = agreement(), {0: msgspec.structs.replace(round_of(0, (A, B)), learners=(B,))}
    made.heard(A, 1, "d")
    assert [type(command) for command in conclude(made, 1, 0.0, rounds)] == [Report]


def test_a_light_member_hears_what_the_others_agree_on_and_fetches_no_state_for_it() -> None:
    made, rounds = agreement(C), {0: msgspec.structs.replace(round_of(0), learners=(C,))}
    for peer in (A, B):
        made.heard(peer, 1, "d")
    assert [type(command) for command in conclude(made, 1, 0.0, rounds)] == [Witness]
