"""The check of the interpreter that starts SGLang's servers has a limit, and its failure is an error message."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start import machine


@pytest.mark.parametrize("text", ["#!/bin/sh\nexec sleep 60\n", "#!/nowhere/python\n"])
def test_an_interpreter_that_hangs_or_cannot_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(0o700)
    monkeypatch.setattr(machine, "_FIND_LIMIT_S", 0.5)
    config = ExperimentConfig()
    config.generation.backend = "sglang"
    config.generation.sglang.python = str(python)
    with pytest.raises(ConfigError, match=r"generation\.sglang\.python=.* cannot be asked for sglang"):
        machine.check_reachable(config)
