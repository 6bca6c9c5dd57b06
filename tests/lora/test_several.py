"""Adapters on ranks: their files, several of them, and what is refused."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import shardwise
from shardwise.errors import ConfigError, LoadError, UnsupportedError
from tests.families import FULL_PRODUCT, tiny_batch, tiny_model
from tests.lora.test_product import add_second, batch_of, with_lora
from tests.oracle import differing, differing_gradients

# peft warns of attributes that transformers has renamed, and of layers that are tied.
pytestmark = [pytest.mark.spawn, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A base, and an adapter that plain PEFT trained for it."""
    place = tmp_path_factory.mktemp("lora")
    model = tiny_model("gpt2", tied=True, vocab_size=2048)  # large enough to be mapped
    model.save_pretrained(place / "base")
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], init_lora_weights=False, lora_alpha=3)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(place / "adapter")
    wrapped.merge_and_unload().save_pretrained(place / "merged")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(tiny_model("gpt2"), prompts).save_pretrained(place / "prompts")
    return place


def exchange_files(mesh, layout, place):
    """An adapter loaded, and written in every mode; rank 0 compares with what PEFT reads and writes."""
    place, out = Path(place), Path(place) / f"out-{mesh.shape}"
    model = shardwise.load(place / "base", mesh, adapter=place / "adapter")
    for mode in ("only", "with_base", "merged"):
        shards = {"max_shard_bytes": 100_000} if mode == "merged" else {}  # of which every rank writes some
        shardwise.export_pretrained(model, out / mode, adapter=mode, **shards)
    fail_alone(model, mesh, out)
    free = model(**tiny_batch(model)).loss.detach()
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(place / "base", attn_implementation="eager"), out / "only"
    )
    problems = differing("loss", free, theirs(**tiny_batch(theirs)).loss.detach(), 1e-5)
    problems += [
        f"{mode} of {file}"
        for mode, file, other in (
            ("only", "adapter_model.safetensors", place / "adapter"),
            ("with_base", "adapter/adapter_model.safetensors", place),
            ("with_base", "model.safetensors", place / "base"),
        )
        if not equal_files(out / mode / file, other / file)
    ]
    files = sorted((out / "merged").glob("model-*.safetensors"))
    problems += ["one file"] if len(files) < 3 else []
    merged, expected = {}, load_file(place / "merged" / "model.safetensors")
    for path in files:
        merged |= load_file(path)
    for name, value in expected.items():
        problems += differing(name, merged[name], value, 1e-6)
    return problems + sorted(set(merged) ^ set(expected))


def fail_alone(model, mesh, out):
    """One rank cannot compute what it is to write: all raise its error, and nobody waits."""
    kind = next(type(each) for each in model.modules() if hasattr(each, "get_delta_weight"))
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            patch.setattr(kind, "get_delta_weight", no_room)
        with pytest.raises(LoadError, match="no room"):
            shardwise.export_pretrained(model, out / "failed", adapter="merged", max_shard_bytes=100_000)


def no_room(*_):
    raise MemoryError("no room")


def equal_files(one, other):
    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def start_adapter(mesh, layout, place):
    """What is wrong with an adapter that starts at random values, and with further ones."""
    base = Path(place) / "base"
    config = peft.LoraConfig(r=4, target_modules="all-linear", modules_to_save=["ln_f"])
    model = shardwise.load(base, mesh, adapter=config)
    state, plain = shardwise.full_state_dict(model), shardwise.full_state_dict(shardwise.load(base, mesh))
    problems = []
    for name, value in state.items():
        own = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace("original_module.", "")
        own = own.replace("modules_to_save.default.", "")
        if ".lora_A." in name and not 0 < float(value.abs().max()) <= 1:
            problems.append(f"{name} is no A")
        elif ".lora_B." in name and value.any():
            problems.append(f"{name} does not start at zero")
        elif ".lora_" not in name and not torch.equal(value, plain[own]):
            problems.append(f"{name} is not {own}")
    where = {name: value.data_ptr() for name, value in model.named_parameters() if not value.requires_grad}
    shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    problems += [f"{name} was copied" for name, place in where.items() if model.get_parameter(name).data_ptr() != place]
    return problems, {name: float(value.sum()) for name, value in state.items() if ".lora_A." in name}


SECOND = ["q_proj", "o_proj", "down_proj"]


def use_adapters(mesh, layout, place):
    """What differs from PEFT unsplit as adapters are added, switched, merged and taken out again."""
    full = with_lora("llama", target_modules=["q_proj", "o_proj", "down_proj"])
    if mesh.size("pp") > 1:
        add_second(full, SECOND)
    split = shardwise.parallelize(copy.deepcopy(full), mesh)
    batch = batch_of(full)
    problems = []

    def compare(what):
        nonlocal problems
        problems += differing(what, split(**batch).loss.detach(), full(**batch).loss.detach(), 1e-5)

    for model in (full, split):
        if mesh.size("pp") == 1:
            add_second(model, SECOND)
        model.set_adapter("two")
    compare("the second adapter")
    for model in (full, split):
        model(**batch).loss.backward()
    expected = {name: value.grad for name, value in full.named_parameters() if value.grad is not None}
    problems += differing_gradients(shardwise.full_gradients(split), expected)
    if mesh.data_size > 1:
        with pytest.raises(UnsupportedError, match="merging adapters into .* that FSDP2 holds"):
            split.merge_adapter()
    else:
        before = shardwise.full_state_dict(split)
        for _ in range(20):
            split.merge_adapter()
            split.unmerge_adapter()
        after = shardwise.full_state_dict(split)
        problems += [f"{name} drifted" for name, value in after.items() if not torch.equal(value, before[name])]
        for model in (full, split):
            model.merge_adapter()
        compare("merged")
        for model in (full, split):
            model.unmerge_adapter()
    for model in (full, split):
        model.set_adapter("default")
    compare("the first adapter")
    with full.disable_adapter(), split.disable_adapter():
        compare("the base")
    if mesh.size("pp") > 1:
        with pytest.raises(UnsupportedError, match="after the model was cut into stages"):
            add_second(split, SECOND, "three")
    else:
        own = Path(place) / f"two-{layout}-{mesh.rank}"
        full.save_pretrained(own, selected_adapters=["two"])
        for model in (full, split, split):  # the last time over one of that name, in place of PEFT's hotswap_adapter
            for name, value in model.named_parameters():
                if ".loaded." in name:
                    value.data.zero_()
            model.load_adapter(own / "two", "loaded")
            model.set_adapter("loaded")
        compare("an adapter that was loaded")
    for model in (full, split) if layout == "tp2" else ():
        model.add_weighted_adapter(["two", "loaded"], [0.7, 0.4], "both", combination_type="linear")
        model.set_adapter("both")
    compare("adapters combined")
    with pytest.raises(UnsupportedError, match="adapters combined by 'svd' in a model that is split over"):
        split.add_weighted_adapter(["two", "default"], [0.7, 0.4], "more")
    for each in (split, split.get_base_model()):
        with pytest.raises(UnsupportedError, match=r"(?s)save_pretrained .*on every rank"):
            each.save_pretrained(place)
    for model in (full, split):  # of what FSDP2 has gathered, and not freed, for a forward without backward
        model.set_adapter("default")
        model.zero_grad()
        model(**batch).loss.backward()
    expected = {name: value.grad for name, value in full.named_parameters() if value.grad is not None}
    problems += differing_gradients(shardwise.full_gradients(split), expected)
    return problems + train_both(full, split, batch)


def train_both(full, split, batch):
    """Two adapters trained at once, beside forwards of the base alone as in training on preferences; one leaves."""
    for model in (full, split):
        model.zero_grad()
        model.base_model.set_adapter(["default", "two"])
        with torch.no_grad(), model.disable_adapter():
            base = model(**batch).loss
        (model(**batch).loss - base).backward()
        with torch.no_grad(), model.disable_adapter():
            model(**batch)
    expected = {name: value.grad for name, value in full.named_parameters() if value.grad is not None}
    problems = differing_gradients(shardwise.full_gradients(split), expected)
    problems += [] if {name.split(".")[-2] for name in expected} == {"default", "two"} else [f"of {sorted(expected)}"]
    for model in (full, split):
        model.delete_adapter("two")
    assert shardwise.full_state_dict(split).keys() == full.state_dict().keys()
    return problems + differing("one that stays", split(**batch).loss.detach(), full(**batch).loss.detach(), 1e-5)


def on_shared_ranks(mesh, layout, place, what):
    if what == STARTS:
        return start_adapter(mesh, layout, place)
    if what == FILES:
        return exchange_files(mesh, layout, place), None
    return use_adapters(mesh, layout, place), None


FILES = "files are PEFT's both ways"
STARTS = "an adapter starts alike in every layout, and leaves the base in its file"
USES = "adapters are added, switched, merged and restored"


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        ("tp2", FILES),
        *((layout, what) for layout in ("tp2", "fsdp2", "pp2") for what in (STARTS, USES)),
        *[("pp2", FILES)] * FULL_PRODUCT,
        *[("fsdp2.tp2", what) for what in (FILES, STARTS, USES)] * FULL_PRODUCT,
    ],
)
def test_adapters_in_every_layout(on_ranks, checkpoints, layout, what):
    found = on_ranks(on_shared_ranks, place=str(checkpoints))
    assert not any(problems for problems, _ in found), found[0][0]
    if what == STARTS:
        with shardwise.Mesh.open("tp1") as mesh:
            assert found[0] == start_adapter(mesh, "tp1", str(checkpoints))


def refuse(mesh, place):
    base, texts = Path(place) / "base", []
    other = Path(place) / f"other-{mesh.rank}"
    peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(other)
    ranked = Path(place) / f"ranked-{mesh.rank}"
    shutil.copytree(Path(place) / "adapter", ranked)
    config = json.loads((ranked / "adapter_config.json").read_text()) | {"r": 8}
    (ranked / "adapter_config.json").write_text(json.dumps(config))
    for adapter, kind in (
        (peft.LoraConfig(target_modules=["nothing"]), ConfigError),
        (peft.LoraConfig(target_modules=["c_attn"], init_lora_weights="pissa"), UnsupportedError),
        (peft.LoraConfig(target_modules=["c_attn"], use_dora=True), UnsupportedError),
        (peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), UnsupportedError),
        (Path(place) / "prompts", UnsupportedError),
        (3, ConfigError),
        (base, LoadError),
        (other, ConfigError),
        (ranked, LoadError),
    ):
        with pytest.raises(kind) as raised:
            shardwise.load(base, mesh, adapter=adapter)
        texts.append(str(raised.value))
    model = shardwise.load(base, mesh, adapter=Path(place) / "adapter")
    plain = shardwise.load(base, mesh)
    calls = [
        lambda: shardwise.export_pretrained(model, place, adapter="megred"),
        lambda: shardwise.export_pretrained(plain, place, adapter="merged"),
        model.merge_and_unload,
    ]
    for call in calls:
        with pytest.raises((ConfigError, UnsupportedError)) as raised:
            call()
        texts.append(str(raised.value))
    with model.disable_adapter(), pytest.raises(ConfigError) as raised:
        shardwise.export_pretrained(model, place, adapter="merged")
    return [*texts, str(raised.value)]


@pytest.mark.parametrize("layout", ["tp2"])
def test_bad_adapters_are_refused_on_every_rank_alike(on_ranks, checkpoints, layout):
    found = on_ranks(refuse, place=str(checkpoints))
    expected = [
        "the adapter does not fit GPT2LMHeadModel",
        "init_lora_weights='pissa'",
        "use_dora",
        *["prompts (P_TUNING)", "prompts (PROMPT_TUNING)"],
        "an adapter cannot be a int",
        "has no adapter_config.json",
        "does not fit GPT2LMHeadModel",
        "does not fit the model",
        "did you mean 'merged'",
        "it has no adapters",
        'adapter="merged"',
        "switched off",
    ]
    for texts in found:
        for text, part in zip(texts, expected, strict=True):
            assert part in text
