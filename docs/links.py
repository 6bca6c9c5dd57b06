"""For mkdocs: documents link to files outside of docs/, which the site holds as texts below files/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)\)")


def _outside(page: Path, target: str) -> Path | None:
    """Returns where a link leads, from the root; None where that is below docs/, or nowhere."""
    place = (page.parent / target).resolve()
    inside = place.is_relative_to(ROOT / "docs") or not place.is_relative_to(ROOT)
    return None if inside or not place.exists() else place.relative_to(ROOT)


def on_files(files: Files, config: Any) -> None:
    """Adds every file that a page links to."""
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(page.content_string):
            place = _outside(Path(page.abs_src_path or ""), match["target"])
            uri = f"files/{place}.txt"
            if place is not None and (ROOT / place).is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=(ROOT / place).read_text()))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links to those files; a link to a directory becomes its text."""

    def replace(match: re.Match[str]) -> str:
        place = _outside(Path(page.file.abs_src_path), match["target"])
        if place is None:
            return match[0]
        up = "../" * page.file.src_uri.count("/")
        return f"[{match['text']}]({up}files/{place}.txt)" if (ROOT / place).is_file() else match["text"]

    return LINK.sub(replace, markdown)
