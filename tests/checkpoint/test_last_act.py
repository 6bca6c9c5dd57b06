"""What a script saves as its last act is saved when it ends, or its exit code is not 0."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import shardwise
from shardwise.checkpoint.writer import SaveJob
from shardwise.ranks.rank import local_variables, warm
from tests.checkpoint.training import Training
from tests.programs import run_script

pytestmark = pytest.mark.spawn


def save(place, **options):
    training = Training(shardwise.Mesh.open("tp1"), "llama")
    write = SaveJob._write
    SaveJob._write = lambda *arguments: time.sleep(0.5) or write(*arguments)  # the interpreter is gone by then
    return training, training.save(place, tag="a", async_save=True, **options)


def end_of_script(place):
    save(place)


def export_after_it(place):
    training, _ = save(place)
    shardwise.export_pretrained(training.model, place / "model")


def raise_error(place):
    save(place)
    raise ValueError("something else")


def exit_with_code(place):
    save(place)
    sys.exit(7)


def be_terminated(place):
    save(place)
    os.kill(os.getpid(), signal.SIGTERM)


def save_in_a_thread(place):
    threading.Thread(target=save, args=(place,)).start()


def fail(place):
    place.write_text("no directory")
    save(place)


def fail_with_another_error(place):
    """An error that is none of Shardwise's."""
    SaveJob._complete = lambda *_: 1 / 0
    save(place)


ENDINGS = {
    end_of_script: 0,
    export_after_it: 0,
    raise_error: 1,
    exit_with_code: 7,
    be_terminated: -signal.SIGTERM,
    save_in_a_thread: 0,
    fail: 1,
    fail_with_another_error: 1,
}


def end_as_a_script(ending, place, output):
    """Runs `ending` in a forked process that has imported everything, and ends as the interpreter ends a script."""
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    code = 0
    try:
        ending(place)
    except SystemExit as error:
        code = error.code
    except ValueError:
        code = 1
    ctypes.pythonapi.Py_Exit(code)


def run(target, *arguments):
    warm()
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    process.start()
    process.join(100)
    return process.exitcode


def is_saved(place):
    return (place / "a" / "manifest.json").exists()


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_a_script_that_ends_has_saved_or_fails(tmp_path, ending):
    code = run(end_as_a_script, ending, tmp_path / "root", tmp_path / "stderr")
    said = (tmp_path / "stderr").read_text()
    assert code == ENDINGS[ending], said
    assert is_saved(tmp_path / "root") or code not in (0, 7), said
    if ending in (fail, fail_with_another_error):
        assert said.count("error: the last checkpoint was not saved") == 1
    if ending is export_after_it:
        assert load_file(tmp_path / "root" / "model" / "model.safetensors")


def test_a_process_of_multiprocessing_has_saved_too(tmp_path):
    """Such a process ends without the functions of atexit."""
    assert run(end_of_script, tmp_path / "root") == 0
    assert is_saved(tmp_path / "root")


SCRIPT = """
    import sys
    import peft, torch, transformers, shardwise

    mesh = shardwise.Mesh.open("tp2")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=16,
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=["q_proj"]))
    model = shardwise.parallelize(model, mesh)
    shardwise.export_pretrained(model, sys.argv[1] + "/adapter")
    shardwise.save_checkpoint(sys.argv[1], model=model, tag="a", async_save=True)
"""


def test_the_ranks_of_a_script_have_saved_when_they_exit(tmp_path):
    """Interpreters whose process groups end with them, under a launcher that keeps the store."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {**local_variables(2, "127.0.0.1", store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with ThreadPoolExecutor(2) as pool:
        run = functools.partial(run_script, script, str(tmp_path), **shared)
        ranks = [pool.submit(run, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    for rank in ranks:
        assert rank.result().returncode == 0, rank.result().stderr
    assert is_saved(tmp_path)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
