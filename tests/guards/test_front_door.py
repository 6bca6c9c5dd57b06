"""The public surface: exactly these names, importing nothing heavy, clear about what is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.single

PUBLIC = [
    "Compile",
    "FsdpPolicy",
    "Mesh",
    "MeshShape",
    "Pipeline",
    "Plan",
    "Precision",
    "Recompute",
    "ShardwiseError",
    "TrainStep",
    "build_optimizer",
    "clip_grad_norm_",
    "export_pretrained",
    "full_gradients",
    "full_state_dict",
    "load",
    "load_checkpoint",
    "parallelize",
    "save_checkpoint",
    "verify",
]


def test_the_public_names_are_these():
    import shardwise

    assert sorted(shardwise.__all__) == sorted(
        [*PUBLIC, "__version__"] if "__version__" in shardwise.__all__ else PUBLIC
    )
    assert len(shardwise.__all__) == len(set(shardwise.__all__))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name):
    import shardwise

    value = getattr(shardwise, name)
    assert value.__doc__, f"shardwise.{name} has no docstring"
    assert name in dir(shardwise)


def test_a_name_that_is_not_there_is_an_attribute_error_that_says_so():
    import shardwise

    with pytest.raises(AttributeError, match="shardwise.*'parallelise'"):
        _ = shardwise.parallelise  # type: ignore[attr-defined]


def test_importing_shardwise_imports_neither_torch_nor_transformers():
    code = "import shardwise, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "[]\n"
