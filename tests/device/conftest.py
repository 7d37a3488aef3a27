"""These tests register a device with torch for their whole process, so they are collected only when asked for alone."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return None if all(path == HERE or HERE in path.parents for path in asked) else True
