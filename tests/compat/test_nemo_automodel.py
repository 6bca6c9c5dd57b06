"""Automodel's strategies train as the unsplit model does, with the meshes, plans and units that its users have."""

from __future__ import annotations

import copy
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardwise
from shardwise.compat.nemo_automodel import (
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    import_classes_from_paths,
    nvfsdp_strategy_parallelize,
    to_cpu,
    translate_to_torch_parallel_style,
)
from shardwise.compat.nemo_automodel.distributed.parallelizer import (
    RuleStyle,
    _destroy_dist_connection,
    adopt_device_mesh,
    read_plan,
)
from shardwise.compat.warned import CompatWarning, warn_idle
from shardwise.errors import ConfigError, GradientError, PlanError, ShardwiseError, UnsupportedError
from shardwise.parallel.build import initialize_meta
from tests.families import FULL_PRODUCT, tiny_batch, tiny_model
from tests.oracle import LOSS, differing, differing_gradients

FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
LAYER = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
ATTENTION = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
STYLES = {
    **ATTENTION,
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.[01].mlp.up_proj": ColwiseParallel(),  # as fnmatch reads it
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
PARTS = {
    **STYLES,
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "model.norm": SequenceParallel(),
    "model.layers.*.input_layernorm": SequenceParallel(),
    "model.layers.*.post_attention_layernorm": SequenceParallel(),
    "model.layers.*.self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    ),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def strings_of(model):
    return dict.fromkeys(ATTENTION, "colwise") | {
        "model.layers.*.self_attn.o_proj": "rowwise",
        "lm_head": "colwise_rep",
    }


PLANS = {
    "automatic": lambda model: None,
    "styles": lambda model: STYLES,
    "sequence": lambda model: PARTS,
    "strings": strings_of,
    "import path": lambda model: "tests.compat.test_nemo_automodel.STYLES",
    "path of a function": lambda model: "tests.compat.test_nemo_automodel.strings_of",
    "of the model": get_hf_tp_shard_plan,
}
MESHES = {
    "the document's": ((1, 1, 2), ("data_parallel", "context_parallel", "tensor_parallel"), ()),
    "data": ((2, 1, 1), ("data_parallel", "context_parallel", "tensor_parallel"), ()),
    "context": ((1, 2, 1), ("data_parallel", "context_parallel", "tensor_parallel"), ()),
    "both": ((2, 2, 1), ("data_parallel", "context_parallel", "tensor_parallel"), ()),
    "flattened": ((2, 2, 1), ("data_parallel", "context_parallel", "tensor_parallel"), ("dp_cp",)),
    "all": ((2, 1, 2), ("data_parallel", "context_parallel", "tensor_parallel"), ()),
    "today's": ((1, 1, 2, 1, 2), ("pp", "dp_replicate", "dp_shard", "cp", "tp"), ()),
    "hybrid": ((1, 2, 2, 1, 1), ("pp", "dp_replicate", "dp_shard", "cp", "tp"), ()),
    "hybrid with context": ((1, 2, 1, 2, 1), ("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("dp_shard_cp",)),
}


def open_mesh(kind):
    shape, names, flattened = MESHES[kind]
    theirs = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for name in flattened:
        theirs[tuple(each for each in names if each in (*_DATA, "cp", "context_parallel"))]._flatten(name)
    return theirs


_DATA = ("data_parallel", "dp_shard")


class Mixer(nn.Module):
    """No transformers model: an embedding, blocks of two linears, a norm, a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 24), "down": nn.Linear(24, 16), "norm": nn.LayerNorm(16)})
            for _ in range(2)
        )
        self.head = nn.Linear(16, 31)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block["norm"](x + block["down"](torch.relu(block["up"](x))))
        return self.head(x)


def loss_of(model, ids):
    if isinstance(model, Mixer):
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return model(input_ids=ids, labels=ids).loss


def build(family):
    if family == "mixer":
        torch.manual_seed(0)
        return Mixer()
    return tiny_model(family)


def differences(model, whole, ids, *, rank, ranks, factor=1.0):
    """What three steps of the split model, with this data rank's rows, compute differently from the unsplit."""
    mine = ids.chunk(ranks)[rank]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, whole)]
    problems = []
    for step in range(3):
        losses = [loss_of(model, mine), loss_of(whole, ids)]
        (losses[0] * factor).backward()
        losses[1].backward()
        total = losses[0].detach() / ranks
        dist.all_reduce(total) if ranks == dist.get_world_size() else None
        if ranks in (1, dist.get_world_size()):
            problems += differing(f"loss {step}", total, losses[1].detach(), LOSS)
        expected = {name: each.grad for name, each in whole.named_parameters()}
        problems += differing_gradients(shardwise.full_gradients(model), expected)
        norms = [shardwise.clip_grad_norm_(model, 0.5), nn.utils.clip_grad_norm_(whole.parameters(), 0.5)]
        problems += differing(f"norm {step}", *norms, 1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: to_cpu(each) for name, each in model.named_parameters()}
    return problems + [
        f"{name} drifted" for name, each in whole.named_parameters() if (weights[name] - each).abs().max() > 2e-4
    ]


def fsdp2(mesh, kind, family, plan):
    whole = build(family)
    chosen = PLANS[plan](whole) if isinstance(plan, str) else plan
    theirs = open_mesh(kind)
    model = fsdp2_strategy_parallelize(copy.deepcopy(whole), theirs, FLOAT32, chosen)
    data = adopt_device_mesh(theirs)
    ids = torch.randint(3, 31, (4, 12), generator=torch.Generator().manual_seed(1))
    return differences(model, whole, ids, rank=data.data_rank, ranks=data.data_size)


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])
@pytest.mark.parametrize(
    ("kind", "family", "plan"),
    [
        *(("the document's", "llama", plan) for plan in PLANS if FULL_PRODUCT or plan not in ("styles", "strings")),
        ("the document's", "qwen3", "styles"),  # norms within heads: theirs drift apart
        ("the document's", "gpt2", "of the model"),  # no plan is declared: theirs raises
        ("the document's", "glm4", "of the model"),  # gate and up in one: theirs computes another loss
        ("the document's", "olmo2", "of the model"),  # norms across heads: theirs raises
        (
            "the document's",
            "mixer",
            {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "embed": "embedding_rowwise"},
        ),
        ("data", "llama", "automatic"),
        *[("context", "llama", "automatic"), ("data", "mixer", "automatic")] * FULL_PRODUCT,
    ],
)
def test_fsdp2_on_two_ranks(on_ranks, layout, kind, family, plan):
    assert on_ranks(fsdp2) == [[], []]


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["fsdp2.tp2"])
@pytest.mark.parametrize(
    ("kind", "family", "plan"),
    [
        ("today's", "llama", "sequence"),
        ("hybrid with context", "llama", "automatic"),
        *[("all", "llama", "styles"), ("both", "mixer", "automatic"), ("flattened", "llama", "automatic")]
        * FULL_PRODUCT,
        *[("hybrid", "mixer", "automatic")] * FULL_PRODUCT,
    ],
)
def test_fsdp2_on_four_ranks(on_ranks, layout, kind, family, plan):
    assert on_ranks(fsdp2) == [[]] * 4


def by_torch(mesh):
    """The plan of a model in torch's own `parallelize_module`, and FSDP2 around it: norms within heads have one rank's
    gradients there.
    """
    whole = tiny_model("qwen3")
    whole.model.layers[0].self_attn.q_norm.requires_grad_(False)
    model = copy.deepcopy(whole)
    theirs = open_mesh("the document's")
    parallelize_module(model, theirs["tensor_parallel"], get_hf_tp_shard_plan(model))
    fully_shard(model.model.layers[1], mesh=theirs["data_parallel"])
    ids = torch.randint(3, 31, (4, 12), generator=torch.Generator().manual_seed(1))
    for rows in ids.chunk(2):
        for each in (model, whole):
            each(input_ids=rows).logits.square().mean().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    full = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}
    expected = {name: each.grad for name, each in whole.named_parameters() if each.requires_grad}
    return differing_gradients(full, expected)


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])
def test_plans_in_torchs_own_function(on_ranks, layout):
    assert on_ranks(by_torch) == [[], []]


def nvfsdp(mesh, kind, strategy, units, options):
    whole = tiny_model("llama")
    theirs = open_mesh(kind)
    data = adopt_device_mesh(theirs, shards=strategy != "no_shard")
    model = nvfsdp_strategy_parallelize(
        copy.deepcopy(whole), theirs, units, data_parallel_sharding_strategy=strategy, **options
    )
    ids = torch.randint(3, 31, (4, 12), generator=torch.Generator().manual_seed(1))
    factor = 1 / data.data_size if "calculate_per_token_loss" in options else 1.0
    problems = differences(model, whole, ids, rank=data.data_rank, ranks=data.data_size, factor=factor)
    held = isinstance(next(model.parameters()), DTensor) and next(model.parameters()).placements[-1].is_shard()
    units = shardwise.parameters.registry.registry_of(model).plan.data.units
    return problems, held, len(units)


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["fsdp2"])
@pytest.mark.parametrize(
    ("kind", "strategy", "units", "options"),
    [
        ("data", "optim_grads_params", [LAYER], {"grad_reduce_in_fp32": True}),
        ("data", "optim_grads", None, {"average_in_collective": True}),
        ("data", "optim", [LAYER], {"check_for_nan_in_grad": False}),
        ("data", "no_shard", None, {}),
        ("data", "params", [LAYER, "torch.nn.Embedding"], {"calculate_per_token_loss": True}),
        ("context", "grads_params", None, {"preserve_fp32_weights": True}),
        ("the document's", "optim_grads_params", [LAYER], {}),
    ],
)
def test_nvfsdp(on_ranks, layout, kind, strategy, units, options):
    expected = {None: 0, 1: 2, 2: 3}[len(units) if units else None]
    for problems, is_sharded, num_units in on_ranks(nvfsdp):
        assert problems == []
        assert is_sharded == (strategy != "no_shard" and kind != "the document's")
        assert num_units == expected


def refusals(mesh):
    theirs, llama = open_mesh("the document's"), tiny_model("llama")
    others = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_paralel",))
    wrong = {
        "mesh": lambda: fsdp2_strategy_parallelize(llama, others),
        "no mesh": lambda: fsdp2_strategy_parallelize(llama, {"tp": 2}),
        "plan": lambda: fsdp2_strategy_parallelize(llama, theirs, tp_shard_plan={"blocks.*.up": "colwise"}),
        "one name": lambda: fsdp2_strategy_parallelize(
            llama, theirs, tp_shard_plan={**STYLES, "model.layers.*.mlp.upproj": "colwise"}
        ),
        "strategy": lambda: nvfsdp_strategy_parallelize(
            llama, theirs, data_parallel_sharding_strategy="optim_grad_params"
        ),
        "units": lambda: nvfsdp_strategy_parallelize(llama, theirs, ["torch.nn.Conv2d"]),
        "ub": lambda: nvfsdp_strategy_parallelize(llama, open_mesh("data"), nccl_ub=True),
        "inputs": lambda: fsdp2_strategy_parallelize(llama, theirs, MixedPrecisionPolicy(cast_forward_inputs=False)),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
        except ShardwiseError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def others(mesh):
    """The default policy, offloading, NaN gradients, values of DTensors, and the end of everything."""
    theirs = open_mesh("data")
    model = fsdp2_strategy_parallelize(tiny_model("llama"), theirs)
    ids = torch.randint(3, 31, (2, 12))
    dtype = model(input_ids=ids).logits.dtype
    model = fsdp2_strategy_parallelize(tiny_model("llama"), theirs, FLOAT32, offload_policy=CPUOffloadPolicy())
    loss_of(model, ids).backward()
    shifted = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    output = fsdp2_strategy_parallelize(tiny_model("llama"), theirs, shifted)(input_ids=ids).logits.dtype
    model = nvfsdp_strategy_parallelize(tiny_model("llama"), theirs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, ids).backward()
    if mesh.rank == 1:
        next(model.parameters()).grad.to_local().fill_(float("nan"))
    try:
        optimizer.step()
        raised = ""
    except GradientError as error:
        raised = str(error)
    full = to_cpu(DTensor.from_local(torch.full((2,), float(mesh.rank)), theirs["data_parallel"], [Shard(0)]))
    before = signal.getsignal(signal.SIGINT)
    _destroy_dist_connection()
    return dtype, output, bool(raised), full.tolist(), signal.getsignal(signal.SIGINT) is before, dist.is_initialized()


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])
def test_bad_input_is_every_ranks_error(on_ranks, layout):
    first, second = on_ranks(refusals)
    assert first == second
    expected = {
        "mesh": ["'tensor_paralel' is no axis (did you mean 'tensor_parallel'?)"],
        "no mesh": ["cannot be a dict", "init_device_mesh"],
        "plan": ["blocks.*.up"],
        "one name": ["upproj", "up_proj"],
        "strategy": ["did you mean 'optim_grads_params'?"],
        "units": ["no module of LlamaForCausalLM is a torch.nn.Conv2d", LAYER],
        "ub": ["symmetric memory on cpu"],
        "inputs": ["cast_forward_inputs=False"],
    }
    assert first.keys() == expected.keys()
    for name, parts in expected.items():
        assert all(part in first[name] for part in parts), first[name]


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["fsdp2"])
def test_policies_values_and_the_end(on_ranks, layout):
    for found in on_ranks(others):
        assert found == (torch.bfloat16, torch.float32, True, [0.0, 0.0, 1.0, 1.0], True, False)


single = pytest.mark.single
SEED = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": ColwiseParallel,
    "rowwise_rep": RowwiseParallel,
    "sequence_parallel": SequenceParallel,
}
NEWER = {
    "colwise_gather_output": ColwiseParallel,
    "rowwise_split_input": RowwiseParallel,
    "embedding_rowwise": RowwiseParallel,
    "embedding_colwise": ColwiseParallel,
    **dict.fromkeys(
        [
            "packed_colwise",
            "packed_rowwise",
            "replicated_with_grad_allreduce",
            "moe_tp_experts",
            "mla_kv_a_proj",
            "local_params",
            "replicate",
            "all_reduce",
            "moe_identity_expert",
            "split(0)",
            "region",
        ],
        RuleStyle,
    ),
}


@single
@pytest.mark.parametrize(("name", "kind"), (SEED | NEWER).items())
def test_every_style_string_has_a_style_of_its_own(name, kind):
    first, second = translate_to_torch_parallel_style(name), translate_to_torch_parallel_style(name)
    assert type(first) is kind
    assert first is not second, "callers must not share one mutable object"


@single
@pytest.mark.parametrize(
    ("style", "part"), [("colwize", "Unknown parallel style: colwize (did you mean 'colwise'?)"), (None, "NoneType")]
)
def test_a_style_that_is_none_is_a_value_error(style, part):
    with pytest.raises(PlanError, match="nsupported parallel style type|Unknown") as caught:
        translate_to_torch_parallel_style(style)
    assert part in str(caught.value) and isinstance(caught.value, ValueError)


@single
def test_ours_are_refused_by_torch_and_say_where_they_work():
    with pytest.raises(UnsupportedError, match="fsdp2_strategy_parallelize"):
        translate_to_torch_parallel_style("packed_colwise")._apply(nn.Linear(2, 2), None)


@single
@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ({"model.norm": object()}, ["object", "'model.norm'", "ColwiseParallel"]),
        (["colwise"], ["cannot be a list"]),
        ("tests.compat.nowhere.PLAN", ["cannot import", "nowhere"]),
        ("tests.compat.test_nemo_automodel.STYLE", ["did you mean 'STYLES'?"]),
    ],
)
def test_a_plan_that_cannot_be_followed_is_an_error(plan, parts):
    with pytest.raises(ShardwiseError) as caught:
        read_plan(plan, tiny_model("llama"))
    assert all(part in str(caught.value) for part in parts), caught.value


@single
def test_plans_of_models_come_back_as_the_same_rules():
    for family in ("llama", "gpt2"):
        model = tiny_model(family)
        plan, _ = read_plan(get_hf_tp_shard_plan(model), model)
        again, _ = read_plan(get_hf_tp_shard_plan(model), model)
        assert plan == again and len(plan.rules) > 5


@single
def test_classes_are_imported_or_all_their_errors_told():
    assert import_classes_from_paths(["torch.nn.Linear", LAYER])[0] is nn.Linear
    with pytest.raises(ConfigError) as caught:
        import_classes_from_paths(["nodot", "torch.nn.Liner", "no.such.Thing", None, "torch.nn.functional.relu"])
    for part in ("'nodot'", "did you mean 'Linear'?", "'no.such.Thing'", "None", "relu cannot be a function"):
        assert part in str(caught.value)
    for other in ("torch.nn.Linear", None):
        with pytest.raises(ConfigError, match="pass a list"):
            import_classes_from_paths(other)


@single
def test_values_that_are_no_dtensors():
    assert to_cpu("text") == "text"
    assert to_cpu(torch.ones(2)).tolist() == [1.0, 1.0]


def loaded_later(mesh, name):
    """A meta model, split, then given memory and full weights, as torch's users do."""
    whole = tiny_model(name)
    with torch.device("meta"):
        model = type(whole)(whole.config)
    device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    fsdp2_strategy_parallelize(model, device_mesh, mp_policy=FLOAT32)
    model.to_empty(device="cpu")
    for value in model.buffers():
        value.fill_(3)  # whatever was in memory
    model.load_state_dict(whole.state_dict())
    batch = tiny_batch(whole, rows=2)
    loss = model(**batch).loss
    loss.backward()
    wanted = whole(**batch).loss
    wanted.backward()
    gradients = {name: value.grad for name, value in whole.named_parameters()}
    problems = differing("loss", loss.detach(), wanted.detach(), LOSS)
    return problems + differing_gradients(shardwise.full_gradients(model), gradients)


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_buffers_that_no_state_dict_holds_are_right_after_to_empty(on_ranks, layout, name):
    assert on_ranks(loaded_later) == [[], []]


@single
def test_a_model_on_the_meta_device_starts_as_its_modules_do():
    config = tiny_model("llama", tied=True).config
    with torch.device("meta"):
        model, plain = type(tiny_model("llama"))(config), nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    plain.append(plain[0])
    torch.manual_seed(5)
    initialize_meta(model)
    torch.manual_seed(5)
    expected = type(model)(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(mine, own) for mine, own in zip(model.parameters(), expected.parameters(), strict=True))
    initialize_meta(plain)
    assert plain[2].weight is plain[0].weight and not plain[0].weight.is_meta and plain[1].weight.sum() == 4
    with torch.device("meta"):
        unable = nn.Module()
        unable.weight = nn.Parameter(torch.empty(2))
    with pytest.raises(UnsupportedError, match="reset_parameters"):
        initialize_meta(unable)


@single
def test_the_end_of_processes_keeps_the_handler_and_works_without_any():
    def handler(*_): ...

    before = signal.signal(signal.SIGINT, handler)
    try:
        _destroy_dist_connection()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@single
def test_what_changes_nothing_is_said_once():
    with pytest.warns(CompatWarning, match="f: x change nothing: it is known"):
        warn_idle("f", "it is known", x=True, y=False)
    warn_idle("f", "it is known", x=True, y=False)
