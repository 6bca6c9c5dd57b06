"""Random schedules of every name, with numbers that it takes."""

import re

from hypothesis import strategies as st

from shardwise.schedule.schedule import SCHEDULES, Action, Kind, Overlap, Schedule, build_schedule


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = SCHEDULES) -> Schedule:
    name = draw(st.sampled_from(names))
    pp_size = draw(st.integers(1, 5))
    in_v, alone = name in ("zbv", "dualpipev"), name in ("gpipe", "1f1b")
    num_stages = 1 if alone else 2 if in_v else draw(st.integers(2 - (name == "interleaved_zero_bubble"), 3))
    fewest = pp_size * num_stages if name in ("1f1b", "dualpipev") else 1
    counts = st.integers(fewest, fewest + 11)
    if name.startswith("interleaved"):
        counts = counts.filter(lambda count: count % max(1, count // pp_size) == 0)
    return build_schedule(name, pp_size=pp_size, num_microbatches=draw(counts), num_stages_per_rank=num_stages)


def read_schedule(text):
    """The schedule whose `str` is `text`."""
    name, *lines = text.splitlines()

    def step(word):
        found = re.findall(r"([0-9]+)([FBIW])([0-9]+)", word)
        actions = [Action(int(stage), Kind(kind), int(microbatch)) for stage, kind, microbatch in found]
        return Overlap(*actions) if len(actions) == 2 else actions[0]

    return Schedule(name, tuple(tuple(map(step, line.split())) for line in lines))
