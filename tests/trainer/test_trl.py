"""TRL's trainers on split models against plain TRL in one process."""

from __future__ import annotations

import copy
import functools
import math
import random
import tempfile

import datasets
import peft
import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.loss import cross_entropy
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.trainer import adapt
from tests.families import FULL_PRODUCT
from tests.train.test_images import MODELS
from tests.trainer.modules import CONFIGS, SIZES, arguments, build
from tests.trainer.test_trl_head import Largest

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
    """Texts of random words, as many as leave one row for the last batch of four, or three."""
    draw = random.Random(0)

    def text(most=9):
        return " ".join(f"w{draw.randrange(92)}" for _ in range(draw.randint(2, most)))

    def row(number):
        if kind in ("padded", "packed", "long"):
            return {"text": text(most=30 if kind == "long" else 9)}
        if kind == "assistant":
            turns = [{"role": role, "content": text()} for role in ("user", "assistant") * draw.randint(1, 2)]
            return {"messages": turns}
        if kind == "completion":
            return {"prompt": text() + " ", "completion": text()}
        if kind == "kto":
            return {"prompt": text() + " ", "completion": text(), "label": number % 3 > 0}
        made = {"prompt": text() + " ", "chosen": text(), "rejected": text()}
        return made | {"margin": draw.random()} if kind == "reward" else made

    return datasets.Dataset.from_list([row(number) for number in range({"packed": 48, "reward": 19}.get(kind, 17))])


def trainer_of(kind):
    name = KINDS.get(kind, "SFT")
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def options_of(kind, steps=STEPS, **options):
    chosen = {"max_steps": steps, "bf16": False, "gradient_checkpointing": False} | options
    special = {"packed": {"packing": True, "max_length": 16}, "assistant": {"assistant_only_loss": True}}
    counts = {"include_num_input_tokens_seen": "non_padding"} if kind in ("dpo", "reward") else {}
    return chosen | counts | special.get(kind, {})


def log(run):
    """What TRL logs of every step."""
    without = {"epoch", "learning_rate", "step", "train_runtime"}
    entries = [each for each in run.state.log_history if "loss" in each]
    return [
        {name: value for name, value in each.items() if name not in without and "per_second" not in name}
        for each in entries
    ]


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


def check(found, wanted, besides=()):
    """That ranks log alike, and as one process, but for what is named in `besides`."""
    (entries, own), *others = found
    expected, state = wanted
    assert all(each == entries for each, _ in others), "ranks log the same"
    assert len(entries) == len(expected)
    for entry, each in zip(entries, expected, strict=True):
        assert entry.keys() == each.keys()
        assert entry.pop("grad_norm") == pytest.approx(each["grad_norm"], rel=1e-5)
        for name, value in entry.items():
            assert name in besides or value == pytest.approx(each[name], abs=1e-5, rel=1e-5), name
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
CHOSEN = [CASES[number] for number in (0, 7, 13, 16, 22, 29)]
"""Every layout, kind, family and accumulation at least once."""
MORE = [
    (family, kind, layout, accumulation)
    for family in (*FAMILIES, "phi3", "gpt2")
    for kind, accumulation in (("padded", 3), ("dpo", 1))
    for layout in (*LAYOUTS, "pp2.tp2")
]


@pytest.mark.parametrize(
    ("family", "kind", "layout", "accumulation"), dict.fromkeys((*CASES, *MORE)) if FULL_PRODUCT else CHOSEN
)
def test_steps_are_those_of_one_process(on_ranks, tmp_path, family, kind, layout, accumulation):
    """The last batch has a single row, of packed rows three."""
    # Experts are balanced over the rows of a rank, so that another number of ranks has another loss.
    options = (("router_aux_loss_coef", 0.0),) if family == "mixtral" and "d" in layout else ()
    layout, _, suffix = layout.partition("+")
    found = on_ranks(train, layout=layout, directory=str(tmp_path), options=options, sp=bool(suffix))
    check(found, unsplit_run(family, kind, accumulation, options))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("kto", "fsdp2"), ("reward", "tp2"), *[("kto", "tp2"), ("kto", "pp2"), ("reward", "fsdp2")] * FULL_PRODUCT],
)
def test_kto_and_reward_models(on_ranks, tmp_path, kind, layout):
    # KTO mixes the answers of a batch, so that ranks must be given the batches of one process.
    options = (("accelerator_config", {"split_batches": True}),) if kind == "kto" and layout == "fsdp2" else ()
    chosen = {"family": "qwen3", "kind": kind, "accumulation": 1, "options": options, "sp": False}
    # Of these TRL takes the mean over the data ranks, one of which has two rows of the last batch, and the other one.
    besides = ("accuracy", "margin") if (kind, layout) == ("reward", "fsdp2") else ()
    check(on_ranks(train, directory=str(tmp_path), **chosen), unsplit_run("qwen3", kind, 1, ()), besides)


@pytest.mark.parametrize(("kind", "layout"), [("dpo", "tp2"), *[("kto", "tp2"), ("dpo", "pp2")] * FULL_PRODUCT])
def test_references_in_bfloat16(on_ranks, tmp_path, kind, layout):
    """As TRL has it by default: accelerate puts autocast around the reference's fused head."""
    chosen = {"family": "llama", "accumulation": 1, "options": (("bf16", True),)}
    wanted, _ = unsplit_run(kind=kind, **chosen)
    for found, _ in on_ranks(train, directory=str(tmp_path), sp=False, **chosen):
        losses = [each["loss"] for each in found]
        assert losses == pytest.approx([each["loss"] for each in wanted], abs=1e-3)


LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def lora(saved):
    return peft.LoraConfig(**LORA, modules_to_save=["lm_head"] if saved else None)


class Quiet(trl.DPOTrainer):
    """A user's own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)


def train_adapter(mesh, kind, directory, saved):
    """With an adapter that the Trainer is asked for, or of a model that is split already."""
    model, size = build("llama"), mesh.data_size
    trainer = adapt(Quiet if kind == "dpo" else trl.SFTTrainer)
    if saved:
        beside = {"layout": str(mesh.shape), "peft_config": lora(saved)}
    else:
        transformers.set_seed(42)  # as TRL
        model, beside = shardwise.parallelize(peft.get_peft_model(model, lora(saved)), mesh), {}
    run = make(trainer, kind, model, directory, data_size=size, beside=beside)
    run.train()
    if kind == "dpo":
        with pytest.raises(shardwise.ShardwiseError, match="whose adapter is trained"):
            make(trainer, kind, run.model, directory, data_size=size)
    return log(run), shardwise.full_state_dict(run.model)


@pytest.mark.parametrize(
    ("layout", "kind", "saved"),
    [
        *(("tp2", "dpo", True), ("fsdp2", "padded", False)),
        *[("tp2", "padded", True), ("tp2", "dpo", False), ("tp2", "padded", False)] * FULL_PRODUCT,
        *[("fsdp2", "padded", True), ("fsdp2", "dpo", True), ("fsdp2", "dpo", False)] * FULL_PRODUCT,
    ],
)
def test_adapters(on_ranks, tmp_path, kind, layout, saved):
    run = make(trainer_of(kind)[0], kind, build("llama"), str(tmp_path / "one"), beside={"peft_config": lora(saved)})
    run.train()
    check(on_ranks(train_adapter, directory=str(tmp_path)), (log(run), run.model.state_dict()))


def in_one_batch(run, data_size=1):
    run.args.per_device_eval_batch_size = 18 // data_size
    found = run.evaluate(rows("dpo" if isinstance(run, trl.DPOTrainer) else "completion"))
    return {name: value for name, value in found.items() if "per_second" not in name and "runtime" not in name}


class Own(transformers.LlamaForCausalLM):
    """A user's own."""


LOADED = {"model_init_kwargs": {"rms_norm_eps": 0.1, "attn_implementation": "eager"}}


def train_from_files(mesh, kind, directory, source):
    """The Trainer loads the model, and DPO's reference, of which a rank holds a part, in the same way."""
    size, beside = mesh.data_size, {"layout": str(mesh.shape), "auto_class": Own}
    run = make(adapt(trainer_of(kind)[0]), kind, source, directory, data_size=size, beside=beside, **LOADED)
    held = [run.model, run.ref_model] if kind == "dpo" else [run.model]
    assert all(count(each) < 0.6 * count(build("llama")) and isinstance(each, Own) for each in held)
    assert all(each.config._attn_implementation == "eager" for each in held)
    run.train()
    entries = log(run)
    run._save_checkpoint(run.model, trial=None)
    return [*entries, {"grad_norm": 0.0, **in_one_batch(run, size)}], shardwise.full_state_dict(run.model)


def count(model):
    return sum(each.to_local().numel() if isinstance(each, DTensor) else each.numel() for each in model.parameters())


def train_on_images(model, family, directory, data_size=1):
    """Four steps, of which two have three rows, or one."""

    def collate(numbers):
        batch = MODELS[family][1]([each["row"] for each in numbers])
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    skips = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    given = arguments(directory, data_size, kind=trl.SFTConfig, **options_of("images", steps=4, **skips))
    numbers = datasets.Dataset.from_list(
        [{"row": row} for row in ((0, 1, 2, 3, 0, 3, 2) if family == "llava" else (0, 1, 2, 3, 0))]
    )
    beside = {"train_dataset": numbers, "data_collator": collate, "processing_class": tokenizer()}
    run = (trl.SFTTrainer if data_size == 1 else adapt(trl.SFTTrainer))(model, given, **beside)
    run.train()
    return run


def train_on_images_on_rank(mesh, family, directory):
    split = shardwise.parallelize(MODELS[family][0](), mesh)
    run = train_on_images(split, family, directory, mesh.data_size)
    return log(run), shardwise.full_state_dict(run.model)


@pytest.mark.parametrize("layout", ["fsdp2"])
@pytest.mark.parametrize("family", MODELS)
def test_rows_with_images_in_a_batch_that_does_not_divide(on_ranks, tmp_path, layout, family):
    run = train_on_images(MODELS[family][0](), family, str(tmp_path))
    found = on_ranks(train_on_images_on_rank, family=family, directory=str(tmp_path))
    check(found, (log(run), run.model.state_dict()))


def load_for_rewards(mesh, directory, source):
    """The scores of a head that is drawn, on the body of a language model."""
    run = make(adapt(trl.RewardTrainer), "reward", source, directory, beside={"layout": str(mesh.shape)})
    return shardwise.full_state_dict(run.model)


@pytest.mark.parametrize("layout", ["tp2"])
def test_reward_models_begin_with_the_files_of_language_models(on_ranks, tmp_path, layout):
    source = str(tmp_path / "model")
    build("llama").save_pretrained(source)
    state, _ = on_ranks(load_for_rewards, directory=str(tmp_path), source=source)
    assert state.pop("score.weight").shape == (1, 32)
    assert all(torch.equal(value, build("llama").state_dict()[name]) for name, value in state.items())


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *(("tp2", "dpo"), ("fsdp2", "completion")),
        *[("tp2", "completion"), ("fsdp2", "dpo"), ("pp2", "dpo"), ("pp2", "completion")] * FULL_PRODUCT,
    ],
)
def test_models_from_files_and_evaluation(on_ranks, tmp_path, kind, layout):
    """17 rows: a data rank has one more than the other."""
    source = str(tmp_path / "model")
    build("llama").save_pretrained(source)
    run = make(trainer_of(kind)[0], kind, source, str(tmp_path / "one"), **LOADED)
    run.train()
    entries, state = log(run), run.model.state_dict()
    found = on_ranks(train_from_files, directory=str(tmp_path), source=source)
    check(found, ([*entries, {"grad_norm": 0.0, **in_one_batch(run)}], state))
    assert "trl" in (tmp_path / "README.md").read_text(), "the card that TRL writes beside its checkpoints"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{len(entries)}")


def measured(mesh, directory):
    """The most elements of a tensor that a rank makes in two steps of SFT."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 16, "num_attention_heads": 2}, vocab_size=2000)
    split = shardwise.parallelize(transformers.AutoModelForCausalLM.from_config(config), mesh)
    run = make(adapt(trl.SFTTrainer), "long", split, directory, data_size=mesh.data_size, steps=2)
    with pytest.MonkeyPatch.context() as patch, Largest() as found:
        patch.setattr(cross_entropy, "CHUNK_ELEMENTS", 2**12)
        run.train()
    return found.most


@pytest.mark.parametrize("layout", ["tp2", *["fsdp2.tp2"] * FULL_PRODUCT])
def test_no_rank_holds_a_whole_head_or_makes_all_logits(on_ranks, tmp_path, layout):
    assert max(on_ranks(measured, directory=str(tmp_path))) <= 2000 * 16 // 2 < 4 * 30 * 2000


def reward_of(completions):
    return [len(set(each)) / 10 + each[0] / 100 for each in completions]


def sample(trainer, model, directory, data_size=1):
    """Two steps of GRPO, with what was sampled. Many tokens end an answer, so that ranks end at other times."""
    sampled = []
    model.generation_config.eos_token_id = list(range(1, 96, 2))

    def reward(completion_ids, **others):
        sampled.append(completion_ids)
        return reward_of(completion_ids)

    chosen = {"num_generations": 2, "max_completion_length": 8, "rows": 4 * data_size}
    given = arguments(directory, data_size, kind=trl.GRPOConfig, **chosen, **options_of("grpo", steps=2))
    prompts = rows("dpo").select_columns(["prompt"])
    run = trainer(model, reward, given, train_dataset=prompts, processing_class=tokenizer())
    run.train()
    return run, sampled, [{name: value for name, value in each.items() if name != "step_time"} for each in log(run)]


class Written(trl.GRPOTrainer):
    """Its completions depend on the prompt and the place in its group alone."""

    def _generate_single_turn(self, prompt_ids, *others, **options):
        draws = [random.Random(f"{ids} {row % 2}") for row, ids in enumerate(prompt_ids)]
        return [[draw.randrange(2, 96) for _ in range(draw.randint(2, 8))] for draw in draws], None


def compare(trainer, model, directory, data_size=1, *, adapts, sync, **beside):
    """Three steps of GRPO beside a reference model, and an evaluation."""
    chosen = {"num_generations": 2, "max_completion_length": 8, "rows": 8, "beta": 0.5, "learning_rate": 1e-2}
    chosen |= {"sync_ref_model": sync, "ref_model_sync_steps": 2}
    given = arguments(directory, data_size, kind=trl.GRPOConfig, **chosen, **options_of("grpo", steps=3))
    prompts = rows("dpo").select_columns(["prompt"])
    beside |= {"train_dataset": prompts, "eval_dataset": prompts.select(range(2)), "processing_class": tokenizer()}
    adapter = peft.LoraConfig(**LORA, lora_alpha=400) if adapts else None
    run = trainer(model, lambda completion_ids, **_: reward_of(completion_ids), given, peft_config=adapter, **beside)
    run.train()
    run.evaluate()
    entries = [*log(run), {"grad_norm": 0.0, **run.state.log_history[-1]}]
    left_out = ("time", "runtime", "per_second", "epoch")
    return run, [{name: each[name] for name in each if not name.endswith(left_out)} for each in entries]


def compare_on_rank(mesh, directory, adapts, sync):
    model = build("llama") if adapts else f"{directory}/model"  # PEFT draws as in one process
    beside = {"layout": str(mesh.shape), "adapts": adapts, "sync": sync}
    run, entries = compare(adapt(Written), model, directory, mesh.data_size, **beside)
    assert adapts or count(run.ref_model) < 0.6 * count(build("llama"))
    return entries, shardwise.full_state_dict(run.model)


@pytest.mark.parametrize(
    ("layout", "adapts", "sync"), [("tp2", False, True), ("fsdp2", False, False), ("fsdp2", True, False)]
)
def test_grpo_beside_a_reference_and_its_evaluation(on_ranks, tmp_path, layout, adapts, sync):
    build("llama").save_pretrained(tmp_path / "model")
    model = build("llama") if adapts else str(tmp_path / "model")
    run, entries = compare(Written, model, str(tmp_path), adapts=adapts, sync=sync)
    assert entries[2]["kl"] > 1e-4
    found = on_ranks(compare_on_rank, directory=str(tmp_path), adapts=adapts, sync=sync)
    check(found, (entries, run.model.state_dict()))


class Drawing(trl.GRPOTrainer):
    """Draws a number for the sampler, as loaders of split models do."""

    def get_train_dataloader(self):
        torch.empty((), dtype=torch.int64).random_()
        return super().get_train_dataloader()


def sample_on_rank(mesh, directory):
    split = shardwise.parallelize(build("llama"), mesh)
    run, *found = sample(adapt(trl.GRPOTrainer), split, directory, mesh.data_size)
    assert not find_unequal_replicas(run.model)
    return mesh.data_rank, *found


@pytest.mark.parametrize("layout", ["tp2", "fsdp2.tp2", *["fsdp2"] * FULL_PRODUCT])
def test_grpo_samples_alike_on_tp_ranks_and_differently_on_data_ranks(on_ranks, tmp_path, layout):
    found = on_ranks(sample_on_rank, directory=str(tmp_path))
    of_rank = {}
    for rank, sampled, entries in found:
        assert of_rank.setdefault(rank, sampled) == sampled
        assert entries == found[0][2]
        assert all(math.isfinite(each["loss"]) and each["grad_norm"] > 0 for each in entries)
    assert len({str(each) for each in of_rank.values()}) == len(of_rank)
    for number, entry in enumerate(found[0][2]):
        rewards = [reward for sampled in of_rank.values() for reward in reward_of(sampled[number])]
        assert entry["reward"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-5)
    if len(of_rank) == 1:
        _, sampled, expected = sample(Drawing, build("llama"), str(tmp_path))
        assert sampled == of_rank[0]
        for each, other in zip(found[0][2], expected, strict=True):
            assert each == pytest.approx(other, rel=1e-5, abs=1e-5)


@pytest.mark.single
@pytest.mark.parametrize(
    ("kind", "options", "beside", "match"),
    [
        ("padded", {"activation_offloading": True}, {}, "activation_offloading=True over tp1"),
        ("padded", {"chat_template_path": "org/model"}, {}, "number of embeddings"),
        ("padded", {}, {"peft_config": peft.LoraConfig(**LORA)}, r"shardwise\.load\(\.\.\., adapter=peft_config\)"),
        ("dpo", {"precompute_ref_log_probs": True}, {}, "hashes full parameters"),
        ("dpo", {}, {}, "pass ref_model="),
    ],
)
def test_what_split_models_cannot_do_is_refused(tmp_path, kind, options, beside, match):
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        split = shardwise.parallelize(build("llama"), mesh)
        with pytest.raises(shardwise.ShardwiseError, match=match):
            make(adapt(trainer_of(kind)[0]), kind, split, str(tmp_path), beside=beside, **options)


@pytest.mark.single
def test_an_unsplit_model_is_trained_by_trl_alone(tmp_path):
    found = []
    for trainer in (trl.SFTTrainer, adapt(trl.SFTTrainer)):
        run = make(trainer, "packed", build("llama", dropout=0.1), str(tmp_path))
        run.train()
        found.append((log(run), run.model.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


@pytest.mark.single
def test_other_trainers_of_trl_are_refused():
    with pytest.raises(shardwise.ShardwiseError, match="RLOOTrainer on split models"):
        adapt(trl.RLOOTrainer)
