"""Loading into split models: only this rank's bytes, every checkpoint format, the same values for every layout."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardwise
from shardwise.errors import LoadError
from shardwise.parameters.registry import local_part, registry_of
from shardwise.ranks.spawn import spawn
from shardwise.weights.index import CheckpointIndex
from tests.families import COMMON, FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

CHECKPOINTS = {
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama tied": ("llama", {"tied": True}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "phi3": ("phi3", {"num_key_value_heads": 4}),
    "gemma3_text": ("gemma3_text", {"tied": True}),
}


class Log(logging.Handler):
    """What loading warned of."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def load_watched(source, mesh, **options):
    """The loaded model, the bytes that were asked of the checkpoint, and what was logged."""
    opened, open_index, log = [], CheckpointIndex.open, Log()

    def remember(*args, **kwargs):
        opened.append(open_index(*args, **kwargs))
        return opened[-1]

    logger = logging.getLogger("shardwise.load")
    CheckpointIndex.open = remember
    logger.addHandler(log)
    try:
        model = shardwise.load(source, mesh, **options)
    finally:
        CheckpointIndex.open = open_index
        logger.removeHandler(log)
    return model, sum(index.bytes_read for index in opened), log.lines


def digest(state):
    """One text for a state dict, values and dtypes."""
    found = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().contiguous()
        found.update(
            f"{name} {value.dtype} {list(value.shape)} ".encode() + value.view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    for name, (family, options) in CHECKPOINTS.items():
        tiny_model(family, **options).bfloat16().save_pretrained(directory / name, max_shard_size=30_000)
    return directory


def live_storages():
    """Bytes of all memory of tensors in this process, by its address."""
    gc.collect()
    plain = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    found = [each for each in plain if each.device.type == "cpu"]
    return {each.data_ptr(): each.nbytes() for each in (value.untyped_storage() for value in found)}


def load_checkpoint(mesh, name, directory):
    model, nbytes, log = load_watched(directory / name, mesh)
    owned = sum(local_part(value).nbytes for value in (*model.parameters(), *saved_buffers(model)))
    logits = model(input_ids=torch.arange(12).view(2, 6) + 3).logits.detach()
    converted = shardwise.load(directory / name, mesh, dtype="float32")
    is_family = model.config.model_type == CHECKPOINTS[name][0]
    return {
        "owned": owned,
        "share of bytes": nbytes / owned,
        "log": log,
        "state": digest(shardwise.full_state_dict(model)),
        "float32": digest(shardwise.full_state_dict(converted)),
        "config": model.config.to_dict(),
        "class": (type(model).__name__, model.training, model.dtype, converted.dtype, is_family),
        "logits": logits.float(),
        "generation": model.generation_config.to_dict(),
    }


def saved_buffers(model):
    names = {name for name, _ in model.named_buffers()}
    with_buffers = set(shardwise.full_state_dict(model))
    return [value for name, value in model.named_buffers() if name in names & with_buffers]


def share_held(layout, place):
    """Memory of all tensors that a load leaves in a new process, to the bytes that the rank owns."""
    with shardwise.Mesh.open(layout) as mesh:
        shardwise.load(place, mesh)  # what a first load makes once is not the model's
        time.sleep(0.5)
        before = live_storages()
        model = shardwise.load(place, mesh)
        owned = sum(local_part(value).nbytes for value in (*model.parameters(), *saved_buffers(model)))
        # What is on its way out may be seen once more, as long as gloo's thread waits on a busy machine; what a load
        # leaves is seen each time.
        found = []
        for _ in range(10):
            found.append(live_storages())
            time.sleep(0.1)
        return min(sum(size for address, size in each.items() if address not in before) for each in found) / owned


@pytest.mark.parametrize(("layout", "name"), [("tp2", "mixtral"), ("pp2", "llama tied"), ("pp2.tp2", "phi3")])
def test_each_rank_holds_what_it_owns(checkpoints, layout, name):
    shares = spawn(share_held, 4 if "." in layout else 2, layout, checkpoints / name)
    assert all(1.0 <= share <= 1.05 for share in shares), shares


@pytest.mark.parametrize(
    ("layout", "name"),
    [*(("tp2", name) for name in CHECKPOINTS), ("pp2", "llama tied"), ("pp2", "mixtral"), ("pp2.tp2", "phi3")],
)
def test_each_rank_reads_what_it_owns_and_gets_what_transformers_loads(on_ranks, checkpoints, layout, name):
    assert len(list((checkpoints / name).glob("*.safetensors"))) > 2
    with CheckpointIndex.open(checkpoints / name) as index:
        assert name != "mixtral" or any(".experts.3." in key for key in index), "experts were meant to be kept apart"
    whole = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / name)
    converted = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / name, dtype=torch.float32)
    with torch.no_grad():
        logits = whole(input_ids=torch.arange(12).view(2, 6) + 3).logits.float()
    ranks = on_ranks(load_checkpoint, directory=checkpoints)
    if layout == "pp2":  # a tied weight is on both of the stages that use it
        twice = whole.get_input_embeddings().weight.nbytes if whole.config.tie_word_embeddings else 0
        assert sum(found["owned"] for found in ranks) == sum(each.nbytes for each in whole.parameters()) + twice
    for found in ranks:
        assert 1.0 <= found["share of bytes"] <= 1.05
        assert found["log"] == []
        assert found["state"] == digest(whole.state_dict())
        assert found["float32"] == digest(converted.state_dict())
        assert found["config"] == whole.config.to_dict()
        assert found["generation"] == whole.generation_config.to_dict()
        assert found["class"] == (type(whole).__name__, False, torch.bfloat16, torch.float32, True)
        assert float((found["logits"] - logits).abs().max()) <= 0.05 * float(logits.abs().max())


def load_with_head(layout, directory):
    with shardwise.Mesh.open(layout) as mesh:
        auto_class = transformers.AutoModelForSequenceClassification
        options = {"auto_class": auto_class, "num_labels": 3, "seed": 11}
        with pytest.raises(LoadError, match="20 of 21 tensors fit LlamaForSequenceClassification") as raised:
            shardwise.load(directory, mesh, **options)
        assert "1 not in the checkpoint: score.weight" in str(raised.value)
        model, _, log = load_watched(directory, mesh, **options, allow_missing=["score"])
        state = shardwise.full_state_dict(model)
        batch = {"input_ids": torch.arange(12).view(2, 6) + 3, "labels": torch.tensor([0, 2])}
        result = shardwise.TrainStep(model, mesh)(batch)
        return (
            digest(state),
            digest({"score": model.score.weight}),
            state["score.weight"].std().item(),
            log,
            float(result.loss),
        )


def test_a_base_model_checkpoint_loads_into_a_task_head_alike_for_every_layout(tmp_path):
    base = tiny_model("llama").model
    base.save_pretrained(tmp_path)
    ranks = [rank for size in (1, 2, 4) for rank in spawn(load_with_head, size, f"tp{size}", tmp_path)]
    assert len({states for states, *_ in ranks}) == 1 and len({head for _, head, *_ in ranks}) == 1
    for _, _, deviation, log, loss in ranks:
        assert 0.01 < deviation < 0.03
        assert len(log) == 1 and "score.weight" in log[0] and "newly initialised" in log[0]
        assert loss == pytest.approx(ranks[0][-1], abs=1e-5)


def drop(state, name):
    return {key: value for key, value in state.items() if key != name}


def stray(state):
    return {**drop(state, UP), "model.layers.0.extra.weight": state[UP]}


def swap(state, name, value):
    return {**state, name: value}


UP = "model.layers.1.mlp.up_proj.weight"
# Name -> (what is done to the stored tensors, to the config, options, parts of the error; None: it loads as it was).
UNFIT = {
    "one missing": (lambda s: drop(s, UP), {}, {}, ("20 of 21 tensors fit", f"1 not in the checkpoint: {UP}")),
    "a stray": (stray, {}, {}, ("20 of 21", "1 others of the checkpoint: model.layers.0.extra")),
    "none fit": (
        lambda s: {f"a{number}.b": value for number, value in enumerate(s.values())},
        {},
        {},
        ("0 of 21 tensors fit LlamaForCausalLM", "21 not in the checkpoint: lm_head.weight, model.embed_tokens.weight"),
    ),
    "more layers": (
        dict,
        {"num_hidden_layers": 3},
        {},
        ("21 of 30", "9 not in the checkpoint: model.layers.2.input_layernorm"),
    ),
    "fewer layers": (
        dict,
        {"num_hidden_layers": 1},
        {},
        ("12 of 12 tensors fit", "9 of layers that the model does not have: model.layers.1.input_layernorm"),
    ),
    "tied apart": (
        dict,
        {"tie_word_embeddings": True},
        {},
        ("differ in the checkpoint, but the model ties them", "tie_word_embeddings=False"),
    ),
    "integers": (
        lambda s: swap(s, UP, s[UP].int()),
        {},
        {},
        ("20 of 21", f"1 of another kind: {UP}: torch.int32 in the checkpoint, torch.float32 in the model"),
    ),
    **{
        f"float8, {scale}": (
            lambda s, scale=scale: swap(swap(s, UP, s[UP].to(torch.float8_e4m3fn)), scale, torch.ones(1, 1)),
            {},
            {},
            ("float8", "scale", "quantized", "load the checkpoint it was quantized from"),
        )
        for scale in (f"{UP}_scale_inv", f"{UP}_scale", UP.replace("weight", "scale_weight"))
    },
    "shape": (
        dict,
        {"intermediate_size": 100},
        {},
        ("15 of 21", "6 of another shape: ", "mlp.up_proj.weight: [96, 64] in the checkpoint, [100, 64] in the model"),
    ),
    "module.": (lambda s: {f"module.{key}": value for key, value in s.items()}, {}, {}, None),
    "nested prefixes": (lambda s: {f"module._orig_mod.{key}": value for key, value in s.items()}, {}, {}, None),
    "Lightning": (lambda s: {f"model.{key}": value for key, value in s.items()}, {}, {}, None),
}
ALLOWED = {
    "one missing": ({"allow_missing": True}, f"1 not in the checkpoint and newly initialised: {UP}"),
    "a stray": ({"allow_missing": ["model.layers.*.mlp"]}, "extra.weight"),
    "fewer layers": ({"allow_unused": True}, "9 in the checkpoint but not in the model"),
    "shape": ({"ignore_mismatched_sizes": True}, "6 of another shape in the checkpoint and newly initialised"),
}


def write_unfit(directory):
    whole = tiny_model("llama")
    for name, (change, config, _, _) in UNFIT.items():
        whole.save_pretrained(directory / name)
        path = directory / name / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})
        values = json.loads((directory / name / "config.json").read_text()) | config
        (directory / name / "config.json").write_text(json.dumps(values))
    return digest(whole.state_dict())


def load_unfit(layout, directory):
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        for name, (_, _, options, _) in UNFIT.items():
            try:
                model = shardwise.load(directory / name, mesh, **options)
                found[name] = digest(shardwise.full_state_dict(model))
            except shardwise.ShardwiseError as error:
                found[name] = str(error)
        logs = {}
        for name, (options, _) in ALLOWED.items():
            model, _, log = load_watched(directory / name, mesh, **options)
            assert not any(value.is_meta or value.isnan().any() for value in model.parameters())
            logs[name] = "\n".join(log)
        return found, logs


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    """What two ranks made of every case, and the digest of the unsplit model."""
    directory = tmp_path_factory.mktemp("unfit")
    expected = write_unfit(directory)
    first, second = spawn(load_unfit, 2, "tp2", directory)
    assert first == second
    return *first, expected


@pytest.mark.parametrize("name", UNFIT)
def test_a_checkpoint_that_does_not_cover_the_model_is_an_error(unfit, name):
    found, _, expected = unfit
    parts = UNFIT[name][-1]
    if parts is None:
        assert found[name] == expected
    else:
        assert [part for part in parts if part not in found[name]] == [], found[name]


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_to_be_missing_is_logged(unfit, name):
    assert ALLOWED[name][1] in unfit[1][name]


RANDOM = ("llama", "mixtral", "gemma3_text", "phi3", "deepseek_v3", "gpt_neox")


def initialise(mesh, family, seeds=(0, 1)):
    """Digests of what seeds give."""
    values = {**COMMON, **FAMILIES[family], "num_hidden_layers": 1, "tie_word_embeddings": family == "gemma3_text"}
    config = transformers.AutoConfig.for_model(family, **values)
    before = config.to_dict()
    torch.manual_seed(mesh.rank)  # must not matter
    stream = torch.get_rng_state()
    states = [shardwise.full_state_dict(shardwise.load(config, mesh, seed=seed)) for seed in seeds]
    assert torch.equal(torch.get_rng_state(), stream), "loading drew from the caller's stream"
    assert config.to_dict() == before
    with torch.device("meta"):
        expected = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    shapes = {name: value.shape for name, value in expected.items()}
    assert {name: value.shape for name, value in states[0].items()} == shapes
    assert 0.015 < float(states[0][next(iter(states[0]))].std()) < 0.025
    return [digest(state) for state in states]


@pytest.mark.parametrize(
    ("layout", "family"),
    [*(("tp2", family) for family in RANDOM), *(("tp4", family) for family in ("mixtral", "phi3"))],
)
def test_random_values_depend_on_the_seed_alone(on_ranks, layout, family):
    with shardwise.Mesh.open("tp1") as mesh:
        first, again, other = initialise(mesh, family, seeds=(0, 0, 1))
    assert first == again != other
    assert all(found == [first, other] for found in on_ranks(initialise))


def load_by_plan(layout, directory):
    with shardwise.Mesh.open(layout) as mesh:
        plan = {"**.layers.*.mlp.*": "replicate", "model.embed_tokens": "embedding_colwise", "lm_head": "replicate"}
        model, nbytes, _ = load_watched(directory, mesh, plan=plan, sequence_parallel=True)
        split = sorted(name for name, entry in registry_of(model).entries.items() if entry.split is not None)
        owned = sum(value.nbytes for value in model.parameters())
        batch = tiny_batch(model)
        with torch.no_grad():
            loss = float(model(**batch).loss)
        return split, nbytes / owned, digest(shardwise.full_state_dict(model)), loss


def test_a_plan_of_the_users_own_decides_what_is_read(tmp_path):
    whole = tiny_model("llama", num_hidden_layers=1, num_key_value_heads=4)
    whole.save_pretrained(tmp_path)
    with torch.no_grad():
        loss = float(whole(**tiny_batch(whole)).loss)
    attention = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "koqv"]
    for split, share, state, found in spawn(load_by_plan, 2, "tp2", tmp_path):
        assert split == ["model.embed_tokens.weight", *attention]
        assert 1.0 <= share <= 1.05
        assert state == digest(whole.state_dict())
        assert found == pytest.approx(loss, abs=1e-5)
