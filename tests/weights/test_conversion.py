"""Against transformers' own from_pretrained: every tensor, whole and by boxes, and every report."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    ConversionOps,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    LinearToConv3d,
    MergeModulelist,
    PermuteForRope,
    SplitModulelist,
    Transpose,
)

from shardwise.weights.conversion import Resolution, plan_export, resolve_keys
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.lazy import LazyTensor

pytestmark = pytest.mark.single

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, head_dim=8),
}


def on_meta(auto: type, config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return auto.from_config(config)


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {fqn: tuple(tensor.shape) for fqn, tensor in model.state_dict().items()}


def check_equal(resolution: Resolution, index: CheckpointIndex, expected: dict[str, torch.Tensor]) -> None:
    for fqn, tensor in expected.items():
        lazy = resolution.tensors[fqn]
        assert isinstance(lazy, LazyTensor)
        boxes = [tuple((0, size) for size in tensor.shape)]
        for _ in range(5):
            boxes.append(tuple(tuple(sorted(random.choices(range(size + 1), k=2))) for size in tensor.shape))
        for box in boxes:
            before = index.bytes_read
            got = lazy.read(box)
            assert torch.equal(got, tensor[tuple(slice(*i) for i in box)]), (fqn, box)
            assert index.bytes_read - before == got.nbytes


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_as_from_pretrained(tmp_path: Path, name: str, dtype: torch.dtype, max_shard_size: str) -> None:
    config = CONFIGS[name]()
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    model = on_meta(AutoModelForCausalLM, config)
    with CheckpointIndex.open(tmp_path) as index:
        resolution = resolve_keys(model, index, shapes_of(model))
        assert not (resolution.missing or resolution.unexpected or resolution.mismatched)
        assert not resolution.conversion_errors
        assert not resolution.duplicates
        check_equal(resolution, index, expected)
    if "moe" in name or "mixtral" in name:
        assert len(resolution.tensors["model.layers.0.mlp.experts.gate_up_proj"].keys) == 2 * 4


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_base_model_into_a_head_and_back(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]()
    AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "head")
    cases = [
        (AutoModelForCausalLM, "base"),
        (AutoModelForSequenceClassification, "base"),
        (AutoModelForSequenceClassification, "head"),
        (AutoModel, "head"),
    ]
    for auto, directory in cases:
        reference, report = auto.from_pretrained(tmp_path / directory, output_loading_info=True)
        model = on_meta(auto, config)
        with CheckpointIndex.open(tmp_path / directory) as index:
            resolution = resolve_keys(model, index, shapes_of(model))
            assert resolution.missing == set(report["missing_keys"])
            assert resolution.unexpected == set(report["unexpected_keys"])
            expected = reference.state_dict()
            check_equal(resolution, index, {fqn: expected[fqn] for fqn in expected.keys() - resolution.missing})


def saved_llama(directory: Path, name: str = "llama") -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(directory)
    return on_meta(AutoModelForCausalLM, CONFIGS[name]()), load_file(directory / "model.safetensors")


def resolve(model: PreTrainedModel, directory: Path, state: dict[str, torch.Tensor]) -> Resolution:
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    with CheckpointIndex.open(directory) as index:
        return resolve_keys(model, index, shapes_of(model))


def test_reports_as_transformers_does(tmp_path: Path) -> None:
    model, state = saved_llama(tmp_path)
    del state["model.norm.weight"]
    state["model.layers.0.stray.weight"] = torch.zeros(2)
    state["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # old checkpoints have it; to be ignored
    state["lm_head.weight"] = torch.zeros(7, 32)
    resolution = resolve(model, tmp_path, state)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, ignore_mismatched_sizes=True)
    assert resolution.missing == set(report["missing_keys"]) == {"model.norm.weight"}
    assert resolution.unexpected == set(report["unexpected_keys"]) == {"model.layers.0.stray.weight"}
    assert resolution.mismatched == {"lm_head.weight": ((7, 32), (101, 32))}
    assert {(fqn, *map(tuple, shapes)) for fqn, *shapes in report["mismatched_keys"]} == {
        ("lm_head.weight", (7, 32), (101, 32))
    }
    assert "lm_head.weight" not in resolution.tensors


def test_an_expert_of_another_shape_is_a_conversion_error(tmp_path: Path) -> None:
    model, state = saved_llama(tmp_path, "mixtral")
    key = next(key for key in state if "experts.2.w1" in key)
    state[key] = torch.zeros(3, 3)
    resolution = resolve(model, tmp_path, state)
    (fqn,) = resolution.conversion_errors
    assert fqn == "model.layers.0.mlp.experts.gate_up_proj"
    assert resolution.missing == {fqn}
    assert fqn not in resolution.tensors


def test_a_tied_tensor_under_either_name(tmp_path: Path) -> None:
    model, state = saved_llama(tmp_path, "llama-tied")
    both = {"model.embed_tokens.weight", "lm_head.weight"}
    embedding = state.pop("model.embed_tokens.weight")
    rest = dict(state)
    for name in both:
        resolution = resolve(model, tmp_path, {**rest, name: embedding})
        assert not resolution.missing
        assert not resolution.duplicates
        assert {resolution.tensors[fqn].keys for fqn in both} == {(name,)}
    assert resolve(model, tmp_path, rest).missing == both


def test_a_tied_tensor_stored_twice(tmp_path: Path) -> None:
    model, state = saved_llama(tmp_path, "llama-tied")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    with CheckpointIndex.open(tmp_path) as index:
        resolution = resolve_keys(model, index, shapes_of(model))
    assert resolution.duplicates == {"lm_head.weight": "model.embed_tokens.weight"}


def test_key_mapping_renames(tmp_path: Path) -> None:
    model, state = saved_llama(tmp_path)
    save_file({f"wrapped.{key}": value for key, value in state.items()}, tmp_path / "model.safetensors")
    with CheckpointIndex.open(tmp_path) as index:
        assert resolve_keys(model, index, shapes_of(model)).missing
        resolution = resolve_keys(model, index, shapes_of(model), key_mapping={r"^wrapped\.": ""})
    assert not (resolution.missing or resolution.unexpected)


def test_canonical_shapes_count_where_the_model_is_split(tmp_path: Path) -> None:
    model, _ = saved_llama(tmp_path)
    shapes = shapes_of(model)
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight = torch.nn.Parameter(torch.empty(16, 32, device="meta"))
    with CheckpointIndex.open(tmp_path) as index:
        resolution = resolve_keys(model, index, shapes)
    assert not resolution.mismatched
    assert resolution.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)


@pytest.mark.parametrize("name", CONFIGS)
def test_export_restores_the_checkpoint_in_small_groups(tmp_path: Path, name: str) -> None:
    model, stored = saved_llama(tmp_path, name)
    with CheckpointIndex.open(tmp_path) as index:
        resolution = resolve_keys(model, index, shapes_of(model))
        state = {fqn: lazy.read() for fqn, lazy in resolution.tensors.items()}
    groups = plan_export(model, model.state_dict())
    assert max(len(group.fqns) for group in groups) == 1
    written = {}
    for group in groups:
        part = dict(group.build({fqn: state[fqn] for fqn in group.fqns}))
        assert tuple(part) == group.names
        written.update(part)
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[key], stored[key]) for key in stored)


def run_operation(operation: ConversionOps, inputs: dict[str, list[torch.Tensor]], targets: list[str]) -> dict:
    config = SimpleNamespace(num_attention_heads=2)
    made = operation.convert(inputs, source_patterns=list(inputs), target_patterns=targets, config=config, model=None)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


OPERATIONS: dict[str, tuple[ConversionOps, dict[str, list[tuple[int, ...]]], list[str]]] = {
    "chunk": (Chunk(dim=1), {"qkv": [(4, 6)]}, ["q", "k", "v"]),
    "concatenate": (Concatenate(dim=1), {"a": [(2, 3)], "b": [(2, 5)]}, ["ab"]),
    "conv3d": (Conv3dToLinear(2, (1, 2, 2)), {"a": [(3, 2, 1, 2, 2)]}, ["b"]),
    "ernie": (ErnieFuseAndSplitTextVisionExperts(), {"g": [(2, 3)] * 4, "u": [(2, 3)] * 4}, ["text", "vision"]),
    "interleave": (Interleave(dim=1), {"a": [(2, 8, 3)]}, ["b"]),
    "linear": (LinearToConv3d(2, (1, 2, 2)), {"a": [(3, 8)]}, ["b"]),
    "merge": (MergeModulelist(dim=0), {"experts.*.w": [(2, 3)] * 4}, ["experts.w"]),
    "rope": (PermuteForRope(permute_layer_names=["q_proj"]), {"q_proj": [(8, 3)]}, ["q_proj"]),
    "split": (SplitModulelist(dim=0), {"experts.w": [(4, 2, 3)]}, ["experts.*.w"]),
    "transpose": (Transpose(1, 2), {"a": [(2, 3, 4)]}, ["b"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_transformers_operations_read_only_the_box(tmp_path: Path, name: str) -> None:
    operation, shapes, targets = OPERATIONS[name]
    stored = {f"{key}.{i}": torch.randn(shape) for key, group in shapes.items() for i, shape in enumerate(group)}
    save_file(stored, tmp_path / "model.safetensors")
    with CheckpointIndex.open(tmp_path) as index:
        keys = {key: [f"{key}.{i}" for i in range(len(group))] for key, group in shapes.items()}
        lazies = {key: [LazyTensor.of_node(index.node(name)) for name in names] for key, names in keys.items()}
        made = run_operation(operation, lazies, targets)
        expected = run_operation(
            operation, {key: [stored[name] for name in names] for key, names in keys.items()}, targets
        )
        assert made.keys() == expected.keys()
        for key, tensor in expected.items():
            assert isinstance(made[key], LazyTensor)
            box = tuple((size // 3, size - size // 4) for size in tensor.shape)
            index.bytes_read = 0
            got = made[key].read(box)
            assert torch.equal(got, tensor[tuple(slice(*i) for i in box)])
            assert index.bytes_read == got.nbytes
