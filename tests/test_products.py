"""Products of features that a reader found wrong: what is trained, stepped, saved or resumed in them."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from transformers import LlamaConfig, LlamaForCausalLM, Wav2Vec2Config, Wav2Vec2ForCTC

import shardwise
from shardwise.api.building import load_by_spec
from shardwise.checkpoint.load import open_on_all_ranks
from shardwise.checkpoint.stored import encode_tree
from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import registry_of
from shardwise.plan.options import ParallelSpec
from shardwise.tiny.models import set_dropout
from tests.families import rows_of, tiny_batch, tiny_model
from tests.lightning.modules import Automatic, loader, trainer

pytestmark = pytest.mark.spawn
GROUPS = [{"params": "**.embed_tokens.*", "lr": 1e-5}, {"params": ["lm_head.*", "**.lm_head.*"], "lr": 1e-4}]
"""At pp2 both stages have two groups, but not the same ones."""


def split(mesh, *frozen, **options):
    model = tiny_model("llama", num_hidden_layers=2, tie_word_embeddings=False).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return shardwise.parallelize(model, mesh, **options)


def step(model, mesh, optimizer):
    shardwise.TrainStep(model, mesh, num_microbatches=mesh.size("pp"))(rows_of(tiny_batch(model, rows=4), mesh))
    optimizer.step()
    optimizer.zero_grad()


def refreeze(mesh, path):
    def build():
        return shardwise.load(path / "base", mesh, adapter=LoraConfig(r=2, target_modules=["q_proj"])).train()

    model = build()
    base = [each for name, each in model.named_parameters() if "embed_tokens" in name or "norm" in name]
    for trains in (True, False):
        for parameter in base:
            parameter.requires_grad_(trains)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=0.1)  # fused: torch counts no write
        if trains:
            step(model, mesh, optimizer)
    shardwise.save_checkpoint(path / "saved", model=model, optimizer=optimizer)
    wanted, model = shardwise.full_state_dict(model), build()
    shardwise.load_checkpoint(path / "saved", model=model)
    return [name for name, value in shardwise.full_state_dict(model).items() if not torch.equal(value, wanted[name])]


@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "pp2"])
def test_a_base_that_a_fused_optimizer_trained_is_saved_after_it_was_frozen(on_ranks, layout, tmp_path):
    tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    assert on_ranks(refreeze, path=tmp_path) == [[], []]


def rates(mesh, path, *, with_optimizer):
    found = []
    for has_saved in (False, True):
        model = split(mesh)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3, groups=GROUPS)
        parts = [LinearLR(optimizer, 0.5, total_iters=4), CosineAnnealingLR(optimizer, 8)]
        schedule = (
            SequentialLR(optimizer, parts, milestones=[4]) if with_optimizer else LambdaLR(optimizer, lambda n: n)
        )
        kept = {"model": model, "scheduler": schedule, **({"optimizer": optimizer} if with_optimizer else {})}
        if has_saved:
            shardwise.load_checkpoint(path, **kept)
        for number in range(2 if has_saved else 0, 6):
            step(model, mesh, optimizer)
            schedule.step()
            if number == 1:
                shardwise.save_checkpoint(path, **kept)
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("layout", ["pp2"])
def test_every_stage_resumes_with_the_rates_of_its_own_groups(on_ranks, layout, with_optimizer, tmp_path):
    for through, resumed in on_ranks(rates, path=tmp_path, with_optimizer=with_optimizer):
        assert resumed == pytest.approx(through)


class Grouped(Automatic):
    def configure_optimizers(self):
        optimizer = shardwise.build_optimizer(self.model, torch.optim.AdamW, lr=1e-3, groups=GROUPS)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda n: 1 / (1 + n)), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["step"] = "mine"

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["step"] == "mine"

    def on_train_end(self):
        self.rates = [group["lr"] for group in self.optimizers().param_groups]


def lightning_rates(mesh, path):
    found = []
    for steps, start in ((2, None), (4, path / "saved"), (4, None)):
        module = Grouped()
        module.model = tiny_model("llama", num_hidden_layers=2, tie_word_embeddings=False)
        run = trainer("pp2", max_steps=steps)
        run.fit(module, loader(mesh.data_size), ckpt_path=start)
        if steps == 2:
            run.save_checkpoint(path / "saved")
        found.append(module.rates)
    return found[1:]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("layout", ["pp2"])
def test_lightning_resumes_every_stage_with_the_rates_of_its_own_groups(on_ranks, layout, tmp_path):
    for resumed, through in on_ranks(lightning_rates, path=tmp_path):
        assert resumed == pytest.approx(through)


def under_autocast(model, batch):
    with torch.autocast("cpu", torch.float16):
        model(**batch)  # backward would run before a GradScaler scales the loss


def stepping_in_backward(model, batch):
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    model(**batch).loss.backward()  # at its end ranks sum gradients


def unfreezing(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        model.requires_grad_(True)  # what was frozen is stored in bfloat16


def weighing(model, batch):
    (model(**batch).loss * (1 + registry_of(model).mesh.data_rank)).backward()  # right under fsdp alone


def refused(mesh, attempt):
    narrow = shardwise.Precision(compute="bfloat16") if attempt is unfreezing else None
    model = split(
        mesh, *["layers.1."] * (attempt is unfreezing), precision=narrow, sequence_parallel=mesh.size("tp") > 1
    )
    with pytest.raises(UnsupportedError) as caught:
        attempt(model, rows_of(tiny_batch(model, rows=4), mesh))
    return caught.value.summary


@pytest.mark.parametrize(
    ("layout", "attempt", "says"),
    [
        ("pp2", under_autocast, "under float16 autocast"),
        ("tp2", stepping_in_backward, "inside of backward"),
        ("pp2.ddp2", weighing, "multiply by other numbers: 1 to 2"),
        ("fsdp2", unfreezing, "was frozen when the model was split"),
    ],
)
def test_steps_that_would_be_wrong_are_errors(on_ranks, layout, attempt, says):
    assert all(says in summary for summary in on_ranks(refused, attempt=attempt))


def clip_in_parts(mesh):
    """By parts of which stages have some, or none: the embedding and the head."""
    whole = tiny_model("llama", num_hidden_layers=2, tie_word_embeddings=False).train()
    model, norms = split(mesh), []
    batch = tiny_batch(whole, rows=4)
    whole(**batch).loss.backward()
    model(**rows_of(batch, mesh)).loss.backward()
    for part in ("norm", "embed_tokens", "lm_head", "proj"):
        chosen = [[value for name, value in each.named_parameters() if part in name] for each in (whole, model)]
        expected = torch.nn.utils.clip_grad_norm_(chosen[0], 1e-3)
        norms.append((float(expected), float(shardwise.clip_grad_norm_(chosen[1], 1e-3, model=model))))
    found = shardwise.full_gradients(model)
    worst = max(float((found[name] - value.grad).abs().max()) for name, value in whole.named_parameters())
    return norms, worst


@pytest.mark.parametrize("layout", ["pp2", "pp2.tp2"])
def test_gradients_are_clipped_in_parts_of_which_a_stage_may_have_none(on_ranks, layout):
    for norms, worst in on_ranks(clip_in_parts):
        assert worst < 1e-6 and all(abs(one - other) < 1e-5 for one, other in norms), norms


def options(mesh):
    model = tiny_model("llama", num_hidden_layers=2, num_key_value_heads=1, tie_word_embeddings=True).train()
    model.model.layers[0].requires_grad_(False)
    optimizer = shardwise.build_optimizer(shardwise.parallelize(model, mesh), torch.optim.AdamW, lr=1e-2)
    return optimizer.param_groups[0].get("fused")


@pytest.mark.parametrize("layout", ["pp2.tp2"])
def test_stages_that_hold_copies_round_alike(on_ranks, layout):
    assert len(set(on_ranks(options))) == 1


def idle(mesh, path):
    model = split(mesh, "layers.0.", "embed")
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    step(model, mesh, optimizer)
    shardwise.save_checkpoint(path, model=model, optimizer=optimizer)
    shardwise.load_checkpoint(path, optimizer=optimizer)


@pytest.mark.parametrize("layout", ["pp2"])
def test_an_optimizer_alone_is_loaded_where_a_stage_trains_nothing(on_ranks, layout, tmp_path):
    assert on_ranks(idle, path=tmp_path) == [None, None]


@pytest.mark.single
def test_an_optimizer_of_the_inner_model_leaves_the_outer_modules_parameters_alone():
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        outer = nn.ModuleDict({"model": split(mesh), "head": nn.Linear(64, 1)})
        shardwise.clip_grad_norm_(outer, 1.0)
        optimizer = shardwise.build_optimizer(outer["model"], torch.optim.SGD, lr=0.1, groups=[{"params": "lm_head.*"}])
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        assert held == {id(each) for each in outer["model"].parameters()}


@pytest.mark.single
def test_sets_are_saved_in_one_order():
    words = {f"word {number}" for number in range(50)}
    assert encode_tree(words, "extra", {})["is"] == sorted(words)


@pytest.mark.single
def test_a_trained_adapter_is_not_replaced_by_the_one_that_training_began_with(tmp_path):
    config, spec = tiny_model("llama", num_hidden_layers=2).config, ParallelSpec()
    build = functools.partial(load_by_spec, config, spec=spec, dtype=None, seed=0, options={})
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        first = build(mesh, adapter=LoraConfig(r=2, target_modules=["q_proj"]))
        shardwise.export_pretrained(first, tmp_path / "adapter", adapter="only")
        for name, parameter in first.named_parameters():
            parameter.data += "lora" in name
        shardwise.save_checkpoint(tmp_path / "saved", model=first)
        stored = open_on_all_ranks(tmp_path / "saved", None, mesh)
        again = shardwise.full_state_dict(build(mesh, adapter=tmp_path / "adapter", checkpoint=stored))
        assert all(torch.equal(again[name], value) for name, value in shardwise.full_state_dict(first).items())


def one_side(mesh, path, target):
    config = LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    adapted = get_peft_model(tiny_model("llama", tied=True), config)
    if target == "q_proj":  # and another adapter, which is not active
        adapted.add_adapter("other", LoraConfig(r=2, target_modules=["lm_head"]))
    model = shardwise.parallelize(adapted, mesh)
    shardwise.export_pretrained(model, path, adapter="merged")
    assert LlamaConfig.from_pretrained(path).tie_word_embeddings == (target == "q_proj")
    loaded, batch = LlamaForCausalLM.from_pretrained(path), tiny_batch(model)
    return float((model(**batch).loss - loaded(**batch).loss).abs().detach())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # PEFT's, of tied layers
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head", "q_proj"])
@pytest.mark.parametrize("layout", ["pp2.tp2"])
def test_a_merged_adapter_of_one_module_of_a_tie_does_not_change_the_other(on_ranks, layout, target, tmp_path):
    assert max(on_ranks(one_side, path=tmp_path, target=target)) < 1e-5


def sums(mesh):
    own = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
    own |= {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "mask_time_prob": 0.0}
    own |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "vocab_size": 20}
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**own)).eval()
    batch = {"input_values": torch.randn(4, 800), "labels": torch.randint(1, 20, (4, 5))}
    loss = float(model(**batch).loss.detach())
    set_dropout(model, 0.0)
    return loss, float(shardwise.parallelize(model.train(), mesh)(**batch).loss.detach())


@pytest.mark.parametrize("layout", ["pp2"])
def test_a_loss_that_is_a_sum_over_rows_is_that_of_the_whole_batch(on_ranks, layout):
    for loss, split_loss in on_ranks(sums):
        assert split_loss == pytest.approx(loss, rel=1e-5)
