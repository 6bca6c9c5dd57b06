"""TRL's trainers on split models against plain TRL in one process."""

from __future__ import annotations

import copy
import functools
import random
import tempfile

import datasets
import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

import shardwise
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.trainer import adapt
from tests.trainer.modules import arguments, build

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


def make(trainer, kind, model, directory, *, data_size=1, beside=None, **options):
    config = trainer_of(kind)[1]
    given = arguments(directory, data_size, kind=config, **options_of(kind, **options))
    return trainer(model=model, args=given, train_dataset=rows(kind), processing_class=tokenizer(), **(beside or {}))


@functools.cache
def unsplit_run(family, kind, accumulation, options):
    with tempfile.TemporaryDirectory() as directory:
        model = build(family)
        beside = {"ref_model": copy.deepcopy(model)} if kind in ("dpo", "kto") else {}
        chosen = {"gradient_accumulation_steps": accumulation, **dict(options)}
        run = make(trainer_of(kind)[0], kind, model, directory, beside=beside, **chosen)
        run.train()
    return log(run), {name: value.detach().clone() for name, value in run.model.state_dict().items()}


def train(mesh, family, kind, accumulation, options, directory, sp):
    model = build(family)
    beside = {"ref_model": copy.deepcopy(model)} if kind in ("dpo", "kto") else {}
    split = shardwise.parallelize(model, mesh, sequence_parallel=sp)
    chosen = {"gradient_accumulation_steps": accumulation, **dict(options)}
    trainer = adapt(trainer_of(kind)[0])
    run = make(trainer, kind, split, directory, data_size=mesh.data_size, beside=beside, **chosen)
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


CASES = [
    ("llama", "padded", "tp2", 3, ()),
    ("llama", "dpo", "tp2", 1, ()),
    ("llama", "packed", "fsdp2", 1, ()),
]


@pytest.mark.parametrize(("family", "kind", "layout", "accumulation", "options"), CASES)
def test_steps_are_those_of_one_process(on_ranks, tmp_path, family, kind, layout, accumulation, options):
    """The last batch has a single row."""
    found = on_ranks(train, directory=str(tmp_path), layout=layout.removesuffix("+sp"), sp=layout.endswith("+sp"))
    check(found, unsplit_run(family, kind, accumulation, options))
