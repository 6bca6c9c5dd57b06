"""The versions that are supported, and the private names of torch: one place for each, and all of them there."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict

import pytest

from shardwise import versions
from tests.guards.private_names import PRIVATE_NAMES, has_private_name
from tests.guards.sources import ROOT, SOURCES, name_of, parse

pytestmark = pytest.mark.single

# Private names of transformers, PEFT, Lightning, numpy, the standard library, and fields of files and configs.
OF_OTHERS = {
    *("_actions", "_current_frames", "_exit", "_Environ", "_getframe", "_replace", "_run_exitfuncs", "_run_finalizers"),
    *("_adjust_missing_and_unexpected_keys", "_attn_implementation", "_can_set_attn_implementation", "_embeddings"),
    *("_experts_implementation", "_from_config", "_get_dtype_plan", "_gradient_checkpointing_func", "_init_weights"),
    *("_is_hf_initialized", "_keys_to_ignore_on_save", "_loss_function", "_model_mapping", "_name_or_path"),
    *("_set_gradient_checkpointing", "_tp_plan", "_weight_conversions", "_weight_map"),
    *(
        *("_custom_objects", "_save_model_state_pre_hook"),
        *("_dataloaders", "_is_accelerate_prepared", "_models", "_prepare_inputs", "_save_scaler", "_train_batch_size"),
        *(
            "_get_output_dir",
            "_push_from_checkpoint",
            "_get_train_sampler",
            "_load_best_model",
            "_load_from_checkpoint",
        ),
        *("_load_optimizer_and_scheduler", "_load_rng_state", "_move_model_to_device", "_save_checkpoint"),
        *("_clip_grad_norm", "_get_grad_norm"),
        "_cast_input_dtype",
        "_register_custom_module",
        "_checkpoint_io",
        "_max_depth",
        "_reset_optimizers_and_schedulers",
        "_reconstruct",
    ),
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names():
    """Dotted private names of torch that the package imports or reaches through imports, with the files."""
    found = defaultdict(set)
    for path in SOURCES:
        aliases = {}
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                for each in node.names:
                    first = each.name.partition(".")[0]
                    aliases[each.asname or first] = each.name if each.asname else first
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                for each in node.names:
                    aliases[each.asname or each.name] = name = f"{node.module}.{each.name}"
                    found[name].add(name_of(path))
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and (name := dotted(node, aliases)) is not None:
                found[name].add(name_of(path))
    return {name: files for name, files in found.items() if any(map(is_private, name.split(".")))}


def dotted(node, aliases):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    root = aliases.get(node.id) if isinstance(node, ast.Name) else None
    return ".".join([root, *reversed(parts)]) if root is not None and root.partition(".")[0] == "torch" else None


def foreign_attributes():
    """Private attributes of objects that the package does not define itself, with the files."""
    own, used = set(), defaultdict(set)
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                    own.add(node.attr)
                used[node.attr].add(name_of(path))
    return {name: files for name, files in used.items() if name not in own}


def test_every_private_name_of_torch_is_in_the_table():
    table = set(PRIVATE_NAMES)
    prefixes = {".".join(name.split(".")[:end]) for name in table for end in range(1, name.count(".") + 2)}
    missing = [
        f"{name} ({', '.join(sorted(files))})"
        for name, files in private_names().items()
        if name not in prefixes and not any(name.startswith(f"{entry}.") for entry in table)
    ]
    last = {re.split(r"[.:]", name)[-1] for name in table} | {part for name in table for part in name.split(".")}
    missing += [
        f"attribute {name} ({', '.join(sorted(files))})"
        for name, files in foreign_attributes().items()
        if name not in last and name not in OF_OTHERS
    ]
    assert not missing, "name them in tests/guards/private_names.py, with the versions you read them in"


def test_every_private_name_of_the_table_is_used():
    text = "\n".join(path.read_text() for path in SOURCES)
    unused = [name for name in PRIVATE_NAMES if not re.search(rf"\b{re.split(r'[.:]', name)[-1]}\b", text)]
    assert not unused, "take them out of tests/guards/private_names.py"


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_installed_torch_has_the_private_name(name):
    found = versions.installed("torch")
    read_in = PRIVATE_NAMES[name]
    if not has_private_name(name):
        text = f"torch {found} has no {name}, which shardwise uses; it was there in {', '.join(read_in)}"
        assert versions.release_of(found) < versions.release_of(read_in[0]), text


def test_names_that_are_missing_are_missing():
    assert not has_private_name("torch._no_such_function")
    assert not has_private_name("torch.nn.Module:_no_such_attribute")


def test_versions_are_the_same_everywhere():
    pyproject = (ROOT / "pyproject.toml").read_text()
    for package, support in versions.SUPPORTED.items():
        assert f'"{package}>={support.oldest}"' in pyproject
        for constraints in ROOT.glob("constraints*.txt"):
            pinned = re.search(rf"^{package}==([\d.]+)", constraints.read_text(), re.MULTILINE)[1]
            assert not support.is_newer(pinned), f"{constraints.name} pins {package} {pinned}"


def test_a_newer_version_is_a_warning_with_the_tested_range(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_untested()
    monkeypatch.setattr(versions, "version", {"torch": "2.99.0+cu130", "transformers": "5.23.0"}.get)
    with pytest.warns(UserWarning, match=r"not tested with torch 2\.99\.0\+cu130 \(tested: 2\.11 to ") as caught:
        versions.warn_if_untested()
    assert "transformers" not in str(caught[0].message)
