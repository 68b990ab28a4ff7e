"""Going on with a run: which spec it goes on by, what is said, and what a machine has of its runs."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.run.going_on import ended_in_words, going_on, learning_rate_in_words, new_run_note, same_run
from shoal.deploy.run.run_file import with_changes
from shoal.deploy.ship.scores import Score, keep_evaluation
from shoal.deploy.state import places
from shoal.deploy.state.known_peers import KnownPeers
from shoal.deploy.state.run_folder import RunFolder, SavedStanding, runs_in
from shoal.deploy.state.runs import all_runs, find, find_hosted
from shoal.deploy.state.runs import remove as remove_runs
from shoal.deploy.state.spec_record import seal_spec
from shoal.peer.disk.archive import Archive
from shoal.peer.disk.snapshot_name import SnapshotName
from shoal.peer.model.layout import all_layer_keys
from shoal.peer.model.state import StageState, initial_state
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.live.loop import LoopClock
from shoal.protocol.spec import (
    ContinuedSpec,
    DataSpec,
    ModelSpec,
    RunSpec,
    SourceSpec,
    TrainingSpec,
    continued_spec,
    run_id,
)

OWNER = Identity(bytes(32))
SPEC = RunSpec(name="notes", training=TrainingSpec(steps=100), data=DataSpec(source="notes/", digest="aa" * 32))
RUN = run_id(SPEC, OWNER.peer_id)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run_folder(spec: RunSpec = SPEC, *, step: int, peer: Path | None = None, **fields: Any) -> RunFolder:
    """As a peer leaves one behind that has seen the run at `step`."""
    peer = peer or places.state_root() / "hosts" / spec.name
    peer.mkdir(parents=True, exist_ok=True)
    (peer / ".lock").touch()
    folder = RunFolder(peer, run_id(spec, OWNER.peer_id))
    folder.keep_record(spec, seal_spec(OWNER, spec))
    standing = {"name": spec.name, "role": "host", "steps": spec.training.steps, "loss": 1.5, "used_s": time.time()}
    folder.keep_standing(SavedStanding(**(standing | {"step": step, "finished": step >= spec.training.steps} | fields)))
    return folder


def asked(**changes: Any) -> RunSpec:
    return with_changes(SPEC, {name.replace("__", "."): value for name, value in changes.items()})


# --- which spec ---


def test_a_run_that_was_stopped_goes_on_by_the_same_spec() -> None:
    going = going_on(SPEC, run_folder(step=60))
    assert (going.spec, going.finished) == (SPEC, False)
    assert going.sentences == (
        f"run notes ({RUN}) goes on: it was at step 60 of 100",
        "training goes on from its beginning",
    ), "nothing was saved yet"


def test_a_run_file_with_more_steps_is_the_next_revision() -> None:
    folder = run_folder(step=100)
    for going in (going_on(asked(training__steps=300), folder), going_on(SPEC, folder, steps=300)):
        assert going.spec.continued == (ContinuedSpec(at=100, steps=100),)
        assert going.spec.training.steps == 300
        assert run_id(going.spec, OWNER.peer_id) == RUN
        assert f"run notes ({RUN}) goes on from step 100 to step 300 (where it had ended)" in going.sentences
        assert "learning rate (cosine): climbs from 0.0004 to 0.004 by step 118, then falls to 0.0004 at step 300" in (
            going.sentences
        )


def test_who_raises_the_steps_of_a_stopped_run_is_told_where_it_goes_on() -> None:
    going = going_on(asked(optimizer__schedule="wsd", optimizer__decay_steps=50), run_folder(step=60), steps=300)
    assert going.spec.continued == (ContinuedSpec(at=60, steps=100),)
    assert "goes on from step 60 to step 300 (it was to end at step 100)" in going.sentences[0]
    assert going.sentences[-1].endswith("stays at 0.004 to step 249, then falls to 0.0004 at step 300")


def test_a_run_file_that_says_what_it_always_said_changes_nothing_of_a_run_that_was_continued() -> None:
    later = continued_spec(SPEC, asked(training__steps=300), at=100)
    going = going_on(SPEC, run_folder(later, step=150))
    assert going.spec == later
    assert going.sentences[1] == "the run file says 100 steps; the run has been continued to 300"


@pytest.mark.parametrize("steps", [1, 59, 60])
def test_fewer_steps_than_there_are_is_one_sentence(steps: int) -> None:
    with pytest.raises(LocalError, match=rf"has reached step 60, and {steps} is not more: give a higher number"):
        going_on(with_changes(SPEC, {"optimizer.warmup_steps": 0}), run_folder(step=60), steps=steps)


def test_a_run_can_be_ended_sooner_than_planned() -> None:
    going = going_on(SPEC, run_folder(step=60), steps=80)
    assert going.spec.training.steps == 80
    assert learning_rate_in_words(going.spec, 60) == "learning rate (cosine): falls to 0.0004 at step 80"


def test_more_peers_may_be_waited_for_without_another_learning_rate() -> None:
    going = going_on(asked(swarm__min_peers=9), run_folder(step=60))
    assert (going.spec.swarm.min_peers, going.spec.revision) == (9, 1)
    assert learning_rate_in_words(going.spec, 60) == learning_rate_in_words(SPEC, 60)


def test_what_nobody_said_may_be_chosen_otherwise_by_now_and_what_somebody_said_may_not() -> None:
    other = asked(optimizer__warmup_steps=7, training__steps=5000)
    assert not same_run(other, SPEC)
    assert same_run(other, SPEC, ["optimizer.warmup_steps"])
    assert not same_run(asked(data__digest="bb" * 32), SPEC, ["optimizer.warmup_steps"])


def test_a_new_run_of_an_old_name_says_what_is_not_as_before() -> None:
    folder = run_folder(step=60)
    assert new_run_note(asked(seed=1), [folder]).startswith(
        f"this is a new run: seed is not as in run notes ({RUN}), which is at step 60 of 100"
    )
    assert "the text is not as in" in new_run_note(asked(data__digest="bb" * 32), [folder])
    assert new_run_note(asked(seed=1, name="another"), [folder]) == ""
    assert new_run_note(SPEC, []) == ""


# --- what can be read of it ---

MODEL = ModelSpec(dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=12, context=8)
SMALL = msgspec.structs.replace(SPEC, model=MODEL)


def saved_at(*versions: int, step: int, last_layer: int | None = None) -> RunFolder:
    """A run alone on this machine, as `Archive` writes it; with `last_layer` the part of a peer of the first stage."""
    folder = run_folder(SMALL, step=step)
    archive = Archive(
        LiveDisk(folder.peer_folder), run=folder.run, spec=SMALL, clock=LoopClock(), run_blocking=asyncio.to_thread
    )
    layers = initial_state(SMALL, all_layer_keys(MODEL)[:last_layer], torch.device("cpu")).layers

    async def write() -> None:
        for version in versions:
            assert await archive.write(StageState(version=version, layers=layers), era=0)

    asyncio.run(write())
    return folder


def damage(folder: RunFolder, version: int) -> None:
    """Cut a file of the snapshot short."""
    (file,) = folder.path.glob(f"snapshots/*/*-step-{version:08d}-*/head.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def test_the_step_it_really_goes_on_from_is_said() -> None:
    folder = saved_at(40, 60, step=64)
    was_at = f"run notes ({folder.run}) goes on: it was at step 64 of 100"
    newest = "training goes on from step 60, the newest snapshot that can be read here"
    assert going_on(SMALL, folder).sentences == (was_at, newest)
    damage(folder, 60)
    before = "training goes on from step 40, the newest snapshot that can be read here"
    assert going_on(SMALL, folder).sentences == (was_at, before)
    assert before in going_on(SMALL, folder, steps=300).sentences


def test_a_run_of_which_nothing_can_be_read_does_not_begin_anew() -> None:
    folder = saved_at(40, 60, step=64)
    for version in (40, 60):
        damage(folder, version)
    left = (
        r"run notes \(.*\) was saved at step 60, and the snapshot .*-step-00000060-.* is damaged: head.safetensors has "
        r"changed since it was written \(and 1 more\); no other machine has taken part, so nobody else has a copy: .*"
    )
    for steps in (None, 300):
        with pytest.raises(LocalError, match=left):
            going_on(SMALL, folder, steps=steps)
    shutil.rmtree(folder.path / "snapshots")
    with pytest.raises(LocalError, match=r"there is no whole snapshot in .*snapshots any more \(is its disk mounted"):
        going_on(SMALL, folder)


def test_a_run_of_which_others_may_have_copies_waits_for_them() -> None:
    folder = saved_at(40, 60, step=64)
    KnownPeers(LiveDisk(folder.peer_folder), folder.run).note({"other": ["/ip4/10.0.0.2/tcp/1/p2p/other"]}, now_s=1.0)
    assert going_on(SMALL, folder).sentences[1] == (
        "training goes on from step 60, the newest snapshot that can be read here, unless the other machines have a "
        "newer one"
    )
    shutil.rmtree(folder.path / "snapshots")
    assert (
        going_on(SMALL, folder)
        .sentences[1]
        .endswith("(is its disk mounted?): the run goes on once machines are here that have a copy")
    )


def test_a_part_that_is_sound_says_that_others_have_the_rest() -> None:
    """The run ended within seconds: who else took part was not noted yet."""
    folder = saved_at(40, step=40, last_layer=2)
    assert not folder.has_met_others()
    assert going_on(SMALL, folder).sentences[1] == (
        "training goes on from the newest step that its machines have together"
    )


# --- what a folder remembers ---


def test_the_newest_spec_is_kept_and_an_older_one_does_not_replace_it() -> None:
    folder = run_folder(step=60)
    later = continued_spec(SPEC, asked(training__steps=300), at=100)
    folder.keep_record(later, seal_spec(OWNER, later))
    folder.keep_record(SPEC, seal_spec(OWNER, SPEC))
    assert folder.spec() == later
    (folder.path / "spec.record").write_bytes(b"rubbish")
    assert folder.spec() is None
    (folder.path / "spec.record").write_bytes(seal_spec(Identity(bytes([1]) * 32), later))
    assert folder.spec() is None, "another's run"
    folder.keep_record(SPEC, seal_spec(OWNER, SPEC))
    assert folder.spec() == SPEC


def test_without_a_record_the_newest_snapshot_has_the_spec() -> None:
    folder = run_folder(step=10)
    (folder.path / "spec.record").unlink()
    later = continued_spec(SPEC, asked(training__steps=300), at=100)
    for era, version, spec in ((0, 90, SPEC), (1, 80, later)):
        snapshot = folder.path / "snapshots" / "embed-head" / str(SnapshotName(RUN, era, version, "0" * 16))
        snapshot.mkdir(parents=True)
        (snapshot / "manifest.json").write_bytes(msgspec.json.encode({"spec": spec}))
    assert folder.spec() == later
    assert (folder.version(), folder.reached(), folder.is_finished()) == (90, 90, False)


def test_the_last_loss_is_the_records_if_there_is_one() -> None:
    folder = run_folder(step=60)
    assert folder.last_loss() == 1.5
    lines = [
        b'{"kind":"step","loss":1.25}',
        b'{"kind":"validation","loss":9.0}',
        b'{"kind":"step","loss":null}',
        b'{"k',
    ]
    (folder.path / "record.jsonl").write_bytes(b"\n".join(lines))
    assert folder.last_loss() == 1.25


# --- the commands ---


def said(*arguments: object, code: int = 0, stdin: str = "") -> str:
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), input=stdin)
    assert result.exit_code == code, result.output
    return result.output


def test_hosting_a_finished_run_says_so_and_what_can_be_done_with_it(home: Path) -> None:
    text, toml = home / "text", home / "run.toml"
    text.write_text("some words to learn from\n" * 1000)
    toml.write_text(f'name = "done"\n[data]\nsource = "{text}"\n[training]\nsteps = 30\n')
    from shoal.deploy.run.run_text import load_own_corpus
    from shoal.protocol.toml.spec_file import load_spec

    spec, _ = load_own_corpus(load_spec(toml))
    run_folder(spec, step=30)
    told = said("host", toml)
    run = run_id(spec, OWNER.peer_id)
    assert f"run done ({run}) is finished: 30 of 30 steps, loss 1.500" in told
    for command in (f"continue {run} --steps 60", "generate", "export", "report", f"runs remove {run}"):
        assert f"shoal {command}" in told
    assert "is finished: 30 of 30" in said("continue", "done")
    assert said("host", toml, "--steps", 30) == told
    assert "has reached step 30, and 29 is not more" in said("host", toml, "--steps", 29, code=2)
    events = [msgspec.json.decode(line)["event"] for line in said("host", toml, "--json").splitlines()]
    assert set(events[:-1]) == {"Note"}
    assert events[-1] == "Left"


def test_runs_lists_what_was_hosted_and_joined_wherever_it_is(home: Path) -> None:
    assert said("runs") == "no run has been hosted or joined on this machine\n"
    run_folder(step=60)
    other = RunSpec(name="fish", training=TrainingSpec(steps=20))
    elsewhere = home / "disk" / "peer"
    run_folder(other, step=20, peer=elsewhere, role="volunteer", used_s=0.0)
    places.note_folder(elsewhere)
    notes, fish = msgspec.json.decode(said("runs", "--json"))
    assert (notes["name"], notes["run"], notes["role"], notes["step"], notes["steps"]) == (
        "notes",
        RUN,
        "host",
        60,
        100,
    )
    assert (notes["loss"], notes["finished"], notes["running"]) == (1.5, False, False)
    assert notes["size_bytes"] == sum(path.stat().st_size for path in Path(notes["folder"], RUN).iterdir())
    assert (fish["name"], fish["role"], fish["finished"], fish["folder"]) == ("fish", "volunteer", True, str(elsewhere))
    table = said("runs")
    assert "60/100" in table
    assert "20/20" in table
    with places.announced(make_invite(RUN, OWNER.peer_id, ("/ip4/127.0.0.1/tcp/9/p2p/" + OWNER.peer_id,)), None):
        assert not any(run.running for run in all_runs()), "of another folder"
    peer = places.state_root() / "hosts" / "notes"
    with places.announced(make_invite(RUN, OWNER.peer_id, ("/ip4/127.0.0.1/tcp/9/p2p/" + OWNER.peer_id,)), peer):
        assert "up now" in said("runs")


def test_a_run_is_meant_by_its_name_its_id_or_the_beginning_of_that() -> None:
    run_folder(step=60)
    run_folder(RunSpec(name="fish"), step=1, peer=places.state_root() / "runs" / "x" / "peer-1", role="volunteer")
    runs = all_runs()
    assert find("notes", runs) == find(RUN, runs) == find(RUN[:3], runs)
    with pytest.raises(LocalError, match=r"no run 'nets' is on this machine: `shoal runs` lists them"):
        find("nets", runs)
    with pytest.raises(LocalError, match="no run ''"):
        find("", runs)
    assert find_hosted("notes", None)[1] == SPEC
    with pytest.raises(LocalError, match=r"run fish .* was not hosted on this machine"):
        find_hosted("fish", None)


def test_removing_asks_and_takes_the_text_that_nobody_else_uses(home: Path) -> None:
    run_folder(step=60)
    second = with_changes(SPEC, {"seed": 5})
    run_folder(second, step=3)
    text = places.cache_root() / "text" / "0123"
    text.mkdir(parents=True)
    (text / "meta.json").write_bytes(msgspec.json.encode({"digest": SPEC.data.digest}))
    peer = places.state_root() / "hosts" / "notes"

    assert "Delete it?" in said("runs", "remove", RUN, code=1, stdin="n\n")
    assert RunFolder(peer, RUN).path.exists()
    assert "may mean" in said("runs", "remove", "notes", code=2)

    lock = places.claim_folder(peer)
    assert "another shoal runs in" in said("runs", "remove", RUN, "--yes", code=2)
    lock.release()
    assert RunFolder(peer, RUN).path.exists()

    assert f"deleted run notes ({RUN})" in said("runs", "remove", RUN, stdin="y\n")
    assert [folder.run for folder in runs_in(peer)] == [run_id(second, OWNER.peer_id)]
    assert text.exists(), "the second run has the same text"
    told = msgspec.json.decode(said("runs", "remove", "notes", "--yes", "--json").splitlines()[-1])
    assert told["bytes"] > 0
    assert not peer.exists()
    assert not text.exists()
    assert all_runs() == []


def test_a_run_of_several_sources_goes_with_all_of_their_texts_and_with_its_scores(home: Path) -> None:
    data = DataSpec(sources=(SourceSpec(source="a"), SourceSpec(source="b")), digest="aa+bb")
    spec = RunSpec(name="mixed", data=data)
    run_folder(spec, step=3)
    texts = [places.cache_root() / "text" / digest for digest in ("aa", "bb", "cc")]
    for text in texts:
        text.mkdir(parents=True)
        (text / "meta.json").write_bytes(msgspec.json.encode({"digest": text.name}))
    scores = keep_evaluation(run_id(spec, OWNER.peer_id), 0, 3, [Score(name="validation", loss=1.0)])
    said("runs", "remove", "mixed", "--yes")
    assert [text.exists() for text in texts] == [False, False, True]
    assert not scores.exists()


def test_a_volunteers_folder_goes_with_its_run_and_a_demo_as_a_whole() -> None:
    peer = places.state_root() / "runs" / RUN / "peer-1"
    run_folder(step=60, peer=peer, role="volunteer")
    demo = places.state_root() / "demo" / "2026-11-23-100000"
    run_folder(RunSpec(seed=9), step=4, peer=demo / "peers" / "ana", role="host")
    assert [run.role for run in all_runs()] == ["demo", "volunteer"]
    for run in all_runs():
        remove_runs([run])
    assert not peer.parent.exists()
    assert not demo.exists()


def test_a_volunteer_who_finds_nobody_of_a_finished_run_is_told_that_it_is_over() -> None:
    assert ended_in_words(run_folder(step=60)) == ""
    assert "was finished at step 100, and nobody of it is up" in ended_in_words(run_folder(step=100))
    later = continued_spec(SPEC, asked(training__steps=300), at=100)
    assert ended_in_words(run_folder(later, step=100)) == ""
