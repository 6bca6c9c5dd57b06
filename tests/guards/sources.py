"""Where the guards look: the package's files, and its documents with the snippets in them."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(path: Path) -> str:
    """A file's path from the repository's root: a readable test id."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=name_of(path))


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a document: its language, its text, and where it stands (`README.md:12`)."""

    language: str
    text: str
    place: str


def snippets(*languages: str) -> list[Snippet]:
    """Every fenced block in one of these languages, in every document."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in re.finditer(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            body = "\n".join(row.removeprefix(match[1]) for row in match[3].splitlines())
            body = re.sub(r'^--8<-- "(.*)"$', lambda each: (ROOT / each[1]).read_text(), body, flags=re.MULTILINE)
            found.append(Snippet(match[2], body, f"{name_of(path)}:{line}"))
    return [snippet for snippet in found if snippet.language in languages]
