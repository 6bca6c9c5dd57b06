"""Models, rows and Trainers of these tests, and what plain transformers makes of them in one process."""

from __future__ import annotations

import functools
import tempfile

import torch
import transformers
from torch.utils.data import Dataset

import shardwise
from shardwise.trainer import Seq2SeqTrainer, Trainer


class Over(transformers.LlamaForCausalLM):
    """A user's own, whose loss is computed by the class above."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 96, **SIZES}
T5 = {"vocab_size": 96, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
    "over": lambda: transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**TEXT, num_key_value_heads=2, head_dim=8),
    "phi3": lambda: transformers.Phi3Config(**TEXT, num_key_value_heads=2, pad_token_id=0),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mixtral": lambda: transformers.MixtralConfig(
        **TEXT, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
    "decoder": lambda: transformers.LlamaConfig(**TEXT, num_key_value_heads=2, num_labels=3, pad_token_id=0),
    "numbers": lambda: transformers.LlamaConfig(**TEXT, num_key_value_heads=2, num_labels=1, pad_token_id=0),
    "several": lambda: transformers.LlamaConfig(**TEXT, num_key_value_heads=2, num_labels=3, pad_token_id=0),
    "tokens": lambda: transformers.LlamaConfig(**TEXT, num_key_value_heads=2, num_labels=3, classifier_dropout=0.0),
    "bert": lambda: transformers.BertConfig(**TEXT, num_labels=3),
    "vit": lambda: transformers.ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=3),
    "t5": lambda: transformers.T5Config(**T5, decoder_start_token_id=0, pad_token_id=0),
}
CLASSES = {
    "over": Over,
    "decoder": transformers.LlamaForSequenceClassification,
    "numbers": transformers.LlamaForSequenceClassification,
    "several": transformers.LlamaForSequenceClassification,
    "tokens": transformers.LlamaForTokenClassification,
    "bert": transformers.BertForSequenceClassification,
    "vit": transformers.ViTForImageClassification,
    "t5": transformers.T5ForConditionalGeneration,
}
STEPS = 20


def build(family, dropout=0.0):
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name in vars(config):
        if "dropout" in name and isinstance(getattr(config, name), float):
            setattr(config, name, dropout)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, dropout)
    kind = CLASSES.get(family)
    return transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)


class Rows(Dataset):
    """Random rows, with fewer targets in some than in others, and one without any."""

    def __init__(self, family, number):
        generator = torch.Generator().manual_seed(1)
        self.family, self.number = family, number
        self.ids = torch.randint(3, 96, (number, 10), generator=generator)
        self.classes = torch.randint(0, 3, (number,), generator=generator)
        self.pixels = torch.randn(number, 3, 16, 16, generator=generator)

    def __len__(self):
        return self.number

    def __getitem__(self, row):
        if self.family == "vit":
            return {"pixel_values": self.pixels[row], "labels": self.classes[row]}
        if self.family in ("bert", "decoder"):
            return {"input_ids": self.ids[row], "labels": self.classes[row]}
        if self.family == "numbers":
            return {"input_ids": self.ids[row], "labels": self.pixels[row, 0, 0, 0]}
        if self.family == "several":
            return {"input_ids": self.ids[row], "labels": (self.pixels[row, 0, 0, :3] > 0).float()}
        labels = self.ids[row].clone()
        labels = labels % 3 if self.family == "tokens" else labels
        labels[: 10 if row == 4 else (row * 3) % 7] = -100
        return {"input_ids": self.ids[row].flip(0) if self.family == "t5" else self.ids[row], "labels": labels}


def arguments(directory, data_size=1, *, rows=4, kind=transformers.TrainingArguments, **options):
    """Of batches with `rows` rows of all data ranks together."""
    chosen = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3} | options
    each = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), rows // data_size)
    return kind(
        str(directory),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        adam_epsilon=1e-6,
        weight_decay=0.1,
        **each,
        **chosen,
    )


def curve(trainer):
    """Losses and norms of every step."""
    return [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]


def classes_of(family, ours):
    if family == "t5":
        return Seq2SeqTrainer if ours else transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments
    return Trainer if ours else transformers.Trainer, transformers.TrainingArguments


def split_trainer(mesh, family, directory, *, num_rows=13, split=None, dropout=0.0, beside=None, **options):
    """A Trainer of ours with a model that is split over `mesh`."""
    trainer, kind = classes_of(family, ours=True)
    model = shardwise.parallelize(build(family, dropout), mesh, **(split or {}))
    given = arguments(directory, mesh.data_size, kind=kind, **options)
    return trainer(model, given, train_dataset=Rows(family, num_rows), **(beside or {}))


@functools.cache
def unsplit_run(family, accumulation=1, num_rows=13):
    """Losses, norms and parameters of plain transformers in one process."""
    trainer, kind = classes_of(family, ours=False)
    with tempfile.TemporaryDirectory() as directory:
        given = arguments(directory, kind=kind, gradient_accumulation_steps=accumulation)
        run = trainer(build(family), given, train_dataset=Rows(family, num_rows))
        run.train()
    return curve(run), {name: value.detach().clone() for name, value in run.model.state_dict().items()}
