"""Imports that ranks share: the fork server imports this module once."""

import gc
import importlib
import os
import signal

from shardwise.ranks.rank import ENDING

__all__: list[str] = []

_handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}


def _restore_handlers() -> None:
    while _handlers:
        signal.signal(*_handlers.popitem())


os.register_at_fork(after_in_child=_restore_handlers)
gc.disable()  # imports leave no garbage, and collections take a sixth of their time

# torchao starts CUDA when it is imported, and a fork of a process with CUDA cannot use it. So GPUs are hidden here.
_cards = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

for _name in (
    "encodings.idna",  # for host names
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "shardwise.ranks.rank",
):
    importlib.import_module(_name)
if "COVERAGE_PROCESS_START" not in os.environ:  # coverage would miss earlier imports
    _front = importlib.import_module("shardwise")
    for _name in _front.__all__:
        getattr(_front, _name)
if _cards is None:
    del os.environ["CUDA_VISIBLE_DEVICES"]
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = _cards
gc.freeze()  # a collection would copy the pages that forks share
gc.enable()
