"""A group of the first row against made-up answers, before anything starts: what it finds, and what it lets pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from asyncrl.api import GenerationRequest, SamplingParams
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.launch.__main__ import main
from asyncrl.launch.before_start.rehearsal import MadeUpPolicy, RehearsalOutcome, rehearse, rehearsed
from asyncrl.launch.before_start.setting_checks import validate

Configured = Callable[..., ExperimentConfig]

CODE = """
import asyncio
import os
import subprocess

from asyncrl.api import GenerationRequest

calls = 0


def number(data, completion):
    return float(len(completion))


def nothing(data, completion):
    return None


def everything(data, completion):
    return 1.0


def constant(data, completion):
    return 0.5


def no_such_column(data, completion):
    return float(data["solution"] == completion)


def every_second(data, completion):
    global calls
    calls += 1
    if calls % 2:
        raise ValueError("odd")
    return 1.0


def dies(data, completion):
    os._exit(3)


def leaves(data, completion, *, file, own):
    made = {"start_new_session": True} if own == "session" else {"env": {}}
    with open(file, "w") as told:
        told.write(str(subprocess.Popen(["sleep", "600"], **made).pid))
    return 1.0


async def silent(prompt, env, client):
    return 1.0


async def waits(prompt, env, client):
    await asyncio.Event().wait()


async def chatting(prompt, env, client):
    await client.chat([{"role": "user", "content": "?"}])
    return 1.0


async def judged(prompt, env, client):
    request = GenerationRequest("r", prompt.input_ids, 1, prompt.sampling)
    for asked in (client, client.policy("judge")):
        await asked.generate(request)
    return 1.0


def as_in_trl(prompts, completions, **kwargs):
    return [0.0 for _ in completions]


def as_in_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


def too_few(group):
    return [0.0]
"""


@pytest.fixture
def configured(tmp_path: Path, tiny_model: Path) -> Configured:
    """`configured("reward.path=CODE:number")`: the demo on the tiny model; `CODE` is a file with the code above."""
    code = tmp_path / "code.py"
    code.write_text(CODE)

    def config(*overrides: str) -> ExperimentConfig:
        given = [override.replace("CODE", str(code)) for override in overrides]
        loaded = load_experiment("async_ppo", [f"model.path={tiny_model}", *given])
        assert isinstance(loaded, ExperimentConfig)
        validate(loaded)
        return loaded

    return config


async def test_the_demo_passes(configured: Configured) -> None:
    assert await rehearse(configured()) == RehearsalOutcome()


@pytest.mark.parametrize(
    ("overrides", "says", "line"),
    [
        (["reward.path=CODE:nothing"], "nothing returned None, which leaves a row to other rewards", ""),
        (["reward.path=CODE:no_such_column"], "no_such_column: KeyError: 'solution'", 'data["solution"] == completion'),
        (["reward.path=CODE:too_few"], "returned 1 rewards for a group of", ""),
        (["agent.path=CODE:silent"], "returned the reward 1.0 without asking the policy", ""),
        (["agent.path=CODE:chatting"], "there is no chat template", "await client.chat("),
    ],
)
async def test_code_that_fails_on_every_answer_is_an_error_with_its_line(
    configured: Configured, overrides: list[str], says: str, line: str
) -> None:
    outcome = await rehearse(configured(*overrides))
    assert outcome.error is not None
    assert says in outcome.error
    assert any(line in each for each in outcome.where) if line else outcome.where == []


async def test_the_code_of_an_evaluation_set_is_rehearsed_too(configured: Configured) -> None:
    outcome = await rehearse(configured("eval.reward.path=CODE:no_such_column"))
    assert outcome.error is not None
    assert outcome.error.startswith("eval: reward ")
    assert "KeyError: 'solution'" in outcome.error
    assert any('data["solution"] == completion' in line for line in outcome.where)
    assert await rehearse(configured("eval.reward.path=CODE:number")) == RehearsalOutcome()


@pytest.mark.parametrize(("name", "whose"), [("as_in_trl", "TRL's"), ("as_in_verl", "verl's")])
async def test_rewards_in_the_form_of_another_system_are_refused_by_its_name(
    configured: Configured, name: str, whose: str
) -> None:
    outcome = await rehearse(configured(f"reward.path=CODE:{name}"))
    assert outcome.error is not None
    assert outcome.error.startswith("reward.path=")
    assert f"it has the form of {whose} rewards " in outcome.error
    assert "def score(data, completion)" in outcome.error


async def test_all_code_that_cannot_be_called_is_told_at_once(configured: Configured) -> None:
    wrong = ("reward.path=CODE:number", "reward.args={scale: 2}", "agent.path=CODE:number")
    outcome = await rehearse(configured(*wrong))
    assert outcome.error is not None
    assert [line.partition("=")[0] for line in outcome.error.splitlines()] == ["agent.path", "reward.args"]
    outcome = await rehearse(configured("buffer.order.path=CODE:nothing", "buffer.order.args={by: 1}"))
    assert outcome.error is not None
    assert outcome.error.startswith("buffer.order.args={'by': 1}: ")


async def test_code_is_checked_where_the_base_model_has_yet_to_be_made(configured: Configured) -> None:
    config = configured("agent.path=CODE:number")
    config.model.path = None
    outcome = await rehearse(config)
    assert outcome.error is not None
    assert "an episode is run(prompt, env, client); give it these three parameters" in outcome.error
    config = configured()
    config.model.path = None
    assert await rehearse(config) == RehearsalOutcome()


async def test_code_that_fails_on_some_answers_is_a_note(configured: Configured) -> None:
    outcome = await rehearse(configured("reward.path=CODE:every_second", "group_size=8"))
    assert outcome.error is None
    assert list(outcome.lost.values()) == [4]
    assert "every_second raised ValueError" in next(iter(outcome.lost))


async def test_a_trained_policy_without_a_sample_is_a_note(configured: Configured) -> None:
    settings = ("policies=[{name: judge, trained: true}]", "agent.path=CODE:judged")
    assert await rehearse(configured(*settings)) == RehearsalOutcome()
    assert await rehearse(configured(settings[0])) == RehearsalOutcome(untrained=["judge"])


async def test_a_policy_that_nothing_asks_is_a_note(configured: Configured) -> None:
    settings = ("policies=[{name: judge, trained: true}, {name: past, versions: {every: 1}}]", "agent.path=CODE:judged")
    assert await rehearse(configured(*settings)) == RehearsalOutcome(unasked=["past"])
    with rehearsed(configured(*settings)) as notes:
        (note,) = notes()
    assert "nothing asked policy 'past' for the first row; its servers run all the same" in note


async def test_a_failure_reward_is_no_failure(configured: Configured) -> None:
    overrides = ("reward.path=CODE:no_such_column", "reward.failure_reward=0.0")
    outcome = await rehearse(configured(*overrides))
    assert (outcome.error, outcome.lost) == (None, {})
    assert outcome.unrewarded[0].startswith("the reward is 0 for an empty text")


async def test_a_reward_that_tells_nothing_apart_is_a_note_and_as_a_verdict_an_error(configured: Configured) -> None:
    outcome = await rehearse(configured("reward.path=CODE:constant"))
    assert outcome.error is None
    assert outcome.unrewarded == [
        "the reward is 0.5 for an empty text, 'I do not know.' and the rows' own answers (as they are, boxed, after "
        "# or ####); if it is the same for all answers of a group, nothing is learned from them"
    ]
    outcome = await rehearse(configured("reward.path=CODE:everything", "reward.verdict=true"))
    assert outcome.error is not None
    assert "the reward is 1 for an empty text" in outcome.error


async def test_a_row_that_cannot_be_made_is_left_to_where_it_is_drawn(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "class Rows:\n"
        "    def __init__(self, *, split, seed):\n"
        "        pass\n"
        "    def __len__(self):\n"
        "        return 50\n"
        "    def row(self, index):\n"
        "        return {'prompt': '1+1=', 'answer': ['2'][index // 40]}\n"
    )
    overrides = (f"dataset.path={tmp_path / 'rows.py'}:Rows", "dataset.args={}", "eval.interval=0")
    outcome = await rehearse(configured(*overrides, "reward.path=asyncrl.plugins.rewards.text:exact_match"))
    assert (outcome.error, outcome.unrewarded) == (None, [])


async def test_rows_that_no_answer_can_be_right_for_are_a_note_and_all_of_them_an_error(
    configured: Configured, tmp_path: Path
) -> None:
    def rows(*answers: str) -> RehearsalOutcome:
        lines = [f'{{"prompt": "{number}+1=", "answer": {answer}}}\n' for number, answer in enumerate(answers)]
        (tmp_path / "rows.jsonl").write_text("".join(lines))
        return asyncio.run(
            rehearse(
                configured(
                    f"dataset.path={tmp_path / 'rows.jsonl'}",
                    "dataset.args={}",
                    "reward.path=asyncrl.plugins.rewards.text:exact_match",
                    "eval.interval=0",
                )
            )
        )

    outcome = await asyncio.to_thread(rows, "NaN", '"2"', '{"value": 3}')
    assert outcome.error is None
    assert [note.partition("rows.jsonl")[::2] for note in outcome.unrewarded] == [
        (
            f"2 of the first 3 rows are lost, as no answer can be right: {tmp_path}/",
            ":1: reward asyncrl.plugins.rewards.text:exact_match: the row's answer is nan, of the type float, which no "
            "text agrees with: give a text, a finite number or a list of these, or name another column in "
            "dataset.fields.answer",
        )
    ]
    outcome = await asyncio.to_thread(rows, "NaN", "null")
    assert outcome.error is not None
    assert "the row's answer is nan" in outcome.error


def test_a_process_that_user_code_ends_is_an_error_that_says_so(configured: Configured) -> None:
    with (
        rehearsed(configured("reward.path=CODE:dies")) as notes,
        pytest.raises(ConfigError, match=r"ended with exit code 3; .*rollout\.rehearse=false"),
    ):
        notes()


@pytest.mark.parametrize("own", ["session", "environment"])
def test_a_program_that_user_code_left_with_something_of_its_own_ends_with_the_rehearsal(
    own: str, configured: Configured, tmp_path: Path
) -> None:
    args = f"reward.args={{file: {tmp_path / 'pid'}, own: {own}}}"
    with rehearsed(configured("reward.path=CODE:leaves", args)) as notes:
        notes()
        process = psutil.Process(int((tmp_path / "pid").read_text()))
    with contextlib.suppress(psutil.NoSuchProcess):
        assert process.status() == psutil.STATUS_ZOMBIE


def test_code_that_does_not_return_is_a_note_and_ends(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launch.before_start.rehearsal.LIMIT_S", 6.0)
    before = set(psutil.Process().children())
    with rehearsed(configured("agent.path=CODE:waits")) as notes:
        assert [note.partition(" within ")[0] for note in notes()] == [
            "rehearsal: the first row was not played to its end"
        ]
    assert set(psutil.Process().children()) == before


def test_the_command_ends_with_2_and_makes_no_folder(
    configured: Configured, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configured()
    reward = f"reward.path={tmp_path / 'code.py'}:no_such_column"
    short = ["rollout.sampling.max_new_tokens=16", "eval.sampling.max_new_tokens=16"]
    assert main(["async_ppo", f"model.path={tiny_model}", f"fileroot={tmp_path / 'runs'}", reward, *short]) == 2
    assert "KeyError: 'solution'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def played_no_row(config: ExperimentConfig, why: str) -> ExperimentConfig:
    config.rollout.rehearse = why != "rehearse=false"
    config.samples.replay = "/kept" if why == "replay" else ""
    return config


@pytest.mark.parametrize("why", ["rehearse=false", "replay"])
def test_where_no_row_is_played_the_code_that_is_called_is_checked_all_the_same(
    configured: Configured, why: str
) -> None:
    with rehearsed(played_no_row(configured("reward.path=CODE:dies"), why)) as notes:
        assert notes() == []
    wrong = played_no_row(configured("agent.args={nope: 1}"), why)
    with rehearsed(wrong) as notes:
        if why == "replay":  # which does not call it, and may be where it cannot be imported
            assert notes() == []
        else:
            with pytest.raises(ConfigError, match="has no parameter 'nope'"):
                notes()


def test_code_that_ends_its_process_on_import_is_not_told_of_made_up_answers(
    configured: Configured, tmp_path: Path
) -> None:
    (tmp_path / "ends.py").write_text("import os\n\nos._exit(3)\n\n\ndef score(data, completion): ...\n")
    config = configured(f"reward.path={tmp_path / 'ends.py'}:score", "rollout.rehearse=false")
    with rehearsed(config) as notes, pytest.raises(ConfigError, match="ended with exit code 3") as caught:
        notes()
    assert str(caught.value) == "rehearsal: the process that imported the code ended with exit code 3"


def test_the_command_says_what_it_found_and_leaves_nothing_running(configured: Configured) -> None:
    with (
        rehearsed(configured("reward.path=CODE:no_such_column")) as notes,
        pytest.raises(
            ConfigError, match=r"KeyError: 'solution'\nrehearsal: .*code\.py:\d+ in no_such_column"
        ) as caught,
    ):
        notes()
    assert "rollout.rehearse=false" in str(caught.value)


async def test_made_up_answers_hold_tokens_of_the_prompt_and_keep_the_limit() -> None:
    tokenizer = CharTokenizer("0123456789+=")
    prompt = tuple(tokenizer.encode("12+34="))
    request = GenerationRequest("r", prompt, 64, SamplingParams(max_new_tokens=3))
    policy = MadeUpPolicy(tokenizer, 0)
    for completion in (await policy.generate(request)).completions:
        *body, last = completion.token_ids
        assert len(completion.token_ids) <= 3
        assert set(body) <= set(prompt)
        assert (completion.finish_reason == "stop") == (last == tokenizer.eos_token_id)
    alone = replace(request, input_ids=(tokenizer.eos_token_id,))
    assert all(each.token_ids == [tokenizer.eos_token_id] for each in (await policy.generate(alone)).completions)
