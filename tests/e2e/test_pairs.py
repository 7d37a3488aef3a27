"""Every pair of features that might exclude each other: a run with both trains, or is refused by name at its start.

`docs/tables/pairs.md` is made of what this file finds, and tests hold the page against the code: each refusal, and a
few of the runs. A run has up to `MOST` features, no two of which are refused together. If it does not train, each of
its pairs is tried alone.

    python -m tests.e2e.test_pairs            tries all pairs and writes the page anew
    python -m tests.e2e.test_pairs NAME ...   tries those with one of these features; the other pairs stay as they are
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.launch.commands.audit import audit

from ..conftest import SETTINGS, SGLANG_ENV, Run, make_tiny_model, make_tiny_moe
from ..warm import Template

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "tables" / "pairs.md"
STEPS = 2
MOST = 6
"""Features of a run at most."""
WORKS = "yes"
SGLANG_PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON", "")
MARK = "<!-- made by tests/e2e/test_pairs.py -->\n"
AGENT = """
from asyncrl.api import GenerationRequest


async def run(prompt, env, client, policies):
    "Ask all policies the same, one after the other; who wrote an even number of tokens is paid."
    written = []
    for player in (client, *map(client.policy, policies)):
        request = GenerationRequest(prompt.prompt_id, prompt.input_ids, 1, prompt.sampling, prompt.pictures)
        written.append(len((await player.generate(request)).completions[0].token_ids))
    return float(written[0] % 2 == 0)
"""


@dataclass(frozen=True)
class Feature:
    """Settings of a feature, one of which may be its policy; features of one `kind` are alternatives."""

    settings: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    policy: str = ""
    experiment: str = "async_ppo"
    experts: bool = False


FEATURES = {
    "adapters": Feature({"model.lora.rank": "4"}),
    "data ranks": Feature({"trainer.parallel": "d2"}, "layout"),
    "tensor slices": Feature({"trainer.parallel": "t2"}, "layout"),
    "stages": Feature({"trainer.parallel": "p2"}, "layout"),
    "parts of the tokens": Feature({"trainer.parallel": "c2"}, "layout"),
    "SGLang from memory": Feature(
        {
            "generation.backend": "sglang",
            "generation.sglang.python": SGLANG_PYTHON or sys.executable,
            "generation.device": "cpu",
            "manager.weight_transport": "tensor",
        }
        | {f"+generation.sglang.env.{name}": value for name, value in SGLANG_ENV.items()}
    ),
    "updates in place": Feature({"manager.update_mode": "in_place"}),
    "colocated servers": Feature({"generation.colocated": "all"}),
    "pictures": Feature(experiment="vlm_shapes"),
    "routing replay": Feature({"moe.replay_routing": "true"}, experts=True),
    "critic": Feature({"algorithm.graph": "ppo", "algorithm.advantage.name": "gae"}),
    "reference": Feature({"algorithm.kl_coef": "0.01"}),
    "score ahead": Feature({"algorithm.kl_coef": "0.01", "trainer.score_ahead": "true"}),
    "off-loading": Feature({"trainer.offload": "true", "optimizer.moments_on": "host"}),
    "several passes": Feature({"trainer.ppo_epochs": "2"}),
    "16-bit versions": Feature({"model.publish_dtype": "bfloat16"}),
    "activations on the host": Feature({"trainer.gradient_checkpointing": "true", "trainer.activations_on": "host"}),
    "older selves": Feature(policy="{name: past, versions: {every: 1, keep: 2}}"),
    "second trained policy": Feature(policy="{name: judge, trained: true}"),
}


@dataclass(frozen=True)
class Together:
    """Features of one run."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return " with ".join(self.names)

    @cached_property
    def features(self) -> list[Feature]:
        """Return the features."""
        return [FEATURES[name] for name in self.names]

    @property
    def possible(self) -> bool:
        """Return whether no two of them are alternatives."""
        kinds = [feature.kind for feature in self.features if feature.kind]
        return len(set(kinds)) == len(kinds)

    @property
    def pairs(self) -> list[Together]:
        """Return its pairs, in the order of the table."""
        return [Together(pair) for pair in itertools.combinations(sorted(self.names, key=ORDER.index), 2)]

    @property
    def experiment(self) -> str:
        """Return the experiment that the run is based on."""
        return max((feature.experiment for feature in self.features), key=lambda name: name == "vlm_shapes")

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return what differs from the experiment; what it needs is made in `folder`."""
        own: dict[str, Any] = {"total_train_steps": STEPS, "eval.interval": 0, "checkpoint.interval": 0}
        for feature in self.features:
            own |= feature.settings
        if policies := [feature.policy for feature in self.features if feature.policy]:
            names = [re.findall(r"name: (\w+)", policy)[0] for policy in policies]
            (folder / "agent.py").write_text(AGENT)
            own |= {"policies": f"[{', '.join(policies)}]", "agent.path": f"{folder / 'agent.py'}:run"}
            own["agent.args"] = f"{{policies: [{', '.join(names)}]}}"
        if self.experiment == "vlm_shapes":
            return own | {"rollout.sampling.max_new_tokens": None, "dataset.max_prompt_tokens": None}
        make = make_tiny_moe if any(feature.experts for feature in self.features) else make_tiny_model
        model = folder / make.__name__
        if not model.exists():
            make(model)
        return own | {"model.path": str(model)}

    def refusal(self, folder: Path) -> str:
        """Return why the settings are refused; empty if they are not."""
        settings = SETTINGS | self.settings(folder)
        given = [f"{name}={value}" for name, value in settings.items() if value is not None]
        try:
            validate(load_experiment(self.experiment, given))
        except ConfigError as error:
            return _first(str(error))
        return ""

    def found(self, folder: Path, template: Template | None) -> str:
        """Return `WORKS` after the run, or why it was refused.

        Raises:
            AssertionError: it was neither refused nor right.
        """
        trial = {"trial_name": "_".join(self.names).replace(" ", "-")}
        run = Run(folder, self.settings(folder) | trial, self.experiment, template=template)
        try:
            code = run.wait()
            if code == 2:
                return _first(run.output.partition("error: ")[2])
            assert code == 0, run.output + run.logs()
            rows = run.rows()
            assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), run.output
            assert audit(run.run_dir).findings == ()
            assert run.survivors() == []
        finally:
            run.kill_tree()
        return WORKS


ORDER = list(FEATURES)
PAIRS = [pair for pair in map(Together, itertools.combinations(FEATURES, 2)) if pair.possible]


def _first(text: str) -> str:
    """Return the first line of a refusal."""
    return text.strip().splitlines()[0].removeprefix("error: ").replace(f"{REPOSITORY}/", "")


def refused(page: str) -> dict[Together, str]:
    """Return the pairs that the page calls refused, and its words."""
    lines = re.findall(r"^- (.+?) with (.+?): (.+)$", page.partition(MARK)[2], re.MULTILINE)
    return {Together((first, second)): why for first, second, why in lines}


def on_the(page: str) -> dict[Together, str]:
    """Return the pairs of features that the page names, and what was found of each."""
    shown, found = set(re.findall(r"^\| (.+?) \|", page.partition(MARK)[2], re.MULTILINE)), refused(page)
    return {pair: found.get(pair, WORKS) for pair in PAIRS if shown.issuperset(pair.names)}


def runs(asked: Collection[Together], fit: Collection[Together]) -> Iterator[Together]:
    """Yield runs that have all `asked` pairs between them, and no pair that is not among `fit`."""
    left = dict.fromkeys(asked)
    while left:
        run = next(iter(left))
        for name in ORDER:
            wider = Together((*run.names, name))
            added = [pair for pair in wider.pairs if name in pair.names]
            if name in run.names or len(wider.names) > MOST or not wider.possible:
                continue
            if all(pair in fit for pair in added) and any(pair in left for pair in added):
                run = wider
        for pair in run.pairs:
            left.pop(pair, None)
        yield run


def setting_of(feature: Feature) -> str:
    """Return what switches the feature on, for the page."""
    if feature.policy:
        return f"`policies=[{feature.policy}]`"
    own = {name: value for name, value in feature.settings.items() if "sglang." not in name}
    return " ".join(f"`{name}={value}`" for name, value in own.items()) or f"experiment `{feature.experiment}`"


def lines_of(cells: dict[Together, str]) -> Iterator[str]:
    """Yield what the page says below its mark."""
    yield from ("| feature | setting |", "|---|---|")
    for name, feature in FEATURES.items():
        yield f"| {name} | {setting_of(feature)} |"
    yield from ("", "## Refused together", "")
    for pair in PAIRS:
        if cells[pair] != WORKS:
            yield f"- {pair}: {cells[pair]}"


def main(names: list[str]) -> None:
    """Try the pairs, and write the page if all that it shows were tried."""
    page = PAGE.read_text()
    cells, wrong = on_the(page) if names else {}, 0
    asked = [pair for pair in PAIRS if not names or set(pair.names) & set(names)]
    with tempfile.TemporaryDirectory() as root, closing(Template(str(os.getpid()))) as template:

        def tried(together: Together) -> str:
            try:
                return together.refusal(Path(root)) or together.found(Path(root), template)
            except (AssertionError, pytest.fail.Exception) as error:
                return f"WRONG: {error}"

        cells |= {pair: pair.refusal(Path(root)) or WORKS for pair in asked}
        fit = [pair for pair, found in cells.items() if found == WORKS]
        for run in runs([pair for pair in asked if pair in fit], fit):
            found = tried(run)
            print(f"{run}: {found}", flush=True)
            for pair in run.pairs if found != WORKS else ():
                if pair in asked:
                    cells[pair] = tried(pair)
                    wrong += cells[pair].startswith("WRONG")
                    print(f"{pair}: {cells[pair]}", flush=True)
    if not wrong and cells.keys() == set(PAIRS):
        PAGE.write_text(page.partition(MARK)[0] + MARK + "\n" + "\n".join(lines_of(cells)) + "\n")
    sys.exit(wrong > 0)


PAGE_REFUSES = refused(PAGE.read_text()) if PAGE.exists() else {}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAGE_REFUSES, ids=str)
def test_what_the_page_calls_refused_is_refused_in_these_words(
    pair: Together, tmp_path: Path, template: Template | None
) -> None:
    found = pair.refusal(tmp_path)
    if not found and "SGLang from memory" in pair.names and not SGLANG_PYTHON:
        pytest.skip("ASYNCRL_SGLANG_PYTHON names no interpreter with SGLang, which the launcher asks first")
    assert (found or pair.found(tmp_path, template)) == PAGE_REFUSES[pair]


@pytest.mark.slow
def test_a_pair_that_the_page_calls_tried_trains(tmp_path: Path, template: Template | None) -> None:
    """Others train in other whole runs: `test_several_policies.py` has a critic with a second trained policy."""
    pair = Together(("adapters", "older selves"))
    assert pair not in PAGE_REFUSES
    assert pair.found(tmp_path, template) == WORKS


if __name__ == "__main__":
    main(sys.argv[1:])
