"""Whoever searches the written pages in a user's words finds the page with the answer first.

Ranks sections as a site's search does (BM25, headings and titles count more, words by their beginnings). Questions are
those of public bug reports and forums. The four pages that are made from the code are tables for exact names, and not
ranked.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from docs.made_pages import PAGES

DOCS = Path(__file__).resolve().parents[2] / "docs"
STOP = set(
    re.findall(
        r"\w+",
        "a an and are as at be by can do does for from has have how i if in is it its many much my no not of on or so "
        "than that the there they this to use was what when where which who why will with without you your",
    )
)
HEADING, TITLE = 4, 3
"""Weights of a word in a section's heading and in the page's title; 1 in the text."""
SHORTEST, RATE, LENGTH = 4, 1.2, 0.6
"""Letters of a word from which on its beginning suffices; parameters of BM25."""

QUESTIONS = {
    "no train step, run ended as stalled": "troubleshooting",
    "CUDA out of memory in training": "troubleshooting faults sizing",
    "GPU idle, training waits for rollouts": "troubleshooting",
    "reward is always 0": "troubleshooting rewards",
    "reward goes up but evaluation goes down": "troubleshooting",
    "entropy collapse": "troubleshooting",
    "memory grows until the process is killed": "troubleshooting",
    "resume a run after a crash": "faults tutorial_resume",
    "what happens when a RolloutWorker dies": "faults",
    "stop a run and continue later": "tutorial_resume faults",
    "run in the background and detach": "faults",
    "Kubernetes pods": "hosts",
    "Slurm several nodes": "hosts",
    "ssh to other hosts without a shared folder": "hosts",
    "etcd name resolution": "hosts",
    "TLS certificates and encryption": "security",
    "trust_remote_code": "security models",
    "secrets uploaded to wandb": "security samples",
    "max_head_offpolicyness how to choose": "staleness",
    "on_stale drop or wait": "staleness",
    "importance sampling correction off-policy": "algorithms",
    "GSPO sequence level clipping": "algorithms coming_from",
    "dynamic sampling DAPO zero variance groups": "algorithms",
    "KL penalty to the reference model": "algorithms",
    "own loss function": "algorithms",
    "LoRA adapters": "sizing models",
    "tensor parallel pipeline parallel layout": "sizing models",
    "long context 32k memory": "sizing",
    "one GPU for training and generation colocate": "gpu",
    "SGLang install": "gpu",
    "GRPO on eight GPUs": "gpu",
    "chat template tokenizer": "chat",
    "multi-turn agent with own environment": "agents",
    "gymnasium game": "tutorial_game policies agents",
    "tool calls are not parsed": "tools chat",
    "MCP server tools": "tools",
    "OpenAI API endpoint for an existing agent": "endpoint",
    "Anthropic Claude Code as agent": "endpoint",
    "verifiers environments": "verifiers",
    "Harbor tasks in Docker containers": "verifiers",
    "NeMo-Gym or OpenEnv environment server": "verifiers",
    "math answer boxed verification reward": "rewards",
    "reward that runs tests of generated code in a sandbox": "rewards",
    "LLM as a judge reward": "rewards",
    "reward model bradley terry": "sft rewards algorithms",
    "DPO preferences": "sft algorithms",
    "fine-tune on demonstrations SFT": "sft",
    "knowledge distillation from a teacher": "distillation",
    "self-play against older versions": "policies",
    "images vision language model Qwen2-VL": "vision",
    "dataset mixture weights sources": "data",
    "curriculum by difficulty of prompts": "data algorithms",
    "evaluate pass@k on a held-out set": "evaluation",
    "export a checkpoint to Hugging Face": "models faults evaluation policies",
    "look at generated samples parquet": "samples",
    "Prometheus Grafana metrics": "dashboard",
    "timeline trace of a run": "troubleshooting dashboard",
    "start runs from Python notebook": "python_api",
    "come from verl allocation_mode": "coming_from",
    "speed against TRL": "results",
    "which model architectures are supported": "models tables/models",
    "how is the code organised packages": "architecture",
}
"""What is asked, and the pages of which one has to come first."""


@dataclass(frozen=True)
class Section:
    page: str
    words: Counter[str]
    """By word, its weight in the section."""


def words_of(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9_@]+(?:\.[a-z0-9_]+)*", text.lower()) if word not in STOP]


def parts_of(name: str) -> list[str]:
    """A setting's name and its parts: `generation.max_total_tokens` is found by `tokens`."""
    return [name, *(part for part in re.split(r"[._]", name) if part and part != name)]


def weighted(text: str, weight: int) -> Counter[str]:
    return Counter(
        {word: count * weight for word, count in Counter(p for w in words_of(text) for p in parts_of(w)).items()}
    )


@cache
def sections() -> tuple[Section, ...]:
    texts = {
        page.relative_to(DOCS).as_posix(): page.read_text() for page in DOCS.rglob("*.md") if page.name not in PAGES
    }
    found = []
    for name, text in sorted(texts.items()):
        title, *parts = re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]
        page_title = title.partition("\n")[0]
        for part in (title, *parts):
            heading, _, body = part.partition("\n")
            words = weighted(body, 1) + weighted(heading, HEADING) + weighted(page_title, TITLE)
            found.append(Section(name.removesuffix(".md"), words))
    return tuple(found)


@cache
def count_of(section: int, asked: str) -> float:
    words = sections()[section].words
    if len(asked) < SHORTEST:
        return words[asked]
    stem = asked.removesuffix("s")
    return sum(count for word, count in words.items() if word.startswith(stem))


def ranked(question: str) -> list[str]:
    """Pages, the best first, each by its best section."""
    known = sections()
    lengths = [sum(section.words.values()) for section in known]
    mean = sum(lengths) / len(lengths)
    scores = [0.0] * len(known)
    for asked in set(words_of(question)):
        counts = [count_of(number, asked) for number in range(len(known))]
        having = sum(1 for count in counts if count)
        weight = math.log(1 + (len(known) - having + 0.5) / (having + 0.5))
        for number, count in enumerate(counts):
            damped = RATE * (1 - LENGTH + LENGTH * lengths[number] / mean)
            scores[number] += weight * count * (RATE + 1) / (count + damped)
    best: dict[str, float] = {}
    for section, score in zip(known, scores, strict=True):
        best[section.page] = max(score, best.get(section.page, 0.0))
    return sorted(best, key=lambda page: -best[page])


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_page_first(question: str) -> None:
    found = ranked(question)[:3]
    assert found[0] in QUESTIONS[question].split(), f"{question!r}: {found}"
