"""TRL's trainers on split models against plain TRL in one process."""

from __future__ import annotations

import copy
import functools
import random
import tempfile

import datasets
import peft
import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

import shardwise
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.trainer import adapt
from tests.trainer.modules import CONFIGS, arguments, build

pytestmark = [
    pytest.mark.spawn,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # TRL and PEFT ask for it
]

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}[user] {{ m.content }} {% else %}[model] "
    "{% generation %}{{ m.content }} [end] {% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[model] {% endif %}"
)
STEPS = 6
KINDS = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}


def tokenizer():
    words = ["[pad]", "[end]", "[user]", "[model]", *(f"w{number}" for number in range(92))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="[end]", pad_token="[pad]", chat_template=TEMPLATE
    )


def rows(kind):
    """Texts of random words, as many as leave one row for the last batch of four."""
    draw = random.Random(0)

    def text(most=9):
        return " ".join(f"w{draw.randrange(92)}" for _ in range(draw.randint(2, most)))

    def row(number):
        if kind in ("padded", "packed"):
            return {"text": text()}
        if kind == "assistant":
            turns = [{"role": role, "content": text()} for role in ("user", "assistant") * draw.randint(1, 2)]
            return {"messages": turns}
        if kind == "completion":
            return {"prompt": text() + " ", "completion": text()}
        if kind == "kto":
            return {"prompt": text() + " ", "completion": text(), "label": number % 3 > 0}
        return {"prompt": text() + " ", "chosen": text(), "rejected": text()}

    return datasets.Dataset.from_list([row(number) for number in range(39 if kind == "packed" else 13)])


def trainer_of(kind):
    name = KINDS.get(kind, "SFT")
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def options_of(kind, steps=STEPS, **options):
    chosen = {"max_steps": steps, "bf16": False, "gradient_checkpointing": False} | options
    special = {"packed": {"packing": True, "max_length": 16}, "assistant": {"assistant_only_loss": True}}
    return chosen | special.get(kind, {})


def log(run):
    """What TRL logs of every step."""
    without = {"epoch", "learning_rate", "step"}
    entries = [each for each in run.state.log_history if "loss" in each]
    return [{name: value for name, value in each.items() if name not in without} for each in entries]


def model_of(family, kind):
    if kind != "reward":
        return build(family)
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.num_labels, config.pad_token_id = 1, 0
    return transformers.AutoModelForSequenceClassification.from_config(config)


def make(trainer, kind, model, directory, *, data_size=1, beside=None, **options):
    config = trainer_of(kind)[1]
    given = arguments(directory, data_size, kind=config, **options_of(kind, **options))
    return trainer(model=model, args=given, train_dataset=rows(kind), processing_class=tokenizer(), **(beside or {}))


@functools.cache
def unsplit_run(family, kind, accumulation, options):
    with tempfile.TemporaryDirectory() as directory:
        model = model_of(family, kind)
        beside = {"ref_model": copy.deepcopy(model)} if kind in ("dpo", "kto") else {}
        chosen = {"gradient_accumulation_steps": accumulation, **dict(options)}
        run = make(trainer_of(kind)[0], kind, model, directory, beside=beside, **chosen)
        run.train()
    return log(run), {name: value.detach().clone() for name, value in run.model.state_dict().items()}


def train(mesh, family, kind, accumulation, options, directory, sp):
    model = model_of(family, kind)
    beside = {"ref_model": copy.deepcopy(model)} if kind in ("dpo", "kto") else {}
    if family == "mixtral":  # else no stage of a pipeline sends them
        model.config.output_router_logits = mesh.size("pp") > 1
    split = shardwise.parallelize(model, mesh, sequence_parallel=sp)
    chosen = {"gradient_accumulation_steps": accumulation, **dict(options)}
    trainer = adapt(trainer_of(kind)[0])
    size = 1 if "accelerator_config" in chosen else mesh.data_size
    run = make(trainer, kind, split, directory, data_size=size, beside=beside, **chosen)
    run.train()
    assert not find_unequal_replicas(run.model)
    return log(run), shardwise.full_state_dict(run.model, rank0_only=True)


def check(found, wanted):
    """That ranks log alike, and as one process."""
    (entries, own), *others = found
    expected, state = wanted
    assert all(each == entries for each, _ in others), "ranks log the same"
    assert len(entries) == len(expected)
    for entry, each in zip(entries, expected, strict=True):
        assert entry.keys() == each.keys()
        assert entry.pop("grad_norm") == pytest.approx(each["grad_norm"], rel=1e-5)
        for name, value in entry.items():
            assert value == pytest.approx(each[name], abs=1e-5, rel=1e-5), name
    for name, value in state.items():
        torch.testing.assert_close(own[name], value, atol=1e-5, rtol=0, msg=name)


LAYOUTS = ["tp2", "tp2+sp", "fsdp2", "ddp2", "fsdp2.tp2", "pp2"]
FAMILIES = ["llama", "gemma3", "qwen3", "mixtral"]
# Every layout with every kind and every family, and every kind with every family.
CASES = [
    (FAMILIES[(row + column) % 4], kind, layout, 1 + 2 * ((row + column // 2) % 2))
    for row, layout in enumerate(LAYOUTS)
    for column, kind in enumerate(["padded", "packed", "completion", "assistant", "dpo"])
]


@pytest.mark.parametrize(("family", "kind", "layout", "accumulation"), CASES)
def test_steps_are_those_of_one_process(on_ranks, tmp_path, family, kind, layout, accumulation):
    """The last batch has a single row, of packed rows three."""
    # Experts are balanced over the rows of a rank, so that another number of ranks has another loss.
    options = (("router_aux_loss_coef", 0.0),) if family == "mixtral" and "d" in layout else ()
    layout, _, suffix = layout.partition("+")
    found = on_ranks(train, layout=layout, directory=str(tmp_path), options=options, sp=bool(suffix))
    check(found, unsplit_run(family, kind, accumulation, options))


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind in ("kto", "reward") for layout in ("tp2", "fsdp2")]
)
def test_kto_and_reward_models(on_ranks, tmp_path, kind, layout):
    # KTO mixes the answers of a batch, so that ranks must be given the batches of one process.
    options = (("accelerator_config", {"split_batches": True}),) if kind == "kto" and layout == "fsdp2" else ()
    chosen = {"family": "qwen3", "kind": kind, "accumulation": 1, "options": options, "sp": False}
    check(on_ranks(train, directory=str(tmp_path), **chosen), unsplit_run("qwen3", kind, 1, ()))


LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def train_adapter(mesh, kind, directory, saved, source):
    """From an unsplit model or its directory, with an adapter that the Trainer is asked for."""
    adapter = peft.LoraConfig(**LORA, modules_to_save=["lm_head"] if saved else None)
    beside = {"layout": str(mesh.shape), "peft_config": adapter}
    run = make(
        adapt(trainer_of(kind)[0]), kind, source or build("llama"), directory, data_size=mesh.data_size, beside=beside
    )
    run.train()
    return log(run), shardwise.full_state_dict(run.model)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", ["padded", "dpo"])
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_adapters(on_ranks, tmp_path, kind, layout, saved):
    adapter = peft.LoraConfig(**LORA, modules_to_save=["lm_head"] if saved else None)
    run = make(trainer_of(kind)[0], kind, build("llama"), str(tmp_path / "one"), beside={"peft_config": adapter})
    run.train()
    state = {name: value for name, value in run.model.state_dict().items()}
    check(on_ranks(train_adapter, directory=str(tmp_path), source=None), (log(run), state))


def train_from_files(mesh, kind, directory, source):
    run = make(
        adapt(trainer_of(kind)[0]),
        kind,
        source,
        directory,
        data_size=mesh.data_size,
        beside={"layout": str(mesh.shape)},
    )
    if kind == "dpo":
        assert sum(each.numel() for each in run.ref_model.parameters()) < 0.6 * count(build("llama"))
    run.train()
    found = run.evaluate(rows(kind))
    return (
        log(run),
        shardwise.full_state_dict(run.model),
        {name: value for name, value in found.items() if "_per_" not in name},
    )


def count(model):
    return sum(each.numel() for each in model.parameters())
