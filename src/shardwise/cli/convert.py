"""`shardwise convert`: writes a checkpoint, or an adapter merged into its base, as a Hugging Face directory."""

import argparse
from pathlib import Path

from shardwise.errors import ConfigError

HELP = """\
Write the model of a checkpoint as a directory that `from_pretrained` loads, in one process and one tensor at a time.
Also reads torch.distributed.checkpoint (NeMo Automodel's among them), transformers' distributed_checkpoint=True,
Optimum Neuron and NxD.

  shardwise convert runs/first/checkpoints --to hf out
  shardwise convert runs/first/checkpoints --tag step-200 --to hf out --dtype bfloat16 --tokenizer path/or/hub-id
  shardwise convert automodel/epoch_0_step_100/model --config path/or/hub-id --to hf out

The checkpoint of a run that trained an adapter holds only the adapter. Write it in PEFT's format, or merge it into its
base model, which is named first:

  shardwise convert runs/lora/checkpoints --adapter --to hf out
  shardwise convert path/or/hub-id --merge-adapter runs/lora/checkpoints --to hf out
  shardwise convert path/or/hub-id --merge-adapter directory/of/adapter --to hf out

A checkpoint of shardwise.trainer's Trainer is written so that transformers' Trainer goes on from it in one process,
with its optimizer, whose states are held in memory:

  shardwise convert runs/first/checkpoint-300 --to trainer out
"""

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `shardwise convert`."""
    about = "a directory of checkpoints, or one of them; with --merge-adapter the base"
    parser.add_argument("checkpoint", metavar="CKPT", help=about)
    parser.add_argument("out", metavar="OUT", help="the new directory")
    about = "the format: hf, which transformers loads; trainer, from which its Trainer resumes"
    parser.add_argument("--to", choices=("hf", "trainer"), required=True, help=about)
    parser.add_argument("--tag", help="which checkpoint (default: the newest)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as saved)")
    parser.add_argument("--adapter", action="store_true", help="write only the adapter, in PEFT's format")
    about = "merge this adapter (a checkpoint, or PEFT's directory) into the base CKPT"
    parser.add_argument("--merge-adapter", metavar="ADAPTER", help=about)
    parser.add_argument("--config", metavar="DIRECTORY", help="the model's config, for checkpoints without one")
    about = "tokenizer directory or hub id, copied to OUT (default for --adapter: that of its base)"
    parser.add_argument("--tokenizer", metavar="DIRECTORY", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    out = Path(arguments.out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} is not empty", fix="remove it or name another; nothing is overwritten")
    if arguments.adapter and (arguments.merge_adapter or arguments.dtype):
        raise ConfigError("--adapter writes only an adapter", fix="remove --merge-adapter and --dtype")
    is_trainer = arguments.to == "trainer"
    if is_trainer and (arguments.adapter or arguments.merge_adapter or arguments.dtype or arguments.tokenizer):
        raise ConfigError("--to trainer writes what was saved", fix="remove the other options, or use --to hf")
    import torch  # slow to import, as are the next

    from shardwise.api import converting
    from shardwise.cli.data import read_tokenizer
    from shardwise.weights.locate import CONVERTIBLE, kind_of

    tokenizer = read_tokenizer(arguments.tokenizer, option="--tokenizer") if arguments.tokenizer else None
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    path = Path(arguments.checkpoint)
    if arguments.merge_adapter:
        converting.merge_adapter(
            path, arguments.merge_adapter, out, tag=arguments.tag, dtype=dtype, tokenizer=tokenizer
        )
        print(f"{arguments.merge_adapter} merged into {path}: {out}")
        return 0
    is_foreign = kind_of(path) in CONVERTIBLE and not is_trainer
    if (arguments.tag if is_foreign else arguments.config) is not None:
        option, kind = ("--tag", "Shardwise's own checkpoints") if is_foreign else ("--config", "other checkpoints")
        raise ConfigError(f"{option} is only for {kind}", fix="remove it")
    if is_foreign:
        converting.convert_weights_to_hf(path, out, config=arguments.config, dtype=dtype, tokenizer=tokenizer)
        print(f"{path} converted to {out}")
        return 0
    with converting.open_anywhere(path, arguments.tag) as stored:
        if is_trainer:
            converting.convert_to_trainer(stored, out)
        elif arguments.adapter:
            converting.convert_adapter(stored, out, tokenizer=tokenizer)
        else:
            converting.convert_to_hf(stored, out, dtype=dtype, tokenizer=tokenizer)
        print(f"{stored.directory} converted to {out}")
    return 0
