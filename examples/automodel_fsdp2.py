"""A script for NeMo Automodel with one import line changed: a device mesh, a plan of torch's styles, FSDP2.

    python examples/automodel_fsdp2.py

Two data-parallel and two tensor-parallel ranks on CPUs train as one rank does.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM

# from nemo_automodel.distributed.parallelizer import fsdp2_strategy_parallelize
from shardwise.compat.nemo_automodel.distributed.parallelizer import fsdp2_strategy_parallelize
from shardwise.testing.spawn import spawn

CONFIG = LlamaConfig(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def train(dp: int, tp: int) -> list[float]:
    """The losses of five steps; this rank's, which hold for its rows."""
    dist.init_process_group("gloo")
    names = ("data_parallel", "context_parallel", "tensor_parallel")
    device_mesh = init_device_mesh("cpu", (dp, 1, tp), mesh_dim_names=names)

    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    model = fsdp2_strategy_parallelize(model, device_mesh, mp_policy=policy, tp_shard_plan=PLAN)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(CONFIG.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    rows = ids.chunk(dp)[device_mesh.get_local_rank("data_parallel")]
    losses = []
    for _ in range(5):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    (whole,) = spawn(train, 1, 1, 1)
    ranks = spawn(train, 4, 2, 2)
    means = [(first + second) / 2 for first, second in zip(ranks[0], ranks[2], strict=True)]
    print("step   one rank   dp2 tp2")
    for number, (one, mean) in enumerate(zip(whole, means, strict=True), start=1):
        print(f"{number:>4}   {one:.6f}   {mean:.6f}")
        assert abs(one - mean) < 1e-5


if __name__ == "__main__":
    main()
