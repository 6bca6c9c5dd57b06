"""docs/map.md: every file of the package, with the first sentence of its docstring. `make fix` writes it anew."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardwise"
MAP = ROOT / "docs" / "map.md"

HEAD = """# The map, file by file

Rooms in the order of [the design](design.md#3-rooms-and-what-may-know-what): a file may import what stands below it.
Made by `make fix` from the first line of every module.
"""

ORDER = (
    *("cli", "compat", "lightning", "api", "search", "parallel", "train", "lora", "checkpoint", "proof"),
    *(
        "pipeline",
        "data",
        "optim",
        "tiny",
        "testing",
        "ranks",
        "modules",
        "weights",
        "parameters",
        "loss",
        "stages",
        "runtime",
    ),
    *("comm", "mesh.py", "job"),
    *("estimate", "plan", "schedule", "sharding", "topology", "failure.py", "errors.py"),
)


def written() -> str:
    """The text of the map."""
    parts = [HEAD]
    for name in ORDER:
        place = SOURCE / name
        if place.is_file():
            parts.append(f"\n## `{name}`\n\n{_sentence(place)}\n")
            continue
        files = [file for file in sorted(place.rglob("*.py")) if file.name != "__init__.py"]
        lines = [f"- `{file.relative_to(place)}`: {_sentence(file)}" for file in files]
        parts.append(f"\n## `{name}/`\n\n{_sentence(place / '__init__.py')}\n\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def _sentence(file: Path) -> str:
    """The first paragraph of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "(says nothing)"
    return " ".join(docstring.split("\n\n")[0].split())


if __name__ == "__main__":
    MAP.write_text(written(), encoding="utf-8")
