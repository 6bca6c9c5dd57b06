"""Bad input raises one right error, with values and a remedy, the same on every rank, before anything communicates."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
import torch.distributed as dist
import transformers

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.errors import (
    BatchError,
    ConfigError,
    LayoutError,
    LoadError,
    MeshError,
    PlanError,
    ShardwiseError,
    UnsupportedError,
)
from shardwise.ranks.spawn import spawn
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

# Name -> (error class, parts its message must have, fix included where the error is ours).
EXPECTED = {
    "layout empty": (MeshError, "layout text is empty", "pp2.fsdp2.tp4"),
    "layout unknown axis": (MeshError, "'tpp2'", "did you mean 'tp'", "the axes are pp, ddp, fsdp, cp, tp"),
    "layout twice": (MeshError, "axis 'tp' is given twice, with sizes 2 and 1"),
    "layout zero": (MeshError, "axis 'tp' has size 0", "at least 1"),
    "layout out of order": (MeshError, "'tp2.pp1'", 'write "pp1.tp2"'),
    "layout garbage": (MeshError, "'2tp!' is not an axis name followed by a size"),
    "layout no text": (MeshError, "a layout cannot be a int", '"fsdp2.tp4"'),
    "layout too large": (MeshError, "tp4 needs 4 ranks, but 2 are running", "--nproc-per-node 4"),
    "layout too small": (MeshError, "tp1 needs 1 rank, but 2 are running", 'use the layout "tp2"'),
    "cuts without pp": (ConfigError, "the layout tp2 has no pipeline to cut", "pp_size is 1"),
    "unknown schedule": (ConfigError, "unknown pipeline schedule '1f1B'", "did you mean '1f1b'"),
    "more stages than layers": (ConfigError, "4 stages for a model that runs 3 layers"),
    "cuts out of order": (ConfigError, "Pipeline layers (0, 0) do not fit", "ascending, of 3"),
    "cuts past the end": (ConfigError, "Pipeline layers (0, 3) do not fit", "a model that runs 3 layers"),
    "too few layers": (ConfigError, "numbers of layers: 2 together, of 3"),
    "recompute and split backward": (ConfigError, "recomputation (full) with the schedule zbv"),
    "schedule of a load": (ConfigError, "unknown pipeline schedule 'zbw'", "did you mean 'zbv'"),
    "axis cp": (UnsupportedError, "cp2", "fsdp2 or tp2"),
    "zero stage": (ConfigError, "zero_stage is 4", "use 1, 2 or 3"),
    "precision": (ConfigError, "'bf16'", "use one of float32, bfloat16"),
    "recompute": (ConfigError, "'blocks'", "use one of none, full"),
    "budget": (ConfigError, "budget is 1.5", "a share from 0 to 1"),
    "option by its name": (ConfigError, "recompute is 'full'", "shardwise.Recompute(...)"),
    "compiler": (ConfigError, "backend is 'indutcor'", "did you mean 'inductor'"),
    "mode of the compiler": (ConfigError, "mode is 'max'", "use one of default"),
    "heads": (PlanError, "self_attn over tp=2", "3 query heads do not divide among 2 ranks", "use tp_size 1, 3"),
    "key/value heads": (PlanError, "3 key-value heads do not divide among 2 ranks", "use tp_size 1, 3, 6, 12"),
    "plan name": (PlanError, "unknown plan 'atuo' (did you mean 'auto'?)", 'use "auto"'),
    "plan type": (PlanError, "a plan cannot be a int", 'use "auto"'),
    "rule without match": (PlanError, "model.layers.*.mlp.upproj", "did you mean", "up_proj"),
    "style": (PlanError, "unknown style 'colwize' (did you mean 'colwise'?)", "rowwise"),
    "pattern": (PlanError, "cannot read the pattern 'model..up_proj'"),
    "tied apart": (PlanError, "lm_head.weight and model.embed_tokens.weight are one tied parameter", "leave them out"),
    "split twice": (PlanError, "LlamaForCausalLM is split already", "split a model once"),
    "model type": (ConfigError, "the model cannot be a str", "shardwise.load takes a directory or a hub id"),
    "mesh type": (ConfigError, "the mesh of a model cannot be a str", "with shardwise.Mesh.open"),
    "mesh of a step": (ConfigError, "the mesh of a step cannot be a str", "pass the mesh"),
    "sequence parallel": (ConfigError, "sequence_parallel cannot be a str", "use True or False"),
    "compiled": (UnsupportedError, "a model that is compiled already", "torch.compile(shardwise.parallelize"),
    "data parallel": (UnsupportedError, "a model in DataParallel"),
    "source type": (ConfigError, "what a model is loaded from cannot be a LlamaForCausalLM", "shardwise.parallelize("),
    "mesh of a load": (ConfigError, "the mesh of a model cannot be a NoneType", "with shardwise.Mesh.open"),
    "not split, state": (LayoutError, "LlamaForCausalLM is not a model that Shardwise has split", "parallelize"),
    "not split, step": (LayoutError, "LlamaForCausalLM is not a model that Shardwise has split", "parallelize"),
    "no directory": (LoadError, "nowhere", "there is no such directory", "check the path"),
    "no config": (LoadError, "config.json", "save_pretrained"),
    "unknown model type": (LoadError, "llamma"),
    "no weights": (LoadError, "holds no model.safetensors and no model.safetensors.index.json", "found", "pass"),
    "pickled weights": (LoadError, "only pickled weights", "pytorch_model.bin", "save_pretrained"),
    "shard missing": (LoadError, "1 of 4 shards are missing: model-00002-of-00004.safetensors", "copy or download"),
    "truncated": (LoadError, "model.safetensors", "not fully covered", "download"),
    "header": (LoadError, "model.safetensors", "download"),
    "mismatched": (LoadError, "[96, 64] in the checkpoint, [80, 64] in the model", "ignore_mismatched_sizes"),
    "one rank's file": (LoadError, "rank 1/model.safetensors", "not fully covered"),
    "dtype": (ConfigError, "unknown dtype 'bfloat61'", "bfloat16"),
    "class": (UnsupportedError, "AutoModelForImageClassification cannot build a model of type 'llama'", "auto_class"),
    "no class": (UnsupportedError, "'AutoModel' is no transformers class", "pass an auto class"),
    "option": (UnsupportedError, "attn_implementatoin", "and options that it takes"),
    "quantized": (UnsupportedError, "quantized model (LlamaConfig", "load the checkpoint it was quantized from"),
    "no labels": (BatchError, "the batch has no labels (it has input_ids)", 'add "labels"'),
    "labels no tensor": (BatchError, "labels cannot be a list", "torch.tensor"),
    "unequal rows": (BatchError, "input_ids: 2, labels: 1"),
    "rows": (BatchError, "cannot divide 2 rows into 4 microbatches", "use a multiple of 4 rows"),
    "no rows": (BatchError, "cannot divide 0 rows into 1 microbatch\n", "at least one"),
    "microbatches": (BatchError, "num_microbatches is 0", "integer of at least 1"),
    "no dict": (BatchError, "a batch cannot be a Tensor", "pass a dict"),
    "token id": (IndexError, "ids from", "the vocabulary has 96 entries"),
    "target": (IndexError, "Target 96 is out of bounds: there are 96 classes"),
    "state_dict": (UnsupportedError, "state_dict() of a LlamaForCausalLM that is split over tp=2", "full_state_dict"),
    "save_pretrained": (UnsupportedError, "save_pretrained of a split model", "export_pretrained"),
    "resize": (UnsupportedError, "resize_token_embeddings of a split model", "before shardwise.parallelize"),
    "optimizer": (TypeError, "optimizer_class must be a torch.optim.Optimizer class", "'AdamW'"),
    "max_norm": (ConfigError, "max_norm must be at least 0, got -1.0"),
    "norm_type": (ConfigError, "norm_type must be positive or math.inf, got 0"),
    "export to a file": (LoadError, "a-file", "File exists", "pass a directory"),
}
# What reads or writes files, and what plans, fails together, so it communicates: one gather of small objects. Options
# that fit no model, and cuts that do not fit this one, are errors of every rank by itself. Batches are compared before
# they are read: where one rank's is at fault, the others must not wait for it. A target outside the vocabulary is found
# where the loss is, at the same point on every rank.
TOGETHER = {
    "heads", "key/value heads", "plan name",
    "plan type", "rule without match", "style", "pattern", "tied apart", "split twice",
    "no directory", "no config", "unknown model type", "no weights", "pickled weights", "shard missing",
    "truncated", "header", "mismatched", "one rank's file", "dtype", "class", "no class", "option", "quantized",
    "source type", "data parallel",
    "export to a file", "shard size", "target", "no labels", "labels no tensor", "unequal rows", "rows", "no rows",
    "no dict", "token id",
}  # fmt: skip


def write_checkpoints(directory):
    model = tiny_model("llama", num_hidden_layers=1)
    for name in (
        "whole",
        "truncated",
        "header",
        "mismatched",
        "no weights",
        "pickled",
        "rank 0",
        "rank 1",
        "no config",
    ):
        model.save_pretrained(directory / name)
    model.save_pretrained(directory / "sharded", max_shard_size=60_000)
    (directory / "no config/config.json").unlink()
    (directory / "no weights/model.safetensors").unlink()
    (directory / "pickled/model.safetensors").rename(directory / "pickled/pytorch_model.bin")
    next((directory / "sharded").glob("model-00002-*.safetensors")).unlink()
    for name in ("truncated", "rank 1"):
        path = directory / name / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
    (directory / "header/model.safetensors").write_bytes(
        b"\x20" + bytes(7) + b"not a header at all, is it? No.." + bytes(64)
    )
    rewrite_config(directory / "mismatched", intermediate_size=80)
    shutil.copytree(directory / "whole", directory / "unknown")
    rewrite_config(directory / "unknown", model_type="llamma")
    (directory / "a-file").touch()


def rewrite_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def layout_cases():
    texts = {
        "empty": " ", "unknown axis": "tpp2", "twice": "tp2.tp1", "zero": "tp0", "out of order": "tp2.pp1",
        "garbage": "2tp!", "no text": 2, "too large": "tp4", "too small": "tp1",
    }  # fmt: skip
    return {f"layout {name}": lambda text=text: shardwise.Mesh.open(text) for name, text in texts.items()}


def plan_cases(mesh, whole):
    def split(plan="auto", **overrides):
        model = tiny_model("llama", num_hidden_layers=1, **overrides) if overrides else copy.deepcopy(whole)
        return shardwise.parallelize(model, mesh, plan=plan)

    def compiled(**options):
        return shardwise.parallelize(whole, mesh, compilation=shardwise.Compile(**options))

    def on(layout, recompute=None, **pipeline):
        model = tiny_model("llama", num_hidden_layers=3)
        chosen = shardwise.Pipeline(**pipeline) if pipeline else None
        return shardwise.parallelize(model, shardwise.Mesh.open(layout), recompute=recompute, pipeline=chosen)

    return {
        "axis cp": lambda: on("cp2"),
        "cuts without pp": lambda: on("tp2", layers=(0, 1)),
        "unknown schedule": lambda: on("pp2", schedule="1f1B"),
        "more stages than layers": lambda: on("pp2", schedule="zbv"),
        "cuts out of order": lambda: on("pp2", layers=(0, 0)),
        "cuts past the end": lambda: on("pp2", layers=(0, 3)),
        "too few layers": lambda: on("pp2", layers=(1, 1)),
        "recompute and split backward": lambda: on("pp2", schedule="zbv", recompute=shardwise.Recompute(mode="full")),
        "schedule of a load": lambda: shardwise.load(
            whole.config, shardwise.Mesh.open("pp2"), pipeline=shardwise.Pipeline(schedule="zbw")
        ),
        "zero stage": lambda: shardwise.FsdpPolicy(zero_stage=4),
        "precision": lambda: shardwise.Precision(compute="bf16"),
        "recompute": lambda: shardwise.Recompute(mode="blocks"),
        "budget": lambda: shardwise.Recompute(mode="budget", budget=1.5),
        "option by its name": lambda: shardwise.load(whole.config, mesh, recompute="full"),
        "compiler": lambda: compiled(backend="indutcor"),
        "mode of the compiler": lambda: compiled(mode="max"),
        "heads": lambda: split(hidden_size=48, num_attention_heads=3, num_key_value_heads=3),
        "key/value heads": lambda: split(hidden_size=96, head_dim=8, num_attention_heads=12, num_key_value_heads=3),
        "plan name": lambda: split("atuo"),
        "plan type": lambda: split(7),
        "rule without match": lambda: split({"model.layers.*.mlp.upproj": "colwise"}),
        "style": lambda: split({"model.layers.*.mlp.up_proj": "colwize"}),
        "pattern": lambda: split({"model..up_proj": "colwise"}),
        "tied apart": lambda: split({"lm_head": "replicate"}, tied=True),
        "split twice": lambda: shardwise.parallelize(split(), mesh),
        "model type": lambda: shardwise.parallelize("model", mesh),
        "mesh type": lambda: shardwise.parallelize(whole, "tp2"),
        "mesh of a step": lambda: shardwise.TrainStep(whole, "tp2"),
        "sequence parallel": lambda: shardwise.parallelize(whole, mesh, sequence_parallel="no"),
        "compiled": lambda: shardwise.parallelize(torch.compile(whole), mesh),
        "data parallel": lambda: shardwise.parallelize(torch.nn.DataParallel(whole), mesh),
        "source type": lambda: shardwise.load(whole, mesh),
        "mesh of a load": lambda: shardwise.load(whole.config, None),
        "not split, state": lambda: shardwise.full_state_dict(whole),
        "not split, step": lambda: shardwise.TrainStep(whole, mesh),
    }


def load_cases(mesh, directory):
    def load(name, **options):
        return shardwise.load(directory / name, mesh, **options)

    quantized = transformers.LlamaConfig(quantization_config={"quant_method": "fp8"})
    return {
        "no directory": lambda: load("nowhere"),
        "no config": lambda: load("no config"),
        "unknown model type": lambda: load("unknown"),
        "no weights": lambda: load("no weights"),
        "pickled weights": lambda: load("pickled"),
        "shard missing": lambda: load("sharded"),
        "truncated": lambda: load("truncated"),
        "header": lambda: load("header"),
        "mismatched": lambda: load("mismatched"),
        "one rank's file": lambda: load(f"rank {mesh.rank}"),
        "dtype": lambda: load("whole", dtype="bfloat61"),
        "class": lambda: load("whole", auto_class=transformers.AutoModelForImageClassification),
        "no class": lambda: load("whole", auto_class="AutoModel"),
        "option": lambda: load("whole", attn_implementatoin="eager"),
        "quantized": lambda: shardwise.load(quantized, mesh),
    }


def train_cases(mesh, model, directory):
    batch = tiny_batch(model)
    ids, labels = batch["input_ids"], batch["labels"]

    def step(batch, num_microbatches=1):
        return shardwise.TrainStep(model, mesh, num_microbatches=num_microbatches)(batch)

    return {
        "no labels": lambda: step({"input_ids": ids}),
        "labels no tensor": lambda: step(batch | {"labels": labels.tolist()}),
        "unequal rows": lambda: step(batch | {"labels": labels[:1]}),
        "rows": lambda: step(batch, num_microbatches=4),
        "no rows": lambda: step({"input_ids": ids[:0], "labels": labels[:0]}),
        "microbatches": lambda: step(batch, num_microbatches=0),
        "no dict": lambda: step(ids),
        "token id": lambda: step(batch | {"input_ids": ids + 90}),
        "target": lambda: step(batch | {"labels": labels.masked_fill(labels == labels[1, 5], 96)}),
        "state_dict": model.state_dict,
        "save_pretrained": lambda: model.save_pretrained(directory / f"saved {mesh.rank}"),
        "resize": lambda: model.resize_token_embeddings(100),
        "optimizer": lambda: shardwise.build_optimizer(model, "AdamW", lr=1.0),
        "max_norm": lambda: shardwise.clip_grad_norm_(model, -1.0),
        "norm_type": lambda: shardwise.clip_grad_norm_(model, 1.0, 0),
        "export to a file": lambda: shardwise.export_pretrained(model, directory / "a-file"),
    }


def raise_all(layout, directory):
    """Every case's error on this rank: class, text, whether it communicated; all ranks meet after each."""
    with shardwise.Mesh.open(layout) as mesh:
        whole = tiny_model("llama", num_hidden_layers=1)
        model = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=True)
        cases = layout_cases() | plan_cases(mesh, whole) | load_cases(mesh, directory)
        cases |= train_cases(mesh, model, directory)
        assert cases.keys() == EXPECTED.keys()
        found = {name: raise_one(case, mesh) for name, case in cases.items()}
        # None of it left a trace: the model still trains.
        shardwise.TrainStep(model, mesh)(tiny_batch(model))
        return found


def raise_one(case, mesh):
    error = None
    with CommunicationCount() as count:
        try:
            case()
        except Exception as raised:  # noqa: BLE001 - which error it is, is what is tested
            error = raised
    meeting = torch.ones(1)
    dist.all_reduce(meeting, group=mesh.group("tp"))
    parts = (getattr(error, "why", ""), getattr(error, "fix", ""))
    return type(error), str(error), parts, bool(count.calls)


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """What every case raised on each of two ranks."""
    directory = tmp_path_factory.mktemp("inputs")
    write_checkpoints(directory)
    return spawn(raise_all, 2, "tp2", directory, timeout=100)


@pytest.mark.parametrize("name", EXPECTED)
def test_bad_input_raises_its_error_on_every_rank(raised, name):
    first, second = (rank[name] for rank in raised)
    assert first == second, "ranks raise differently"
    found, text, parts, communicated = first
    kind, *texts = EXPECTED[name]
    assert found is kind, text
    assert [part for part in texts if part not in text] == [], text
    assert not issubclass(kind, ShardwiseError) or any(parts), f"neither why nor fix: {text}"
    assert name in TOGETHER or not communicated, "communicated before it raised"


def test_a_layout_of_many_ranks_needs_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError, match="layout tp2 needs 2 processes") as raised:
        shardwise.Mesh.open("tp2")
    assert "torchrun --nproc-per-node 2" in str(raised.value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match="the environment of this rank is invalid"):
        shardwise.Mesh.open("tp2")
