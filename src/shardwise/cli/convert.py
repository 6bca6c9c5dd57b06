"""`shardwise convert`: a checkpoint, or an adapter in its base, as a plain Hugging Face directory, without ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.weights.staging import is_url

__all__ = ["HELP", "add_arguments", "run"]

HELP = """\
Write the model of a checkpoint as a directory that `from_pretrained` loads, in one process: tensors are copied one by
one. Also reads torch.distributed.checkpoint (NeMo Automodel's among them), transformers' distributed_checkpoint=True,
Optimum Neuron and NxD.

  shardwise convert runs/first/checkpoints --to hf out
  shardwise convert runs/first/checkpoints --tag step-200 --to hf out --dtype bfloat16 --tokenizer path/or/hub-id
  shardwise convert automodel/epoch_0_step_100/model --config path/or/hub-id --to hf out

The checkpoint of a run that trained an adapter holds the adapter alone. Write it in PEFT's format, or merge it into its
base model, which is named first:

  shardwise convert runs/lora/checkpoints --adapter --to hf out
  shardwise convert path/or/hub-id --merge-adapter runs/lora/checkpoints --to hf out
  shardwise convert path/or/hub-id --merge-adapter directory/of/adapter --to hf out
"""

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardwise convert`."""
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="a directory of checkpoints, or one of them; with --merge-adapter the base"
    )
    parser.add_argument("out", metavar="OUT", help="where to; it must be empty or not there")
    parser.add_argument("--to", choices=("hf",), required=True, help="the format: hf, which transformers loads")
    parser.add_argument("--tag", help="which checkpoint; by default the newest")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; by default as they were saved")
    parser.add_argument("--adapter", action="store_true", help="write the adapter that it holds, as PEFT does")
    parser.add_argument(
        "--merge-adapter",
        metavar="ADAPTER",
        help="add that adapter, a checkpoint or PEFT's directory, to the base CKPT",
    )
    parser.add_argument("--config", metavar="DIRECTORY", help="the model's config, where another's checkpoint has none")
    parser.add_argument("--tokenizer", metavar="DIRECTORY", help="tokenizer directory or hub id, written beside them")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    out = Path(arguments.out)
    if is_url(arguments.out):
        raise ConfigError(f"{arguments.out} is a URL", fix="name a directory of a file system")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} is not empty", fix="remove it or name another; nothing is overwritten")
    if arguments.adapter and (arguments.merge_adapter or arguments.dtype or arguments.tokenizer):
        raise ConfigError("--adapter writes an adapter alone", fix="leave out --merge-adapter, --dtype and --tokenizer")
    import torch  # slow to import, as are the next

    from shardwise.api.converting import convert_to_hf, convert_weights_to_hf, open_anywhere
    from shardwise.api.converting_adapters import convert_adapter, merge_adapter
    from shardwise.cli.tokenizer import read_tokenizer
    from shardwise.weights.kinds import CONVERTIBLE, kind_of

    tokenizer = read_tokenizer(arguments.tokenizer, option="--tokenizer") if arguments.tokenizer else None
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    if arguments.merge_adapter:
        base, adapter = arguments.checkpoint, arguments.merge_adapter
        merge_adapter(base, adapter, out, tag=arguments.tag, dtype=dtype, tokenizer=tokenizer)
        print(f"{adapter} added to {base}: {out}")
        return 0
    path = Path(arguments.checkpoint)
    if (kind := kind_of(path)) in CONVERTIBLE:
        if arguments.tag is not None:
            raise ConfigError(
                f"--tag {arguments.tag}", why=f"{path} is {kind}, which has none", fix="pass its directory"
            )
        convert_weights_to_hf(path, out, config=arguments.config, dtype=dtype, tokenizer=tokenizer)
        print(f"{path}, {kind}, converted to {out}")
        return 0
    if arguments.config is not None:
        raise ConfigError("--config", why="a checkpoint of ours holds the model's config", fix="leave it out")
    with open_anywhere(path, arguments.tag) as stored:
        if arguments.adapter:
            convert_adapter(stored, out)
        else:
            convert_to_hf(stored, out, dtype=dtype, tokenizer=tokenizer)
        print(f"{stored.directory} converted to {out}")
    return 0
