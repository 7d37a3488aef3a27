"""Search over a corpus on this machine: BM25 by the `bm25s` package (extra `search`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.api import Tool, ToolResult, ToolSchema
from asyncrl.data.settings import JSONL

MAX_QUERY_CHARS = 2000


class SearchTool(Tool):
    """Finds passages by their words. The index is made when the worker starts: about 20,000 passages a second.

    Args:
        corpus: a JSONL file; each line is an object with a passage's text and, optionally, its title.
        name: name of the tool for the model.
        description: description of the corpus for the model.
        text_field, title_field: names of these fields.
        top_k: number of passages that a search returns.
        passage_chars: longest passage shown, in characters; longer ones are cut.

    Raises:
        ValueError: the corpus cannot be read, is empty, or `bm25s` is not installed.
    """

    def __init__(
        self,
        *,
        corpus: str,
        name: str = "search",
        description: str = "Search a collection of texts by keywords.",
        text_field: str = "text",
        title_field: str = "title",
        top_k: int = 3,
        passage_chars: int = 1000,
    ) -> None:
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}: give at least 1")
        try:
            import bm25s
        except ImportError:
            raise ValueError("the search tool needs the package bm25s: pip install 'asyncrl[search]'") from None
        self.name, self._description, self._chars = name, description, passage_chars
        self._passages = _read(Path(corpus).expanduser(), text_field, title_field)
        self._top_k = min(top_k, len(self._passages))
        self._bm25s = bm25s
        self._index = bm25s.BM25()
        texts = [f"{title} {text}" for title, text in self._passages]
        self._index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def schema(self) -> ToolSchema:
        """Return the schema: a query."""
        query = {"type": "string", "description": "keywords"}
        parameters: dict[str, Any] = {"type": "object", "properties": {"query": query}, "required": ["query"]}
        parameters["additionalProperties"] = False
        return {
            "type": "function",
            "function": {"name": self.name, "description": self._description, "parameters": parameters},
        }

    def execute(self, instance_id: str, arguments: Mapping[str, Any]) -> ToolResult:  # type: ignore[override]
        """Return the passages that fit `arguments["query"]` best, the best first; in a thread."""
        query = str(arguments["query"])[:MAX_QUERY_CHARS]
        tokens = self._bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
        if not tokens[0]:
            return ToolResult("nothing was found: the query has no keyword")
        numbers, scores = self._index.retrieve(tokens, k=self._top_k, show_progress=False)
        found = [int(number) for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]
        return ToolResult("\n\n".join(map(self._shown, found)) or "nothing was found")

    def _shown(self, number: int) -> str:
        title, text = self._passages[number]
        cut = text if len(text) <= self._chars else text[: self._chars] + " ..."
        return f"{title}\n{cut}" if title else cut


def _read(file: Path, text_field: str, title_field: str) -> list[tuple[str, str]]:
    """Return title and text of each line.

    Raises:
        ValueError: see `SearchTool`.
    """
    if file.suffix != JSONL:
        raise ValueError(f"corpus {str(file)!r}: give a {JSONL} file")
    passages = []
    try:
        with file.open(encoding="utf-8") as lines:
            number = 0
            for number, line in enumerate(lines, start=1):  # noqa: B007
                if line.strip():
                    row = json.loads(line)
                    passages.append((str(row.get(title_field) or ""), str(row[text_field])))
    except OSError as error:
        raise ValueError(f"corpus {str(file)!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError) as error:
        message = f"corpus {str(file)!r}, line {number}: it is not an object with {text_field!r} ({error!r:.100})"
        raise ValueError(message) from error
    if not passages:
        raise ValueError(f"corpus {str(file)!r} is empty: give at least one passage")
    return passages
