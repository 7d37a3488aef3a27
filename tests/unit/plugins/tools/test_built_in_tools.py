"""Programs in a sandbox and search, as tools."""

from __future__ import annotations

import json

import pytest

from asyncrl.plugins.sandbox import SandboxUnavailable
from asyncrl.plugins.tools.python import PythonTool


def _python(cpu_s):
    try:
        return PythonTool(cpu_s=cpu_s)
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def python():
    return _python(40.0)


@pytest.fixture(scope="module")
def impatient():
    return _python(1.0)


def test_a_program_gives_what_it_prints(python):
    result = python.execute("a", {"code": "print(sum(range(10)))"})
    assert (result.text, result.is_error) == ("45", False)
    assert python.execute("a", {"code": "x = 1"}).text == "(it printed nothing)"


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        ("1/0", "ZeroDivisionError"),
        ("print('é' * 3); raise SystemExit(3)", "ééé\n(exit code 3)"),
        ("while True: print('x' * 1000)", "printed more than"),
        ("bytearray(10 << 30)", "MemoryError"),
        ("import os; os._exit(7)", "(exit code 7)"),
        ("print(open('/etc/passwd').read())", "FileNotFoundError"),
        ("import socket; socket.create_connection(('1.1.1.1', 53), 1)", "OSError"),
        ("\x00", "(exit code 1)"),
        ("'\ud800'", "(exit code 1)"),
    ],
)
def test_a_program_that_fails_says_so_to_the_model(python, code, reported):
    result = python.execute("a", {"code": code})
    assert result.is_error
    assert reported in result.text


@pytest.mark.parametrize(
    ("code", "reported"), [("while True: pass", "(e"), ("import time; time.sleep(100)", "longer than 3 s")]
)
def test_a_program_that_does_not_end_is_ended(impatient, code, reported):
    result = impatient.execute("a", {"code": code})
    assert result.is_error
    assert reported in result.text


def _corpus(tmp_path, rows):
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


ROWS = [
    {"title": "Oslo", "text": "Oslo is the capital of Norway."},
    {"title": "Fish", "text": "Cod and herring are fish of the North Sea."},
    {"text": "A capital letter begins a sentence." + " long" * 500},
]


def test_a_search_gives_the_best_passages_first(tmp_path):
    search = pytest.importorskip("asyncrl.plugins.tools.search")
    pytest.importorskip("bm25s")
    tool = search.SearchTool(corpus=_corpus(tmp_path, ROWS), top_k=5, passage_chars=100)
    found = tool.execute("a", {"query": "capital of Norway"}).text
    assert found.startswith("Oslo\nOslo is the capital")
    assert "herring" not in found
    assert tool.execute("a", {"query": "herring"}).text.startswith("Fish\n")
    assert len(tool.execute("a", {"query": "sentence letter"}).text) < 200
    for query in ("", "the of", "zebra", "\x00", "\ud800", "漢字", "a" * 100_000):
        assert tool.execute("a", {"query": query}).text.startswith("nothing was found")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "line 1"),
        ('{"text": "a"}\n{"body": "b"}', "line 2"),
        ("[1]", "line 1"),
        (None, "cannot be read"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused(tmp_path, content, message):
    search = pytest.importorskip("asyncrl.plugins.tools.search")
    pytest.importorskip("bm25s")
    file = tmp_path / "corpus.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        search.SearchTool(corpus=str(file))
