"""What enters and leaves a split model: state dicts whole or refused, resizing refused, exports that load anywhere."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import transformers

import shardwise
from shardwise.errors import ConfigError, LoadError, UnsupportedError
from shardwise.ranks.spawn import spawn
from shardwise.weights import write
from shardwise.weights.write import TensorFileWriter
from tests.families import tiny_batch, tiny_model
from tests.oracle import differing

pytestmark = pytest.mark.spawn


def same_state(found, expected):
    """Names that differ; the order of names counts."""
    if list(found) != list(expected):
        return ["the names differ", *(set(found) ^ set(expected))]
    return [
        name for name in expected if not torch.equal(found[name], expected[name]) or found[name].device.type != "cpu"
    ]


def doors(layout):
    with shardwise.Mesh.open(layout) as mesh:
        whole = tiny_model("phi3", tied=True, num_key_value_heads=1)
        expected = copy.deepcopy(whole.state_dict())
        config = whole.config.to_dict()
        model = shardwise.parallelize(whole, mesh)
        assert model is whole
        assert same_state(shardwise.full_state_dict(model), expected) == []
        on_first = shardwise.full_state_dict(model, rank0_only=True)
        assert same_state(on_first, expected if mesh.rank == 0 else {}) == []
        assert model.config.to_dict() == config

        other = {name: value + 1.0 for name, value in expected.items()}
        kept = dict(other)
        assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
        assert all(other[name] is kept[name] for name in kept), "the caller's dictionary changed"
        assert same_state(shardwise.full_state_dict(model), other) == []
        local = {name: value.detach().clone() for name, value in model.named_parameters()}
        model.load_state_dict({name: value * 2 for name, value in local.items()}, strict=False)
        assert all(torch.equal(value, 2 * local[name]) for name, value in model.named_parameters())
        model.load_state_dict(expected, assign=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight, "they were tied"
        shardwise.TrainStep(model, mesh)(tiny_batch(model))
        assert same_state(shardwise.full_state_dict(model), expected) == []
        half = {name: value / 2 for name, value in expected.items() if name != "lm_head.weight"}  # as files hold it
        model.load_state_dict(half, strict=False, assign=True)
        half["lm_head.weight"] = half["model.embed_tokens.weight"]
        assert same_state(shardwise.full_state_dict(model), half) == []
        return refusals(model)


def refusals(model):
    texts = []
    for attempt in (
        model.state_dict,
        model.model.state_dict,
        model.model.layers[0].state_dict,
        copy.deepcopy(model).state_dict,
        lambda: model.resize_token_embeddings(128),
        lambda: model.model.resize_token_embeddings(128),
    ):
        with pytest.raises(UnsupportedError) as raised:
            attempt()
        texts.append(str(raised.value))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"lm_head.weight": torch.zeros(3, 3)}, strict=False)
    # A module that holds nothing split may say what it holds.
    assert set(model.model.norm.state_dict()) == {"weight"}
    return texts


def test_state_dicts_are_whole_or_refused():
    first, *others = spawn(doors, 2, "tp2")
    assert others == [first]
    assert all("full_state_dict" in text for text in first[:4]) and all("resize" in text for text in first[4:])


def watch_embedding():
    """What differs from the unsplit embedding's output where somebody looks at it."""
    with shardwise.Mesh.open("tp2") as mesh:
        full = tiny_model("llama")
        model = shardwise.parallelize(copy.deepcopy(full), mesh, sequence_parallel=True)
        seen = []
        for each in (full, model):
            each.model.embed_tokens.register_forward_hook(lambda _, __, output: seen.append(output.detach()))
            each(**tiny_batch(full))
        return differing("rows", seen[1], seen[0], 1e-6)


def test_a_hook_on_an_embedding_sees_full_rows():
    assert spawn(watch_embedding, 2) == [[], []]


def one_process(layout):
    """tp1 is the unsplit model: its own doors stay open."""
    with shardwise.Mesh.open(layout) as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh)
        assert same_state(shardwise.full_state_dict(model), model.state_dict()) == []
        model.resize_token_embeddings(40, mean_resizing=False)
        return True


def test_one_process_keeps_its_doors_open():
    assert spawn(one_process, 1, "tp1") == [True]


EXPORTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tied": True}),
    "mixtral": ("mixtral", {}),
    "gemma3_text": ("gemma3_text", {"tied": True}),
    "phi3": ("phi3", {"num_key_value_heads": 1}),
    "deepseek_v3": ("deepseek_v3", {}),
}


def export_all(layout, directory):
    opened = []

    class Counted(TensorFileWriter):
        def __init__(self, path, tensors):
            opened.append(path.parent.parent.name)  # of a hidden directory in the target
            super().__init__(path, tensors)

    write.TensorFileWriter = Counted
    with shardwise.Mesh.open(layout) as mesh:
        for name, (family, options) in EXPORTS.items():
            model = shardwise.parallelize(tiny_model(family, num_hidden_layers=1, **options), mesh)
            model.generation_config.max_new_tokens = 7
            before = model.config.to_dict()
            shardwise.export_pretrained(model, directory / name, max_shard_bytes=40_000)
            assert model.config.to_dict() == before
        errors = []
        no, wrong = directory / "no", mesh.rank == 1
        for place, num_bytes, adapter in (
            (None, 40_000, None),
            (None if wrong else no, 40_000, None),
            (no, 40_000, "bogus" if wrong else None),
        ):
            with pytest.raises(ConfigError) as error:
                shardwise.export_pretrained(model, place, max_shard_bytes=num_bytes, adapter=adapter)
            errors.append(str(error.value))
        return errors, collections.Counter(opened)


def test_exports_are_what_transformers_writes(tmp_path):
    (errors, opened), (also_errors, also_opened) = spawn(export_all, 2, "tp2", tmp_path)
    assert errors == also_errors
    assert "None cannot be a directory" in errors[0]
    assert "export_pretrained alike\n  at:  directory" in errors[1] and "on rank 1: None" in errors[1]
    assert "export_pretrained alike\n  at:  adapter" in errors[2] and "on rank 1: bogus" in errors[2]
    assert not [path.name for path in tmp_path.iterdir() if path.name not in EXPORTS], "something was left behind"
    for name, (family, options) in EXPORTS.items():
        whole = tiny_model(family, num_hidden_layers=1, **options)
        files = len(list((tmp_path / name).glob("*.safetensors")))
        assert files > 1
        assert opened[name] + also_opened[name] == files
        assert opened[name] > 1 and also_opened[name] > 1, "ranks share the files"
        found, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], name
        assert same_state(found.state_dict(), whole.state_dict()) == [], name
        assert found.generation_config.max_new_tokens == 7
        assert found.dtype == torch.float32 and type(found) is type(whole)
        whole.save_pretrained(tmp_path / "theirs" / name, max_shard_size=40_000)
        assert stored_keys(tmp_path / name) == stored_keys(tmp_path / "theirs" / name), name


def stored_keys(directory):
    from shardwise.weights.index import CheckpointIndex

    with CheckpointIndex.open(directory) as index:
        return {key: (index[key].shape, index[key].dtype) for key in index}


def export_with_tokenizer(layout, source, target):
    with shardwise.Mesh.open(layout) as mesh:
        model = shardwise.load(source, mesh)
        shardwise.export_pretrained(model, target)
        try:
            (target.parent / "file").touch()
            shardwise.export_pretrained(model, target.parent / "file")
        except LoadError as error:
            return str(error)
    return None


def test_the_tokenizer_goes_with_the_model(tmp_path):
    import tokenizers

    tiny_model("llama").save_pretrained(tmp_path / "source")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "source")
    texts = spawn(export_with_tokenizer, 2, "tp2", tmp_path / "source", tmp_path / "target")
    assert texts[0] == texts[1] and "File exists" in texts[0]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "target").get_vocab() == {"a": 0, "b": 1, "?": 2}
