"""Conversations with pictures: placeholders where they stand, pictures apart by content, refusals by name."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from asyncrl.api import Environment, Prompt, SamplingParams, ToolResult
from asyncrl.api.generation import GenerationRequest
from asyncrl.api.picture import MAX_PICTURES, Picture, PictureError
from asyncrl.api.tool import as_result
from asyncrl.chat.episode_client import EpisodeClient, check_prompt_pictures
from asyncrl.chat.parsers import parser
from asyncrl.chat.template import PICTURES, ChatFormat
from asyncrl.data.chat_template import ChatError, ChatTemplate
from asyncrl.data.picture_parts import content_of
from asyncrl.data.prompt_format import InvalidPrompt, PromptFormat
from asyncrl.data.settings import Overlong
from asyncrl.data.tokenizers import load_tokenizer, special_tokens
from asyncrl.plugins.agents.game import GameAgent
from asyncrl.plugins.agents.sample_builder import SampleBuilder
from asyncrl.plugins.agents.tool_agent import _content as tool_content
from asyncrl.plugins.envs.gymnasium_env import GymnasiumEnv

from .conftest import FakePolicy

PAD = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LISTS_ALONE = TEMPLATE.replace("{% if m.content is string %}{{ m.content }}{% else %}", "").replace(
    "{% endfor %}{% endif %}<|im_end|>", "{% endfor %}<|im_end|>"
)
NUMBERED = TEMPLATE.replace("{% for m in", "{% set n = namespace(i=0) %}{% for m in").replace(
    "<|vision_start|>", "{% set n.i = n.i + 1 %}Picture {{ n.i }}: <|vision_start|>"
)


def picture(seed: int, width: int = 30, height: int = 20) -> Picture:
    return Picture.from_array(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


ONE, TWO = picture(1), picture(2)


@dataclass
class Rules:
    """A row for each 10 x 10 pixels; with `lines` a break after each line of them, as Mistral 3 has."""

    token_id: int
    marker: str = PAD
    lines: bool = False

    def text(self, shown: Picture) -> str:
        width, height = shown.size
        line = PAD * (width // 10)
        return "-".join([line] * (height // 10)) if self.lines else line * (height // 10)

    def rows(self, shown: Picture) -> int:
        width, height = shown.size
        return (width // 10) * (height // 10)


@pytest.fixture(scope="module")
def folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    names = [PAD, "<|vision_start|>", "<|vision_end|>"]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    path = tmp_path_factory.mktemp("vision")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def form(folder: Path) -> Callable[..., PromptFormat]:
    tokenizer = load_tokenizer(folder)

    def make(template: str = TEMPLATE, **rules: Any) -> PromptFormat:
        pad = tokenizer.control_tokens[PAD]
        return PromptFormat(tokenizer, ChatTemplate(template, special_tokens(folder)), pictures=Rules(pad, **rules))

    return make


def user(*parts: Any) -> dict[str, Any]:
    shown = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": "user", "content": shown}


def client_of(form: PromptFormat, *texts: str, prompt: Prompt | None = None) -> tuple[EpisodeClient, FakePolicy]:
    chat = ChatFormat(form, parser("none"))
    end = chat.findings.end_id
    assert end is not None
    policy = FakePolicy(end, 300, form.tokenizer.encode, *texts)
    prompt = prompt or Prompt("p", 0, {}, (1,), 1, SamplingParams(max_new_tokens=20, seed=3))
    return EpisodeClient(policy, prompt, chat), policy


def test_placeholders_stand_where_the_picture_does(form: Any) -> None:
    made, (ids, pictures) = form().fitted({"prompt": [user("Left ", ONE, " right ", TWO)]})
    pad = form().pictures.token_id
    assert [placed.picture for placed in pictures] == [ONE, TWO]
    for placed in pictures:
        assert ids[placed.position : placed.end] == [pad] * 6
    assert ids.count(pad) == 12
    assert made[0]["content"][1] == {"type": "image", "image": ONE}
    text = form().tokenizer.decode_all(ids).replace(PAD * 6, "#")
    assert "Left <|vision_start|>#<|vision_end|> right <|vision_start|>#<|vision_end|><|im_end|>" in text


def test_a_span_runs_from_the_first_placeholder_to_the_last(form: Any) -> None:
    _, (ids, (placed,)) = form(lines=True).fitted({"prompt": [user(ONE)]})
    pad = form().pictures.token_id
    inside = ids[placed.position : placed.end]
    assert inside[0] == inside[-1] == pad
    assert (inside.count(pad), placed.length) == (6, 7)


def test_the_name_of_a_placeholder_in_a_text_stays_text(form: Any) -> None:
    _, (ids, pictures) = form().fitted({"prompt": [user(f"What is {PAD}? ", ONE)]})
    assert ids.count(form().pictures.token_id) == 6
    assert ids[pictures[0].position] == form().pictures.token_id
    _, (ids, pictures) = form().fitted({"prompt": f"What is {PAD}?"})
    assert (form().pictures.token_id in ids, pictures) == (False, ())


def test_a_template_that_wants_lists_gets_lists(form: Any) -> None:
    for row in ({"prompt": "Hello"}, {"prompt": [user(ONE, "Hello")]}):
        assert form(LISTS_ALONE).encode(row) == form().encode(row)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "0 times for 1 pictures"),
        (TEMPLATE.replace(PAD, PAD * 2), "2 times for 1 pictures"),
    ],
)
def test_a_template_that_does_not_show_each_picture_once_is_refused(form: Any, template: str, why: str) -> None:
    with pytest.raises(InvalidPrompt, match=why):
        form(template).fitted({"prompt": [user("x", ONE)]})


def test_a_tokenizer_of_another_model_is_refused(form: Any) -> None:
    wrong = replace(form(), pictures=Rules(5))
    with pytest.raises(InvalidPrompt, match=r"makes 0 placeholders \(id 5\) of 1 pictures, which have 6 rows"):
        wrong.fitted({"prompt": [user("x", ONE)]})


def test_a_model_without_pictures_refuses_them(form: Any) -> None:
    text_only = replace(form(), pictures=None)
    for row in ({"prompt": [user("x", ONE)]}, {"prompt": "x", "images": [ONE]}):
        with pytest.raises(InvalidPrompt, match=r"takes none"):
            text_only.fitted(row)
    client, _ = client_of(text_only)
    with pytest.raises(ChatError, match=r"takes none"):
        client.prompt_ids([user("x", ONE)])


def test_an_overlong_prompt_loses_text_and_no_picture(form: Any) -> None:
    row = {"prompt": [user(ONE, "word " * 50, TWO)]}
    short = replace(form(), max_tokens=60, overlong=Overlong.right)
    prompt, (ids, pictures) = short.fitted(row)
    assert len(ids) <= 60
    assert [placed.picture for placed in pictures] == [ONE, TWO]
    assert 0 < prompt[0]["content"][1]["text"].count("word") < 50
    with pytest.raises(InvalidPrompt, match=r"has .* tokens"):
        replace(short, max_tokens=20).fitted(row)


async def test_a_conversation_of_several_turns_is_extended_by_ids_and_pictures(form: Any) -> None:
    client, policy = client_of(form(), "A red one.", "A blue one.", "Both.")
    talk = [user("What is ", ONE, "?")]
    for new in (user("And ", TWO, "?"), {"role": "user", "content": "Again?"}, None):
        reply = await client.chat(talk)
        talk.append(reply.message)
        if new:
            talk.append(new)
    assert client.metrics["chat/extended"] == 2
    (sample,) = client.samples(1.0)
    assert [placed.picture for placed in sample.pictures] == [ONE, TWO]
    pad = form().pictures.token_id
    for placed in sample.pictures:
        assert (sample.tokens[placed.position : placed.end] == pad).all()
        assert not sample.loss_mask[placed.position : placed.end].any()
    whole = ChatFormat(form(), parser("none")).begin(talk[:-1])
    assert list(policy.asked[-1].input_ids) == whole.ids
    assert policy.asked[-1].pictures == whole.pictures == sample.pictures


async def test_another_picture_begins_another_conversation(form: Any) -> None:
    client, policy = client_of(form(), "Red.", "Blue.", "Yes.")
    first = await client.chat([user(ONE, "Colour?")])
    second = await client.chat([user(TWO, "Colour?")])
    assert first.prompt_ids == second.prompt_ids
    assert client.metrics["chat/branches"] == 2
    seeds = [asked.sampling.seed for asked in policy.asked]
    assert seeds[0] != seeds[1]
    more = [user(TWO, "Colour?"), {"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Sure?"}]
    await client.chat(more)
    assert client.metrics["chat/extended"] == 1
    ones, twos = client.samples()
    assert [placed.picture for placed in ones.pictures] == [ONE]
    assert [placed.picture for placed in twos.pictures] == [TWO]
    assert twos.generated_length > ones.generated_length


async def test_calls_in_token_ids_are_apart_by_picture(form: Any) -> None:
    client, _ = client_of(form())
    _, (ids, pictures) = form().fitted({"prompt": [user(ONE, "x")]})
    other = tuple(replace(placed, picture=TWO) for placed in pictures)
    sampling = SamplingParams(max_new_tokens=5, seed=1)
    (first,) = (await client.generate(GenerationRequest("a", tuple(ids), 1, sampling, pictures))).completions
    longer = (*ids, *first.token_ids, 7)
    await client.generate(GenerationRequest("b", longer, 1, sampling, other))  # the same ids over another picture
    await client.generate(GenerationRequest("c", longer, 1, sampling, pictures))
    shown = [[placed.picture for placed in sample.pictures] for sample in client.samples()]
    assert shown == [[ONE], [TWO]]


async def test_numbered_pictures_make_conversations_that_are_rendered_anew(form: Any) -> None:
    chat = ChatFormat(form(NUMBERED), parser("none"))
    assert PICTURES in chat.findings.refused
    assert PICTURES not in ChatFormat(form(), parser("none")).findings.refused
    client, _ = client_of(form(NUMBERED), "A.", "B.")
    reply = await client.chat([user(ONE)])
    await client.chat([user(ONE), reply.message, user(TWO)])
    assert client.metrics["chat/branches"] == 2
    assert "Picture 2: " in form().tokenizer.decode_all(client.samples()[1].tokens.tolist())


async def test_a_prompt_asked_for_without_its_pictures_is_refused(form: Any) -> None:
    _, (ids, pictures) = form().fitted({"prompt": [user(ONE, "x")]})
    prompt = Prompt("p", 0, {}, tuple(ids), 1, SamplingParams(max_new_tokens=5), pictures=pictures)
    client, _ = client_of(form(), prompt=prompt)
    with pytest.raises(ValueError, match=r"what Prompt\.pictures has"):
        await client.generate(GenerationRequest("a", tuple(ids), 1, prompt.sampling))
    (answer,) = (await client.generate(GenerationRequest("a", tuple(ids), 1, prompt.sampling, pictures))).completions
    builder = SampleBuilder(ids, pictures)
    builder.generate(answer)
    sample = builder.build(0.0, truncated=False)
    check_prompt_pictures(prompt, sample.tokens.tolist(), sample.pictures)
    with pytest.raises(ValueError, match=r"what Prompt\.pictures has"):
        check_prompt_pictures(prompt, sample.tokens.tolist(), ())


PNG = base64.b64encode(ONE.data).decode()
PIL = Image.open(io.BytesIO(ONE.data))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "image_url", "image_url": f"data:image/png;base64,{PNG}"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {"type": "image", "data": PNG, "mimeType": "image/png"},
        {"type": "image", "image": {"bytes": ONE.data, "path": None}},
        {"type": "image", "image": {"data": ONE.data, "sha256": ONE.sha256}},
        {"type": "image", "base64": PNG},
        {"type": "image", "image": ONE.data},
        {"type": "image", "image": ONE.pixels()},
        {"type": "image", "image": PIL},
        {"type": "image", "image": ONE},
    ],
    ids=lambda part: " ".join(part),
)
def test_every_usual_form_of_a_picture_is_taken(part: dict[str, Any]) -> None:
    text, found, more = content_of([{"type": "text", "text": "a"}, part, {"type": "text", "text": "b"}])
    assert (text["text"], more["text"]) == ("a", "b")
    assert np.array_equal(found["image"].pixels(), ONE.pixels())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "nothing is fetched"),
        ([{"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}], "nothing is fetched"),
        ([{"type": "image", "path": "/etc/passwd"}], "is not a data URL"),
        ([{"type": "image"}], "without content"),
        ([{"type": "image", "image": {"data": ONE.data, "sha256": "0" * 64}}], "SHA-256"),
        ([{"type": "image", "source": {"type": "file", "file_id": "x"}}], "has the keys type, file_id"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}], "part 1 .*'input_audio'"),
        ([{"type": "video", "video": "x"}], "no sounds or videos"),
        ([{"type": "image", "image": ONE}] * (MAX_PICTURES + 1), "at most 1024 in one prompt"),
        (["text"], "part 0 of a message is 'str'"),
        (17, "is a int"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(content: Any, why: str, form: Any) -> None:
    client, _ = client_of(form())
    with pytest.raises(ChatError, match=why):
        client.prompt_ids([{"role": "user", "content": content}])


class Frames(Environment):
    """Three frames, the first one after the prompt's own picture; the game ends with them."""

    def __init__(self, *frames: Any) -> None:
        self._frames = iter(frames)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return next(self._frames), {}

    async def step(self, action: Any) -> Any:
        frame = next(self._frames, None)
        return frame, 1.0, frame is None, False, {}


async def test_a_game_is_played_from_frames(form: Any) -> None:
    shown = [ONE.pixels(), TWO.image(), [{"type": "text", "text": "Now "}, {"type": "image", "image": ONE}]]
    data = {"prompt": [user("Play. ", TWO)]}
    made, (ids, pictures) = form().fitted(data)
    sampling = SamplingParams(max_new_tokens=20, seed=1)
    prompt = Prompt("p", 0, {"prompt": made}, tuple(ids), 1, sampling, pictures=pictures)
    client, _ = client_of(form(), "up", "down", "left", prompt=prompt)
    agent = GameAgent(tokenizer=form().tokenizer, chat=True)
    (sample,) = await agent.run(prompt, Frames(*shown), client)
    assert [placed.picture.pixels().tolist() for placed in sample.pictures] == [
        each.pixels().tolist() for each in (TWO, ONE, TWO, ONE)
    ]
    assert sample.total_reward == 3.0
    assert client.metrics["chat/extended"] == 2
    with pytest.raises(PictureError, match=r"needs a chat template"):
        await GameAgent(tokenizer=form().tokenizer, chat=False).run(prompt, Frames(*shown), client)


async def test_a_gymnasium_game_may_show_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shows_frames.py").write_text(
        "import numpy as np\ndef frame(observation, env):\n    return np.full((4, 6, 3), observation, np.uint8)\n"
    )
    monkeypatch.chdir(tmp_path)
    env = GymnasiumEnv(id="FrozenLake-v1", observe="shows_frames.py:frame", kwargs={"is_slippery": False})
    (first,) = env.reset(seed=1)[0]
    (second,) = env.step("2")[0]
    assert [part["image"].pixels()[0, 0].tolist() for part in (first, second)] == [[0, 0, 0], [1, 1, 1]]
    env.close()


async def test_what_a_tool_shows_is_seen_or_named(form: Any) -> None:
    result = ToolResult("It is drawn.", pictures=(ONE,))
    seen = tool_content(result, pictures=True)
    assert seen == [{"type": "text", "text": "It is drawn."}, {"type": "image", "image": ONE}]
    assert tool_content(result, pictures=False) == f"It is drawn.\n{ONE}"
    assert tool_content(as_result(ONE), pictures=True) == [{"type": "image", "image": ONE}]
    client, policy = client_of(form(), "Draw.", "Red.")
    assert client.takes_pictures
    assert not client_of(replace(form(), pictures=None))[0].takes_pictures
    asked = {"role": "user", "content": "Draw it."}
    call = {"id": "a", "type": "function", "function": {"name": "draw", "arguments": "{}"}}
    sampled = {"role": "assistant", "content": "", "tool_calls": [call]}
    await client.chat([asked, sampled, {"role": "tool", "tool_call_id": "a", "content": seen}])
    assert [placed.picture for placed in policy.asked[0].pictures] == [ONE]
