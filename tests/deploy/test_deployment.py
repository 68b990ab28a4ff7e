"""Every file with which shoal is deployed: its form, the paths that it names, the commands and options that it runs."""

import configparser
import json
import os
import plistlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import yaml
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.commands import service_unit as service
from shoal.deploy.manners.config import Settings
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite
from shoal.protocol.toml.spec_file import load_spec

DEPLOY = Path(cli.__file__).parent
ROOT = DEPLOY.parent
GROUP: Any = typer.main.get_command(cli.app)
FOLDERS = ("docker", "compose", "systemd", "launchd", "kubernetes", "cloud-init")
DOCKERFILES = sorted(path for path in (DEPLOY / "docker").glob("Dockerfile.*") if path.suffix != ".dockerignore")
PEERS = yaml.safe_load((DEPLOY / "compose" / "peers.yaml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "shoal.yaml").read_text()))
USER_DATA = (DEPLOY / "cloud-init" / "user-data.yaml").read_text()


def check_command(words: list[str]) -> None:
    """That `shoal` has this command and these options; what it is given is not looked at.

    Raises: click's UsageError.
    """
    command, rest = GROUP, words
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{' '.join(words)}: there is no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    if rest != ["--help"]:
        command.make_context(" ".join(words), list(rest), resilient_parsing=False)


def shoal_words(script: str) -> list[list[str]]:
    """The commands of `shoal` in a line of shell."""
    found = []
    for part in re.split(r"&&|\|\||;|\|", script):
        words = shlex.split(re.sub(r"[<>]\s*\S+", "", part), comments=True)
        if words and words[0] == "exec":
            words = words[1:]
        if words and words[0].rpartition("/")[2] == "shoal":
            found.append(words[1:])
    return found


def is_silent(words: list[str]) -> bool:
    """Whether a health check's output goes elsewhere: what it prints is kept and shown."""
    return words[:2] == ["sh", "-c"] and bool(re.search(r"> (/dev/null|/invite/)", words[2]))


def check_all(*ways: list[str]) -> int:
    """Each is a program with its arguments, or a shell with a line. Returns: how many are commands of shoal."""
    lines: list[list[str]] = []
    for words in ways:
        lines += shoal_words(words[2]) if words[:2] == ["sh", "-c"] else [words[1:]] if words[:1] == ["shoal"] else []
    for line in lines:
        check_command(line)
    return len(lines)


# --- docker ---


def instructions(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines()]  # type: ignore[misc]


def test_there_is_an_image_for_processors_and_one_for_gpus() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_an_image_runs_shoal_as_nobody_special_and_says_whether_it_is_well(path: Path) -> None:
    found = instructions(path)
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert {name for name, _ in found} <= known | {"ENTRYPOINT", "CMD"}
    last = dict(found)
    uid = int(last["USER"])
    assert uid > 0
    assert any(f"--uid {uid}" in text for name, text in found if name == "RUN")
    assert last["STOPSIGNAL"] == "SIGINT"
    assert json.loads(last["ENTRYPOINT"]) == ["shoal"]
    check_command(json.loads(last["CMD"]))
    (health,) = (json.loads(text.partition("CMD")[2]) for name, text in found if name == "HEALTHCHECK")
    assert check_all(health) == 1
    assert is_silent(health), "`docker inspect` keeps what a health check prints"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_an_image_is_made_of_what_is_there_and_pinned(path: Path) -> None:
    text = path.read_text()
    sources = [line.split()[1] for line in text.splitlines() if line.startswith("COPY") and "--from" not in line]
    assert all((ROOT / source).exists() for source in sources)
    (install,) = re.findall(r"(deploy/lock/\S+) /opt/shoal/bin/python", text)
    assert os.access(ROOT / install, os.X_OK)
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert re.findall(r"^ARG PYTHON_IMAGE=python:([\d.]+)", text, re.M) == ["3.11"]
    assert re.findall(r"^FROM (\S+)", text, re.M) == ["${PYTHON_IMAGE}"] * 2
    assert python.startswith(">=3.11")
    assert path.with_name(f"{path.name}.dockerignore").is_file()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_the_commands_above_an_image_are_such(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.startswith("#   docker ")]
    build, start = (shlex.split(line.lstrip("# ")) for line in lines)
    assert (ROOT / build[build.index("-f") + 1]).samefile(path)
    image = build[build.index("-t") + 1]
    check_command(start[start.index(image) + 1 :])


# --- compose ---


def test_compose_names_what_is_there() -> None:
    base = DEPLOY / "compose"
    for name, one in [*COMPOSE["services"].items(), *PEERS["services"].items()]:
        assert (base / one["build"]["context"]).resolve() == ROOT
        dockerfile = one["build"]["dockerfile"]
        assert {ROOT / dockerfile.replace("${SHOAL_IMAGE:-cpu}", kind) for kind in ("cpu", "cuda")} == set(DOCKERFILES)
        assert one["stop_signal"] == "SIGINT"
        for volume in one.get("volumes", ()):
            source = volume.split(":")[0]
            assert (base / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
        assert set(one.get("depends_on", {})) <= set(COMPOSE["services"]) - {name}
        health = one.get("healthcheck", {"test": ["CMD"]})["test"][1:]
        program = [*one.get("entrypoint", ["shoal"]), *one.get("command", [])]
        assert check_all(program, health) == (2 if name == "host" else 1)
        assert name != "host" or is_silent(health)
    (peer,) = PEERS["services"].values()
    assert peer["secrets"] == list(PEERS["secrets"])
    assert peer["entrypoint"][2].endswith(f"< /run/secrets/{peer['secrets'][0]}")
    secret = PEERS["secrets"]["invite"]["file"].removeprefix("./")
    assert all(
        f"deploy/compose/{secret}\n" in path.with_name(f"{path.name}.dockerignore").read_text() for path in DOCKERFILES
    )
    assert load_spec(base / "run.toml").swarm.min_peers <= 3


# --- kubernetes ---


def test_kubernetes_objects_fit_together() -> None:
    assert [(o["kind"], o["metadata"]["name"]) for o in OBJECTS] == [
        ("Service", "shoal-host"),
        ("StatefulSet", "shoal-host"),
        ("StatefulSet", "shoal-peer"),
    ]
    for one in OBJECTS[1:]:
        spec, pod = one["spec"], one["spec"]["template"]["spec"]
        assert one["apiVersion"] == "apps/v1"
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        assert spec["serviceName"] == OBJECTS[0]["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["terminationGracePeriodSeconds"] >= 60
        volumes = {v["name"] for v in pod["volumes"]} | {v["metadata"]["name"] for v in spec["volumeClaimTemplates"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        program = [*container.get("command", ["shoal"]), *container.get("args", [])]
        probes = [container[name]["exec"]["command"] for name in ("startupProbe", "livenessProbe") if name in container]
        assert all(map(is_silent, probes))
        assert check_all(program, container["lifecycle"]["preStop"]["exec"]["command"], *probes) == 2 + len(probes)
    assert OBJECTS[0]["spec"]["selector"] == OBJECTS[1]["spec"]["template"]["metadata"]["labels"]


# --- systemd, launchd, cloud-init ---


def unit(text: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None, strict=True)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(text)
    assert parsed.sections() == ["Unit", "Service", "Install"]
    assert parsed["Service"]["KillSignal"] == "SIGINT"
    return parsed


@pytest.fixture
def invite() -> str:
    owner = Identity(bytes(32)).peer_id
    return make_invite("0123456789abcdef", owner, (f"/ip4/127.0.0.1/tcp/9/p2p/{owner}",))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """With a systemctl that writes down what it is told, and fails if it is told to: always with a file `fails`, at a
    unit that wants a user namespace with a file `plain`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    tool = tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\n[ "$2" = show ] && echo 226 && exit 0\necho "$@" >> {tmp_path}/told\n'
        f"[ -e {tmp_path}/fails ] && echo no bus >&2 && exit 1\n"
        f'[ -e {tmp_path}/plain ] && [ "$2" = enable ] && '
        f"grep -qs ^PrivateUsers {tmp_path}/.config/systemd/user/shoal.service && exit 1\nexit 0\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(service.sys, "platform", "linux")
    return tmp_path


def test_a_service_is_installed_started_shown_and_removed(home: Path, invite: str) -> None:
    arguments = ["--limit", "hours=22:00-07:00, 12-13", "--name", "50% $HOME"]
    shown = CliRunner().invoke(cli.app, ["service", "show", *arguments])
    result = CliRunner().invoke(cli.app, ["service", "install", invite, *arguments])
    assert result.exit_code == 0, result.output
    path = home / ".config" / "systemd" / "user" / "shoal.service"
    kept = home / ".config" / "shoal" / "service.invite"
    assert shown.stdout == f"# {path}; the invite: {kept}\n{path.read_text()}"
    assert invite not in path.read_text() + result.stdout, "it would be in the list of processes, too"
    assert kept.read_text() == f"{invite}\n"
    assert kept.stat().st_mode & 0o077 == 0, "who reads the invite may join"
    assert unit(path.read_text())["Service"]["StandardInput"] == f"file:{kept}"
    command = unit(path.read_text())["Service"]["ExecStart"]
    words = shlex.split(command.replace("%%", "%").replace("$$", "$"))
    assert Path(words[0]).name == "shoal"
    assert [words[words.index(o) + 1] for o in ("--limit", "--name")] == ["hours=22:00-07:00, 12-13", "50% $HOME"]
    check_command(words[1:])
    assert CliRunner().invoke(cli.app, ["service", "uninstall"]).exit_code == 0
    assert not path.exists()
    assert not kept.exists()
    told = (home / "told").read_text().splitlines()
    assert told == [
        "--user daemon-reload",
        "--user enable --now shoal.service",
        "--user disable --now shoal.service",
    ]


def binds(section: configparser.SectionProxy) -> tuple[list[str], list[str]]:
    """The folders that a unit may write, and those that it may read."""
    writes, reads = (shlex.split(section[name]) for name in ("BindPaths", "BindReadOnlyPaths"))
    return writes, reads


def test_a_service_sees_of_the_home_only_what_it_needs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = unit(service.service([]).text)["Service"]
    assert found["ProtectSystem"] == "strict"
    assert found["ProtectHome"] == "tmpfs"
    assert {found[name] for name in ("PrivateUsers", "PrivateTmp", "NoNewPrivileges", "RestrictSUIDSGID")} == {"yes"}
    assert "AF_PACKET" not in found["RestrictAddressFamilies"]
    writes, reads = binds(found)
    assert writes == [f"-{home}/.local/state/shoal", f"-{home}/.cache/shoal"]
    assert {f"-{sys.prefix}", f"-{ROOT}", f"-{home}/.config/shoal"} <= set(reads)
    assert not {"-%t", f"-{home}"} & {*reads, *writes}
    assert f"NUMBA_CACHE_DIR={home}/.cache/shoal/numba" in shlex.split(found["Environment"])
    watching = CliRunner().invoke(cli.app, ["service", "show", "--limit", "only_when_idle=true"])
    assert "-%t" in binds(unit(watching.stdout)["Service"])[1], "it could not ask the desktop who is there"
    monkeypatch.setenv("XDG_STATE_HOME", f"{home}/a b:50%")
    found = unit(service.service([]).text)["Service"]
    assert f"XDG_STATE_HOME={home}/a b:50%%" in shlex.split(found["Environment"])
    assert f"-{home}/a b\\:50%%/shoal" in binds(found)[0]


def test_a_system_without_user_namespaces_gets_a_service_that_sees_all(home: Path, invite: str) -> None:
    (home / "plain").touch()
    result = CliRunner().invoke(cli.app, ["service", "install", "-"], input=f"{invite}\n")
    assert result.exit_code == 0, result.output
    assert "cannot isolate a user" in result.stdout
    told = [line.split()[1] for line in (home / "told").read_text().splitlines()]
    assert told == ["daemon-reload", "enable", "disable", "daemon-reload", "enable"]
    found = unit((home / ".config" / "systemd" / "user" / "shoal.service").read_text())["Service"]
    assert found["NoNewPrivileges"] == "yes"
    assert not {"PrivateUsers", "ProtectHome", "CapabilityBoundingSet", "BindPaths", "RestrictNamespaces"} & set(found)


def test_what_goes_wrong_with_a_service_is_one_line(home: Path, invite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, complaint in (
        (["uninstall"], "no service is installed"),
        (["install", "hello"], "not a shoal invite"),
        (["install", invite, "--limit", "uplod=5"], "uplod"),
    ):
        result = CliRunner().invoke(cli.app, ["service", *arguments])
        assert result.exit_code == cli.EXIT_USER_ERROR
        assert complaint in result.stderr
        assert len(result.stderr.splitlines()) == 1
    (home / "fails").touch()
    with pytest.raises(LocalError, match="no bus; `shoal service show`"):
        service.install(invite, [])
    path, kept = service.service(()).path, service.service(()).invite
    assert not path.exists(), "a service that never started is left behind"
    assert not kept.exists()
    path.write_text("the one before")
    with pytest.raises(LocalError, match="no bus"):
        service.install(invite, [])
    assert path.read_text() == "the one before"
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(LocalError, match="no systemctl"):
        service.install(invite, [])
    with pytest.raises(LocalError, match="win32"):
        service.service([], platform="win32")


@pytest.mark.parametrize("broken", ["{}\nExecStartPre=/bin/touch /tmp/theirs", "{}\r\n[Unit]", "see:\n {} \n%H"])
def test_what_was_pasted_around_an_invite_is_not_in_the_service(home: Path, invite: str, broken: str) -> None:
    kept = home / ".config" / "shoal" / "service.invite"
    result = CliRunner().invoke(cli.app, ["service", "install", broken.format(invite)])
    assert result.exit_code == cli.EXIT_USER_ERROR or kept.read_text() == f"{invite}\n"
    halves = f"{invite[:30]}\n{invite[30:]}"  # a chat that breaks lines is understood
    assert CliRunner().invoke(cli.app, ["service", "install", halves]).exit_code == 0
    assert kept.read_text() == f"{invite}\n"


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("option", ["--name", "--device", "--limit", "--listen"])
@pytest.mark.parametrize("letter", ["\n", "\r", "\0", "\x1b", "\x85", "\u2028", "\ud800"])
def test_a_service_takes_no_control_character(home: Path, invite: str, platform: str, option: str, letter: str) -> None:
    with pytest.raises(LocalError, match="control character") as refused:
        service.service([option, f"a{letter}ExecStartPre=/bin/theirs"], platform=platform)
    assert len(str(refused.value).splitlines()) == 1


def test_a_name_that_a_terminal_types_may_have_any_letter(home: Path, invite: str) -> None:
    made = service.service(["--name", "Zoë's 👩‍🚀 50% $HOME"])
    words = shlex.split(unit(made.text)["Service"]["ExecStart"].replace("%%", "%").replace("$$", "$"))
    assert words[-1] == "Zoë's 👩‍🚀 50% $HOME"


def test_an_agent_for_launchd_is_a_property_list_that_runs_shoal(home: Path, invite: str) -> None:
    made = service.service(["--name", "a <b> & c"], platform="darwin")
    agent = plistlib.loads(made.text.encode())
    assert made.path == home / "Library" / "LaunchAgents" / f"{agent['Label']}.plist"
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert Path(agent["ProgramArguments"][0]).name == "shoal"
    check_command(agent["ProgramArguments"][1:])
    assert "@" not in made.text


def test_cloud_init_installs_what_is_there_and_joins() -> None:
    assert USER_DATA.startswith("#cloud-config\n")
    data = yaml.safe_load(USER_DATA)
    files = {one["path"]: one["content"] for one in data["write_files"]}
    found = unit(files["/etc/systemd/system/shoal.service"])["Service"]
    command = shlex.split(found["ExecStart"].replace("%H", "name"))
    check_command(command[1:])
    assert command[1:3] == ["join", "-"]
    (invite,) = (one for one in data["write_files"] if one["path"] == found["StandardInput"].removeprefix("file:"))
    assert invite["permissions"] == "0600"
    assert "shoal1" not in USER_DATA.replace(invite["content"].strip(), "")
    template = configparser.ConfigParser(interpolation=None)
    template.optionxform = str  # type: ignore[assignment,method-assign]
    template.read_string((DEPLOY / "systemd" / service.UNIT).read_text())
    shared = {"SystemCallFilter", "RestrictAddressFamilies", "ProtectSystem", "PrivateTmp", "CapabilityBoundingSet"}
    assert {found[name] == template["Service"][name] for name in shared} == {True}
    assert found["ProtectHome"] == "yes"
    msgspec.toml.decode(files["/etc/shoal/shoal/config.toml"], type=Settings)
    scripts = [line[2] for line in data["runcmd"] if line[0] == "sh"]
    named = [name for line in scripts for name in re.findall(r"/opt/shoal/(deploy/\S+)", line)]
    assert named
    assert all((ROOT / name).exists() for name in named)
    assert command[0] == "/opt/shoal/.venv/bin/shoal"
    assert "/opt/shoal/.venv/bin/pip install" in " ".join(scripts)
    assert found["User"] in [user["name"] for user in data["users"] if isinstance(user, dict)]


@pytest.mark.parametrize("folder", [*FOLDERS, "manners"])
def test_the_commands_that_a_readme_shows_exist(folder: str) -> None:
    blocks = re.findall(r"^```\n(.*?)^```", (DEPLOY / folder / "README.md").read_text(), re.S | re.M)
    for line in "".join(blocks).splitlines():
        for words in shoal_words(
            line.partition("exec CONTAINER ")[2] or re.sub(r"^docker compose exec \w+ ", "", line)
        ):
            check_command(words)
