"""A script for Optimum Neuron with one import line changed: load lazily, parallelize, train, save, load, consolidate.

    python examples/optimum_script.py

Two ranks on CPUs train as one process with transformers alone does, with tensor parallelism and in two stages.
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

# from neuronx_distributed.parallel_layers import parallel_state
# from optimum.neuron.distributed import (
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state
from shardwise.compat.optimum_neuron.distributed import (
    ParallelizersManager,
    consolidate_model_parallel_checkpoints_to_unified_checkpoint,
    lazy_load_for_parallelism,
    make_optimizer_constructor_lazy,
)
from shardwise.testing.spawn import spawn

CONFIG = LlamaConfig(
    vocab_size=199,  # divides by nothing
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
)
BATCHES = [torch.randint(199, (4, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def load(directory: Path, tp: int, pp: int) -> tuple:
    """The model, the optimizer and the parallelizer, as scripts make them."""
    with lazy_load_for_parallelism(tensor_parallel_size=tp, pipeline_parallel_size=pp):
        model = AutoModelForCausalLM.from_pretrained(directory)
    lazy_adamw = make_optimizer_constructor_lazy(torch.optim.AdamW)
    optimizer = lazy_adamw(model.parameters(), lr=1e-3, weight_decay=0.1)
    original = dict(model.named_parameters())

    parallelizer = ParallelizersManager.parallelizer_for_model(model)
    model = parallelizer.parallelize(model, kv_size_multiplier=tp, pipeline_parallel_num_microbatches=2)
    parallel = {id(original[name]): parameter for name, parameter in model.named_parameters()}
    return model.train(), parallelizer.optimizer_for_mp(optimizer, parallel), parallelizer


def train(directory: Path, tp: int, pp: int) -> list[float]:
    """The losses of four steps; between the second and the third everything is saved and loaded into new objects."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    model, optimizer, parallelizer = load(directory, tp, pp)
    losses = []
    for number, ids in enumerate(BATCHES):
        if number == 2:
            parallelizer.save_model_sharded_checkpoint(model, directory / f"tp{tp}pp{pp}", optimizer=optimizer)
            model, optimizer, parallelizer = load(directory, tp, pp)
            parallelizer.load_sharded_checkpoint(directory / f"tp{tp}pp{pp}", model, optimizer)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parallelizer.save_model_sharded_checkpoint(model, directory / f"tp{tp}pp{pp}")
    return losses


def train_unsplit(directory: Path) -> tuple[list[float], LlamaForCausalLM]:
    """The same with transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for ids in BATCHES:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model


def main() -> None:
    directory = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(directory)
    expected, unsplit = train_unsplit(directory)
    print("step  " + "  ".join(f"{number:>8}" for number in range(1, 5)))
    print("one   " + "  ".join(f"{loss:.6f}" for loss in expected))
    for tp, pp in ((2, 1), (1, 2)):
        losses = spawn(train, 2, directory, tp, pp)
        print(f"tp{tp}pp{pp}" + "  ".join(f"{loss:.6f}" for loss in losses[0]))
        for loss, own, other in zip(expected, *losses, strict=True):
            assert abs(loss - own) < 1e-5 and abs(loss - other) < 1e-5

        unified = directory / f"hf_tp{tp}pp{pp}"
        consolidate_model_parallel_checkpoints_to_unified_checkpoint(directory / f"tp{tp}pp{pp}", unified)
        trained = AutoModelForCausalLM.from_pretrained(unified)
        for name, value in unsplit.state_dict().items():
            torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    print("the consolidated directories hold what one process trained")


if __name__ == "__main__":
    main()
