"""Where control groups with a quota can be made, and that nothing is left of them."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from cpu_groups import CpuGroups, NoQuota, _make, _parent

V1 = "26 22 0:23 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "26 22 0:23 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def system(root: Path, *, groups: str, mounts: str, hands_on: dict[str, str]) -> Path:
    """A folder with the files of /proc and /sys that count. Args: hands_on: group -> its controllers inside."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(mounts)
    for group, controllers in hands_on.items():
        (root / group).mkdir(parents=True, exist_ok=True)
        (root / group / "cgroup.subtree_control").write_text(controllers)
    return root


def test_version_1_is_taken_where_cpu_is_mounted_inside_our_own_group(tmp_path):
    folder = "sys/fs/cgroup/cpu/box"
    root = system(tmp_path, groups="3:cpu,cpuacct:/box\n0::/\n", mounts=V1, hands_on={folder: ""})
    assert _parent(root) == (tmp_path / folder, 1)


def test_version_2_needs_a_group_above_that_hands_cpu_on(tmp_path):
    hands_on = {"sys/fs/cgroup": "cpu memory", "sys/fs/cgroup/user": "memory", "sys/fs/cgroup/user/shell": ""}
    root = system(tmp_path, groups="0::/user/shell\n", mounts=V2, hands_on=hands_on)
    assert _parent(root) == (tmp_path / "sys/fs/cgroup", 2)
    (tmp_path / "sys/fs/cgroup/cgroup.subtree_control").write_text("memory")
    with pytest.raises(NoQuota, match="no control group here hands `cpu` on"):
        _parent(root)


@pytest.mark.parametrize("mounts", ["", "25 22 0:23 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"])
def test_a_system_without_them_says_so(tmp_path, mounts):
    with pytest.raises(NoQuota, match="no control groups for processors"):
        _parent(system(tmp_path, groups="0::/\n", mounts=mounts, hands_on={}))
    with pytest.raises(NoQuota, match="no control groups"):
        _parent(tmp_path / "elsewhere")


def test_a_quota_is_told_in_the_words_of_its_version(tmp_path):
    _make(tmp_path / "one", 1, 0.25)
    assert (tmp_path / "one/cpu.cfs_quota_us").read_text() == "25000"
    assert (tmp_path / "one/cpu.cfs_period_us").read_text() == "100000"
    _make(tmp_path / "two", 2, 1.5)
    assert (tmp_path / "two/cpu.max").read_text() == "150000 100000"
    with pytest.raises(NoQuota, match=r"cannot make the control group .*two with a quota of 0\.5 cores"):
        _make(tmp_path / "two", 2, 0.5)


def test_hosts_without_a_quota_need_no_groups():
    async def scenario():
        async with CpuGroups({}, root=Path("/nowhere")) as groups:
            assert groups.inside("a") == []

    asyncio.run(scenario())


PROGRAM = """
import time
began_s = time.monotonic()
while time.monotonic() < began_s + 1.5:
    pass
print(time.process_time(), flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_a_host_gets_its_quota_and_nothing_is_left():
    async def scenario():
        try:
            groups = await CpuGroups({"a": 0.2}).__aenter__()
        except NoQuota as error:
            pytest.skip(str(error))
        file = groups.inside("a")[-1]
        argv = [*groups.inside("a"), sys.executable, "-c", PROGRAM]
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert float(await process.stdout.readline()) < 0.2 * 1.5 + 0.1
        await groups.__aexit__(None, None, None)
        assert await process.wait() == -signal.SIGKILL
        return file

    assert not Path(asyncio.run(scenario())).parent.exists()
