"""`make machines`: two machines train under torchrun; one is lost, the link is cut or slow, an address is wrong, a
firewall stands between. No part of `make test`. docs/launching.md says how each ends.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from shardwise.ranks.spawn import spawn
from tests.cli.test_train import losses_of, train_rank, tree  # noqa: F401 - a fixture
from tests.machines.machines import NAMES, Machines

pytestmark = [pytest.mark.spawn, pytest.mark.timeout(600)]

SECONDS = 10  # timeout_seconds
RENDEZVOUS = "join_timeout=45,read_timeout=15"
ENDLESS = {"steps": 100_000}
ONE_RATE = "optimizer.schedule={name: constant}"


@pytest.fixture
def machines(tree, tmp_path):  # noqa: F811
    """Makes two machines that both have the run."""
    opened = []

    def make(*, shares_disk=True, **values):
        root = tmp_path / "machines"
        root.mkdir()
        try:
            opened.append(Machines(root, shares_disk=shares_disk).__enter__())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"two machines need root, `ip`, `unshare` and network namespaces: {error}")
        run = {**tree, "layout": "fsdp2", "sequence_parallel": False, "timeout_seconds": SECONDS}
        run["checkpoint"] = {"dir": "saved", "every": 2}
        for disk in opened[0].disks:
            (disk / "run.yaml").write_text(yaml.safe_dump({**run, "log": {"dir": "logs"}, **values}))
        return opened[0]

    yield make
    for each in opened:
        each.__exit__()


def start(machines, number, *options, endpoint="first-host:29500", restarts=0, words=(), **environment):
    nodes = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(restarts), "--monitor-interval", "0.5")
    meet = options or ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", RENDEZVOUS)
    command = ("torch.distributed.run", *nodes, *meet, "-m", "shardwise", "train", "run.yaml", *words)
    return machines.start(number, *command, **environment)


def start_both(machines, **options):
    first, second = start(machines, 0, **options), start(machines, 1, **options)
    first.await_text(r"step +20/")
    return first, second


def check_failed(run, *parts, seconds):
    assert run.end(seconds=seconds) == 1
    assert all(re.search(part, run.text) for part in parts), run.text


@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2"])
def test_they_train_save_and_resume_as_one_process(machines, tree, layout):  # noqa: F811
    pair = machines(layout=layout)
    for steps in ("4", "6"):
        runs = [start(pair, number, words=(f"steps={steps}", ONE_RATE)) for number in range(2)]
        assert [run.end(seconds=120) for run in runs] == [0, 0], runs[0].text + runs[1].text
    assert "resume  saved/step-4" in runs[0].text
    alone = {"layout": "tp1", "sequence_parallel": False, "optimizer": {"lr": 0.01, "schedule": {"name": "constant"}}}
    spawn(train_rank, 1, {**tree, **alone})
    own = {"log": {"dir": str(pair.disks[0] / "logs")}}
    assert losses_of(own) == pytest.approx(losses_of(tree), abs=1e-4)


def test_disks_that_are_not_shared_are_an_error_before_the_first_step(machines):
    pair = machines(shares_disk=False)
    for run in [start(pair, number) for number in range(2)]:
        check_failed(run, "rank 1 does not see the checkpoint's directory", "all machines share", seconds=90)
        assert "step 1/" not in run.text


def test_without_checkpoints_disks_need_not_be_shared(machines):
    pair = machines(shares_disk=False, checkpoint={}, export="model")
    runs = [start(pair, number) for number in range(2)]
    assert [run.end(seconds=120) for run in runs] == [0, 0], runs[0].text + runs[1].text
    assert (pair.disks[0] / "model" / "model.safetensors").exists()


def test_a_machine_that_is_lost_and_comes_back_trains_on(machines):
    pair, options = machines(**ENDLESS), {"restarts": 2, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first, _ = start_both(pair, **options)
    pair.kill(1)
    first.await_text("error: rank 1 did not come to")
    start(pair, 1, **options)
    first.await_text(r"resume  saved/step-\d+.*step +\d+/")


def test_a_machine_that_is_lost_for_good_is_named(machines):
    pair = machines(**ENDLESS)
    first, _ = start_both(pair, restarts=1)
    pair.kill(1)
    check_failed(first, "error: rank 1 did not come to", "RendezvousTimeoutError", seconds=90)


def test_the_first_machine_is_lost(machines):
    pair = machines(**ENDLESS)
    _, second = start_both(pair, restarts=1)
    pair.kill(0)
    check_failed(second, r"error: rank 0 or its launcher did not come to .*|RendezvousConnectionError", seconds=30)


@pytest.mark.parametrize("background", [False, True])
def test_the_link_is_cut(machines, background):
    pair = machines(**ENDLESS, checkpoint={"dir": "saved", "every": 1, "async_save": background})
    first, second = start_both(pair)
    pair.filter("blackhole")
    check_failed(first, "error: rank 1 did not come to", seconds=60)
    check_failed(second, r"error: rank 0 .*did not come to|RendezvousConnectionError", seconds=90)


@pytest.mark.parametrize("queue", ["tbf rate 2mbit burst 32k latency 2s", "netem delay 50ms loss 1%"])
def test_a_slow_link_is_waited_for(machines, queue):
    pair = machines(timeout_seconds=60)
    try:
        pair.slow_down(*queue.split())
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel has no {queue.split()[0]}: {error.stderr}")
    runs = [start(pair, number) for number in range(2)]
    assert [run.end(seconds=300) for run in runs] == [0, 0], runs[0].text + runs[1].text


@pytest.mark.parametrize("endpoint", ["no-host:29500", "10.77.0.9:29500", "first-host:29501"])
def test_a_wrong_address(machines, endpoint):
    pair = machines()
    first, second = start(pair, 0), start(pair, 1, endpoint=endpoint)
    check_failed(second, endpoint.replace(":", "[:, ]+"), "RendezvousConnectionError", seconds=90)
    check_failed(first, "RendezvousTimeoutError", seconds=90)


def test_a_firewall_that_drops_everything(machines):
    pair = machines()
    pair.filter("blackhole")
    first, second = start(pair, 0), start(pair, 1)
    check_failed(second, "first-host[:, ]+29500", "RendezvousConnectionError", seconds=90)
    check_failed(first, "RendezvousTimeoutError", seconds=90)


@pytest.mark.parametrize("action", ["blackhole", "prohibit"])
def test_a_firewall_that_lets_the_rendezvous_pass(machines, action):
    pair = machines()
    pair.filter(action, 29500)
    first, second = start(pair, 0), start(pair, 1)
    check_failed(first, r"error: 1 of 2 ranks never came to first-host:\d+", "for rank 1", seconds=120)
    check_failed(second, r"rank 1 cannot reach the store of rank 0 at first-host:\d+|RendezvousConn", seconds=90)


def test_a_firewall_that_lets_one_port_pass(machines):
    """With a fixed port the ranks meet there, and then cannot connect to each other."""
    pair = machines()
    pair.filter("blackhole", 29500)
    options = ("--master-addr", "first-host", "--master-port", "29500", "--node-rank")
    runs = [start(pair, number, *options, str(number)) for number in range(2)]
    for number, run in enumerate(runs):
        check_failed(run, f"rank {number} on {NAMES[number]} cannot connect to all other", "TCP ports", seconds=200)
