"""An episode of a real agent program against the real endpoint, a real chat template and a scripted policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from asyncrl.api import Completion, FinishReason, GenerationRequest, GenerationResult, Prompt, Sample, SamplingParams
from asyncrl.chat.episode_client import EpisodeClient
from asyncrl.chat.parsers import parser
from asyncrl.chat.template import ChatFormat
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import ChatTokenizer, load_tokenizer, special_tokens
from asyncrl.inference.openai.endpoint import Endpoint, Session

from .programs import DONE, TASK, Program

TESTS = Path(__file__).parents[1]
TEMPLATE = TESTS / "chat_templates" / "trl_qwen3.jinja"
AGENTS = Path(__file__).parent / "agents"
SAMPLING = SamplingParams(max_new_tokens=512)
LIMIT_S = 240.0
"""Time limit in seconds of a program: it ends a hang."""


@dataclass
class ScriptedPolicy:
    """Answers the task's conversation with the program's `answers` in turn, and others with `DONE`. The n-th token that
    it generates, from 1 on, has the log-probability -n.
    """

    program: Program
    tokenizer: ChatTokenizer
    answered: int = 0
    """Answers to the task's conversation."""
    generated: list[int] = field(default_factory=list)
    """All token ids, in order."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        text = DONE
        if self.program.main in self.tokenizer.decode_all(request.input_ids):
            if self.answered == len(self.program.answers):
                raise AssertionError("the program asks once more than it has to for its task")
            text = self.program.answers[self.answered]
            self.answered += 1
        ids = [*self.tokenizer.encode_plain(text), self.tokenizer.eos_token_id]
        first = len(self.generated) + 1
        self.generated += ids
        logprobs = [-float(number) for number in range(first, first + len(ids))]
        return GenerationResult(request.request_id, (Completion(ids, logprobs, [0] * len(ids), FinishReason.stop),))


class RecordingEndpoint(Endpoint):
    """An endpoint that keeps the bodies of requests, by the path of their API."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[tuple[str, Any]] = []

    async def _body(self, request: web.BaseRequest) -> bytes:
        body = await super()._body(request)
        self.bodies.append((request.path.rpartition("/v1")[2], json.loads(body)))
        return body


@dataclass(frozen=True)
class Episode:
    """What is left of an episode.

    Attributes:
        code: the program's exit code.
        output: what it printed.
        refused: calls that were not served, by the error's code.
        bodies: requests as path and body, in order.
        samples: samples of the episode.
    """

    program: Program
    code: int
    output: str
    refused: Counter[str]
    bodies: Sequence[tuple[str, Any]]
    samples: Sequence[Sample]
    policy: ScriptedPolicy

    @property
    def body(self) -> Any:
        """The last request of the task's conversation, which has all earlier ones in it."""
        return next(body for path, body in reversed(self.bodies) if self.program.main in json.dumps(body))

    def trained(self) -> list[tuple[float, int]]:
        """Log-probability and id of every token with loss, in the order of generation."""
        found: list[tuple[float, int]] = []
        for sample in self.samples:
            with_loss = sample.loss_mask.nonzero()[0]
            found += zip(sample.behave_logprobs[with_loss].tolist(), sample.tokens[with_loss].tolist(), strict=True)
        return sorted(found, reverse=True)


def chat_format(model: Path) -> ChatFormat:
    """Qwen3's template with the tokenizer of the chat model in the folder `model`."""
    prompts = PromptFormat(load_tokenizer(model), ChatTemplate(TEMPLATE.read_text(), special_tokens(model)))
    return ChatFormat(prompts, parser("hermes"))


async def play(program: Program, folder: Path, chat: ChatFormat) -> Episode:
    """Have the program do its task in the new folder `folder/work`, with `folder/home` as its home."""
    policy = ScriptedPolicy(program, chat.tokenizer)
    client = EpisodeClient(policy, Prompt("p0", 0, {}, (), 1, SAMPLING), chat)
    endpoint = RecordingEndpoint()
    session = await endpoint.open(client, SAMPLING)
    try:
        code, output = await _run(program, folder, session)
        return Episode(program, code, output, endpoint.refused, endpoint.bodies, client.samples(1.0), policy)
    finally:
        session.close()
        await endpoint.close()


async def _run(program: Program, folder: Path, session: Session) -> tuple[int, str]:
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    given = {"root": session.root_url, "base": session.base_url, "key": session.api_key, "folder": str(work)}
    given |= {"task": TASK, "agent": str(AGENTS / f"{program.package.replace('-', '_')}_agent.py")}

    def filled(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: given.get(found[1], found[0]), text)

    for name, text in program.files.items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(filled(text))
    command = [str(program.executable), *map(filled, shlex.split(program.command))]
    own = {**program.env, **program.quiet}
    with (folder / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=work,
            env=_environment(home, work) | {name: filled(value) for name, value in own.items()},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(TimeoutError):  # it is killed, which its exit code says
                async with asyncio.timeout(LIMIT_S):
                    await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
    return code, (folder / "output").read_text(errors="replace")


def _environment(home: Path, work: Path) -> dict[str, str]:
    """Nothing of the caller's but where programs are found. Other hosts are behind a proxy that is not there."""
    own = {"HOME": str(home), "PWD": str(work), "TMPDIR": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
    proxy = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    return {"PATH": os.environ["PATH"], **own, **proxy}
