"""Checkpoints of other systems: read bit for bit, and nothing in them is ever run."""

from __future__ import annotations

import json
import os
import pickle
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import shardwise
from shardwise.api.prepare import decide
from shardwise.cli.main import main
from shardwise.errors import LoadError, ShardwiseError, UnsupportedError
from shardwise.plan.options import ParallelSpec
from shardwise.ranks.spawn import spawn
from shardwise.sharding.boxes import full_box
from shardwise.topology.shape import MeshShape
from shardwise.weights.foreign import open_weights
from shardwise.weights.neuron_files import open_nxd, open_optimum_neuron
from tests.families import tiny_model

pytestmark = [pytest.mark.single, pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]

NUM_HEADS, NUM_KEYS, TP_SIZE = 4, 2, 4


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_key_value_heads=NUM_KEYS)


def assert_same(index, state):
    """Every tensor, and boxes of it, across what it is cut into."""
    assert set(index) == set(state)
    for key, value in state.items():
        assert torch.equal(index.map_tensor(key), value), key
        box = tuple((size // 3, size - size // 4) for size in value.shape)
        part = torch.empty([stop - start for start, stop in box])
        index.node(key).fill(box, part)
        assert torch.equal(part, value[tuple(slice(*each) for each in box)]), key
        assert index.node(key).map_rows(full_box(tuple(value.shape))) is None


def converts(path, out, model, *words):
    assert main(["convert", str(path), "--to", "hf", str(out), *words]) == 0
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    return all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_a_dcp_directory_of_a_model_alone_or_with_its_optimizer(model, tmp_path, capsys):
    state = model.state_dict()
    dcp.save(dict(state), checkpoint_id=tmp_path / "alone", no_dist=True)
    both = {"model": dict(state), "optimizer": {"state": {"x": torch.ones(3)}, "groups": [{"lr": 0.1}]}, "step": 3}
    dcp.save(both, checkpoint_id=tmp_path / "both" / "model", no_dist=True)
    for name in ("alone", "both"):
        with open_weights(tmp_path / name) as index:
            assert_same(index, state)
    model.config.save_pretrained(tmp_path / "config")
    words = ("--config", str(tmp_path / "config"), "--dtype", "float32")
    assert converts(tmp_path / "both", tmp_path / "out", model, *words)
    assert "converted to" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "both"), "--to", "hf", str(tmp_path / "no")]) == 1
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    model.config.save_pretrained(tmp_path / "both" / "model" / ".hf_metadata")  # as Automodel has it
    loaded = shardwise.load(tmp_path / "both", shardwise.Mesh.open("tp1"))
    assert all(torch.equal(value, state[name]) for name, value in shardwise.full_state_dict(loaded).items())


def save_sharded(base):
    from torch.distributed.fsdp import fully_shard

    with shardwise.Mesh.open("fsdp2"):
        model = fully_shard(tiny_model("llama", num_key_value_heads=NUM_KEYS))
        dcp.save({"model": model.state_dict()}, checkpoint_id=base / "dcp")
        split = AutoModelForCausalLM.from_pretrained(base / "plain", distributed_config=DistributedConfig(tp_size=2))
        try:
            split.save_pretrained(base / "transformers", distributed_checkpoint=True)
        except ValueError as error:
            return str(error)  # of releases that save only what FSDP has wrapped
    return None


@pytest.mark.spawn
def test_what_ranks_have_saved_with_dcp_and_transformers(model, tmp_path):
    model.save_pretrained(tmp_path / "plain")
    refused = spawn(save_sharded, 2, tmp_path)[0]
    for name in ("dcp",) if refused else ("dcp", "transformers"):
        with open_weights(tmp_path / name) as index:
            assert_same(index, model.state_dict())
    if refused:
        pytest.skip(f"transformers {transformers.__version__}: {refused}")
    loaded = shardwise.load(tmp_path / "transformers", shardwise.Mesh.open("tp1"))
    found = shardwise.full_state_dict(loaded)
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    lost = sorted((tmp_path / "transformers").glob("*.safetensors"))[1]
    os.truncate(lost, 100)
    with pytest.raises(LoadError, match="not a usable safetensors file"):
        open_weights(tmp_path / "transformers")
    lost.unlink()
    with pytest.raises(LoadError, match="fit LlamaForCausalLM"):
        shardwise.load(tmp_path / "transformers", shardwise.Mesh.open("tp1"))


class Dangerous:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_dcp_pickle_runs_nothing(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "dcp"
    dcp.save({"w": torch.ones(4), "v": torch.ones(2)}, checkpoint_id=root, no_dist=True)
    metadata = (root / ".metadata").read_bytes()

    def refused(says, kind=LoadError):
        with pytest.raises(kind, match=says) as found, open_weights(root) as index:
            index.map_tensor("w")
        assert str(root) in str(found.value)

    (root / ".metadata").write_bytes(pickle.dumps(Dangerous()))
    refused(r"\.metadata cannot be read[\s\S]*it names \w+\.system")
    (root / ".metadata").write_bytes(metadata[:-20])
    refused(r"\.metadata cannot be read")
    (root / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../_0.distcp"))
    refused("leads out of its directory")
    (root / ".metadata").write_bytes(metadata)
    file = next(root.glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:100])
    refused("cannot be read from")
    file.write_bytes(content)
    (root / "x").symlink_to(file)
    with open_weights(root) as index:
        assert torch.equal(index.map_tensor("w"), torch.ones(4))
    torch.save(Dangerous(), root / "payload")
    found = pickle.loads(metadata)
    for place in found.storage_data.values():
        place.relative_path, place.offset, place.length = "payload", 0, (root / "payload").stat().st_size
    (root / ".metadata").write_bytes(pickle.dumps(found))
    refused("w cannot be read from payload|v cannot be read from payload")
    assert not (tmp_path / "ran").exists()


def optimum_neuron(model, root, *, fused=False, xser=False, tp_size=TP_SIZE):
    """Writes what Optimum Neuron writes: each key head copied, all heads, then all again."""
    copies = tp_size // NUM_KEYS
    state = model.state_dict()
    ranks = [{} for _ in range(tp_size)]
    split, originals, outputs = {}, {}, set()
    rows = model.config.hidden_size // NUM_HEADS

    def heads_of(rank):  # the query heads of a rank: those that use its key head, and of these its copy's share
        key, copy = rank % NUM_KEYS, rank // NUM_KEYS
        group = NUM_HEADS // NUM_KEYS
        return [key * group + copy * (group // copies) + i for i in range(group // copies)]

    order = torch.tensor(
        [head * rows + row for rank in range(tp_size) for head in heads_of(rank) for row in range(rows)]
    )
    for name, value in state.items():
        parent, _, leaf = name.rpartition(".")
        attention, _, kind = parent.rpartition(".")
        if kind in ("q_proj", "k_proj", "v_proj"):
            changed = value[order] if kind == "q_proj" else value.repeat(copies, 1)
            own = f"{attention}.qkv_proj.{leaf}_{'qkv' if fused else kind[0]}"
            originals[name], split[own] = own, {"kind": "sharded", "partition_dim": 0}
            for rank, part in zip(ranks, changed.chunk(tp_size), strict=True):
                rank[own] = torch.cat([rank[own], part]) if own in rank else part.clone()
        elif kind == "o_proj":
            outputs.add(name)
            split[name] = {"kind": "sharded", "partition_dim": 1}
            for rank, part in zip(ranks, value[:, order].chunk(tp_size, 1), strict=True):
                rank[name] = part.clone()
        else:
            dim = {"gate_proj": 0, "up_proj": 0, "down_proj": 1, "embed_tokens": 0, "lm_head": 0}.get(kind)
            parts = [value] * tp_size if dim is None else value.chunk(tp_size, dim)
            if dim is not None:
                split[name] = {"kind": "sharded", "partition_dim": dim}
            for rank, part in zip(ranks, parts, strict=True):
                rank[name] = part.clone()
    (root / "shards" / "model").mkdir(parents=True)
    heads = {
        "original_names_to_gqa_qkv_names": originals,
        "output_projections_names": outputs,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KEYS,
        "kv_size_multiplier": copies,
        "q_output_size_per_partition": NUM_HEADS * rows // tp_size,
        "kv_output_size_per_partition": NUM_KEYS * copies * rows // tp_size,
        "fuse_qkv": fused,
    }
    torch.save({"sharded_metadata": split, "gqa_qkv_metadata": heads}, root / "shards" / "mp_metadata_pp_rank_0.pt")
    for number, rank in enumerate(ranks):
        path = root / "shards" / "model" / f"dp_rank_00_tp_rank_{number:02d}_pp_rank_00.pt"
        torch.save(as_references(rank, path) if xser else rank, path)
    model.config.save_pretrained(root)


def as_references(state, path):
    """What torch_xla's serialization makes of a state dict: references, and a file for each tensor."""
    tensors = path.with_name(f"{path.name}.tensors")
    tensors.mkdir()
    found = {}
    for number, (name, value) in enumerate(state.items()):
        torch.save(value, tensors / f"tensor_{number}.pt")
        found[name] = sys.modules["torch_xla.utils.serialization"].TensorReference(number)
    return found


@pytest.fixture
def torch_xla(monkeypatch):
    """A stand-in for the module whose class is pickled by name; it is not there when files are read."""
    name = "torch_xla.utils.serialization"

    class TensorReference:
        def __init__(self, tid):
            self.tid = tid

    TensorReference.__module__, TensorReference.__qualname__ = name, "TensorReference"
    for place in ("torch_xla", "torch_xla.utils", name):
        monkeypatch.setitem(sys.modules, place, types.ModuleType(place))
    sys.modules[name].TensorReference = TensorReference
    return lambda: monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("fused", "xser"), [(False, False), (True, False), (False, True)])
def test_an_optimum_neuron_checkpoint_with_copied_key_heads(model, tmp_path, torch_xla, fused, xser):
    optimum_neuron(model, tmp_path, fused=fused, xser=xser)
    torch_xla()
    with open_optimum_neuron(tmp_path) as index:
        assert_same(index, model.state_dict())
    if not fused:
        assert converts(tmp_path, tmp_path / "out", model)


def test_a_missing_rank_and_other_faults_are_named(model, tmp_path):
    optimum_neuron(model, tmp_path)
    files = sorted((tmp_path / "shards" / "model").iterdir())
    content = files[1].read_bytes()
    files[1].write_bytes(content[:1000])
    with pytest.raises(LoadError, match=f"{files[1].name} cannot be read"):
        open_optimum_neuron(tmp_path)
    torch.save({"a": Dangerous()}, files[1])
    with pytest.raises(LoadError, match=f"{files[1].name} cannot be read"):
        open_optimum_neuron(tmp_path)
    files[1].unlink()
    with pytest.raises(LoadError, match=r"are of tp ranks \[0, 2, 3\]"):
        open_optimum_neuron(tmp_path)


def nxd(state, dims, root, *, tp_size=2):
    """Writes what NxD writes: of every tp rank its chunk of what is split; two stages."""
    place = root / "tag" / "model"
    place.mkdir(parents=True)
    names = sorted(state)
    for rank in range(tp_size):
        held = {
            name: value if dims(name, value) is None else value.chunk(tp_size, dims(name, value))[rank].clone()
            for name, value in state.items()
        }
        for stage, own in enumerate((names[:5], names[5:])):
            path = place / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            torch.save({name: held[name] for name in own}, path)


def as_linears(name, value):
    """Along which dim NxD's layers of transformers' names are split."""
    kind = name.split(".")[-2]
    is_row = kind in ("o_proj", "down_proj")
    return int(is_row) if kind.endswith("_proj") or kind in ("embed_tokens", "lm_head") else None


def layouts_of(model):
    def layouts(tp_size):
        plan = decide(model, MeshShape(tp_size=tp_size), ParallelSpec())
        return {name: planned.layout for name, planned in plan.parameters.items()}

    return layouts


def test_nxd_files_are_read_by_convert_alone(model, tmp_path):
    state = model.state_dict()
    nxd(state, lambda name, value: None, tmp_path / "whole", tp_size=1)
    with open_nxd(tmp_path / "whole", layouts_of(model)) as index:
        assert_same(index, state)
    with pytest.raises(LoadError, match="(?s)has to be converted.*a checkpoint of neuronx.*shardwise convert"):
        open_weights(tmp_path / "whole")


def test_nxd_files_of_several_ranks_are_joined_where_the_models_config_tells_how(model, tmp_path):
    """Of square tensors, too: the shapes tell the dim, and the plan must have the same."""
    nxd(model.state_dict(), as_linears, tmp_path)
    with open_nxd(tmp_path, layouts_of(model)) as index:
        assert_same(index, model.state_dict())
    model.config.save_pretrained(tmp_path / "config")
    assert converts(tmp_path, tmp_path / "out", model, "--config", str(tmp_path / "config"))


@pytest.mark.parametrize("case", ["fused", "copied heads", "another dim", "another name", "unlike copies"])
def test_nxd_files_that_could_be_joined_in_several_ways_are_refused(model, tmp_path, case):
    dims, state, tp_size = as_linears, dict(model.state_dict()), 2
    if case == "fused":
        model = tiny_model("phi3", num_key_value_heads=NUM_KEYS)
        state = dict(model.state_dict())
    if case == "copied heads":
        tp_size = 4
        state |= {name: value.repeat(2, 1) for name, value in state.items() if ".k_proj" in name or ".v_proj" in name}
    if case == "another dim":
        dims = lambda name, value: 1 if "embed_tokens" in name else as_linears(name, value)  # noqa: E731
    if case == "another name":
        state["model.layers.0.mlp.gate_up.weight"] = state.pop("model.layers.0.mlp.gate_proj.weight")
        dims = lambda name, value: 0 if "gate_up" in name else as_linears(name, value)  # noqa: E731
    nxd(state, dims, tmp_path, tp_size=tp_size)
    if case == "unlike copies":
        path = next((tmp_path / "tag" / "model").glob("*tp_rank_01_pp_rank_01.pt"))
        torch.save({name: value + ("norm" in name) for name, value in torch.load(path).items()}, path)
    with pytest.raises(UnsupportedError, match=r"NxD's files of \d tp ranks: [\s\S]*several tensors may be fused"):
        open_nxd(tmp_path, layouts_of(model))


def test_parts_that_overlap_or_leave_a_gap_are_refused(tmp_path):
    def write(rank, tensors, starts):
        info = {name: {"saved_offsets": list(start)} for name, start in starts.items()}
        path = tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(info)})

    write(1, {"w": torch.zeros(2, 4)}, {"w": (0, 0)})
    write(2, {"w": torch.ones(2, 4)}, {"w": (2, 0)})
    with open_weights(tmp_path) as index:
        assert index.map_tensor("w").sum() == 8
    for start in (3, 1):
        write(2, {"w": torch.ones(2, 4)}, {"w": (start, 0)})
        with pytest.raises(ShardwiseError, match="w is not complete: its 2 parts hold 16"):
            open_weights(tmp_path)


def test_a_plain_directory_stays_one(model, tmp_path):
    model.save_pretrained(tmp_path)
    with open_weights(tmp_path) as index:
        assert torch.equal(
            index.map_tensor("model.norm.weight"), load_file(tmp_path / "model.safetensors")["model.norm.weight"]
        )
