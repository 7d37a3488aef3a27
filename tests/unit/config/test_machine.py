"""In a container, its limits are those of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config import machine
from asyncrl.config.machine import free_memory, host_memory, usable_cores


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`groups(lines, file=content)`: this process's control groups, and their files."""

    def groups(lines: str, **files: str) -> None:
        monkeypatch.setattr(machine, "_GROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(machine, "_GROUPS_ROOT", tmp_path / "fs")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
        (tmp_path / "cgroup").write_text(lines)
        for name, content in files.items():
            file = tmp_path / "fs" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)

    return groups


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/pod/box\n", {"pod/cpu.max": "400000 100000", "pod/box/cpu.max": "max 100000"}, 4),
        ("0::/not/visible\n", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,x:/docker/1\n", {"cpu,x/cpu.cfs_quota_us": "300000", "cpu,x/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("", {}, 64),
    ],
)
def test_a_containers_share_of_the_cores_counts(
    groups: Callable[..., None], lines: str, files: dict[str, str], cores: int
) -> None:
    groups(lines, **files)
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("lines", "folder", "names"),
    [
        ("0::/box\n", "box/", ("memory.max", "memory.current")),
        ("9:memory:/box\n", "memory/box/", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_a_containers_limit_of_memory_counts(
    groups: Callable[..., None], lines: str, folder: str, names: tuple[str, str]
) -> None:
    limit, used = (f"{folder}{name}" for name in names)
    groups(lines, **{limit: "67108864\n", used: "60000000\n", f"{folder}memory.stat": "anon 5\ninactive_file 1000\n"})
    assert host_memory() == 67108864
    assert free_memory() == 67108864 - 60000000 + 1000
    groups(lines, **{limit: "max\n"})
    assert host_memory() > 67108864
