"""What a person sees of a peer of theirs, in the order in which they see it."""

import io
from typing import Any

import pytest
from rich.console import Console

from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.dashboard.view import run_phase
from shoal.deploy.record.report import Contribution, Joined, Left, Note, Phase, Ready, Status, Summary
from shoal.deploy.terminal.peer_output import PeerOutput
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PeerStatus, SwarmStatus

A, B = (PeerID("12D3KooW" + letter * 44) for letter in "AB")


def peer(peer_id: PeerID, stage: int, **says: Any) -> PeerStatus:
    usual = {"name": "", "device": "cpu", "version": 0, "synced": True, "draining": False, "seen_s_ago": 0.1}
    return PeerStatus(peer=peer_id, stage=stage, **(usual | {"forward_s": 0.0, "window": 0} | says))


def status(step: int, **says: Any) -> SwarmStatus:
    usual: dict[str, Any] = {
        "peers": (peer(A, 0), peer(B, 1)),
        "validation_loss": None,
        "loss": 4.0 if step else None,
    }
    return SwarmStatus(
        run="0123456789abcdef",
        name="small",
        coordinator=A,
        term=1,
        plan_sequence=1,
        plan_reason="first plan",
        step=step,
        steps=100,
        tokens_per_s=10.0,
        staleness_steps_mean=0.0,
        stages=((0, 2), (2, 4)),
        elapsed_s=1.0,
        **(usual | says),
    )


def contribution(**says: Any) -> Contribution:
    usual: dict[str, Any] = dict.fromkeys(("busy", "sending", "waiting", "flop_per_s", "microbatches_per_s"), 0)
    usual |= {"flop_total": 0.0, "memory_bytes": 0, "links": (), "name": "guest", "stage": 0, "synced": True}
    return Contribution(peer=B, **(usual | says))


@pytest.fixture
def said() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def output(said: io.StringIO) -> PeerOutput:
    facts = RunFacts(name="small", steps=100, num_layers=4, tokens_per_step=80 * 64, tokens_per_microbatch=64)
    return PeerOutput(facts, title="shoal small", console=Console(file=said, width=200))


def test_a_host_reads_the_invite_what_it_waits_for_and_in_the_end_what_to_do_with_it(
    output: PeerOutput, said: io.StringIO
) -> None:
    output.say(Phase(name="measuring this machine"))
    output.say(Ready(peer=A, run="r", invite="shoal1x"))
    output.say(Joined(peer=A, name="host", invite="shoal1x"))
    for here in (1, 1, 2):
        output.say(Phase(name=f"waiting for peers: {here} of 2 are here"))
    output.say(Status(status=status(1)))
    output.say(Left(peer=A, state_dir="/state", finished=True))
    lines = said.getvalue().splitlines()
    wanted = [
        "measuring this machine",
        "others join with:",
        "shoal join shoal1x",
        "takes part as host",
        "Ctrl-C leaves",
        "waiting for peers: 1 of 2",
        "waiting for peers: 2 of 2",
        "step 1/100",
        "state and snapshots: /state",
        "`shoal generate",
    ]
    assert len(lines) == len(wanted), lines
    assert all(line.startswith(start) for line, start in zip(lines, wanted, strict=True)), lines


def test_a_guest_is_not_told_to_export_what_it_has_a_part_of(output: PeerOutput, said: io.StringIO) -> None:
    output.say(Joined(peer=B, name="guest", invite="shoal1x"))
    output.say(Note(text="by the way"))
    output.say(Left(peer=B, state_dir="/state", finished=True))
    assert "by the way" in said.getvalue()
    assert "export" not in said.getvalue()


@pytest.mark.parametrize(
    ("step", "says", "phase"),
    [
        (0, {}, "computing the first step"),
        (7, {}, "training"),
        (7, {"waits_for": "stage 1: no peer holds it"}, "waiting for stage 1: no peer holds it"),
        (7, {"stands_s": 30.0}, "waiting for an unknown reason"),
        (100, {"stands_s": 30.0, "waits_for": "stage 1: no peer holds it"}, "the run is done"),
    ],
)
def test_what_the_run_does(step: int, says: dict[str, Any], phase: str) -> None:
    assert run_phase(status(step, **says)) == phase


def test_a_standstill_is_told_once_with_its_cause_and_when_it_is_over(output: PeerOutput, said: io.StringIO) -> None:
    output.say(Status(status=status(7)))
    for seconds in range(10, 40):
        waits_for = f"stage 1: its only holder, bob, is paused, for {seconds} s"
        output.say(Status(status=status(7, stands_s=seconds + 1.0, waits_for=waits_for)))
    output.say(Status(status=status(7, stands_s=41.0, waits_for="stage 1: its only holder, bob, is leaving")))
    for step in (8, 9):  # steps come, and each is late
        output.say(Status(status=status(step)))
        waits_for = "stage 1: its only holder, bob, is leaving"
        output.say(Status(status=status(step, stands_s=6.0, waits_for=waits_for)))
    for step in range(10, 20):
        output.say(Status(status=status(step)))
    assert [line for line in said.getvalue().splitlines() if not line.startswith("step")] == [
        "no step for 11 s: waiting for stage 1: its only holder, bob, is paused, for 10 s",
        "no step for 41 s: waiting for stage 1: its only holder, bob, is leaving",
        "the run goes on",
    ]


def test_what_is_on_one_machine_alone_is_told_when_that_changes(output: PeerOutput, said: io.StringIO) -> None:
    risk = "only bob has what stage 1 has learnt: no other machine has a copy"
    for risks in ((risk,), (risk,), (), (risk,)):
        output.say(Status(status=status(7, risks=risks)))
    assert said.getvalue().splitlines().count(risk) == 2


def test_a_late_joiner_says_which_version_was_validated(output: PeerOutput) -> None:
    output.say(Status(status=status(4, validation_loss=5.6, validation_step=0)))
    view = output.presenter.view()
    assert (view.validation_step, view.validation_loss) == (0, 5.6)
    output.say(Status(status=status(9, validation_loss=5.0, validation_step=8)))
    view = output.presenter.view()
    assert (view.validation_step, view.validation_loss) == (8, 5.0)


def test_a_volunteer_without_a_record_reads_in_the_end_what_it_gave_and_where_the_run_is(
    output: PeerOutput, said: io.StringIO
) -> None:
    output.say(Status(status=status(7)))
    output.say(Status(status=status(27)))
    mine = contribution(microbatches_total=1234, sent_bytes_total=2.5e6, received_bytes_total=1e6, uptime_s=725.0)
    output.say(mine)
    output.say(Left(peer=B, state_dir="/state", finished=False))
    output.close()
    assert said.getvalue().splitlines()[-2:] == [
        "this peer computed 1,234 microbatches (79.0 k tokens) in 12 min 5 s: 77% of what the run trained on "
        "meanwhile. It sent 2.5 MB and received 1 MB",
        "the run: step 27 of 100, loss 4.0000",
    ]


def test_who_keeps_a_record_reads_its_summary_last(output: PeerOutput, said: io.StringIO) -> None:
    output.say(Status(status=status(7)))
    output.say(Left(peer=B, state_dir="/state", finished=False))
    output.say(Summary(lines=("notes: 7 of 100 steps", "  lost  nothing")))
    output.close()
    assert said.getvalue().splitlines()[-2:] == ["notes: 7 of 100 steps", "  lost  nothing"]


def test_steps_that_are_done_again_after_a_step_back_have_lines_too(output: PeerOutput, said: io.StringIO) -> None:
    for era, step in ((0, 8), (0, 9), (1, 5), (1, 5), (1, 6)):
        output.say(Status(status=status(step, era=era)))
    assert [line.split()[1] for line in said.getvalue().splitlines()] == ["8/100", "9/100", "5/100", "6/100"]
