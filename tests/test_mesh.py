"""`Mesh`: opened again and again, and left by a rank that fails."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import MeshError
from shardwise.ranks.spawn import spawn
from tests.families import rows_of, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn


def sum_over(mesh):
    value = torch.ones(1)
    dist.all_reduce(value, group=mesh.group("tp"))
    return value.item()


def open_repeatedly():
    found = []
    for _ in range(4):
        with shardwise.Mesh.open("tp2") as mesh:
            found.append(sum_over(mesh))
            with shardwise.Mesh.open("fsdp2") as other:
                found.append(float(other.size("fsdp")))
            found.append(sum_over(mesh))
    return found


def test_a_job_may_open_meshes_one_after_another_and_within():
    assert spawn(open_repeatedly, 2) == [[2.0] * 12] * 2


def count_groups(layout):
    """The process groups made, on any ranks, when the mesh is open and after a step that sums shared heads."""
    with shardwise.Mesh.open(layout) as mesh:
        opened = dist.distributed_c10d.get_pg_count()
        model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1, num_key_value_heads=1), mesh)
        shardwise.TrainStep(model, mesh)(tiny_batch(model))
        return opened, dist.distributed_c10d.get_pg_count()


@pytest.mark.parametrize(("layout", "count"), [("tp2", 1), ("ddp2.fsdp2", 5), ("fsdp2.tp2", 5)])
def test_an_axis_has_one_group_and_that_from_the_start(layout, count):
    size = shardwise.MeshShape.parse(layout).world_size
    assert spawn(count_groups, size, layout) == [(count, count)] * size


def open_theirs(kind):
    """A mesh of somebody else, and what of ours its names represent."""
    dist.init_process_group("gloo")
    names = ("tensor", "dp_shard") if kind == "permuted" else ("dp_shard", "tp")
    theirs = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    axes = {"dp_shard": "fsdp", **({"tensor": "tp"} if kind == "permuted" else {})}
    return {name: theirs.get_group(name) for name in names} if kind == "groups" else theirs, axes


def take_over(kind):
    """Where this rank stands, which ranks its groups sum, a step's loss, and how many groups were made for it."""
    theirs, axes = open_theirs(kind)
    count = dist.distributed_c10d.get_pg_count()
    mesh = shardwise.Mesh.adopt(theirs, axes=axes)
    groups = [sorted(dist.get_process_group_ranks(mesh.group(*axes))) for axes in (("fsdp",), ("tp",), ())]
    model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
    loss = float(shardwise.TrainStep(model, mesh)(rows_of(tiny_batch(model), mesh)).loss)
    made = dist.distributed_c10d.get_pg_count() - count
    return str(mesh), (mesh.coord("fsdp"), mesh.coord("tp")), groups, loss, made


@pytest.mark.parametrize("kind", ["device mesh", "groups", "permuted"])
def test_a_mesh_over_what_somebody_else_opened(kind):
    model = tiny_model("llama", num_hidden_layers=1)
    expected = float(model(**tiny_batch(model)).loss.detach())
    for rank, (text, coords, groups, loss, made) in enumerate(spawn(take_over, 4, kind)):
        assert (text, made) == (f"Mesh(fsdp2.tp2, rank {rank} of 4, cpu)", 0)
        pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert coords == ((rank % 2, rank // 2) if kind == "permuted" else (rank // 2, rank % 2))
        assert groups == [*((pair, across) if kind == "permuted" else (across, pair)), [0, 1, 2, 3]]
        assert abs(loss - expected) < 1e-5


def refused_meshes():
    dist.init_process_group("gloo")
    made = dist.device_mesh.init_device_mesh
    backwards = dist.DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",), _init_backend=False)
    cases = {
        "no names": (made("cpu", (2,)), None),
        "unknown name": (made("cpu", (2,), mesh_dim_names=("dp_shard",)), None),
        "unknown dim": (made("cpu", (2,), mesh_dim_names=("dp_shard",)), {"dp_shrad": "fsdp"}),
        "unknown axis": (made("cpu", (2,), mesh_dim_names=("dp_shard",)), {"dp_shard": "fdsp"}),
        "not ascending": (backwards, None),
        "a part": (dist.DeviceMesh("cpu", [0], mesh_dim_names=("tp",), _init_backend=False), None),
        "other names": ({("tp", "fsdp")[dist.get_rank()]: dist.group.WORLD}, None),
    }
    found = {}
    for name, (theirs, axes) in cases.items():
        try:
            shardwise.Mesh.adopt(theirs, axes=axes)
        except MeshError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def refusals():
    return spawn(refused_meshes, 2)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("no names", ["have no names", "mesh_dim_names"]),
        ("unknown name", ["dp_shard (2)", "'dp_shard' is not an axis", 'axes={"dp_shard": "fsdp"}']),
        ("unknown dim", ["no dim 'dp_shrad' (did you mean 'dp_shard'?)"]),
        ("unknown axis", ["did you mean 'fsdp'?"]),
        ("not ascending", ["ascending", "[1, 0]"]),
        ("a part", ["cannot use a mesh of tp1", "all 2 ranks", "the mesh of the whole job"]),
        ("other names", ["different names or sizes", "rank 1: {'fsdp': [0, 1]}"]),
    ],
)
def test_a_mesh_that_cannot_be_taken_over_is_every_ranks_error(case, parts, refusals):
    first, second = refusals
    assert first[case] == second[case]
    assert all(part in first[case] for part in parts), first[case]


def fail_under_torchrun(file):
    os.environ["TORCHELASTIC_ERROR_FILE"] = file + os.environ["RANK"]
    with shardwise.Mesh.open("tp2"):
        raise MeshError("wrong", fix="right")


def test_torchrun_shows_the_message_of_an_error_that_leaves_a_mesh(tmp_path):
    with pytest.raises(MeshError, match="wrong"):
        spawn(fail_under_torchrun, 2, str(tmp_path / "error"))
    message = json.loads((tmp_path / "error0").read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == "error: wrong\n  fix: right"


class LeftError(Exception):
    pass


def leave_early():
    try:
        with shardwise.Mesh.open("tp2") as mesh:
            if mesh.rank == 1:
                raise LeftError
            sum_over(mesh)
    except (LeftError, RuntimeError) as error:
        return type(error).__name__
    return None


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    first, second = spawn(leave_early, 2, timeout=30)
    assert (first, second) == ("RankError", "LeftError")
