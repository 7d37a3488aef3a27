"""Pictures of data sets: from every usual place, in the order of the text, never from outside of the data's folder."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from asyncrl.api import Prompt, SamplingParams
from asyncrl.api.picture import MAX_PICTURES, Picture
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.demonstrations import DemonstrationFormat
from asyncrl.data.files import FileDataset
from asyncrl.data.picture_parts import PictureSource, observed
from asyncrl.data.prompt_format import InvalidPrompt, PromptFormat, make_prompt, measure_prompts
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.rollout.user_code_pool.agent_protocol import _sample_of
from asyncrl.staging.inputs import content_sum

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}\x01{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


class Letters:
    """A token a character."""

    control_tokens: ClassVar = {"\x01": 1}
    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(each) for each in text]

    encode_plain = encode

    def decode_all(self, ids: Any) -> str:
        return "".join(map(chr, ids))


class Rules:
    token_id, marker = 1, "\x01"

    def text(self, picture: Picture) -> str:
        return "(" + "\x01" * self.rows(picture) + ")"

    def rows(self, picture: Picture) -> int:
        return picture.size[0]


FORM = PromptFormat(Letters(), ChatTemplate(TEMPLATE, {}), pictures=Rules())  # type: ignore[arg-type]


def picture(width: int) -> Picture:
    return Picture.from_array(np.full((2, width, 3), width, np.uint8))


ONE, TWO = picture(1), picture(2)
URL = f"data:image/png;base64,{base64.b64encode(TWO.data).decode()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    (tmp_path / "data" / "one.png").write_bytes(ONE.data)
    (tmp_path / "data" / "pictures" / "two.png").write_bytes(TWO.data)
    (tmp_path / "outside.png").write_bytes(ONE.data)
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "outside.png")
    (tmp_path / "data" / "broken.png").write_bytes(ONE.data[:40])
    (tmp_path / "data" / "notes.png").write_text("not a picture")
    return tmp_path / "data"


def dataset_of(folder: Path, *rows: dict[str, Any], **args: Any) -> FileDataset:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileDataset(path=str(folder / "rows.jsonl"), **args)


def prompt_of(dataset: Any, row: int = 0) -> Prompt:
    return make_prompt(PromptRef("p", row, row), dataset, FORM, 4, SamplingParams(), 0)


def shown(prompt: Prompt) -> str:
    return FORM.tokenizer.decode_all(prompt.input_ids).replace("(\x01\x01)", "2").replace("(\x01)", "1")


def parts(*given: Any) -> dict[str, Any]:
    shown = [{"type": "text", "text": part} if isinstance(part, str) else part for part in given]
    return {"role": "user", "content": shown}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "a", "images": ["one.png"]}, "[user]1a"),
        ({"prompt": "a", "image": "pictures/two.png"}, "[user]2a"),
        ({"problem": "<image>a<image>b", "images": ["one.png", URL]}, "[user]1a2b"),
        ({"messages": [asked("a"), {"role": "assistant", "content": "x"}, asked("b")], "images": [URL]}, None),
        (
            {"messages": [asked("a<image>"), {"role": "assistant", "content": "x"}, asked("b<image>")]}
            | {"images": ["one.png", "pictures/two.png"]},
            "[user]a1[assistant]x[user]b2",
        ),
        ({"prompt": [parts({"type": "image"}, "a")], "images": [URL]}, "[user]2a"),
        ({"prompt": [parts("a", {"type": "image", "image": "one.png"})]}, "[user]a1"),
        ({"prompt": [parts({"type": "image_url", "image_url": {"url": URL}})]}, "[user]2"),
        ({"prompt": "text <image>", "images": []}, "[user]text <image>"),
        ({"prompt": "text <image>"}, "[user]text <image>"),
        ({"prompt": [parts("a", "b")]}, "[user]ab"),
    ],
)  # fmt: skip
def test_pictures_of_json_lines(folder: Path, row: dict[str, Any], text: str | None) -> None:
    prompt = prompt_of(dataset_of(folder, row))
    assert shown(prompt) == (text or "[user]2a[assistant]x[user]b")
    assert [placed.length for placed in prompt.pictures] == [placed.picture.size[0] for placed in prompt.pictures]
    assert ("images" in prompt.data) == (not prompt.pictures and "images" in row)


def test_the_rows_of_the_page_are_read(folder: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "vision.md").read_text(encoding="utf-8")
    rows = page.split("```json\n")[1].split("```")[0]
    (folder / "shapes").mkdir()
    for name in ("shapes/17.png", "a.png", "b.png"):
        (folder / name).write_bytes(ONE.data)
    (folder / "page.jsonl").write_text(rows)
    dataset = FileDataset(path=str(folder / "page.jsonl"))
    texts = [shown(prompt_of(dataset, row)) for row in range(3)]
    assert texts == ["[user]1How many circles are there?", "[user]11Which is larger?", "[user]1Colour?"]


def test_demonstrations_have_their_pictures_if_the_training_takes_any(folder: Path) -> None:
    dataset = dataset_of(folder, {"prompt": "a", "images": ["one.png"], "answer": "b"}, demonstrations=True)
    (made,) = DemonstrationFormat(FORM).encode(dataset, dataset.row(0))
    (placed,) = made.pictures
    assert placed.picture == ONE
    assert not any(made.loss_mask[: placed.end])
    with pytest.raises(ValueError, match="it has pictures, and this training takes none"):
        DemonstrationFormat(replace(FORM, pictures=None)).encode(dataset, dataset.row(0))


def test_prompt_template_and_pictures(folder: Path) -> None:
    row = {"prompt": "<image>a", "images": ["one.png"]}
    assert shown(prompt_of(dataset_of(folder, row, prompt_template="{prompt}!"))) == "[user]1a!"


@pytest.mark.parametrize("column", ["bytes", "hugging face", "list of structs"])
def test_pictures_of_a_table(folder: Path, column: str) -> None:
    struct = {"bytes": ONE.data, "path": "somewhere/else.png"}
    value = {"bytes": ONE.data, "hugging face": struct, "list of structs": [struct, {"bytes": TWO.data, "path": None}]}
    name = "images" if column == "list of structs" else "image"
    pa.parquet.write_table(pa.Table.from_pylist([{"prompt": "a", name: value[column]}]), folder / "t.parquet")
    dataset = FileDataset(path=str(folder / "t.parquet"))
    assert isinstance(dataset.row(0)["prompt"][0]["content"][0]["image"], PictureSource)  # not decoded yet
    assert shown(prompt_of(dataset)) == ("[user]12a" if column == "list of structs" else "[user]1a")


def test_messages_with_parts_of_a_table(folder: Path) -> None:
    content = [
        {"type": "image", "text": None, "image": {"bytes": TWO.data}},
        {"type": "text", "text": "a", "image": None},
    ]
    table = pa.Table.from_pylist([{"messages": [{"role": "user", "content": content}]}])
    pa.parquet.write_table(table, folder / "t.parquet")
    assert shown(prompt_of(FileDataset(path=str(folder / "t.parquet")))) == "[user]2a"


class Drawn:
    """A class of a user's own, with arrays and PIL images."""

    def __len__(self) -> int:
        return 2

    def row(self, index: int) -> dict[str, Any]:
        if index:
            return {"prompt": [{"role": "user", "content": [{"type": "image", "image": ONE.image()}]}]}
        return {"prompt": "a", "images": [TWO.pixels(), ONE]}


def test_pictures_of_a_class() -> None:
    assert [shown(prompt_of(Drawn(), row)) for row in (0, 1)] == ["[user]21a", "[user]1"]


@pytest.mark.parametrize("path", ["../outside.png", "link.png", "/etc/passwd", "pictures/../../outside.png"])
@pytest.mark.parametrize("inline", [False, True])
def test_a_path_out_of_the_folder_is_refused_before_anything_starts(folder: Path, path: str, inline: bool) -> None:
    part = {"type": "image", "image": path}
    row = {"prompt": [{"role": "user", "content": [part]}]} if inline else {"prompt": "a", "images": [path]}
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: .*{path}.* is outside of the data's folder"):
        dataset_of(folder, row)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "<image>", "images": ["one.png", "one.png"]}, "2 pictures and 1 placeholders"),
        ({"prompt": "<image><image>", "images": ["one.png"]}, "more placeholders for pictures than pictures"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "more placeholders for pictures than pictures",
        ),
        ({"prompt": "a", "images": [{"url2": "x"}]}, "has the keys url2"),
        ({"prompt": "a", "image": "https://example.org/a.png"}, "is a URL, and nothing is fetched"),
        (
            {"prompt": [parts({"type": "image_url", "image_url": {"url": "http://a/b.png"}})]},
            "is a URL, and nothing is",
        ),
        ({"prompt": "a", "images": ["one.png"] * (MAX_PICTURES + 1)}, "at most 1024 in one prompt"),
    ],
)
def test_pictures_that_no_row_can_have_are_refused(folder: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: .*{why}"):
        dataset_of(folder, row)


def test_a_damaged_picture_costs_its_row(folder: Path) -> None:
    rows = [{"prompt": "a", "images": [name]} for name in ("one.png", "broken.png", "notes.png", "none.png")]
    dataset = dataset_of(folder, *rows, {"prompt": "a", "images": [17]})
    for row, why in (
        (1, "broken.png: .*damaged"),
        (2, "notes.png: .*unknown format"),
        (3, "none.png cannot"),
        (4, "is a int"),
    ):
        with pytest.raises(InvalidPrompt, match=f"row {row} of the dataset: .*{why}"):
            prompt_of(dataset, row)
    found = measure_prompts(dataset, FORM)
    assert (found.rows, found.bad) == (5, 4)
    assert "row 1: " in found.first_bad
    content_sum(dataset, folder)  # names no picture that cannot be read


def test_held_out_rows_and_the_record_know_pictures(folder: Path) -> None:
    rows = [{"prompt": f"a{n}", "images": [["one.png", "pictures/two.png"][n % 2]]} for n in range(40)]
    sizes = [len(dataset_of(folder, *rows, split=split, held_out_share=0.5)) for split in ("train", "held_out")]
    assert sum(sizes) == 40
    assert min(sizes) > 0
    first = content_sum(dataset_of(folder, *rows), folder)
    rows[0]["images"] = ["pictures/two.png"]
    assert content_sum(dataset_of(folder, *rows), folder) != first


def test_a_prompt_and_a_sample_cross_to_a_process_and_back(folder: Path) -> None:
    import msgspec

    from asyncrl.plugins.agents.sample_builder import SampleBuilder
    from asyncrl.rollout.user_code_pool.child import LENGTH, packed

    def crossed(value: Any) -> bytes:
        return packed(value)[LENGTH.size :]

    prompt = prompt_of(dataset_of(folder, {"prompt": "a", "images": ["one.png", URL]}))
    arrived = msgspec.convert(msgspec.msgpack.decode(crossed(prompt)), Prompt)
    assert arrived.pictures == prompt.pictures
    assert arrived.pictures[1].picture.data == TWO.data
    sample = SampleBuilder(prompt.input_ids, prompt.pictures).build(1.0, truncated=False)
    assert _sample_of(msgspec.msgpack.decode(crossed(sample))).pictures == prompt.pictures
    for frame in (ONE.pixels(), ONE.image()):  # an environment's observation
        assert observed(msgspec.msgpack.decode(crossed(frame))) == [
            {"type": "image", "image": Picture.from_array(ONE.pixels())}
        ]
    messages = msgspec.msgpack.decode(crossed(prompt.data["prompt"]))
    assert (
        shown(make_prompt(PromptRef("p", 0, 0), Rows([{"prompt": messages}]), FORM, 1, SamplingParams(), 0))
        == "[user]12a"
    )


class Rows(list[dict[str, Any]]):
    def row(self, index: int) -> dict[str, Any]:
        return self[index]


def test_a_large_file_is_no_bomb(folder: Path) -> None:
    file = io.BytesIO()
    Image.new("1", (20000, 2000)).save(file, "PNG")  # 40 megapixels in 5 kB
    (folder / "bomb.png").write_bytes(file.getvalue())
    with pytest.raises(InvalidPrompt, match=r"bomb\.png: the picture has 20000 x 2000 pixels"):
        prompt_of(dataset_of(folder, {"prompt": "a", "images": ["bomb.png"]}))
