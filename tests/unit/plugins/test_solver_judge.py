"""`solver_judge`: claims and their truth, and which policy is paid for what."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from asyncrl.api import (
    Completion,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    SamplingParams,
)
from asyncrl.chat.episode_client import ChatPolicy, EpisodeClient
from asyncrl.data.tokenizers import CharTokenizer

RECIPES = Path(__file__).parents[3] / "experiments" / "recipes"
TOKENIZER = CharTokenizer()


@pytest.fixture(scope="module")
def demo() -> Any:
    sys.path.insert(0, str(RECIPES))
    try:
        import solver_judge
    finally:
        sys.path.remove(str(RECIPES))
    return solver_judge


def test_about_half_of_the_claims_that_can_be_careless_are_wrong(demo: Any) -> None:
    rows = [demo.Claims(num_rows=400, split="held_out").row(index) for index in range(400)]
    wrong = [row for row in rows if row["claim"] != row["answer"]]
    assert 120 < len(wrong) < 220
    assert all(sum(map(int, row["prompt"].rstrip("=").split("+"))) == int(row["answer"]) for row in rows)
    assert all(row["claim"].isdecimal() for row in rows)


@dataclass
class Scripted:
    """Answers as each policy is told to."""

    answers: dict[str, str]
    asked: list[str] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.append(request.policy)
        tokens = list(TOKENIZER.encode(self.answers[request.policy]))
        done = Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), FinishReason.stop, policy=request.policy)
        return GenerationResult(request.request_id, (done,))


def played(demo: Any, agent: str, answers: dict[str, str], **data: str) -> tuple[list[Any], list[str]]:
    policy = Scripted(answers)
    prompt = Prompt("e0-0", 0, {"prompt": "37+5=", **data}, tuple(TOKENIZER.encode("37+5=")), 1, SamplingParams())
    client = EpisodeClient(policy, prompt, None, ChatPolicy(policies=("judge",), trained=("judge",)))
    return asyncio.run(getattr(demo, agent)(prompt, None, client, tokenizer=TOKENIZER)), policy.asked


@pytest.mark.parametrize(
    ("solver", "judge", "solved", "agrees"),
    [
        ("37+5=42#42", "37+5=42#42", 1.0, 1.0),
        ("37+5=32#32", "37+5=42#42", 0.0, 1.0),
        ("37+5=42#42", "37+5=32#32", 0.0, 0.0),
        ("37+5=32#32", "37+5=32#32", 1.0, 0.0),
    ],
    ids=["both right", "the judge knows better", "the judge errs", "both err alike"],
)
def test_the_solver_is_paid_by_the_verdict_and_the_judge_by_the_truth(
    demo: Any, solver: str, judge: str, solved: float, agrees: float
) -> None:
    samples, _ = played(demo, "play", {"": solver, "judge": judge}, answer="42")
    assert [(sample.group, sample.reward) for sample in samples] == [("", solved), ("judge", agrees)]
    assert samples[0].metrics == {"right": float("42" in solver)}


def test_an_answer_without_a_result_is_wrong_and_the_judge_is_not_asked(demo: Any) -> None:
    samples, asked = played(demo, "play", {"": "37+5"}, answer="42")
    assert ([(sample.group, sample.reward) for sample in samples], asked) == ([("", 0.0)], [""])


@pytest.mark.parametrize(("claim", "own", "reward"), [("42", "42", 1.0), ("32", "42", 1.0), ("42", "32", 0.0)])
def test_an_evaluation_of_the_judge_is_of_its_verdict_on_the_claim(
    demo: Any, claim: str, own: str, reward: float
) -> None:
    samples, _ = played(demo, "judged", {"judge": f"37+5={own}#{own}"}, answer="42", claim=claim)
    assert [(sample.group, sample.reward) for sample in samples] == [("judge", reward)]
