from shoal.coordinator.ledger import WAITING_MAX, ReportQueue
from shoal.protocol.limits import REPORTS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import ValidationReport


def report(step):
    return ValidationReport(step=step, loss=1.0, microbatches=4)


def steps(heartbeat):
    return [validation.step for validation in heartbeat.validations]


def test_reports_go_with_the_heartbeat_that_brought_them(make_heartbeat):
    outbox = ReportQueue()
    heartbeat, sent = outbox.enclose(make_heartbeat("a", validations=(report(1), report(2))), 0.0)
    assert steps(heartbeat) == [1, 2]
    outbox.returned(sent, arrived=True)
    heartbeat, _ = outbox.enclose(make_heartbeat("a"), 0.0)
    assert steps(heartbeat) == []


def test_what_did_not_arrive_goes_again_before_what_is_new(make_heartbeat):
    outbox = ReportQueue()
    _, sent = outbox.enclose(make_heartbeat("a", validations=(report(1),)), 0.0)
    outbox.returned(sent, arrived=False)
    heartbeat, sent = outbox.enclose(make_heartbeat("a", validations=(report(2),)), 0.0)
    assert steps(heartbeat) == [1, 2]
    outbox.returned(sent, arrived=True)
    assert len(outbox._waiting) == 0


def test_while_one_heartbeat_is_under_way_the_next_carries_none(make_heartbeat):
    outbox = ReportQueue()
    _, first = outbox.enclose(make_heartbeat("a", validations=(report(1),)), 0.0)
    heartbeat, second = outbox.enclose(make_heartbeat("a", validations=(report(2),)), 0.0)
    assert steps(heartbeat) == []
    outbox.returned(second, arrived=True)
    outbox.returned(first, arrived=True)
    heartbeat, _ = outbox.enclose(make_heartbeat("a"), 0.0)
    assert steps(heartbeat) == [2]


def test_many_reports_go_a_few_at_a_time_oldest_first(make_heartbeat):
    outbox = ReportQueue()
    heartbeat, sent = outbox.enclose(make_heartbeat("a", validations=tuple(report(step) for step in range(40))), 0.0)
    gone = steps(heartbeat)
    while sent:
        assert len(sent) <= REPORTS_PER_HEARTBEAT_MAX
        outbox.returned(sent, arrived=True)
        heartbeat, sent = outbox.enclose(make_heartbeat("a"), 0.0)
        gone += steps(heartbeat)
    assert gone == list(range(40))


def test_without_a_coordinator_the_oldest_are_forgotten(make_heartbeat):
    outbox = ReportQueue()
    _, sent = outbox.enclose(make_heartbeat("a", validations=(report(0),)), 0.0)
    outbox.enclose(make_heartbeat("a", validations=tuple(report(step) for step in range(1, WAITING_MAX + 1))), 0.0)
    assert len(outbox._waiting) == WAITING_MAX
    outbox.returned(sent, arrived=True)
    assert len(outbox._waiting) == WAITING_MAX, "what was under way had been forgotten, nothing else may go"
