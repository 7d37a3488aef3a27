"""A wheel built from the tree, installed where no source is, runs the main job from any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..warm import Template, stand_in

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    return next(out.glob("asyncrl-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel. The packages it depends on are lent by this one, the source tree is not."""
    venv = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=LIMIT_S)
    interpreter = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=LIMIT_S)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


@pytest.fixture(scope="module")
def python(installed: Path, template: Template | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same, whose programs are forked from one that has imported what the wheel's processes do."""
    if template is None:
        yield installed
        return
    forks = Template(f"{template.run} wheel", str(installed))
    yield stand_in(forks, tmp_path_factory.mktemp("python"))
    forks.close()


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_the_wheel_holds_the_experiments_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"asyncrl/experiments/async_ppo.yaml", "asyncrl/experiments/recipes/kimi_k2.yaml"} <= set(names)
    assert "asyncrl/installers/install_verifiers.sh" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "asyncrl/tests"))]


def test_the_installed_package_is_the_one_in_the_wheel(installed: Path, python: Path, tmp_path: Path) -> None:
    for each in (installed, python):
        ended = run(each, tmp_path, "-c", "import asyncrl; print(asyncrl.__file__)")
        assert ended.stdout.startswith(str(installed.parents[1])), ended.stdout + ended.stderr


def test_a_project_of_ones_own_runs_from_an_empty_folder(
    installed: Path, python: Path, tmp_path: Path, tiny_model: Path
) -> None:
    """The way of a newcomer: `init`, its test, every check of a start, a run with its reward, and what it left."""
    launch = ["-m", "asyncrl.launch"]
    made = run(installed, tmp_path, *launch, "init", "mine")
    assert made.returncode == 0, made.stderr
    project = tmp_path / "mine"
    assert "2 passed" in run(python, project, "-m", "pytest", "-q").stdout
    settings = ["mine", "--config-dir", ".", "train_batch_size=4", "group_size=2", "total_train_steps=3"]
    settings += ["trainer.ppo_minibatches=2", "rollout.sampling.max_new_tokens=16", "eval.sampling.max_new_tokens=16"]
    settings += ["eval.size=8", "samples.every=1", f"model.path={tiny_model}", "fileroot=runs"]
    settings += ["system.start_timeout_s=240", "system.stall_timeout_s=240"]  # of a busy machine
    checked = run(python, project, *launch, "doctor", *settings)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ended = run(python, project, *launch, *settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folder = project / "runs" / "mine" / "trial0"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
    judged = run(python, project, *launch, "doctor", str(folder), "--json")
    assert json.loads(judged.stdout)["step"] == 3
    for command in (["dashboard", "--report", "report.html"], ["trace", "--svg", "run.svg"], ["show"]):
        reported = run(python, project, *launch, command[0], str(folder), *command[1:])
        assert reported.returncode == 0, reported.stdout + reported.stderr
    assert "rollout_worker/0" in (project / "report.html").read_text()
