"""The listing of NxD's tensor-parallel guide with its import lines changed: BERT's attention over two tp ranks.

    python examples/nxd_bert.py

Trains as the unsplit BERT does: loss, gradient norm and what it predicts. Parameters that are not divided, and the
layers that are, are all known to clipping and to `shardwise.full_state_dict`.
"""

import tempfile

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BertConfig, BertForMaskedLM
from transformers.models.bert.modeling_bert import BertSelfAttention, BertSelfOutput

# import neuronx_distributed; import torch_xla.core.xla_model as xm
# from neuronx_distributed.parallel_layers import ...
import shardwise
import shardwise.compat.neuronx_distributed as neuronx_distributed
from shardwise.compat.neuronx_distributed import parallel_layers, xm
from shardwise.compat.neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    clip_grad_norm,
    parallel_state,
)
from shardwise.testing.spawn import spawn

CONFIG = BertConfig(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class ParallelSelfAttention(BertSelfAttention):
    def __init__(self, config):
        super().__init__(config)
        self.query = ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
        self.key = ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
        self.value = ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
        tp_size = parallel_state.get_tensor_parallel_size()
        self.num_attention_heads = self.num_attention_heads // tp_size
        self.all_head_size = self.all_head_size // tp_size


class ParallelSelfOutput(BertSelfOutput):
    def __init__(self, config):
        super().__init__(config)
        self.dense = RowParallelLinear(config.hidden_size, config.hidden_size, input_is_parallel=True)


def build_unsplit():
    torch.manual_seed(0)
    return BertForMaskedLM(CONFIG)


def build_parallel():
    model = build_unsplit()
    state = model.state_dict()
    for layer in model.bert.encoder.layer:
        layer.attention.self = ParallelSelfAttention(CONFIG)
        layer.attention.output = ParallelSelfOutput(CONFIG)
    model.load_state_dict(state)  # full tensors: every rank takes its part
    return model


def create_dataloader(num_replicas, rank):
    ids = torch.randint(3, 199, (24, 16), generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(TensorDataset(ids), num_replicas=num_replicas, rank=rank, shuffle=False)
    return DataLoader(TensorDataset(ids), sampler=sampler, batch_size=8 // num_replicas)


def train(tensor_parallel_size, path):
    """Losses, averaged over data ranks by the caller, and norms of three steps; the full weights, saved and loaded."""
    neuronx_distributed.parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
    dataloader = create_dataloader(
        parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    )
    model = build_parallel()
    parallel_layers.move_model_to_device(model, xm.xla_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    history = []
    for (ids,) in dataloader:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = clip_grad_norm(model.parameters(), 1.0)
        xm.optimizer_step(optimizer, groups=parallel_state.get_data_parallel_group(as_list=True))
        optimizer.zero_grad()
        scheduler.step()
        history.append((float(loss.detach()), float(norm)))
    parallel_layers.save(
        {"epoch": 1, "model": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "loss": history[-1]},
        path,
    )
    model = build_parallel()
    parallel_layers.move_model_to_device(model, xm.xla_device())
    assert parallel_layers.load(path, model)["epoch"] == 1
    state = shardwise.full_state_dict(model)
    parallel_state.destroy_model_parallel()
    return history, state


def train_unsplit():
    model = build_unsplit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    history = []
    for (ids,) in create_dataloader(1, 0):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        history.append((float(loss.detach()), float(norm)))
    return history, model.state_dict()


def main() -> None:
    expected, weights = train_unsplit()
    with tempfile.TemporaryDirectory() as path:
        ranks = spawn(train, 2, 2, path)
    print("step   loss whole   loss tp2     norm whole   norm tp2")
    for number, ((loss, norm), (split_loss, split_norm)) in enumerate(zip(expected, ranks[0][0], strict=True), start=1):
        print(f"{number:>4}   {loss:<10.6f}   {split_loss:<10.6f}   {norm:<10.6f}   {split_norm:<10.6f}")
        assert abs(loss - split_loss) < 1e-5 and abs(norm - split_norm) < 1e-4
    for name, value in ranks[1][1].items():
        assert (value - weights[name]).abs().max() < 1e-4, name


if __name__ == "__main__":
    main()
