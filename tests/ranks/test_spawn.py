"""The harness itself: ranks that return, raise, exit and hang, and nothing left behind."""

from __future__ import annotations

import functools
import os
import random
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, RankError
from shardwise.ranks.spawn import spawn

pytestmark = pytest.mark.spawn


def where_am_i():
    return {
        name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    }


def sum_over_ranks(tensor):
    dist.init_process_group("gloo")
    total = tensor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return {"total": [total, (total.sum().item(), str(total.dtype))]}  # the group is left for the harness to take down


class CustomError(Exception):
    def __init__(self, first, second):  # cannot be rebuilt from `args`
        super().__init__(f"{first} {second}")


def raise_on_rank_1(kind):
    print("about to start")
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise CustomError("not", "picklable") if kind == "custom" else ValueError("one went wrong")
    dist.barrier()


def exit_on_rank_1(how):
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        print("last words")
        sys.exit(3) if how == "sys.exit" else os._exit(3)
    dist.barrier()


def hang_on_rank_1(pids):
    (Path(pids) / os.environ["RANK"]).write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        return
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(pids) / "child").write_text(str(child.pid))
    dist.barrier()


def warn():
    warnings.warn("look out", UserWarning, stacklevel=1)


def unpicklable_result():
    return lambda: None


def say_hello():
    print("hello")
    sys.stderr.write("there\n")


def random_numbers():
    return random.random(), np.random.rand(), torch.rand(1).item()


def leave_a_trace():
    import shardwise.mesh

    found = getattr(shardwise.mesh, "trace", None)
    shardwise.mesh.trace = "left"
    return found


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_no_strays(directory):
    """Wait until every process whose id stands in a file of `directory` is gone."""
    deadline = time.monotonic() + 30
    pids = [int(text) for file in directory.iterdir() if (text := file.read_text())]
    assert pids
    for pid in pids:
        while is_alive(pid):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.02)


def test_results_come_in_rank_order():
    results = spawn(where_am_i, 3)
    assert [r["RANK"] for r in results] == [r["LOCAL_RANK"] for r in results] == ["0", "1", "2"]
    assert {r["WORLD_SIZE"] + r["LOCAL_WORLD_SIZE"] + r["OMP_NUM_THREADS"] for r in results} == {"331"}


def test_env_reaches_the_ranks_and_not_the_caller(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")  # a caller inside torchrun does not confuse its ranks
    assert spawn(where_am_i, 1, env={"OMP_NUM_THREADS": "2"})[0]["OMP_NUM_THREADS"] == "2"
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert spawn(where_am_i, 1)[0]["LOCAL_WORLD_SIZE"] == "1"


def test_nested_results_with_tensors():
    results = spawn(sum_over_ranks, 2, tensor=torch.ones(3))
    for result in results:
        total, (number, dtype) = result["total"]
        assert torch.equal(total, torch.full((3,), 3.0))
        assert (number, dtype) == (9.0, "torch.float32")


def test_a_raising_rank_ends_the_others_with_its_own_exception():
    spawn(random_numbers, 1)  # warm
    with pytest.raises(ValueError, match="^one went wrong$") as caught:  # and not, at the timeout, a RankError
        spawn(raise_on_rank_1, 2, "value")
    cause = str(caught.value.__cause__)
    assert "rank 1 of 2 raised ValueError" in cause
    assert "in raise_on_rank_1" in cause
    assert "about to start" in cause


def test_an_exception_that_cannot_travel_becomes_a_rank_error():
    with pytest.raises(RankError, match="(?s)rank 1 of 2 raised CustomError.*not picklable"):
        spawn(raise_on_rank_1, 2, "custom")


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
def test_a_rank_that_exits_is_named_with_its_code(how):
    with pytest.raises(RankError, match="(?s)rank 1 of 2 exited with code 3 without a result.*last words"):
        spawn(exit_on_rank_1, 2, how)


def test_a_hang_is_ended_in_time_with_stacks_and_leaves_no_strays(tmp_path):
    with pytest.raises(RankError) as caught:
        spawn(hang_on_rank_1, 3, str(tmp_path), timeout=5)
    message = str(caught.value)
    assert "rank(s) 0, 2 of 3 did not return within 5 seconds" in message
    assert "rank(s) 1 had returned" in message
    assert message.count("in hang_on_rank_1") == 2
    assert "in barrier" in message
    check_no_strays(tmp_path)


def test_warnings_are_errors_in_ranks_where_they_are_for_the_caller():
    with pytest.raises(UserWarning, match="look out"):
        spawn(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert spawn(warn, 1) == [None]


def test_a_result_that_cannot_be_pickled_is_that_ranks_failure():
    with pytest.raises(Exception, match="unpicklable_result|pickle"):
        spawn(unpicklable_result, 1)


def test_output_is_passed_on(capsys):
    spawn(say_hello, 2)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(
        f"[rank {rank}] {word}" for rank in (0, 1) for word in ("hello", "there")
    )


def test_ranks_start_from_the_same_seeds_as_a_test():
    assert spawn(random_numbers, 2) == [random_numbers()] * 2  # conftest seeds this side


def test_ranks_find_the_package_imported_and_nothing_that_others_did_with_it():
    assert spawn(leave_a_trace, 2) == spawn(leave_a_trace, 2) == [None, None]
    assert "shardwise.parallel.apply" in spawn(imported_before_this_module, 1)[0]


def imported_before_this_module():
    names = list(sys.modules)
    return names[: names.index(__name__)]


def test_ranks_find_imported_what_their_test_modules_import_again_and_again():
    assert "pytest" in spawn(imported_before_this_module, 1)[0]


def master_port():
    return int(os.environ["MASTER_PORT"])


def test_a_port_that_another_caller_has_is_left_to_it(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    with socket.socket(type=socket.SOCK_DGRAM) as another:
        another.bind(("127.0.0.1", 0))
        monkeypatch.setattr("shardwise.ranks.spawn.PORTS", [another.getsockname()[1]] * 99 + [free])
        assert spawn(master_port, 1) == [free]


def test_what_cannot_be_spawned_is_refused_at_once():
    with pytest.raises(ConfigError, match="top level of a module"):
        spawn(lambda: None, 1)


SCRIPT = """
import multiprocessing, operator, os, signal, sys, time
from pathlib import Path
import shardwise.ranks.rank
from shardwise.errors import RankError
from shardwise.ranks.spawn import spawn

shardwise.ranks.rank.PRELOADED = ()  # these ranks need nothing

def sleep(directory):
    (Path(directory) / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)

def kill_the_server(directory):
    (Path(directory) / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        while len([file for file in Path(directory).iterdir() if file.read_text()]) < 2:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

def own(a, b):
    return a + b

def lock():
    global kept
    kept = multiprocessing.get_context("spawn").Lock()  # as a progress bar's of tqdm is

"""


def write_script(directory, body):
    script = directory / "script.py"
    script.write_text(SCRIPT + body)
    return script


def run_script(script, *arguments):
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("end", ["kill", "send_signal"])
def test_ranks_end_with_their_caller(tmp_path, end):
    script = write_script(tmp_path, "if __name__ == '__main__': spawn(sleep, 2, sys.argv[1])")
    pids = tmp_path / "pids"
    pids.mkdir()
    exchange = tmp_path / "x"  # paths of sockets must be short
    exchange.mkdir()
    caller = subprocess.Popen(
        [sys.executable, str(script), str(pids)],
        env={**os.environ, "TMPDIR": str(exchange)},
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C and so would this one, if the suite is one of them.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one thread
    )
    deadline = time.monotonic() + 60
    while len([f for f in pids.iterdir() if f.read_text()]) < 2:
        assert time.monotonic() < deadline
        assert caller.poll() is None, caller.stderr.read()
        time.sleep(0.02)
    caller.kill() if end == "kill" else caller.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in caller.communicate(timeout=30)[1] or end == "kill"
    check_no_strays(pids)
    left = {entry.name.partition("-")[0] for entry in exchange.iterdir()}
    assert left <= ({"pymp"} if end == "kill" else set()), "more than the directory of multiprocessing is still there"


KILLED = """
if __name__ == "__main__":
    try:
        spawn(kill_the_server, 2, sys.argv[1])
    except RankError as error:
        print(error)
    time.sleep(1)  # until then multiprocessing may not have noticed
    print(spawn(own, 2, 1, 2))
"""


def test_locks_that_ranks_made_are_not_left_behind(tmp_path):
    ended = run_script(write_script(tmp_path, "if __name__ == '__main__': spawn(lock, 2)"))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_ranks_end_where_their_server_has_and_the_next_case_starts_another(tmp_path):
    script = write_script(tmp_path, KILLED)
    (pids := tmp_path / "pids").mkdir()
    run = run_script(script, str(pids))
    assert "without a result" in run.stdout and run.stdout.endswith("[3, 3]\n"), run.stdout + run.stderr
    check_no_strays(pids)


def test_a_script_without_a_guard_may_start_ranks_that_do_not_need_it(tmp_path):
    run = run_script(write_script(tmp_path, "print(spawn(operator.add, 2, 1, 2))"))
    assert (run.stdout, run.stderr) == ("[3, 3]\n", "")


def test_a_script_without_a_guard_is_told_so_where_ranks_need_it(tmp_path):
    run = run_script(write_script(tmp_path, "spawn(own, 2, 1, 2)"))
    assert run.returncode == 1 and run.stdout == ""
    error, why, fix = run.stderr.splitlines()[-3:]
    assert "ConfigError" in error and "script.py starts ranks while it is imported" in error
    assert "would start ranks in turn" in why and 'if __name__ == "__main__":' in fix
