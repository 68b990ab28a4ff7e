import os
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.control import control_socket
from shoal.deploy.manners import config
from shoal.deploy.manners.config import RecordSettings
from shoal.deploy.manners.limits import Limits
from shoal.deploy.state import places
from shoal.protocol.errors import LocalError


@pytest.fixture(autouse=True)
def own_config(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def shoal(*arguments):
    result = CliRunner().invoke(cli.app, ["config", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_what_is_shown_is_a_file_that_means_the_same_and_says_what_each_is():
    code, shown, _ = shoal("show")
    assert code == 0
    assert msgspec.toml.decode(shown.encode(), type=config.Settings) == config.Settings()
    assert set(config.meanings()) == {*Limits.__struct_fields__, *RecordSettings.__struct_fields__}
    assert all(f"# {line}" in shown for meaning in config.meanings().values() for line in meaning.splitlines())


def test_setting_one_leaves_the_rest_of_the_file_alone(tmp_path):
    assert shoal("check") == (0, f"{config.config_path()}: not there, so all defaults hold\n", "")
    assert shoal("set", "upload_mbit_s", "5")[0] == 0
    path = tmp_path / "shoal" / "config.toml"
    assert shoal("path")[1] == f"{path}\n"
    path.write_text("# mine\n" + path.read_text() + "nice = 7 # because\n")
    assert shoal("set", "upload_mbit_s", "2.5")[0] == 0
    assert shoal("set", "hours", "22:00-07:00")[0] == 0
    assert config.load_settings().limits == Limits(upload_mbit_s=2.5, nice=7, hours="22:00-07:00")
    text = path.read_text()
    assert "# mine" in text
    assert "nice = 7 # because" in text
    assert text.count("upload_mbit_s") == 1
    assert msgspec.json.decode(shoal("show", "--json")[1])["limits"]["nice"] == 7
    assert shoal("check")[0] == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[limits]\nuplod = 1\n", "uplod"),
        ("[limits]\nnice = 40\n", "nice"),
        ("[limits\n", "config.toml"),
        ('[limits]\nhours = "late"\n', "22:00-07:00"),
        ("[other]\n", "other"),
    ],
)
def test_a_file_that_is_wrong_is_one_line_that_names_it(tmp_path, text, complaint):
    (tmp_path / "shoal").mkdir()
    (tmp_path / "shoal" / "config.toml").write_text(text)
    code, out, err = shoal("check")
    assert (code, out) == (cli.EXIT_USER_ERROR, "")
    (line,) = err.splitlines()
    assert complaint in line
    assert "config.toml" in line


def test_who_has_no_configuration_folder_has_all_defaults(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", os.devnull)
    assert config.load_settings() == config.Settings()


def test_a_setting_that_cannot_be_leaves_the_file_as_it_is():
    shoal("set", "nice", "5")
    for name, value in (("nice", "50"), ("nice", "very"), ("niceness", "5"), ("hours", "late")):
        code, _, err = shoal("set", name, value)
        assert code == cli.EXIT_USER_ERROR
        assert len(err.splitlines()) == 1
    assert config.load_settings().limits == Limits(nice=5)


def test_pausing_where_nothing_runs_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for command in ("pause", "resume"):
        result = CliRunner().invoke(cli.app, [command])
        assert result.exit_code == cli.EXIT_USER_ERROR
        assert "no peer runs" in result.stderr


def test_what_is_set_of_records_stands_in_a_table_of_its_own(tmp_path):
    for name, value in (("nice", "7"), ("keep_record", "true"), ("wandb_project", "mine"), ("keep_record", "false")):
        assert shoal("set", name, value)[0] == 0
    settings = config.load_settings()
    assert settings.record == RecordSettings(keep_record=False, wandb_project="mine")
    assert settings.limits.nice == 7
    assert config.config_path().read_text().count("keep_record") == 1
    code, _, err = shoal("set", "keep_record", "perhaps")
    assert (code, "true or false" in err) == (2, True)


def test_a_setting_is_written_as_in_the_question_and_taken_back(tmp_path):
    path = config.config_path()
    assert shoal("set", "compute_share", "50%") == (0, f"{path}: compute_share is 0.5\n", "")
    assert shoal("set", "hours", "22:00-07:00")[0] == 0
    assert shoal("set", "keep_record", "yes") == (0, f"{path}: keep_record is true\n", "")
    assert shoal("unset", "compute_share") == (0, f"{path}: compute_share is 1.0\n", "")
    assert config.load_settings() == config.Settings(
        limits=Limits(hours="22:00-07:00"), record=RecordSettings(keep_record=True)
    )
    assert shoal("unset", "keep_record")[1] == f"{path}: keep_record is not set\n"
    assert shoal("set", "hours", "always")[1] == f'{path}: hours is ""\n'
    before = path.read_text()
    assert shoal("unset", "nice")[0] == 0
    assert path.read_text() == before
    assert shoal("unset", "niceness")[0] == cli.EXIT_USER_ERROR


def test_peers_that_run_here_are_told_and_say_what_they_took(monkeypatch, tmp_path):
    bob, ann = (SimpleNamespace(folder=str(tmp_path / name), name=name) for name in ("bob", "ann"))
    monkeypatch.setattr(places, "all_running", lambda: [bob, ann])

    def ask(folder, verb):
        assert verb == "limits"
        if folder.name == "ann":
            raise LocalError("no peer runs in ann")
        return {"limits": msgspec.to_builtins(Limits(hours=config.load_settings().limits.hours))}

    monkeypatch.setattr(control_socket, "ask", ask)
    path = config.config_path()
    lost = "ann: no peer runs in ann\n"
    assert shoal("set", "hours", "22:00-07:00") == (0, f'{path}: hours is "22:00-07:00"\nbob: at once\n', lost)
    later = "bob: from its next start on, unless --limit says otherwise then\n"
    assert shoal("set", "memory_gb", "3 GB") == (0, f"{path}: memory_gb is 3.0\n{later}", lost)
    assert shoal("unset", "wandb_project")[1].endswith("\nbob: from its next start on\n")
