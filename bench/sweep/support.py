"""What sweeps found, by model type: the table that is shipped with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["write_support"]

_KINDS = {("tp2", False): "tp", ("tp2", True): "sp", ("pp2", False): "pp"}


def write_support(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes as JSON which model types were equal to the unsplit model at tp2: for each, whether at tp2, along the
    sequence and at pp2 some class of it was; null where no sweep has tried.
    """
    found: dict[str, dict[str, bool | None]] = {}
    for row in rows:
        kind = _KINDS.get((row["layout"], row["sequence_parallel"]))
        if kind is None or row.get("adapters") or row["result"] == "no tiny model":
            continue
        of_type = found.setdefault(row["model_type"], {"tp": None, "sp": None, "pp": None})
        of_type[kind] = bool(of_type[kind]) or row["result"] == "ok"
    supported = {name: of_type for name, of_type in sorted(found.items()) if of_type["tp"]}
    versions = ", ".join(sorted({row["transformers_version"] for row in rows}))
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(of_type)}" for name, of_type in supported.items())
    path.write_text(f'{{\n  "transformers": {json.dumps(versions)},\n  "model_types": {{\n{lines}\n  }}\n}}\n')
