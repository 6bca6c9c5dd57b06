"""A script for NeMo Automodel's nvFSDP strategy with its import line changed; FSDP2 does the work.

    python examples/automodel_nvfsdp.py

Two data-parallel ranks on CPUs train as one rank does. Any architecture will do: GPT-2 has no plan in Automodel.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

# from nemo_automodel.distributed.parallelizer import get_hf_tp_shard_plan, nvfsdp_strategy_parallelize
from shardwise.compat.nemo_automodel.distributed.parallelizer import get_hf_tp_shard_plan, nvfsdp_strategy_parallelize
from shardwise.testing.spawn import spawn

CONFIG = GPT2Config(
    vocab_size=199,
    n_embd=64,
    n_layer=2,
    n_head=4,
    bos_token_id=1,
    eos_token_id=2,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
)


def train(dp: int, tp: int) -> list[float]:
    """The losses of five steps; this rank's, which hold for its rows."""
    dist.init_process_group("gloo")
    device_mesh = init_device_mesh("cpu", (dp, 1, tp), mesh_dim_names=("dp", "cp", "tp"))

    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG)
    model = nvfsdp_strategy_parallelize(
        model,
        device_mesh,
        nvfsdp_unit_modules=["transformers.models.gpt2.modeling_gpt2.GPT2Block"],
        tp_shard_plan=get_hf_tp_shard_plan(model),
        data_parallel_sharding_strategy="optim_grads_params",
        grad_reduce_in_fp32=True,
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(CONFIG.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    rows = ids.chunk(dp)[device_mesh.get_local_rank("dp")]
    losses = []
    for _ in range(5):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
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
