"""An episode's client: ids are extended, never made anew; what was sampled is recorded once; limits end politely."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.api import (
    ChatClient,
    ChatFinish,
    ChatReply,
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Sample,
    SamplingParams,
    ToolCall,
    ToolSchema,
)
from asyncrl.chat.conversation import ChatLimits
from asyncrl.chat.episode_client import ChatPolicy, ConversationEnded, DriftError, EpisodeClient
from asyncrl.chat.parsers import Parsed
from asyncrl.chat.settings import DriftCheck, Reasoning
from asyncrl.chat.template import ChatFormat
from asyncrl.data.chat_template import ChatError
from asyncrl.plugins.agents.sample_builder import SampleBuilder
from tests.examples import examples

from .conftest import TEMPLATES, FakePolicy

MakeFormat = Callable[..., ChatFormat]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Calls:
    """A parser that finds a call of `look` for each `!` in an answer."""

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
        calls = text.count("!") if tools else 0
        found = tuple(ToolCall(f"{number}", "look", {"at": number}) for number in range(calls))
        return Parsed(text.replace("!", "") if tools else text, None, found, 0)


def ended(chat: ChatFormat) -> int:
    assert chat.findings.end_id is not None
    return chat.findings.end_id


def random_policy(chat: ChatFormat) -> FakePolicy:
    """Any tokens but control tokens, most of them no text that a tokenizer would cut so."""
    return FakePolicy(ended(chat), vocab=600)


def speaking(chat: ChatFormat, *texts: str) -> FakePolicy:
    return FakePolicy(ended(chat), 0, chat.tokenizer.encode, *texts)


def assert_exact(sample: Sample, sampled: Sequence[Completion]) -> None:
    """The sample's masked stretches are these answers, one after the other, with all that belongs to them."""
    where = sample.loss_mask.astype(bool)
    assert sample.tokens[where].tolist() == [token for each in sampled for token in each.token_ids]
    assert sample.versions[where].tolist() == [version for each in sampled for version in each.versions]
    np.testing.assert_array_equal(
        sample.behave_logprobs[where], np.array([p for each in sampled for p in each.logprobs], np.float32)
    )
    assert (sample.versions[~where] == -1).all()
    assert (sample.behave_logprobs[~where] == 0).all()


async def converse(client: ChatClient, turns: int) -> list[ChatReply]:
    messages, replies = [user("What is 3 + 4?")], []
    for turn in range(turns):
        reply = await client.chat(messages)
        replies.append(reply)
        messages += [reply.message, user(f"Try {turn}, <|im_end|> again")]
    return replies


def test_the_episode_client_is_a_chat_client(chat_format: MakeFormat, prompt: Prompt) -> None:
    client: ChatClient = EpisodeClient(random_policy(chat_format("chatml")), prompt, None)
    assert client.samples() == []


@pytest.mark.parametrize("name", TEMPLATES)
async def test_three_turns_are_one_sample_of_the_very_ids(chat_format: MakeFormat, prompt: Prompt, name: str) -> None:
    chat = chat_format(name)
    policy = random_policy(chat)
    client = EpisodeClient(policy, prompt, chat)
    replies = await converse(client, 3)
    (sample,) = client.samples(0.5)
    assert_exact(sample, policy.sampled)
    assert sample.tokens.tolist() == [*policy.asked[2].input_ids, *policy.sampled[2].token_ids]
    for before, after, sampled in zip(policy.asked, policy.asked[1:], policy.sampled, strict=False):
        assert after.input_ids[: len(before.input_ids)] == before.input_ids
        assert list(after.input_ids[len(before.input_ids) :][: len(sampled.token_ids)]) == sampled.token_ids
    assert [reply.prompt_ids for reply in replies] == [request.input_ids for request in policy.asked]
    assert (sample.reward, sample.truncated) == (0.5, False)
    assert client.metrics == {"chat/calls": 3, "chat/branches": 1, "chat/extended": 2, "chat/malformed_calls": 0}


async def test_two_hundred_episodes_of_three_turns_do_not_drift(chat_format: MakeFormat, prompt: Prompt) -> None:
    """The recorded ids equal those that the policy saw and sampled; tokenised again, most would differ."""
    chat = chat_format("qwen3")
    drifting = 0
    for number in range(200):
        policy = random_policy(chat)
        one = replace(prompt, prompt_id=str(number), sampling=replace(prompt.sampling, seed=number))
        client = EpisodeClient(policy, one, chat)
        await converse(client, 3)
        (sample,) = client.samples()
        assert_exact(sample, policy.sampled)
        assert sample.tokens.tolist() == [*policy.asked[2].input_ids, *policy.sampled[2].token_ids]
        drifting += chat.tokenizer.encode(chat.tokenizer.decode_all(sample.tokens.tolist())) != sample.tokens.tolist()
    assert drifting > 180, "the policy's tokens are not those of the tokenizer, so that a drift would show"


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_ids_of_what_a_tokenizer_would_say_are_those_of_the_whole_rendering(
    chat_format: MakeFormat, prompt: Prompt, data: st.DataObject
) -> None:
    """Whatever users and policy say: where the template rewrites nothing, extending is rendering; ids decode to it."""
    words = st.text(st.sampled_from("ab 3\n.{}'\u00e9\u4f60\U0001f600"), min_size=1, max_size=12)
    spoken = words.map(str.strip).filter(bool)  # Llama's template trims
    chat = chat_format(data.draw(st.sampled_from(["chatml", "qwen2.5", "qwen3", "llama3.1"])))
    answers, questions = data.draw(st.lists(spoken, min_size=1, max_size=4)), data.draw(st.lists(words, min_size=4))
    policy = speaking(chat, *answers)
    client = EpisodeClient(policy, prompt, chat, ChatPolicy(drift=DriftCheck.tolerant))

    async def run() -> list[dict[str, Any]]:
        messages = [user(questions[-1])]
        for _, question in zip(answers, questions, strict=False):
            reply = await client.chat(messages)
            messages += [reply.message, user(question)]
        return messages

    messages = asyncio.run(run())
    (sample,) = client.samples()
    assert_exact(sample, policy.sampled)
    whole = chat.tokenizer.decode_all(chat.begin(messages).ids)
    assert whole.startswith(chat.tokenizer.decode_all(sample.tokens.tolist()))
    assert client.metrics.get("chat/drift_text", 0) == 0


async def test_an_answer_cut_off_is_closed_by_a_token_without_loss(chat_format: MakeFormat, prompt: Prompt) -> None:
    chat = chat_format("qwen2.5")
    policy = random_policy(chat)
    policy.cut = True
    client = EpisodeClient(policy, prompt, chat)
    first, _ = await converse(client, 2)
    assert first.finish_reason == ChatFinish.length
    (sample,) = client.samples()
    after = len(first.prompt_ids) + len(first.completion.token_ids)
    assert sample.tokens[after] == ended(chat)
    assert sample.loss_mask[after] == 0
    assert_exact(sample, policy.sampled)
    assert sample.truncated


async def test_rewritten_history_is_a_branch_and_no_token_carries_loss_twice(
    chat_format: MakeFormat, prompt: Prompt
) -> None:
    chat = chat_format("chatml")
    policy = speaking(chat, "one", "two", "three", "four")
    client = EpisodeClient(policy, prompt, chat)
    first = await client.chat([user("a")])
    await client.chat([user("a"), first.message, user("b")])
    await client.chat([user("a"), first.message, user("c")])
    await client.chat([user("a"), {**first.message, "content": "edited"}, user("c")])
    samples = client.samples()
    one, two, three, four = policy.sampled
    for sample, sampled in zip(samples, ([one, two], [three], [four]), strict=True):
        assert_exact(sample, sampled)
    texts = [chat.tokenizer.decode_all(sample.tokens.tolist()) for sample in samples]
    assert "one" in texts[1]
    assert "edited" in texts[2]
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == sum(len(each.token_ids) for each in policy.sampled)


async def test_alternatives_are_samples_each_and_any_may_go_on(chat_format: MakeFormat, prompt: Prompt) -> None:
    chat = chat_format("chatml")
    policy = speaking(chat, "one", "two", "three", "four")
    client = EpisodeClient(policy, prompt, chat)
    reply = await client.chat([user("a")], n=3)
    second = reply.alternatives[0]
    assert [reply.content, *(each.content for each in reply.alternatives)] == ["one", "two", "three"]
    await client.chat([user("a"), second.message, user("b")])
    samples = client.samples()
    one, two, three, four = policy.sampled
    for sample, sampled in zip(samples, ([one], [two, four], [three]), strict=True):
        assert_exact(sample, sampled)


async def test_matching_ignores_what_frameworks_change_and_minds_what_matters(
    chat_format: MakeFormat, prompt: Prompt
) -> None:
    chat = chat_format("chatml", Calls())
    policy = speaking(chat, "see!!", "done")
    client = EpisodeClient(policy, prompt, chat)
    reply = await client.chat([user("a")], tools=TOOLS)
    assert reply.finish_reason == ChatFinish.tool_calls
    assert len({call.id for call in reply.tool_calls}) == 2
    calls = [
        {**call, "index": 0, "function": {**call["function"], "arguments": f'{{ "at":  {number} }}'}}
        for number, call in enumerate(reply.message["tool_calls"])
    ]
    changed = {"role": "assistant", "name": "agent", "refusal": None, "content": "see", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in reply.tool_calls]
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    extended = client.prompt_ids([parts, changed, *results], tools=TOOLS)
    assert extended[: len(reply.prompt_ids)] == reply.prompt_ids
    assert list(extended[len(reply.prompt_ids) :][: len(policy.sampled[0].token_ids)]) == policy.sampled[0].token_ids
    other = [{**calls[0], "id": "another"}, calls[1]]
    for messages, tools in (
        ([parts, {**changed, "tool_calls": other}, *results], TOOLS),
        ([parts, {**changed, "content": "seen"}, *results], TOOLS),
        ([user("b"), changed, *results], TOOLS),
        ([parts, changed, *results], [*TOOLS, *TOOLS]),
    ):
        assert client.prompt_ids(messages, tools=tools)[: len(extended)] != extended
    last = await client.chat([parts, changed, *results], tools=TOOLS)
    assert last.prompt_ids == extended
    (sample,) = client.samples()
    assert_exact(sample, policy.sampled)
    assert client.turns[0].request.calls_tools
    assert (client.turns[1].request.calls_tools, client.turns[1].request.turns) == (False, 2)
    assert client.metrics["chat/tool_s"] > 0


async def test_reasoning_is_kept_or_branches_off(chat_format: MakeFormat, prompt: Prompt) -> None:
    chat = chat_format("qwen3")
    texts = ("<think>\nhm\n</think>\n\none", "<think>\nha\n</think>\n\ntwo")
    kept = EpisodeClient(speaking(chat, *texts), prompt, chat)
    replies = await converse(kept, 2)
    assert [(each.reasoning, each.content) for each in replies] == [("hm", "one"), ("ha", "two")]
    (sample,) = kept.samples()
    assert "hm" in chat.tokenizer.decode_all(sample.tokens.tolist())

    policy = speaking(chat, *texts)
    branched = EpisodeClient(policy, prompt, chat, ChatPolicy(reasoning=Reasoning.branch, drift=DriftCheck.strict))
    await converse(branched, 2)
    first, second = branched.samples()
    assert_exact(first, policy.sampled[:1])
    assert_exact(second, policy.sampled[1:])
    assert "hm" not in chat.tokenizer.decode_all(second.tokens.tolist())


async def test_reasoning_that_the_template_keeps_does_not_branch(chat_format: MakeFormat, prompt: Prompt) -> None:
    """Qwen3 shows reasoning until the user speaks again: a tool's result extends, though the client drops reasoning."""

    class Thinks(Calls):
        def parse(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
            reasoning, _, rest = text.removeprefix("<think>\n").partition("\n</think>\n\n")
            return replace(super().parse(rest, tools), reasoning=reasoning)

    chat = chat_format("qwen3", Thinks())
    texts = ("<think>\nhm\n</think>\n\nsee!", "<think>\nha\n</think>\n\ntwo", "<think>\nso\n</think>\n\nthree")
    policy = speaking(chat, *texts)
    client = EpisodeClient(policy, prompt, chat, ChatPolicy(reasoning=Reasoning.branch))
    messages = [user("a")]
    reply = await client.chat(messages, tools=TOOLS)
    sampled = {key: value for key, value in reply.message.items() if key != "reasoning_content"}
    messages += [sampled, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "4"}]
    second = await client.chat(messages, tools=TOOLS)
    await client.chat([*messages, second.message, user("b")], tools=TOOLS)
    first, last = client.samples()
    assert_exact(first, policy.sampled[:2])
    assert_exact(last, policy.sampled[2:])


async def test_what_is_rendered_anew_has_the_recorded_reasoning_back(chat_format: MakeFormat, prompt: Prompt) -> None:
    """Clients drop it from the messages; a template that shows reasoning gets it from the records."""
    showing = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    chat = chat_format(showing)
    assert chat.findings.shows_reasoning
    client = EpisodeClient(speaking(chat, "<think>hm</think>one"), prompt, chat)
    reply = await client.chat([user("a")])
    sampled = {"role": "assistant", "content": reply.content}
    later = [user("a"), sampled, {"role": "system", "content": "Be brief."}, user("b")]  # not a kind that is extended
    assert "<think>hm</think>one<|im_end|>" in chat.tokenizer.decode_all(client.prompt_ids(later))


async def test_drift_is_counted_or_refused(chat_format: MakeFormat, prompt: Prompt) -> None:
    chat = chat_format("chatml")

    def split(text: str) -> list[int]:
        return [token for letter in text for token in chat.tokenizer.encode(letter)]

    def drifting() -> FakePolicy:
        return FakePolicy(ended(chat), 0, split, "What", "is")

    assert split("What") != chat.tokenizer.encode("What")
    counted = EpisodeClient(drifting(), prompt, chat, ChatPolicy(drift=DriftCheck.tolerant))
    reply = await counted.chat([user("a")])
    await counted.chat([user("a"), reply.message, user("b")])
    assert (counted.metrics["chat/drift_checks"], counted.metrics["chat/drift_tokens"]) == (1, 1)
    strict = EpisodeClient(drifting(), prompt, chat, ChatPolicy(drift=DriftCheck.strict))
    reply = await strict.chat([user("a")])
    with pytest.raises(DriftError, match="same text has other tokens"):
        await strict.chat([user("a"), reply.message, user("b")])
    rewriting = chat_format("qwen3-no-thinking")
    client = EpisodeClient(speaking(rewriting, "one"), prompt, rewriting, ChatPolicy(drift=DriftCheck.strict))
    reply = await client.chat([user("a")])
    with pytest.raises(DriftError, match="shows earlier messages otherwise"):
        await client.chat([user("a"), reply.message, user("b")])


async def test_a_full_context_ends_with_length_and_names_the_setting(
    chat_format: MakeFormat, prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    chat = chat_format("chatml")
    ids = chat.begin([user("a")]).ids
    policy = random_policy(chat)
    policy.cut = True
    client = EpisodeClient(policy, prompt, chat, ChatPolicy(ChatLimits(max_context=len(ids) + 1)))
    reply = await client.chat([user("a")])
    assert policy.asked[0].sampling.max_new_tokens == 1
    assert reply.finish_reason == ChatFinish.length
    more = [user("a"), reply.message, user("b")]
    empty = await client.chat(more)
    assert (empty.finish_reason, empty.completion.token_ids) == (ChatFinish.length, [])
    assert f"generation.context_length={len(ids) + 1}" in caplog.text
    assert client.metrics["chat/limit_context_length"] == 1
    with pytest.raises(ConversationEnded, match=r"generation\.context_length"):
        await client.chat(more)
    (sample,) = client.samples()
    assert sample.truncated
    assert len(policy.asked) == 1


async def test_an_episode_without_samples_that_has_answers_says_what_became_of_them(
    chat_format: MakeFormat, prompt: Prompt
) -> None:
    """Also if another of its conversations did not fit."""
    chat = chat_format("chatml")
    client = EpisodeClient(random_policy(chat), prompt, chat, ChatPolicy(ChatLimits(max_context=90)))
    await client.chat([user("a" * 900)])
    assert "its first prompt of" in client.why_no_samples
    answer = (await client.conversation("judge").chat([user("a")])).completion
    client.conversation("judge").leave_untrained([answer])
    assert client.samples() == []
    assert client.why_no_samples == "all its answers are untrained by rollout.endpoint.conversations"
    empty = EpisodeClient(random_policy(chat), replace(prompt, sampling=SamplingParams(max_new_tokens=0)), chat)
    assert empty.why_no_samples == ""
    await empty.chat([user("a")])
    assert empty.why_no_samples == "all its answers are without a token"


async def test_the_limit_of_turns_ends_politely_also_across_branches(chat_format: MakeFormat, prompt: Prompt) -> None:
    chat = chat_format("qwen3")
    texts = ("<think>\nhm\n</think>\n\none", "<think>\nha\n</think>\n\ntwo")
    rules = ChatPolicy(ChatLimits(max_turns=2), reasoning=Reasoning.branch)
    client = EpisodeClient(speaking(chat, *texts), prompt, chat, rules)
    replies = await converse(client, 3)
    assert [each.finish_reason for each in replies] == ["stop", "stop", "length"]
    assert [sample.truncated for sample in client.samples()] == [False, True]
    assert client.metrics["chat/limit_max_turns"] == 1


async def test_calls_in_token_ids_are_recorded_and_joined_with_those_in_messages(
    chat_format: MakeFormat, prompt: Prompt
) -> None:
    chat = chat_format("chatml")
    policy = random_policy(chat)
    client = EpisodeClient(policy, prompt, chat)
    reply = await client.chat([user("a")])
    ids = (*reply.prompt_ids, *reply.completion.token_ids, 5, 6, 7)
    await client.generate(GenerationRequest("mine", ids, 2, SamplingParams(seed=1)))
    samples = client.samples()
    assert [int(sample.loss_mask.sum()) for sample in samples] == [
        len(policy.sampled[0].token_ids) + len(policy.sampled[1].token_ids),
        len(policy.sampled[2].token_ids),
    ]
    assert samples[0].tokens.tolist() == [*ids, *policy.sampled[1].token_ids]


async def test_seeds_are_the_conversations_whatever_else_is_under_way(chat_format: MakeFormat, prompt: Prompt) -> None:
    chat = chat_format("chatml")

    async def asked(member: int, *texts: str) -> list[int | None]:
        policy = random_policy(chat)
        client = EpisodeClient(policy, replace(prompt, member=member), chat)
        await asyncio.gather(*(client.chat([user(text)]) for text in texts))
        return [request.sampling.seed for request in policy.asked]

    one, two = await asked(0, "a", "b")
    assert await asked(0, "b", "a") == [two, one]
    again = await asked(0, "a", "a")
    assert again[0] == one
    assert len({one, two, again[1], *(await asked(1, "a"))}) == 4


async def test_the_prompts_own_messages_have_the_prompts_own_ids(chat_format: MakeFormat, prompt: Prompt) -> None:
    """Also where it was shortened."""
    client = EpisodeClient(random_policy(chat_format("chatml")), prompt, chat_format("chatml"))
    assert client.prompt_ids([user("What is 3 + 4?")]) == prompt.input_ids
    assert client.prompt_ids([user("What is 3 + 4?")], tools=TOOLS) != prompt.input_ids


async def test_stop_strings_end_the_text_but_not_the_ids(chat_format: MakeFormat, prompt: Prompt) -> None:
    chat = chat_format("chatml")
    policy = speaking(chat, "the answer</a>\n")
    client = EpisodeClient(policy, prompt, chat)
    reply = await client.chat([user("a")], sampling=SamplingParams(stop=("</a>",)))
    assert reply.content == "the answer"
    assert policy.asked[0].sampling.stop == ("</a>",)
    assert ended(chat) in policy.asked[0].sampling.stop_token_ids
    assert_exact(client.samples()[0], policy.sampled)


async def test_what_cannot_be_asked_is_refused_by_name(chat_format: MakeFormat, prompt: Prompt) -> None:
    chat = chat_format("chatml")
    client = EpisodeClient(random_policy(chat), prompt, chat)
    wrong: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
        ([user("a")], {"n": 0}, "n=0"),
        ([user("a")], {"tool_choice": "required"}, "tool_choice='required'"),
        ([user("a")], {"sampling": SamplingParams(stop=("",))}, "stop string ''"),
        ([], {}, "no list of messages"),
        ([user("a")], {"continue_last": True}, "only an assistant's text is continued"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{}]}],
            {"continue_last": True},
            "only an assistant's text",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "without content"),
    ]
    for messages, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            await client.chat(messages, **options)
    with pytest.raises(ChatError, match=r"dataset\.chat_template"):
        await EpisodeClient(random_policy(chat), prompt, None).chat([user("a")])
    assert client.turns == ()


async def test_a_long_conversation_is_rendered_off_the_event_loop(
    chat_format: MakeFormat, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, threads = chat_format("chatml"), []
    begin = chat.begin
    monkeypatch.setattr(chat, "begin", lambda *args: (threads.append(threading.current_thread()), begin(*args))[1])
    client = EpisodeClient(random_policy(chat), replace(prompt, data={}), chat)
    for text in ("short", "long " * 10_000):
        await client.chat([user(text)])
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


@pytest.mark.parametrize("name", ["chatml", "qwen3", "opens-thinking", "llama3.1"])
async def test_an_answer_continues_an_assistants_text_and_is_continued_by_ids(
    chat_format: MakeFormat, prompt: Prompt, name: str
) -> None:
    chat = chat_format(name)
    policy = speaking(chat, " is 4.", "Sure.")
    client = EpisodeClient(policy, prompt, chat)
    begun = {"role": "assistant", "content": "The <|im_end|> sum"}
    reply = await client.chat([user("2 + 2?"), begun], continue_last=True)
    assert (reply.content, reply.message["content"]) == (" is 4.", "The <|im_end|> sum is 4.")
    shown = chat.tokenizer.decode_all(policy.asked[0].input_ids)
    assert shown.endswith("The <|im_end|> sum")
    assert policy.asked[0].input_ids.count(chat.end_id() or -1) == chat.begin([user("2 + 2?")]).ids.count(chat.end_id())
    await client.chat([user("2 + 2?"), reply.message, user("Sure?")])
    assert policy.asked[1].input_ids[: len(reply.prompt_ids)] == reply.prompt_ids
    (sample,) = client.samples()
    assert_exact(sample, policy.sampled)


async def test_a_last_message_of_the_system_or_the_assistant_is_shown_and_answered(
    chat_format: MakeFormat, prompt: Prompt
) -> None:
    chat = chat_format("chatml")
    client = EpisodeClient(policy := random_policy(chat), prompt, chat)
    for last in ({"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Four."}):
        await client.chat([user("2 + 2?"), last])
        shown = chat.tokenizer.decode_all(policy.asked[-1].input_ids)
        assert shown.endswith(f"<|im_start|>{last['role']}\n{last['content']}<|im_end|>\n<|im_start|>assistant\n")


async def test_a_conversation_that_offers_tools_is_refused_if_their_calls_are_not_read(
    chat_format: MakeFormat, prompt: Prompt
) -> None:
    chat = chat_format("chatml")
    unread = ChatFormat(chat._prompts, chat.parser, unread="no format reads them")
    client = EpisodeClient(random_policy(chat), prompt, unread)
    await client.chat([user("a")])
    with pytest.raises(ChatError, match=r"offers tools, and rollout\.chat\.parser=hermes: no format reads them"):
        await client.chat([user("b")], tools=TOOLS)


async def test_tool_choice_none_leaves_calls_as_text(chat_format: MakeFormat, prompt: Prompt) -> None:
    chat = chat_format("chatml", Calls())
    client = EpisodeClient(speaking(chat, "see!"), prompt, chat)
    reply = await client.chat([user("a")], tools=TOOLS, tool_choice="none")
    assert (reply.content, reply.tool_calls, reply.finish_reason) == ("see!", (), ChatFinish.stop)


async def test_two_results_of_a_turn_that_a_template_shows_one_of(chat_format: MakeFormat, prompt: Prompt) -> None:
    """Llama's template refuses two calls in one message; going on by ids needs no rendering of them."""
    chat = chat_format("llama3.1", Calls())
    policy = speaking(chat, "see!!", "done")
    client = EpisodeClient(policy, prompt, chat)
    reply = await client.chat([user("a")], tools=TOOLS)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in reply.tool_calls]
    await client.chat([user("a"), reply.message, *results], tools=TOOLS)
    (sample,) = client.samples()
    assert_exact(sample, policy.sampled)
    assert client.turns[0].request.calls_tools


async def test_conversations_of_an_episode_record_apart_and_name_their_samples(
    chat_format: MakeFormat, prompt: Prompt
) -> None:
    chat = chat_format("qwen3")
    policy = random_policy(chat)
    client = EpisodeClient(policy, prompt, chat)
    judge = client.conversation("judge")
    assert client.conversation("judge") is judge is judge.conversation("judge")
    await converse(client, 2)
    await converse(judge, 2)
    assert policy.asked[0].input_ids == policy.asked[2].input_ids, "a branch of its own"
    assert policy.asked[0].sampling.seed != policy.asked[2].sampling.seed, "no two draw the same numbers"
    (own, judged), (alone,) = client.samples(1.0), judge.samples(0.25)
    assert [(own.group, own.reward), (judged.group, judged.reward)] == [("", 1.0), ("judge", 1.0)]
    assert (alone.group, alone.reward) == ("judge", 0.25)
    assert_exact(own, policy.sampled[:2])
    assert_exact(alone, policy.sampled[2:])
    assert client.metrics["chat/calls"] == 4
    for name in ("", "x" * 65):
        with pytest.raises(ValueError, match="comparison group"):
            client.conversation(name)


async def test_what_another_policy_says_is_recorded_nowhere(prompt: Prompt) -> None:
    policy = FakePolicy(1, vocab=600)
    client = EpisodeClient(policy, prompt, None, ChatPolicy(policies=("past", "judge")))
    past = client.policy("past")
    assert client.policy("past") is past
    request = GenerationRequest("r", (3, 4), 1, SamplingParams(seed=1, max_new_tokens=4))
    await past.generate(request)
    await past.conversation("role").generate(request)
    await client.generate(replace(request, policy="judge"))
    assert [asked.policy for asked in policy.asked] == ["past", "past", "judge"]
    assert client.samples() == past.samples() == past.conversation("role").samples() == []
    await client.generate(request)
    (sample,) = client.samples(1.0)
    assert_exact(sample, policy.sampled[-1:])


async def test_the_samples_of_a_trained_policy_are_those_of_its_client(prompt: Prompt) -> None:
    policy = FakePolicy(1, vocab=600)
    rules = ChatPolicy(policies=("past", "judge"), trained=("judge",))
    client = EpisodeClient(policy, prompt, None, rules)
    request = GenerationRequest("r", (3, 4), 1, SamplingParams(seed=1, max_new_tokens=4))
    judge = client.policy("judge")
    for asked in (client, judge, judge.conversation("round/2"), judge.policy("past")):
        await asked.generate(request)
    assert [each.policy for each in policy.asked] == ["", "judge", "judge", "past"]
    assert [sample.group for sample in client.samples()] == [""]
    assert [sample.group for sample in judge.samples()] == ["judge", "judge/round/2"]
    assert [sample.group for sample in judge.conversation("round/2").samples()] == ["judge/round/2"]
    everything = client.all_samples(0.5)
    assert [(sample.group, sample.reward) for sample in everything] == [
        ("", 0.5),
        ("judge", 0.5),
        ("judge/round/2", 0.5),
    ]
    for sample, sampled in zip(everything, policy.sampled, strict=False):
        assert_exact(sample, [sampled])
    with pytest.raises(ValueError, match=r"'judge' is a trained policy, whose samples come from client\.policy"):
        client.conversation("judge/x")
    with pytest.raises(ValueError, match="at most 64 characters"):
        judge.conversation("x" * 60)


def test_a_policy_that_the_run_lacks_is_refused_by_name(prompt: Prompt) -> None:
    client = EpisodeClient(FakePolicy(1), prompt, None, ChatPolicy(policies=("past",)))
    with pytest.raises(ValueError, match="policy 'future' is not one of the setting `policies`, which has past"):
        client.policy("future")


def test_another_policys_answer_is_no_part_of_a_sample() -> None:
    builder = SampleBuilder([1, 2])
    answer = Completion([3], [-0.5], [4], FinishReason.stop, policy="past")
    with pytest.raises(ValueError, match="an answer of policy 'past' is not trained"):
        builder.generate(answer)
