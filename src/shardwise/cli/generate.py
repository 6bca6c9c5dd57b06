"""`shardwise generate`: lets a model continue a prompt, or answer it as a chat."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from shardwise.cli.launch import run_ranks
from shardwise.errors import ConfigError, UnsupportedError, as_error
from shardwise.topology.shape import MeshShape

HELP = """\
Let a causal model continue a prompt, or with --chat answer it, on as many ranks as the layout names. Without --prompt
the prompt is read from standard input. MODEL is a model directory, a hub id, or a directory of Shardwise's checkpoints
(the newest is taken; it needs --tokenizer).

  shardwise generate path/or/hub-id --prompt "def add(a, b):"
  shardwise generate runs/first/model --chat --prompt "What is 2+2?" --layout tp2 --temperature 0.7
  shardwise generate runs/first/checkpoints --tokenizer path/or/hub-id < question.txt
  shardwise generate path/or/hub-id --adapter runs/lora/model --prompt "What is 2+2?" --chat
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `shardwise generate`."""
    parser.add_argument("model", metavar="MODEL", help="model directory, hub id, or directory of checkpoints")
    parser.add_argument("--prompt", metavar="TEXT", help="what is continued (default: standard input)")
    parser.add_argument("--chat", action="store_true", help="write the prompt as a user's message by the chat template")
    parser.add_argument("--layout", default="tp1", metavar="LAYOUT", help="ranks along each axis (default: tp1)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="most tokens (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    parser.add_argument("--dtype", default=None, help="such as bfloat16 (default: that of the weights)")
    parser.add_argument("--tokenizer", metavar="DIRECTORY", help="tokenizer directory or hub id (default: the model's)")
    parser.add_argument("--adapter", metavar="DIRECTORY", help="a PEFT adapter on the model")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    shape = MeshShape.parse(arguments.layout)
    if shape.data_size > 1:
        raise ConfigError(f"the layout {shape} has data ranks", why="there is one prompt", fix="use tp and pp ranks")
    if arguments.max_new_tokens < 1 or not 0 <= arguments.temperature < math.inf:
        what = f"--max-new-tokens {arguments.max_new_tokens} with --temperature {arguments.temperature}"
        raise ConfigError(what, fix="use 1 token or more, and a finite temperature from 0 on")
    words = arguments.words
    if arguments.prompt is None:
        arguments.prompt = sys.stdin.read()
        words = [*words, f"--prompt={arguments.prompt}"]
    return run_ranks(
        words, lambda: _generate(arguments, shape), num_ranks=shape.world_size, show_traceback=arguments.traceback
    )


def _generate(arguments: argparse.Namespace, shape: MeshShape) -> None:
    import torch  # slow to import, as are the next
    from transformers import TextStreamer

    from shardwise.api.building import load_by_spec
    from shardwise.api.checkpoints import holds_all
    from shardwise.checkpoint.load import open_on_all_ranks
    from shardwise.checkpoint.store import find_tags
    from shardwise.cli.data import read_tokenizer
    from shardwise.mesh import Mesh
    from shardwise.parallel.build import num_positions, read_config
    from shardwise.plan.options import ParallelSpec
    from shardwise.runtime.adapter_facts import find_model

    place = Path(arguments.model)
    is_checkpoint = place.is_dir() and bool(find_tags(place))
    tokenizer = read_tokenizer(arguments.tokenizer or arguments.model, option="--tokenizer")
    with Mesh.open(shape) as mesh:
        stored, source = None, arguments.model
        if is_checkpoint:
            stored = open_on_all_ranks(place, None, mesh)
            if arguments.adapter is not None or not holds_all(stored):
                fix = f"shardwise convert {place} --adapter --to hf OUT; shardwise generate BASE --adapter OUT"
                raise ConfigError(f"{place} holds checkpoints of an adapter, or gets one", fix=fix)
            source = read_config(stored.directory / "config.json", {})[0]
        values = {"dtype": arguments.dtype, "adapter": arguments.adapter, "checkpoint": stored}
        model: Any = load_by_spec(source, mesh, ParallelSpec(), seed=0, options={}, **values)
        inner: Any = find_model(model)
        if not inner.can_generate() or inner.main_input_name != "input_ids":
            raise UnsupportedError(f"text from a {type(inner).__name__}", why="it does not go on with a text")
        ids = _encode(tokenizer, arguments.prompt, is_chat=arguments.chat)
        if not ids["input_ids"].numel():
            raise ConfigError("the prompt is empty", fix="write one after --prompt, or to standard input")
        ids = {name: value.to(mesh.device) for name, value in ids.items() if name in ("input_ids", "attention_mask")}
        samples = {"do_sample": bool(arguments.temperature), "temperature": arguments.temperature or None}
        shown = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if mesh.rank == 0 else None
        torch.manual_seed(arguments.seed)
        what = f"{arguments.max_new_tokens} tokens more than the prompt's {ids['input_ids'].shape[1]}"
        fix = f"the model has {num_positions(inner.config)} positions: use a smaller --max-new-tokens"
        with as_error(ConfigError, what, IndexError, fix=fix):  # of a table of positions
            model.generate(**ids, max_new_tokens=arguments.max_new_tokens, streamer=shown, **samples)


def _encode(tokenizer: Any, prompt: str, *, is_chat: bool) -> Any:
    if not is_chat:
        return tokenizer(prompt, return_tensors="pt")
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template", fix="leave out --chat, or name another --tokenizer")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
