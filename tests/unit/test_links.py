"""Links of the README and of the documentation: every page and heading that they name is there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs import made_pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WRITTEN = {page for page in DOCS.rglob("*.md") if page.name not in made_pages.PAGES}
PAGES = [ROOT / "README.md", *sorted(WRITTEN | {DOCS / name for name in made_pages.PAGES})]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
ABROAD = ("http://", "https://", "mailto:")


@cache
def text_of(page: Path) -> str:
    """A page without its blocks of code; those made from the code are not in the folder."""
    text = made_pages.made(page.name) if page.name in made_pages.PAGES else page.read_text(encoding="utf-8")
    return FENCE.sub("", text)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links_of(page: Path) -> Iterator[str]:
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", text_of(page))):
        target = match[1] or match[2]
        if not target.startswith(ABROAD):
            yield target


def anchors_of(page: Path) -> set[str]:
    """As GitHub and the site make them: lower case, without punctuation, hyphens for blanks."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        named = (page.parent / path).resolve() if path else page
        assert named.exists() or named in PAGES, f"{page.name}: {target}"
        if anchor and named.suffix == ".md":
            assert anchor in anchors_of(named), f"{page.name}: {target}"


def test_the_readme_links_to_files_of_the_checkout_alone() -> None:
    assert [
        target for target in links_of(ROOT / "README.md") if Path(target.partition("#")[0]).name in made_pages.PAGES
    ] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(DOCS)], ids=name_of)
def test_no_page_of_the_site_links_out_of_it(page: Path) -> None:
    for target in links_of(page):
        path = target.partition("#")[0]
        assert not path or (page.parent / path).resolve().is_relative_to(DOCS), f"{page.name}: {target}"


def test_the_site_has_every_page_once() -> None:
    def pages_in(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from pages_in(each)

    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(pages_in(nav)) == sorted(
        page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)
    )
