"""`shardwise inspect`: prints what a checkpoint holds, and verifies it."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import LoadError, counted

if TYPE_CHECKING:
    from shardwise.checkpoint.manifest import Index, Manifest
    from shardwise.checkpoint.stored import StoredParts


HELP = """\
List the checkpoints of a directory, newest last, and describe the newest one (or --tag). --verify compares every file
with its checksum. The exit code is 1 if something is damaged.

  shardwise inspect runs/first/checkpoints
  shardwise inspect runs/first/checkpoints --tag step-200 --verify --tensors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `shardwise inspect`."""
    parser.add_argument("checkpoint", metavar="CKPT", help="a directory of checkpoints, or one of them")
    parser.add_argument("--tag", help="which checkpoint (default: the newest)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--verify", action="store_true", help="read everything, and verify its checksums")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from shardwise.checkpoint.manifest import MANIFEST, read_index, read_manifest
    from shardwise.checkpoint.store import find_tag, list_checkpoints

    directory, num_broken = Path(arguments.checkpoint).absolute(), 0
    is_one = (directory / MANIFEST).is_file()
    if not is_one:
        for tag, _, manifest in list_checkpoints(directory):
            if isinstance(manifest, LoadError):
                num_broken += 1
                print(f"{tag:<16} damaged: {manifest.summary}")
                continue
            size = sum(item.num_bytes for item in manifest.files.values())
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
            step = "" if manifest.step is None else f"step {manifest.step:,}"
            print(f"{tag:<16} {step:<12} {saved}  {size / 1e6:>10,.1f} MB  {manifest.layout}")
        print()
    place = directory if is_one and arguments.tag is None else find_tag(directory, arguments.tag)
    manifest = read_manifest(place)
    _describe(manifest, read_index(place, manifest), with_tensors=arguments.tensors)
    if arguments.verify:
        from shardwise.checkpoint.stored import open_checkpoint  # torch is slow to import

        with open_checkpoint(place) as stored:
            num_broken += _verify(stored)
    return 1 if num_broken else 0


def _describe(manifest: Manifest, index: Index, *, with_tensors: bool) -> None:
    kinds: dict[str, list[Any]] = {}
    for key, tensor in index.tensors.items():
        kinds.setdefault(key.partition("/")[0], []).append(tensor)
    print(f"{manifest.tag}: a {manifest.model}, saved by {manifest.layout}")
    print(f"  content    {'all parameters' if manifest.content == 'all' else 'the parameters that were trained'}")
    for kind, tensors in kinds.items():
        num_elements = sum(math.prod(item.shape) for item in tensors)
        print(f"  {kind:<10} {counted(len(tensors), 'tensor')}, {counted(num_elements, 'element')}")
    for name, optimizer in index.optimizers.items():
        groups = counted(len(optimizer["groups"]), "group")
        print(f"  optimizer  {name}{': ' if name else ''}{optimizer['class']}, {groups} of options")
    print(f"  values     {', '.join(sorted(index.values))}")
    size = sum(item.num_bytes for item in manifest.files.values())
    print(f"  files      {len(manifest.files)}, {size / 1e6:,.1f} MB")
    print(f"  versions   {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}")
    for key, tensor in index.tensors.items() if with_tensors else ():
        print(f"  {key}  {list(tensor.shape)} {tensor.dtype_name}, {counted(len(tensor.parts), 'part')}")


def _verify(stored: StoredParts) -> int:
    """Verifies every checksum and prints damaged files and tensors; returns their number."""
    faults = []
    for name in (*stored.manifest.files, *stored.index.tensors):
        try:
            if name in stored.index.tensors:
                stored.read(name)
                stored.drop()
            else:
                stored.check_file(name)
        except LoadError as error:
            faults.append(error)
            print(f"  damaged    {error.summary} ({error.at})")
    print("  verified   all checksums match" if not faults else f"  {len(faults)} damaged")
    return len(faults)
