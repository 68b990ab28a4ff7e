"""The runner and its report: what is finished is never made again, and rows are judged as the README says."""

import msgspec
import pytest
import report
import study
from grids import full, short
from rows import Row, Table, wanted
from settings import Finished, Method, Outcome, Paper, Point, Run, Steps
from tasks import BatchShape

from shoal.protocol.spec import OptimizerSpec

SHAPE = BatchShape(microbatches_per_step=4, microbatch_size=1)


def run_with(regime=None, *, method="none", group="t") -> Run:
    return Run(
        task="bytes",
        shape=SHAPE,
        regime=regime or Steps(),
        method=Method(name=method),
        optimizer=OptimizerSpec(name="adamw"),
        updates=10,
        group=group,
    )


def row(label, *, regime=None, method="none", rates=(0.1, 0.2), seeds=1, role="") -> Row:
    return Row(label=label, run=run_with(regime, method=method), rates=rates, seeds=seeds, role=role)


def ended(run: Run, loss: float | None, *, curve=()) -> Finished:
    outcome = Outcome(
        validation_loss=loss,
        right=0.5,
        training_loss=loss,
        units=40,
        virtual_s=10.0,
        staleness_mean=0.5,
        curve=tuple(Point(*point) for point in curve),
        processor_s=1.0,
    )
    return Finished(key=run.key, run=run, outcome=outcome)


def found(*lines: Finished) -> dict[str, Finished]:
    return {line.key: line for line in lines}


def test_a_runs_name_is_what_it_is_and_not_which_table_it_is_in():
    assert run_with(group="a").key == run_with(group="b").key
    others = [run_with(method="stash"), run_with(Steps(shares=(0.5,))), run_with(Paper())]
    assert len({run.key for run in [run_with(), *others]}) == 4
    again = msgspec.json.decode(msgspec.json.encode(others[1]), type=Run)
    assert again == others[1]
    assert again.key == others[1].key


def test_more_seeds_are_wanted_of_the_best_rate_once_all_rates_are_there():
    r = row("r", seeds=3)
    table = Table(name="t", title="t", rows=(r,))
    assert [run.optimizer.learning_rate for run in table.wanted({})] == [0.1, 0.2]
    one = found(ended(r.at(0.1, 0), 2.0))
    assert table.wanted(one) == [r.at(0.2, 0)]
    both = one | found(ended(r.at(0.2, 0), 1.0))
    assert table.wanted(both) == [r.at(0.2, 1), r.at(0.2, 2)]
    diverged = one | found(ended(r.at(0.2, 0), None))
    assert table.wanted(diverged) == [r.at(0.1, 1), r.at(0.1, 2)]


def test_a_run_of_two_tables_is_made_once():
    tables = [Table(name=name, title="", rows=(row("r"),)) for name in "ab"]
    assert len(wanted(tables, {})) == 2


@pytest.mark.parametrize("tables", [full(), short()], ids=["full", "short"])
def test_every_table_can_be_judged(tables):
    assert len({table.name for table in tables}) == len(tables)
    for table in tables:
        assert [row.role for row in table.rows].count("synchronous") == 1, table.name
        assert [row.role for row in table.rows].count("none") == 1, table.name
        assert len({row.label for row in table.rows}) == len(table.rows)
        keys = [run.key for row in table.rows for run in row.first()]
        assert len(set(keys)) == len(keys), f"two rows of {table.name} are the same run"


def test_lines_are_found_again_whatever_a_kill_has_left_of_the_last_one(tmp_path):
    lines = [ended(run_with(method=name), 1.0) for name in ("none", "stash", "dc")]
    study.append(tmp_path, lines[0])
    study.append(tmp_path, lines[1])
    path = tmp_path / study.LINES
    path.write_bytes(path.read_bytes()[:-20])
    assert study.load(tmp_path) == found(lines[0])
    study.append(tmp_path, lines[2])
    assert study.load(tmp_path) == found(lines[0], lines[2])


def test_results_of_other_code_are_left_out(tmp_path):
    line = ended(run_with(), 1.0)
    study.append(tmp_path, Finished(key="0" * 16, run=line.run, outcome=line.outcome))
    assert study.load(tmp_path) == {}


def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    """The pool is a list here: what is submitted is done at once, until it is stopped."""
    made: list[str] = []
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda *args, **kwargs: InThisProcess(made, stop_after=3))
    table = Table(name="t", title="t", rows=(row("r", seeds=2), row("none", method="stash", role="none")))
    with pytest.raises(KeyboardInterrupt):
        study.study([table], tmp_path, jobs=1, say=lambda line: None)
    assert len(study.load(tmp_path)) == 3
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda *args, **kwargs: InThisProcess(made))
    assert study.study([table], tmp_path, jobs=1, say=lambda line: None) == 0
    assert len(made) == len(set(made)) == 5
    report.write([table], study.load(tmp_path), tmp_path)
    assert not (tmp_path / study.LINES).exists()
    assert study.load(tmp_path).keys() == set(made)
    assert wanted([table], study.load(tmp_path)) == []


def test_a_run_that_fails_is_told_and_the_others_are_made(tmp_path, monkeypatch):
    made: list[str] = []
    bad = row("r").at(0.1, 0).key
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda *args, **kwargs: InThisProcess(made, fails=bad))
    said: list[str] = []
    table = Table(name="t", title="t", rows=(row("r"),))
    assert study.study([table], tmp_path, jobs=2, say=said.append) == 1
    assert any(line.startswith("failed") for line in said)
    assert len(study.load(tmp_path)) == 1


class InThisProcess:
    """A pool whose runs take no time and have 1.0 as their loss."""

    def __init__(self, made, *, stop_after=None, fails=""):
        self.made, self.stop_after, self.fails = made, stop_after, fails

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def submit(self, work, encoded):
        run = msgspec.json.decode(encoded, type=Run)
        if len(self.made) == self.stop_after:
            raise KeyboardInterrupt
        future = study.Future()
        if run.key == self.fails:
            future.set_exception(ValueError("cannot be"))
        else:
            self.made.append(run.key)
            future.set_result(msgspec.json.encode(ended(run, 1.0)))
        return future


def test_rows_are_judged_at_their_own_best_rates():
    rows = (
        row("synchronous", role="synchronous"),
        row("none", regime=Steps(shares=(1.0,)), role="none"),
        row("better", regime=Steps(shares=(1.0,)), method="pipeoptim", seeds=2),
    )
    losses = {("synchronous", 0.1): 1.8, ("synchronous", 0.2): 1.7, ("none", 0.1): 2.2, ("none", 0.2): None}
    losses |= {("better", 0.1): 1.9, ("better", 0.2): 2.5}
    lines = [ended(r.at(rate, 0), losses[r.label, rate]) for r in rows for rate in (0.1, 0.2)]
    lines.append(ended(rows[2].at(0.1, 1), 2.0))
    text = report.table_text(Table(name="t", title="A table", rows=rows), found(*lines))
    better = next(line for line in text.splitlines() if line.startswith("| better"))
    assert "**1.900**" in better
    assert "1.950 ± 0.071" in better
    assert "+0.250" in better
    assert "50%" in better
    assert "diverged" in text


def test_of_a_study_that_is_not_whole_what_there_is_is_judged_and_the_rest_left_out(tmp_path):
    rows = (row("half", role="synchronous"), row("missing", method="stash"))
    missing = Table(name="m", title="Nothing of it", rows=rows[1:])
    line = ended(rows[0].at(0.2, 0), 1.7)
    report.write([Table(name="t", title="Some of it", rows=rows), missing], found(line), tmp_path)
    text = (tmp_path / report.TABLES).read_text()
    assert "| half |  | **1.700** | 1.700 |" in text
    assert "| missing |" not in text
    assert "Nothing of it" not in text
    assert rows[0].best_rate(found(line)) is None, "further seeds wait for all rates"


def test_time_to_a_loss_is_between_the_points_of_a_curve():
    curve = [Point(0, 0, 10.0, 3.0), Point(1, 1, 20.0, 2.0), Point(2, 2, 40.0, 1.0)]
    assert report.seconds_to(2.5, curve) == pytest.approx(15.0)
    assert report.seconds_to(1.25, curve) == pytest.approx(35.0)
    assert report.seconds_to(3.5, curve) == 10.0
    assert report.seconds_to(0.5, curve) == float("inf")


def test_a_row_is_sooner_by_the_time_it_takes_to_the_synchronous_rows_last_loss():
    rows = (row("synchronous", rates=(0.1,), role="synchronous"), row("fast", method="stash", rates=(0.1,)))
    slow = [(1, 1, 10.0, 3.0), (2, 2, 20.0, 2.0), (3, 3, 30.0, 2.0)]
    fast = [(1, 1, 5.0, 3.0), (2, 2, 10.0, 1.0)]
    lines = [ended(rows[0].at(0.1, 0), 2.0, curve=slow), ended(rows[1].at(0.1, 0), 1.0, curve=fast)]
    text = report.table_text(Table(name="t", title="t", rows=rows), found(*lines)).splitlines()
    assert text[4].endswith("| 1.00 |")
    assert text[5].endswith("| 2.67 |"), "20 s, where the synchronous row first is, against 7.5"


def test_no_gap_is_no_share_of_a_gap():
    assert report.gap_closed(1.5, synchronous=1.0, none=2.0) == pytest.approx(0.5)
    assert report.gap_closed(0.9, synchronous=1.0, none=2.0) == pytest.approx(1.1)
    assert report.gap_closed(1.5, synchronous=2.0, none=1.0) is None
    assert report.gap_closed(float("inf"), synchronous=1.0, none=2.0) is None
