"""The sample of NxD's training guide with its import line changed: tensor parallelism with ZeRO-1, a pipeline, LoRA.

    python examples/nxd_training.py

Each configuration trains as the unsplit model does; the first one is saved after half of its steps and continued at
other degrees.
"""

import tempfile

import torch
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

# import neuronx_distributed as nxd
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_state
from shardwise.compat.neuronx_distributed.modules.lora import LoraConfig
from shardwise.testing.spawn import spawn

OPTIMIZER = {"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 0.5}
LORA = {
    "lora_rank": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "k_proj"],
    "init_lora_weights": "gaussian",
}


def get_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def batches(steps):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 96, (4, 12), generator=generator) for _ in range(6)][steps]


def inputs_of_rank(ids):
    rows = ids.chunk(parallel_state.get_data_parallel_size())[parallel_state.get_data_parallel_rank()]
    return {"input_ids": rows, "labels": rows}


def wrap(nxd_config):
    # wrap model
    model = nxd.initialize_parallel_model(nxd_config, get_model)
    # wrap optimizer
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, AdamW, model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def training_loop(model, optimizer, scheduler, steps):
    history = []
    for ids in batches(steps):
        loss = model.run_train(inputs_of_rank(ids))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history.append((float(loss), float(optimizer.grad_norm)))
    return history


def tensor_parallel(directory):
    """Three steps at tp2, saved; three more at tp4 from what was saved."""
    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=2, optimizer_config=OPTIMIZER)
    model, optimizer, scheduler = wrap(nxd_config)
    history = training_loop(model, optimizer, scheduler, slice(0, 3))
    nxd.save_checkpoint(
        directory,
        nxd_config=nxd_config,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        user_content={"total_steps": 3},
    )
    parallel_state.destroy_model_parallel()
    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=4, optimizer_config=OPTIMIZER)
    model, optimizer, scheduler = wrap(nxd_config)
    # loading checkpoint (auto-resume)
    user_content = nxd.load_checkpoint(directory, model=model, optimizer=optimizer, scheduler=scheduler)
    history += training_loop(model, optimizer, scheduler, slice(user_content["total_steps"], 6))
    parallel_state.destroy_model_parallel()
    return history


def pipeline():
    nxd_config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=2,
        pipeline_config={
            "transformer_layer_cls": None,
            "num_microbatches": 2,
            "pipeline_cuts": ["model.layers.0", "model.layers.1", "model.layers.2"],
            "virtual_pipeline_size": 2,
            "input_names": ["input_ids", "labels"],
        },
        optimizer_config=OPTIMIZER,
    )
    history = training_loop(*wrap(nxd_config), slice(0, 3))
    parallel_state.destroy_model_parallel()
    return history


def lora():
    lora_config = LoraConfig(
        enable_lora=True, save_lora_base=False, merge_lora=False, save_lora_config_adapter=True, **LORA
    )
    nxd_config = nxd.neuronx_distributed_config(2, optimizer_config=OPTIMIZER, lora_config=lora_config)
    history = training_loop(*wrap(nxd_config), slice(0, 3))
    parallel_state.destroy_model_parallel()
    return history


def configurations(directory):
    return tensor_parallel(directory), pipeline(), lora()


def unsplit(steps, *, adapters=False):
    model = get_model()
    if adapters:
        import peft

        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=LORA["target_modules"], init_lora_weights=LORA["init_lora_weights"]
        )
        model = peft.get_peft_model(model, config)
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    history = []
    for ids in batches(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history.append((float(loss.detach()), float(norm)))
    return history


def compare(name, found, expected):
    for number, ((loss, norm), (wanted_loss, wanted_norm)) in enumerate(zip(found, expected, strict=True), start=1):
        print(f"{name:<16} {number:>4}   {loss:<10.6f}   {wanted_loss:<10.6f}   {norm:<10.6f}   {wanted_norm:<10.6f}")
        assert abs(loss - wanted_loss) < 5e-5 and abs(norm - wanted_norm) < 1e-4


def main() -> None:
    print("configuration    step   loss         unsplit      norm         unsplit")
    with tempfile.TemporaryDirectory() as directory:
        first = spawn(configurations, 4, directory, timeout=300)[0]
    compare("tensor_parallel", first[0], unsplit(slice(0, 6)))
    compare("pipeline", first[1], unsplit(slice(0, 3)))
    compare("lora", first[2], unsplit(slice(0, 3), adapters=True))


if __name__ == "__main__":
    main()
