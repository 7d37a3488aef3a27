"""A conversation that outgrows its context goes on from the policy's summary; with Qwen3's own template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from asyncrl.api import Prompt, Sample, Tool, ToolResult
from asyncrl.chat.conversation import ChatLimits
from asyncrl.chat.episode_client import ChatPolicy, EpisodeClient
from asyncrl.chat.template import ChatFormat
from asyncrl.plugins.agents.compaction import HEADING, QUESTION, CompactionRules
from asyncrl.plugins.agents.tool_agent import ToolAgent
from asyncrl.plugins.envs.single_turn import SingleTurnEnv
from asyncrl.plugins.tools.toolbox import HostedTool, Toolbox

from .conftest import FakePolicy

QWEN3 = (Path(__file__).parents[2] / "chat_templates" / "trl_qwen3.jinja").read_text(encoding="utf-8")
CALLS = [f'<tool_call>\n{{"name": "look", "arguments": {{"at": {number}}}}}\n</tool_call>' for number in range(9)]
END = "<|im_end|>"


class Look(Tool):
    """Says how it is there, at the length of the row."""

    name = "look"

    def schema(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
        return {"type": "function", "function": {"name": "look", "description": "", "parameters": parameters}}

    async def execute(self, instance_id: str, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(f"seen {arguments['at']}" + " and so on" * (40 if arguments["at"] == 8 else 4))


async def host(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await method(*args, **kwargs)


def one_point(data: object, completion: str) -> float:
    return 1.0


@dataclass
class Episode:
    """An episode that says `texts` in turn: what the policy was asked, as text, and the samples."""

    chat: ChatFormat
    prompt: Prompt
    texts: list[str]
    max_context: int = 0
    sizes: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def play(self, max_turns: int = 8, **compaction: Any) -> list[Sample]:
        (end_id,) = self.chat.tokenizer.encode(END)
        policy = FakePolicy(end_id, 0, self.chat.tokenizer.encode, *self.texts)
        client = EpisodeClient(policy, self.prompt, self.chat, ChatPolicy(ChatLimits(max_context=self.max_context)))
        tools = Toolbox([HostedTool(Look(), "tool look", host, 10_000)])
        agent = ToolAgent(
            tokenizer=self.chat.tokenizer, tools=tools, max_turns=max_turns, compaction=compaction or None
        )
        samples = await agent.run(self.prompt, SingleTurnEnv(reward=one_point), client)
        self.sizes = [len(request.input_ids) for request in policy.asked]
        self.asked = [self.chat.tokenizer.decode_all(request.input_ids) for request in policy.asked]
        answers = [each for each in policy.sampled if each.token_ids]
        assert sum(sample.generated_length for sample in samples) == sum(len(each.token_ids) for each in answers)
        assert {sample.reward for sample in samples} == {1.0}
        return samples

    def learned(self, sample: Sample) -> str:
        return self.chat.tokenizer.decode_all(sample.tokens[sample.loss_mask == 1].tolist())


@pytest.fixture
async def episode(chat_format: Callable[..., ChatFormat], prompt: Prompt) -> Callable[..., Any]:
    async def make(*texts: str, calls: list[str] = CALLS[:2], room: int = 400) -> tuple[Episode, float]:
        """An episode, and the share of its context that it reaches with the results of `calls`."""
        chat = chat_format(QWEN3)
        plain = Episode(chat, prompt, [*calls, "It is 7."])
        (sample,) = await plain.play()
        assert "compactions" not in sample.metrics
        size = plain.sizes[-1]
        return Episode(chat, prompt, [*texts], size + room), (size - 0.5) / (size + room)

    return make


async def test_the_policy_goes_on_from_its_summary_which_is_learned_with_the_episode(episode: Any) -> None:
    played, at = await episode(*CALLS[:2], "I saw 0 and 1.", "It is 7.")
    first, second = await played.play(at=at, keep_turns=2)  # for both there is no room beside the summary
    assert played.learned(first) == CALLS[0] + END + CALLS[1] + END + "I saw 0 and 1." + END
    assert played.learned(second) == "It is 7." + END
    summary, after = played.asked[2:]
    assert summary.startswith(played.asked[1] + CALLS[1] + END), "the request extends the conversation"
    assert summary.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    task, _, last_turn = after.partition(f"<|im_start|>user\nWhat is 3 + 4?\n\n{HEADING}\nI saw 0 and 1.<|im_end|>\n")
    assert played.asked[0].startswith(task)
    assert CALLS[0] not in last_turn
    assert CALLS[1] in last_turn
    assert "seen 1" in last_turn
    assert second.metrics["compactions"] == first.metrics["compactions"] == 1.0
    assert second.metrics["turns"] == 3.0, "a summary is no turn"
    assert second.metrics["cut_summaries"] == 0.0
    assert len(second.tokens) < len(first.tokens)


async def test_without_turns_to_keep_the_summary_is_all_that_stays(episode: Any) -> None:
    played, at = await episode(*CALLS[:2], "I saw 0 and 1.", "It is 7.")
    await played.play(at=at, keep_turns=0, question="Sum it up.")
    assert "Sum it up." in played.asked[2]
    assert "seen" not in played.asked[3]


async def test_a_summary_that_does_not_fit_leaves_out_the_last_turn_which_is_repeated(episode: Any) -> None:
    """The result of call 8 is so long that behind it there is no room for a summary."""
    calls = [*CALLS[:2], CALLS[8]]
    played, at = await episode(*calls, "I saw 0 and 1.", "It is 7.", calls=calls)
    before, summary, after = await played.play(at=at, summary_tokens=400, keep_turns=0)
    assert played.learned(before) == "".join(call + END for call in calls)
    assert played.learned(summary) == "I saw 0 and 1." + END
    assert played.asked[3].startswith(played.asked[2].removesuffix("<|im_start|>assistant\n"))
    assert CALLS[8] not in played.asked[3]
    assert "seen 8" in played.asked[4]
    assert after.metrics["compactions"] == 1.0


async def test_an_episode_is_compacted_so_often_at_most_and_then_ends_at_the_limit(episode: Any) -> None:
    played, at = await episode(*CALLS[:2], "I saw things.", *CALLS[2:8], room=150)
    samples = await played.play(at=at, max_times=1, summary_tokens=20)
    assert samples[0].metrics["compactions"] == 1.0
    assert samples[-1].truncated
    assert len(samples) == 2


async def test_a_summary_that_is_cut_off_is_used_and_counted(episode: Any) -> None:
    played, at = await episode(*CALLS[:2], "I saw 0 and then much more.", "It is 7.")
    first, second = await played.play(at=at, summary_tokens=3)
    assert [first.truncated, second.truncated] == [True, False]
    assert first.metrics["cut_summaries"] == 1.0
    assert not played.learned(first).endswith("more." + END)
    assert f"{HEADING}\n{played.learned(first).rpartition(END)[2]}<|im_end|>" in played.asked[3]


async def test_a_summary_without_text_is_not_used_and_asked_for_no_more_often_than_others(episode: Any) -> None:
    played, at = await episode(*CALLS[:2], "<think>\nThere is much to say.", CALLS[2], "It is 7.")
    blank, last = await played.play(at=at, summary_tokens=4, max_times=1)
    assert played.learned(blank).startswith(CALLS[0] + END + CALLS[1] + END + "<think>\n")
    assert played.learned(last) == CALLS[2] + END + "It is 7." + END
    assert played.asked[3].startswith(played.asked[1] + CALLS[1] + END), "the conversation goes on"
    assert last.metrics["compactions"] == 0.0
    assert last.metrics["cut_summaries"] == 1.0
    assert [blank.truncated, last.truncated] == [True, False]


async def test_of_several_samples_the_one_that_ends_with_calls_at_the_last_turn_is_truncated(episode: Any) -> None:
    played, at = await episode(*CALLS[:2], "I saw 0 and 1.", CALLS[2])
    samples = await played.play(at=at, max_turns=3)
    assert [sample.truncated for sample in samples] == [False, True]


ALTERNATING = """{%- for message in messages %}
{%- if (message.role in ('user', 'tool')) != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


async def test_a_template_of_alternating_roles_has_the_question_in_the_users_last_message(
    chat_format: Callable[..., ChatFormat], prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it refuses the request all the same, the conversation stays as it is."""
    chat = chat_format(ALTERNATING)
    (end_id,) = chat.tokenizer.encode(END)
    policy = FakePolicy(end_id, 0, chat.tokenizer.encode, "One.", "It was one.")
    client = EpisodeClient(policy, prompt, chat, ChatPolicy(ChatLimits(max_context=900)))
    task = {"role": "user", "content": prompt.data["prompt"]}
    reply = await client.chat([task])
    messages = [task, reply.message, {"role": "user", "content": "And then?"}]
    compaction = CompactionRules(at=0.01, keep_turns=0).begin(prompt, client)
    (shorter,) = await compaction.shortened(messages)
    assert shorter["content"].endswith(f"{HEADING}\nIt was one.")
    asked = chat.tokenizer.decode_all(policy.asked[1].input_ids)
    assert asked.endswith(f"user\nAnd then?\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")

    messages[-1] = {"role": "tool", "content": "It is two."}
    for _ in range(2):
        assert await compaction.shortened(messages) == messages
    assert caplog.text.count("its request for a summary cannot be rendered: ") == 1
    assert compaction.metrics["compactions"] == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"at": 1.0}, r"compaction at=1\.0: it is a share"),
        ({"max_times": 0}, "compaction max_times=0: give at least 1"),
        ({"summary_tokens": 0}, "compaction summary_tokens=0"),
        ({"keep_turns": -1}, "compaction keep_turns=-1"),
        ({"keep_turn": 1}, "compaction has no 'keep_turn', did you mean 'keep_turns'"),
    ],
)
def test_what_no_rule_can_be_is_refused_by_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompactionRules.of(args)


def test_a_share_of_no_limit_is_refused(prompt: Prompt) -> None:
    with pytest.raises(ValueError, match=r"set generation\.context_length"):
        CompactionRules().begin(prompt, EpisodeClient(FakePolicy(1), prompt, None))
