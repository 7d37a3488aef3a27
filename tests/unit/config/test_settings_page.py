"""docs/settings.md, made from the settings as they are defined, as `--help` is."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import settings
from asyncrl.config.setting import SettingInfo

PAGE = Path(__file__).resolve().parents[3] / "docs" / "settings.md"
HEAD = """# Settings

For users who look for a setting: each with its default, its bounds and its meaning. `python -m
asyncrl.launch EXPERIMENT --help` prints the same with the values of an experiment, and `--cfg job` the resolved
configuration. On the command line a setting is `name=value`; in YAML, groups are nested.

**Values.** A setting of text is what was written, from the first character to the last: `trial_name=1.10`, `revision:
007` and `split: no` need no quotes. On the command line a value in brackets, braces or quotes is YAML
(`rollout.sampling.stop=["\\n\\n"]`, `agent.args={tries: 3}`). So in double quotes `\\n` is a newline, and without
quotes or in single ones it is two characters. In arguments of your code, which may have any type, numbers, `true`,
`false` and `null` are what YAML says; `on`, `off`, `yes` and `no` are refused without quotes, and `007`, dates and
times are texts. In Python values are taken as they are ([runs from Python](python_api.md)). Everywhere
`${optimizer.lr}` stands for another setting, `${oc.env:NAME}` for a variable of the environment, in a file `${here:}`
for its folder, and `\\${` for the characters.

"""


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


def shown(value: object) -> str:
    text = str(value)
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    return f"`{plain(text)}`" if text else "empty"


def page() -> str:
    """Defaults are those of the schema; experiments set others."""
    schema = ExperimentConfig()
    groups: dict[str, list[tuple[str, SettingInfo]]] = {}
    for path, _, info in settings(ExperimentConfig):
        groups.setdefault(path.rpartition(".")[0], []).append((path, info))
    lines = [HEAD]
    for group, each in groups.items():
        lines.append(f"## {group or 'The run'}\n\n| setting | default | meaning |\n|---|---|---|\n")
        for path, info in each:
            meaning = plain(info.help)
            if info.choices:
                meaning += f"; one of {', '.join(map(str, info.choices))}"
            if info.unit:
                meaning += f" ({info.unit})"
            bounds = [f"at least {info.minimum:.10g}"] if info.minimum is not None else []
            bounds += [f"at most {info.maximum:.10g}"] if info.maximum is not None else []
            lines.append(f"| `{path}` | {shown(attrgetter(path)(schema))} | {'; '.join([meaning, *bounds])} |\n")
        lines.append("\n")
    return "".join(lines).rstrip("\n") + "\n"


def test_the_page_has_every_setting() -> None:
    made, before = page(), PAGE.read_text() if PAGE.exists() else ""
    if made != before:
        PAGE.write_text(made)
    assert made == before, (
        "docs/settings.md was not made from the settings; it has been made anew: look at it, commit it"
    )
