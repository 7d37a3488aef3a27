"""The built-in rewards beyond what docs/rewards.md shows: bad input, hostile answers, servers that fail."""

from __future__ import annotations

import asyncio
import email.utils
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.api import Episode, RewardFunction
from asyncrl.api.reward import RunIn, marked_run_in, reward_parts, run_in, scored
from asyncrl.comm import http_client as http
from asyncrl.comm.http_client import HttpError, HttpRefused
from asyncrl.comm.waits import Backoff
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.machine import bypass_proxy
from asyncrl.plugins.rewards import remote
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.plugins.rewards.code_tests import CodeTestsReward, program_in
from asyncrl.plugins.rewards.format import FormatReward
from asyncrl.plugins.rewards.length import shorter_in_group
from asyncrl.plugins.rewards.math_answer import math_answer_reward
from asyncrl.plugins.rewards.remote import HttpReward, JudgeReward
from asyncrl.plugins.rewards.text import exact_match, f1, numeric_match
from asyncrl.plugins.sandbox import Sandbox, SandboxUnavailable

Handler = Callable[[dict[str, Any], int], Awaitable[web.Response]]


@given(st.text(max_size=100), st.text(max_size=100))
def test_rewards_of_texts_are_within_their_bounds_and_a_text_agrees_with_itself(given_text: str, wanted: str) -> None:
    for reward in (exact_match, f1):
        assert 0.0 <= reward({"answer": wanted}, given_text) <= 1.0
    assert numeric_match({"answer": 7}, given_text) in (0.0, 1.0)
    assert exact_match({"answer": wanted}, wanted) == f1({"answer": wanted}, wanted) == 1.0


def test_the_best_of_several_answers_counts_and_a_missing_field_is_an_error() -> None:
    assert f1({"answer": ["red fox", "a blue whale"]}, "whale") == pytest.approx(2 / 3)
    assert numeric_match({"answer": ["7", "8"]}, "8 apples") == 1.0
    assert numeric_match({"answer": "12"}, "1,2") == 0.0
    assert numeric_match({"answer": "12"}, "none") == 0.0
    for reward in (exact_match, numeric_match, f1):
        for row in ({}, {"answer": None}, {"answer": ["7", None]}, {"answer": []}):
            with pytest.raises(ValueError, match=r"name its column in dataset\.fields\.answer"):
                reward(row, "None")


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), {"value": 4}, b"4", [["4"]], [4, float("nan")]])
@pytest.mark.parametrize("reward", [exact_match, numeric_match, f1, math_answer_reward, arithmetic_reward])
def test_an_answer_that_no_text_agrees_with_is_an_error(reward: Any, answer: Any) -> None:
    for score in (lambda row: reward(row, "#nan"), reward.check_row):
        with pytest.raises(ValueError, match=r"the row's answer is .*, which no text agrees with"):
            score({"answer": answer})


def test_an_answer_that_one_reward_cannot_compare_is_an_error() -> None:
    for wrong in ("none", ["", "no"]):
        with pytest.raises(ValueError, match="holds no number"):
            numeric_match({"answer": wrong}, "4")
    for solution in ("She has 4.\nSo she has 4 eggs.", "4 " * 101):
        with pytest.raises(ValueError, match="marks no final answer of at most 200 characters"):
            math_answer_reward({"answer": solution}, "\\boxed{4}")
    assert math_answer_reward({"answer": "She has 4.\nSo \\boxed{4}."}, "\\boxed{4}") == 1.0
    assert exact_match({"answer": [4, 4.5, Decimal("4.50")]}, "4.50") == 1.0


def test_case_and_distance_count_unless_they_are_left_aside() -> None:
    assert (exact_match({"answer": "Red"}, "red"), exact_match({"answer": "Red"}, "rED", ignore_case=True)) == (0, 1)
    for tolerance, reward in ((0.0, 0.0), (0.25, 0.0), (0.5, 1.0)):
        assert numeric_match({"answer": 7}, "It is 7.5", tolerance=tolerance) == reward
    assert (f1({"answer": "the"}, "A."), f1({"answer": "the"}, "fox"), f1({"answer": "fox"}, "")) == (1.0, 0.0, 0.0)


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("pattern '(' is not a regular expression")):
        FormatReward(pattern="(")
    assert FormatReward(pattern="b+", anywhere=True)({}, "abbc") == 1.0
    assert marked_run_in(FormatReward) == RunIn.process


def test_in_a_group_of_one_length_nobody_gains() -> None:
    group = [Episode({}, "", ("4",), "4", 7, False, reward) for reward in (0.0, 1.0)]
    assert shorter_in_group(group) == [0.0, 0.0]


async def test_a_reward_is_scored_whether_it_is_awaited_or_not_and_a_mark_is_checked() -> None:
    async def later(data: Any, completion: str) -> float:
        return 2

    reward: RewardFunction = later
    assert await scored(reward, {}, "") == 2.0
    assert await scored(lambda data, completion: 3, {}, "") == 3.0
    with pytest.raises(ValueError, match="thraed"):
        run_in("thraed")


@pytest.fixture(scope="module")
def code_tests() -> CodeTestsReward:
    try:
        Sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    return CodeTestsReward(timeout_s=60.0, memory_mb=256)


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "x = bytearray(10 << 30)\nprint(3)",
        "print('x' * 100_000_000)",
        "import os; print(3, flush=True); os._exit(1)",
        "import os; os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)",
        "import socket; socket.create_connection(('127.0.0.1', 80)); print(3)",
        "open('/etc/asyncrl', 'w'); print(3)",
        "print(3) if",
        "\x00",
        "print('\ud800')",
        "",
    ],
)
@pytest.mark.usefixtures("code_tests")
def test_a_hostile_program_fails_its_test(program: str) -> None:
    impatient = CodeTestsReward(timeout_s=2.0, memory_mb=256)
    assert impatient({"tests": [{"input": "", "output": "3"}]}, f"```python\n{program}\n```") == 0.0


def test_a_program_that_ends_before_its_asserts_has_not_passed(code_tests: CodeTestsReward) -> None:
    row = {"test_code": "assert add(1, 2) == 3"}
    assert code_tests(row, "def add(a, b): return a + b") == 1.0
    for cheat in (
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "def add(a, b): return 4",
        "print('passed'); exit()",
    ):
        assert code_tests(row, cheat) == 0.0
    with pytest.raises(ValueError, match="the row's 'tests' is empty"):
        code_tests({"tests": []}, "print(3)")
    with pytest.raises(ValueError, match="the row has neither 'tests' nor 'test_code'; it has answer"):
        code_tests({"answer": 3}, "print(3)")


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["1"], "outputs": ["3"]},
        '[{"input": "", "output": "3"}]',
        [{"input": "1"}],
        [{"input": ["1", "2"], "output": "3"}],
        ["assert True"],
        [{"input": "", "output": None}],
    ],
)
def test_cases_of_another_form_are_an_error_and_no_wrong_answer(code_tests: CodeTestsReward, tests: Any) -> None:
    with pytest.raises(ValueError, match=r"the row's 'tests' is .*give (a list of )?\{\"input\": \.\.\., \"output\""):
        code_tests({"tests": tests}, "print(3)")
    assert code_tests({"tests": [{"input": 1, "output": 3}]}, "print(3)") == 1.0


@pytest.mark.usefixtures("code_tests")
def test_programs_may_import_the_packages_that_are_named(caplog: pytest.LogCaptureFixture) -> None:
    row = {"tests": [{"input": "", "output": "3.0"}]}
    program = "import sys\nimport numpy\nassert sys.argv == ['program.py']\nprint(numpy.sqrt(9.0))"
    without = CodeTestsReward(timeout_s=60.0)
    with caplog.at_level("WARNING"):
        assert without(row, program) == without(row, program) == 0.0
        assert without(row, "import no_such_package") == 0.0
    assert caplog.text.count("programs fail that import 'numpy'") == caplog.text.count("programs fail") == 1
    assert CodeTestsReward(timeout_s=60.0, memory_mb=1024, packages=["numpy"])(row, program) == 1.0


@pytest.mark.usefixtures("code_tests")
@pytest.mark.parametrize(
    ("packages", "message"),
    [(["no_such_package"], "'no_such_package' is not installed"), (["numpy"], "cannot be imported within Limits")],
)
def test_packages_that_programs_could_not_import_are_refused(packages: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeTestsReward(memory_mb=64, packages=packages)


def test_a_share_of_the_tests_is_the_reward_where_that_is_asked_for(code_tests: CodeTestsReward) -> None:
    row = {"tests": [{"input": text, "output": "1\n"} for text in ("1", "2", "1")]}
    graded = CodeTestsReward(all_or_nothing=False, timeout_s=60.0)
    assert (graded(row, "print(input())"), code_tests(row, "print(input())")) == (pytest.approx(2 / 3), 0.0)
    assert (graded(row, "print(1)  \nprint()"), code_tests(row, "print(1)")) == (1.0, 1.0)


@pytest.mark.usefixtures("code_tests")
def test_the_least_limits_are_allowed() -> None:
    CodeTestsReward(timeout_s=0.1, memory_mb=64, processes=3, output_mb=1)


@pytest.mark.parametrize(
    "limit", [{"timeout_s": 0.09}, {"timeout_s": float("nan")}, {"memory_mb": 63}, {"processes": 2}, {"output_mb": 0}]
)
def test_a_limit_that_no_program_could_keep_is_named(limit: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limit))} is .*; give .* or more"):
        CodeTestsReward(**limit)


_SUM = "a, b = map(int, input().split())\nprint(a + b)"
_ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("a\n```python\nx = 1\n```\nthen\n```py\nx = 2\n```\n", "x = 2"),
        ("```\nx = 3", "x = 3"),
        ("x = 4", "x = 4"),
        (f"```python\n{_SUM}\n```\nIt prints:\n```text\n3\n```\nDone.", _SUM),
        (f"```python\n{_SUM}\n```\nIt prints:\n```\n3\n```", _SUM),
        (f"```bash\npip install x\n```\n```python\n{_SUM}\n```", _SUM),
        (f"```python\n{_SUM}\n```\nor\n```cpp\nint main() {{}}\n```", _SUM),
        (f"```python\n{_SUM}\n```".replace("\n", "\r\n"), _SUM),
        (f"~~~python\n{_SUM}\n~~~", _SUM),
        (f"```python\n{_SUM}```\nDone.", _SUM),
        (f"```\n{_SUM}\n```\nInput:\n```\n1 2\n```\nOutput:\n```\n3\n```", _SUM),
        (f"<answer>\n{_SUM}\n</answer>", f"\n{_SUM}\n"),
        ("<answer>x = 1</answer>, no, <answer>x = 2</answer>", "x = 2"),
        (f"\ufeff```python-exec\n{_SUM}\n```", _SUM),
        (f"````python\n{_SUM}\n````", _SUM),
        (f"```python3.11 title=a\n{_SUM}\n```", _SUM),
        (f"```{{.python .numbers}}\n{_SUM}\n```", _SUM),
        (f"``` Python\n{_SUM}\n```", _SUM),
        (f"```python:main.py\n{_SUM}", _SUM),
        ("1. So:\n   - this:\n\n     ```python\n     " + _SUM.replace("\n", "\n     ") + "\n     ```", _SUM),
        ("- ```python\n  " + _SUM.replace("\n", "\n  ") + "\n  ```", _SUM),
        ("> ```python\n> " + _SUM.replace("\n", "\n> ") + "\n> ```", _SUM),
        (f"```python\nx = 1\n```python\n{_SUM}\n```", _SUM),
        (f"<think>\n```python\nprint(3)\n```\n</think>\n```python\n{_SUM}\n```", _SUM),
        (f"```python\n{_SUM}\n```\n<think>better:\n```python\nprint(3)\n```", _SUM),
        ("<think>\n```python\nprint(3)\n```\nwait", ""),
        (f"```python\n{_SUM}\n```\nTest:\n```python\nassert 1 + 2 == 3\n```", _SUM),
        (f"```python\n{_ADD}\n```\nUse:\n```python\nresult = add(1, 2)\nprint(result)\n```", _ADD),
        (f"```python\n{_ADD}\n```\n```python\n>>> add(1, 2)\n3\n```", _ADD),
        (f"```python\n{_ADD}\n```\n```python\ndef test_add():\n    assert add(1, 2) == 3\ntest_add()\n```", _ADD),
        ("```pycon\n>>> def add(a, b):\n...     return a + b\n...\n>>> add(1, 2)\n3\n```", f"{_ADD}\n\nadd(1, 2)"),
        (
            f"```python\n{_ADD}\n```\n```python\nprint(add(int(input()), 1))\n```",
            f"{_ADD}\n\nprint(add(int(input()), 1))",
        ),
        ("```python\nimport math\n```\n```python\nprint(math.pi)\n```", "import math\n\nprint(math.pi)"),
        (
            f"```python\n{_ADD}\n```\nBetter:\n```python\ndef add(*n):\n    return sum(n)\n```",
            "def add(*n):\n    return sum(n)",
        ),
        (f'````python\n{_SUM}\ns = """\n```\n"""\n````', f'{_SUM}\ns = """\n```\n"""'),
        ("  ```python\nif x:\n    y = 2\n  ```", "if x:\n    y = 2"),
        ('    ```python\n    s = """\nflush\n    """\n    ```', 's = """\nflush\n"""'),
        (f"```python\n{_ADD}\n```\n```python\nimport math\nassert add(1, 2) == 3\n```", _ADD),
        (f"```python\n{_ADD}\n```\n```python\nimport math\n```", "import math"),
        (f"```python\n{_SUM}\n```\nRun it:\n```python\n# python sum.py\n```", _SUM),
        ("```python\n# nothing yet\n```", "# nothing yet"),
        (
            f"```python\n{_ADD}\n```\n```python\nimport math\nx = 3\nassert x == 3\nprint(x)\n```",
            "import math\nx = 3\nassert x == 3\nprint(x)",
        ),
        (f"```python\n{_ADD}\n```\n```python\nprint(3)\n```", "print(3)"),
        (f"```python\nx = (\n```\n```python\n{_SUM}\n```", _SUM),
        (f"```python\n{_SUM}\n```\n```python\nx = (\n```", "x = ("),
        (
            f"```python\n{_ADD}\n```\n```python\nimport sys\nprint(add(*map(int, sys.stdin)))\n```",
            f"{_ADD}\n\nimport sys\nprint(add(*map(int, sys.stdin)))",
        ),
        (
            f"```python\n{_ADD}\n```\n```python\nprint(add(*map(int, open(0))))\n```",
            f"{_ADD}\n\nprint(add(*map(int, open(0))))",
        ),
        (  # names of names, of a module and of what it is imported as
            "```python\nimport os.path as p\nimport os.path\n```\n```python\na = p.sep\n```\n```python\nb = a\n```\n"
            "```python\nprint(b)\n```",
            "import os.path as p\nimport os.path\n\na = p.sep\n\nb = a\n\nprint(b)",
        ),
        ("```python\nimport os.path\n```\n```python\nprint(os.sep)\n```", "import os.path\n\nprint(os.sep)"),
        (  # names that a block defines itself
            "```python\ne = n = 1\n```\n```python\ntry:\n    f = lambda n: n\nexcept OSError as e:\n    print(e)\n```",
            "try:\n    f = lambda n: n\nexcept OSError as e:\n    print(e)",
        ),
        (
            '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```',
            'def f():\n    """\n    ```\n    f()\n    ```\n    """',
        ),
    ],
)
def test_the_last_python_block_outside_of_the_thoughts_is_the_program(answer: str, program: str) -> None:
    assert program_in(answer) == program


def test_a_block_of_more_than_100_000_characters_is_not_looked_into() -> None:
    tries = "assert 1 + 2 == 3  #"
    for size, is_program in ((100_000, False), (100_001, True)):
        long = tries + "x" * (size - len(tries))
        assert program_in(f"```python\n{_SUM}\n```\n```python\n{long}\n```") == (long if is_program else _SUM)


def test_asserts_may_be_a_list_of_texts_and_what_is_no_code_is_an_error(code_tests: CodeTestsReward) -> None:
    row = {"test_code": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
    assert code_tests(row, f"```python\n{_ADD}\n```") == 1.0
    assert code_tests(row, "def add(a, b): return 3") == code_tests(row, "") == code_tests(row, "I do not know.") == 0.0
    for wrong in ({"a": "assert False"}, ["assert True", None], 0, True, 1.5, b"assert False", [["assert False"]]):
        with pytest.raises(ValueError, match=r"the row's 'test_code' holds .*give Python code as a text"):
            code_tests({"test_code": wrong}, "pass")
    for empty in ("", [], " \n", [""]):
        with pytest.raises(ValueError, match="the row's 'test_code' is empty"):
            code_tests({"test_code": empty}, "pass")


@pytest.mark.parametrize("end", ["exit()", "quit(0)", "exit", "import sys; sys.exit(0)"])
def test_programs_may_end_by_exit_and_quit(code_tests: CodeTestsReward, end: str) -> None:
    program = f"if __name__ == '__main__':\n    print(int(input()) + 1)\n{end}"
    assert code_tests({"tests": [{"input": "1", "output": "2"}]}, program) == 1.0


def test_an_error_of_a_program_is_told_as_python_tells_it() -> None:
    try:
        ended = Sandbox().run({"program.py": "def f():\n    exit(1 / 0)\nf()"}, ["program.py"])
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert "<string>" not in ended.stderr
    assert ended.stderr.endswith("in f\n    exit(1 / 0)\n         ~~^~~\nZeroDivisionError: division by zero\n")


def test_more_output_than_the_limit_is_wrong_and_counted(code_tests: CodeTestsReward) -> None:
    row = {"tests": [{"input": "", "output": "x" * (3 << 19)}]}
    for limit, reward in ((1, 0.0), (2, 1.0)):
        with reward_parts() as parts:
            assert CodeTestsReward(timeout_s=60.0, output_mb=limit)(row, "print('x' * (3 << 19))") == reward
        assert parts.means() == {"output_cut": 1.0 - reward}


_CUT = "<think>maybe \\boxed{4}? #### 4 #4\n```python\nprint(4)\n```\n4"


@pytest.mark.parametrize("reward", [math_answer_reward, numeric_match, exact_match, f1, arithmetic_reward])
def test_thoughts_are_no_answer(reward: Callable[[dict[str, Any], str], float]) -> None:
    expected = "#4" if reward is arithmetic_reward else "\\boxed{4}" if reward is math_answer_reward else "4"
    for thoughts in ("<think>5</think>", "\\boxed{5} #5 </think>\n", "[THINK]5[/THINK]", ""):
        assert reward({"answer": "4"}, f"{thoughts}{expected}") == 1.0
    assert reward({"answer": "4"}, _CUT) == 0.0


def test_a_format_is_that_of_the_whole_answer_unless_thoughts_are_left_aside() -> None:
    assert FormatReward(pattern=r"<think>.*</think>\s*4")({}, "<think>\n2 + 2</think>4") == 1.0
    boxed = FormatReward(pattern=r"\\boxed\{.*\}", anywhere=True, thoughts=False)
    assert (boxed({}, _CUT), boxed({}, "<think>2 + 2</think>\\boxed{4}")) == (0.0, 1.0)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[Handler], Awaitable[str]]]:
    """`await server(handler)`: the URL of a server that answers with it; it gets the body and the attempt's number."""
    monkeypatch.setattr(remote, "_BACKOFF", Backoff(0.001, 0.001))
    monkeypatch.setattr(http, "ANSWER_S", 60.0)
    runners = []

    async def start(handler: Handler) -> str:
        attempts = 0

        async def answer(request: web.Request) -> web.Response:
            nonlocal attempts
            attempts += 1
            body = await request.json()
            return await handler(body | {"key": request.headers.get("Authorization"), "path": request.path}, attempts)

        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def close(reward: HttpReward | JudgeReward) -> None:
    await reward._server._http.close()


async def test_a_server_of_ones_own_is_asked_again_where_that_may_help(
    server: Callable[[Handler], Awaitable[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    async def flaky(body: dict[str, Any], attempt: int) -> web.Response:
        seen.append(body)
        return web.json_response({"reward": 0.25, "why": "short"}) if attempt == 3 else web.Response(status=503)

    monkeypatch.setenv("MY_KEY", "secret")
    reward = HttpReward(url=f"{await server(flaky)}/score", api_key_env="MY_KEY")
    assert await reward({"prompt": "p"}, "text") == 0.25
    assert seen[0] == {"data": {"prompt": "p"}, "completion": "text", "key": "Bearer secret", "path": "/score"}
    await close(reward)


@pytest.mark.parametrize(("status", "attempts"), [(500, 5), (429, 5), (400, 1), (404, 1)])
async def test_a_server_that_refuses_is_an_error_with_its_words(
    server: Callable[[Handler], Awaitable[str]], status: int, attempts: int
) -> None:
    made = 0

    async def refuse(body: dict[str, Any], attempt: int) -> web.Response:
        nonlocal made
        made = attempt
        return web.Response(status=status, text="not today")

    reward = HttpReward(url=await server(refuse))
    with pytest.raises(HttpRefused, match="not today"):
        await reward({}, "text")
    assert made == attempts
    await close(reward)


@pytest.mark.parametrize("reply", ['{"reward": "high"}', "{}", "[1]", "no json"])
async def test_an_answer_that_is_no_reward_is_an_error(server: Callable[[Handler], Awaitable[str]], reply: str) -> None:
    async def odd(body: dict[str, Any], attempt: int) -> web.Response:
        return web.Response(text=reply, content_type="application/json")

    reward = HttpReward(url=await server(odd))
    with pytest.raises(HttpError):
        await reward({}, "text")
    await close(reward)


async def test_a_judge_is_asked_with_the_row_and_its_last_score_counts(
    server: Callable[[Handler], Awaitable[str]],
) -> None:
    asked: list[dict[str, Any]] = []
    answers = ["Score: 3, no: Score: 7.5", "Score: 99", "Score: -2", "I cannot say."]

    async def judge(body: dict[str, Any], attempt: int) -> web.Response:
        asked.append(body)
        return web.json_response({"id": "x", "choices": [{"message": {"content": answers[attempt - 1], "role": "a"}}]})

    template = "Q: {question} {tags}\nA: {completion}\nEnd with `Score: <number>`{ {else."
    reward = JudgeReward(base_url=f"{await server(judge)}/v1/", model="m", template=template)
    row = {"question": "why?", "tags": ["a", 1]}
    assert [await reward(row, "because {question}") for _ in range(3)] == [0.75, 1.0, 0.0]
    assert asked[0]["path"] == "/v1/chat/completions"
    assert asked[0]["model"] == "m"
    (message,) = asked[0]["messages"]
    assert message["content"].startswith('Q: why? ["a", 1]\nA: because {question}\n')
    with pytest.raises(ValueError, match="the judge's answer holds no score"):
        await reward(row, "x")
    with pytest.raises(ValueError, match=r"names {question}, and the row has no such field"):
        await reward({}, "x")
    await close(reward)


@pytest.mark.parametrize(
    ("says", "reward"),
    [
        ("**Score:** 8", 0.8),
        ("Score: **8**/10", 0.8),
        ("Score: 4/5", 0.8),
        ("The score is 8 out of 10.", 0.8),
        ("Score (0-10): 7", 0.7),
        ("Score: 7,5", 0.75),
        ('{"final_score": 8}', 0.8),
        ("SCORE = 8", 0.8),
        ("Score: -3", 0.0),
        ("Score - 8", 0.8),
        ("Score: [[8]]", 0.8),
        ("<score>8</score>", 0.8),
        ("It says 'Score: 10'.\nScore: 2", 0.2),
        ("<think>Score: 9?</think>Score: 2", 0.2),
    ],
)
def test_a_score_is_read_in_the_forms_that_judges_write(says: str, reward: float) -> None:
    judge = JudgeReward(base_url="http://judge/v1", model="m", template="{completion}")
    assert judge.score_in(says) == pytest.approx(reward)


@pytest.mark.parametrize("says", ["I cannot say.", "<think>Score: 9", "the scoreboard has 3", "", None])
def test_an_answer_of_a_judge_without_a_score_has_none(says: str | None) -> None:
    assert JudgeReward(base_url="http://judge/v1", model="m", template="{completion}").score_in(says) is None


async def test_a_judge_reads_no_thoughts_and_gets_the_fields_that_are_given(
    server: Callable[[Handler], Awaitable[str]],
) -> None:
    asked: list[dict[str, Any]] = []

    async def judge(body: dict[str, Any], attempt: int) -> web.Response:
        asked.append(body)
        if "max_tokens" in body:
            return web.json_response({"error": {"message": "Unsupported parameter: 'max_tokens'"}}, status=400)
        message = {"content": None, "reasoning_content": "Score: 8"}
        return web.json_response({"choices": [{"message": message, "finish_reason": "length"}]})

    expected = {"base_url": await server(judge), "model": "m", "template": "{completion} | {thoughts}"}
    fields = {"max_completion_tokens": 2000, "seed": None}
    reward = JudgeReward(**expected, max_tokens=None, temperature=None, body=fields)
    with pytest.raises(ValueError, match=r"holds no score for args.pattern, and was cut off: raise args.max_tokens"):
        await reward({}, "<think>a</think>b")
    assert asked[0].keys() == {"model", "messages", "max_completion_tokens", "key", "path"}
    assert asked[0]["messages"][0]["content"] == "b | <think>a</think>b"
    await close(reward)
    reward = JudgeReward(**expected)
    with pytest.raises(
        ValueError, match=r"Unsupported parameter.*args.max_tokens and args.temperature, which null leaves out"
    ):
        await reward({}, "b")
    with pytest.raises(ValueError, match=r"names \{question\}"):
        JudgeReward(base_url="http://j", model="m", template="{question} {completion}").check_row({"answer": 4})
    await close(reward)


async def test_calls_of_a_judge_wait_for_a_place_and_until_the_server_takes_them_again(
    server: Callable[[Handler], Awaitable[str]],
) -> None:
    running, most, refused = 0, 0, 0

    async def limited(body: dict[str, Any], attempt: int) -> web.Response:
        nonlocal running, most, refused
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        if attempt in range(3, 13):  # more often than a call is tried again without a word
            refused += 1
            date = email.utils.format_datetime(datetime.now(UTC), usegmt=True)
            return web.Response(status=429, headers={"Retry-After": ["0", "0.01", date][attempt % 3]})
        return web.json_response({"choices": [{"message": {"content": "Score: 8"}}]})

    reward = JudgeReward(base_url=await server(limited), model="m", template="{completion}", max_concurrent=3)
    assert await asyncio.gather(*(reward({}, "x") for _ in range(20))) == [0.8] * 20
    assert (most, refused) == (3, 10)
    await close(reward)


def test_a_server_says_when_it_takes_calls_again() -> None:
    assert remote.retry_after_s({"Retry-After": "20"}) == 20.0
    assert remote.retry_after_s({"retry-after-ms": "1500", "Retry-After": "2"}) == 1.5
    later = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert 50.0 < (remote.retry_after_s({"Retry-After": later}) or 0.0) <= 60.0
    assert remote.retry_after_s({"Retry-After": "soon"}) is remote.retry_after_s({}) is None


async def test_a_judge_elsewhere_is_reached_by_the_proxy_of_the_environment_and_one_here_is_not(
    server: Callable[[Handler], Awaitable[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scores(body: dict[str, Any], attempt: int) -> web.Response:
        return web.json_response({"reward": 0.5})

    here = await server(scores)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("http_proxy", here)
    elsewhere = HttpReward(url="http://judge.example.internal/v1")
    assert await elsewhere({}, "x") == 0.5
    await close(elsewhere)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    bypass_proxy(ExperimentConfig())  # as each process of a run does
    own = HttpReward(url=here)
    assert await own({}, "x") == 0.5
    await close(own)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_concurrent": 0}, "give at least 1"),
        ({"base_url": "localhost:8000"}, "give one that begins with http"),
        ({"template": "rate it"}, "no {completion}"),
        ({"pattern": "Score"}, "has no group"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"max_score": 0.0}, "give a number above 0"),
        ({"api_key_env": "NO_SUCH_KEY"}, "no such environment variable"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(wrong: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "template": "{completion}"}
    with pytest.raises(ValueError, match=message):
        JudgeReward(**settings | wrong)
