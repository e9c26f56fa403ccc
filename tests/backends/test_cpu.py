"""The host's memory and processors within control groups, on made-up /proc and /sys trees."""

import pytest

from dz.backends.cpu import Host

MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n"
K = 1024


@pytest.fixture
def host(tmp_path):
    """A host under tmp_path from {path: text}."""

    def make(files: dict[str, str]) -> Host:
        for path, text in {"proc/meminfo": MEMINFO, **files}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return Host(root=tmp_path)

    return make


def test_a_bare_machine(host):
    assert host({}).memory(0) == (600 * K, 1000 * K)


def test_version_two(host):
    at = "sys/fs/cgroup/a/b"
    got = host(
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{at}/memory.max": "409600\n",
            f"{at}/memory.current": "204800\n",
            f"{at}/memory.stat": "anon 1\ninactive_file 102400\n",
        }
    )
    assert got.memory(0) == (300 * K, 400 * K)


def test_the_tightest_group_on_the_way_up_counts(host):
    got = host(
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "1024\n",
            "sys/fs/cgroup/a/memory.max": "512000\n",
            "sys/fs/cgroup/a/memory.current": "500000\n",
        }
    )
    assert got.memory(0) == (12000, 512000)


def test_inside_a_container_the_mount_is_the_group(host):
    got = host(
        {
            "proc/self/cgroup": "0::/docker/abc\n",
            "sys/fs/cgroup/memory.max": "512000\n",
            "sys/fs/cgroup/memory.current": "512\n",
        }
    )
    assert got.memory(0) == (512000 - 512, 512000)


def test_version_one(host):
    at = "sys/fs/cgroup/memory/a"
    got = host(
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/a\n1:cpu:/\n0::/\n",
            f"{at}/memory.limit_in_bytes": "409600",
            f"{at}/memory.usage_in_bytes": "204800",
            f"{at}/memory.stat": "inactive_file 1\ntotal_inactive_file 102400\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "204800",
        }
    )
    assert got.memory(0) == (300 * K, 400 * K)


def test_over_the_limit_is_no_memory_not_less(host):
    got = host(
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "2000\n"}
    )
    assert got.memory(0) == (0, 1000)


@pytest.mark.parametrize(
    ("quota", "number"), [("max 100000", 8), ("150000 100000", 2), ("200000 100000", 2), ("50000 100000", 1)]
)
def test_processors(host, monkeypatch, quota, number):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert host({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": quota}).processors() == number


def test_name(host):
    assert host({"proc/cpuinfo": "processor : 0\nmodel name\t: Made Up 9000\n"}).describe().name == "Made Up 9000"


def test_this_machine():
    free, total = Host().memory(0)
    assert 0 < free <= total and Host().processors() >= 1 and Host().describe().name
