"""The order of every schedule is that of torch's own, action for action, and the numbers it takes are torch's.

Schedules over several stages say their order when they are built (`pipeline_order`). GPipe and 1F1B run a loop instead,
so a stub of a stage notes what their loop asks of it. (They have a `pipeline_order` too, for pictures: 1F1B's begins on
the last rank with microbatch 1 and ends with one that does not exist.)
"""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from shardwise.errors import ConfigError
from shardwise.schedule.schedule import build_schedule
from tests.families import FULL_PRODUCT

pytestmark = pytest.mark.single

SINGLE = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}
MULTI = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}


def stub_stage(rank, pp_size, num_stages, **more):
    return SimpleNamespace(
        group_rank=rank,
        group_size=pp_size,
        num_stages=num_stages,
        stage_index=rank,
        is_last=rank == num_stages - 1,
        submod=None,
        **more,
    )


def order_of_loop(schedule_class, pp_size, num_microbatches):
    """What a schedule's `_step_microbatches` asks of its stage, on every rank."""
    order = []
    for rank in range(pp_size):
        noted = []
        stage = stub_stage(
            rank,
            pp_size,
            num_stages=pp_size,
            forward_one_chunk=lambda i, *_, noted=noted, rank=rank, **__: noted.append(f"{rank}F{i}"),
            backward_one_chunk=lambda i, *_, noted=noted, rank=rank, **__: noted.append(f"{rank}B{i}"),
            perform_reduce_grad=lambda scale: None,
            **{f"get_{way}_{op}_ops": lambda i: [] for way in ("fwd", "bwd") for op in ("send", "recv")},
        )
        schedule = schedule_class(stage, num_microbatches)
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches()
        order.append(noted)
    return order


def order_said(schedule_class, pp_size, num_microbatches, num_stages):
    stages = [stub_stage(0, pp_size, pp_size * num_stages) for _ in range(num_stages)]
    order = schedule_class(stages, num_microbatches).pipeline_order
    return [[str(action) for action in order[rank] if action is not None] for rank in range(pp_size)]


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 8, *([5] if FULL_PRODUCT else [])])
@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("looped_bfs", 2),
        ("looped_bfs", 3),
        ("interleaved_zero_bubble", 1),
        ("interleaved_zero_bubble", 2),
        ("interleaved_zero_bubble", 3),
        ("zbv", 2),
        ("dualpipev", 2),
    ],
)
def test_the_order_is_torchs(name, num_stages, pp_size):
    num_compared = 0
    for num_microbatches in range(1, 26):
        try:
            if name in SINGLE:
                torchs = order_of_loop(SINGLE[name], pp_size, num_microbatches)
            else:
                torchs = order_said(MULTI[name], pp_size, num_microbatches, num_stages)
        except ValueError:
            with pytest.raises(ConfigError):
                build_schedule(name, pp_size=pp_size, num_microbatches=num_microbatches, num_stages_per_rank=num_stages)
            continue
        ours = build_schedule(name, pp_size=pp_size, num_microbatches=num_microbatches, num_stages_per_rank=num_stages)
        assert [list(map(str, steps)) for steps in ours.order] == torchs, f"{num_microbatches} microbatches"
        num_compared += 1
    assert num_compared >= 9, "otherwise little was compared"


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_torch_refuses_other_stages_too(name, num_stages):
    with pytest.raises(ValueError, match="exactly 2 stages per rank"):
        order_said(MULTI[name], 2, 8, num_stages)


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "looped_bfs"])
def test_torch_reads_what_we_write(name):
    schedule = build_schedule(name, pp_size=3, num_microbatches=6)
    for step in (step for steps in schedule.order for step in steps):
        assert str(torch_schedules._Action.from_str(str(step))) == str(step)
