"""Memory that can still be had: the tightest of machine and control groups."""

from kvist_connector.agent.limits import available_memory


def files(root, **contents):
    for name, text in contents.items():
        path = root / name.replace("__", "/").replace("_max", ".max").replace("_current", ".current")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_tightest_limit_counts(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    files(proc, meminfo="MemTotal: 9000 kB\nMemAvailable: 4000 kB\n", self__cgroup="0::/pod/agent\n")
    assert available_memory(proc, groups) == 4000 * 1024
    files(groups, pod__agent__memory_max="max\n", pod__agent__memory_current="5\n")
    assert available_memory(proc, groups) == 4000 * 1024
    files(groups, pod__memory_max="1000000\n", pod__memory_current="400000\n")
    assert available_memory(proc, groups) == 600_000
    (groups / "pod" / "memory.stat").write_text("anon 7\nactive_file 1000\ninactive_file 2000\n")
    assert available_memory(proc, groups) == 603_000
    files(groups, pod__agent__memory_max="1000\n", pod__agent__memory_current="4000\n")
    assert available_memory(proc, groups) == 0


def test_where_nothing_can_be_told(tmp_path):
    assert available_memory(tmp_path, tmp_path) is None
