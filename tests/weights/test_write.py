import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from shardwise.errors import LoadError
from shardwise.weights import staging
from shardwise.weights import write as write_module
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.staging import atomic_file
from shardwise.weights.write import PretrainedWriter

pytestmark = pytest.mark.single


def opened(directory: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int = 10**9) -> PretrainedWriter:
    planned = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    return PretrainedWriter(directory, max_shard_bytes=max_shard_bytes, planned=planned)


def write(directory: Path, tensors: dict[str, torch.Tensor], max_shard_bytes: int = 10**9) -> None:
    with opened(directory, tensors, max_shard_bytes) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish({"total_parameters": 7})


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_every_tensor_is_written_as_it_is_seen(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {
        "transposed": whole.t().to(torch.bfloat16),
        "half": whole[:2],
        "overlapping half": whole[1:],
        "whole": whole,
        "again": whole,
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "é": torch.randn(2, 3),
        "empty": torch.zeros(0, 2),
    }
    write(tmp_path / "out", tensors)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_from_pretrained_reads_what_was_written(tmp_path: Path, max_shard_bytes: int) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=99
    )
    model = AutoModelForCausalLM.from_config(config)
    with opened(tmp_path / "new" / "out", model.state_dict(), max_shard_bytes) as writer:
        config.save_pretrained(writer.staging)
        for name, tensor in model.state_dict().items():
            writer.add(name, tensor)
        writer.finish()
    assert names_in(tmp_path / "new") == ["out"]
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "out", output_loading_info=True)
    assert not any(report.values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_shards_are_named_and_indexed_as_transformers_does(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4), "b": torch.zeros(4), "large": torch.zeros(100), "c": torch.zeros(2)}
    write(tmp_path, tensors, max_shard_bytes=32)
    assert names_in(tmp_path) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert (tmp_path / "model.safetensors.index.json").read_text() == (
        '{\n  "metadata": {\n    "total_parameters": 7,\n    "total_size": 440\n  },\n  "weight_map": {\n'
        '    "a": "model-00001-of-00003.safetensors",\n    "b": "model-00001-of-00003.safetensors",\n'
        '    "c": "model-00003-of-00003.safetensors",\n    "large": "model-00002-of-00003.safetensors"\n  }\n}\n'
    )
    with CheckpointIndex.open(tmp_path) as index:
        assert set(index) == set(tensors)


def test_an_existing_directory_keeps_its_other_files_and_loses_old_weights(tmp_path: Path) -> None:
    target = tmp_path / "out"
    write(target, {"a": torch.zeros(4), "b": torch.zeros(4)}, max_shard_bytes=16)
    (target / "notes").mkdir()
    (target / "notes" / "why.txt").write_text("kept")
    (target / "config.json").write_text("old")
    with opened(target, {"a": torch.ones(4)}) as writer:
        (writer.staging / "config.json").write_text("new")
        writer.add("a", torch.ones(4))
        writer.finish()
    assert names_in(target) == ["config.json", "model.safetensors", "notes"]
    assert (target / "config.json").read_text() == "new"
    assert (target / "notes" / "why.txt").read_text() == "kept"
    assert load_file(target / "model.safetensors")["a"].tolist() == [1.0] * 4
    assert names_in(tmp_path) == ["out"]


def fail_before_finish(writer: PretrainedWriter) -> None:
    raise KeyError("before finish")


def fail_dtype(writer: PretrainedWriter) -> None:
    writer.add("c", torch.zeros(2, dtype=torch.complex128))


def fail_too_early(writer: PretrainedWriter) -> None:
    writer.finish()


def test_a_file_that_lacks_a_tensor_is_not_taken_for_whole(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    with opened(tmp_path / "out", tensors) as writer:
        writer.add("a", tensors["a"])
        with pytest.raises(LoadError, match="'b' was planned and not written"):
            writer.finish()
    assert names_in(tmp_path / "out") == []


@pytest.mark.parametrize("fail", [fail_before_finish, fail_dtype, fail_too_early])
def test_a_failure_leaves_the_target_as_it_was(tmp_path: Path, fail: Callable[[PretrainedWriter], None]) -> None:
    target = tmp_path / "out"
    write(target, {"a": torch.zeros(4), "b": torch.zeros(4)}, max_shard_bytes=16)
    before = files_in(target)
    tensors = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.zeros(2, dtype=torch.complex128)}
    with opened(target, tensors, max_shard_bytes=16) as writer:
        writer.add("a", torch.ones(4))
        writer.add("b", torch.ones(4))
        with pytest.raises((KeyError, LoadError)):
            fail(writer)
    assert files_in(target) == before
    assert names_in(tmp_path) == ["out"]


def test_a_disk_that_takes_no_more_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "out"
    write(target, {"a": torch.zeros(4)})
    before = files_in(target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(target, {"a": torch.zeros(2**18)}) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
        try:
            with pytest.raises(LoadError, match="cannot write out.*[\\s\\S]*File too large"):
                writer.add("a", torch.zeros(2**18))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_in(target) == before
    assert names_in(tmp_path) == ["out"]


def test_a_full_disk_beside_the_weights_is_named_and_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    def fail(place: Path) -> None:
        (place / "tokenizer.json").touch()
        raise Exception("No space left on device (os error 28)")

    write(tmp_path / "out", {"a": torch.zeros(4)})
    before = files_in(tmp_path / "out")
    with opened(tmp_path / "out", {"a": torch.ones(4)}) as writer:
        writer.add("a", torch.ones(4))
        with pytest.raises(LoadError, match=r"cannot write out[\s\S]*No space left"), writer.companions() as place:
            fail(place)
    assert files_in(tmp_path / "out") == before
    assert names_in(tmp_path) == ["out"]


def test_the_current_directory_stays_and_what_others_make_there_meanwhile(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path(), {"a": torch.zeros(4), "b": torch.zeros(4)}, max_shard_bytes=16)
    (tmp_path / "data").mkdir()
    before = {name: (tmp_path / name).stat().st_ino for name in (".", "data")}
    with opened(Path(), {"a": torch.ones(4)}) as writer:
        writer.add("a", torch.ones(4))
        others = tmp_path / "data" / "of others"
        flush = staging.flush_path
        monkeypatch.setattr(write_module, "flush_path", lambda path: (others.write_text("kept"), flush(path)))
        writer.finish()
    assert {name: (tmp_path / name).stat().st_ino for name in before} == before
    assert files_in(Path()).keys() == {"model.safetensors", "data/of others"} and others.read_text() == "kept"


STAGES = ({"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.ones(4), "b": torch.ones(4)})


@pytest.mark.parametrize("before", [10**9, 16])
@pytest.mark.parametrize("after", [10**9, 16])
@pytest.mark.parametrize("failing_call", range(1, 6))
def test_a_crash_while_files_are_moved_leaves_old_weights_or_new_ones_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int, failing_call: int
) -> None:
    """None that `from_pretrained` takes for a model: never some of both."""
    old, new = STAGES
    write(tmp_path, old, max_shard_bytes=before)
    calls = 0

    def failing(name: str) -> Callable[..., object]:
        do = getattr(Path, name)

        def move(path: Path, *args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == failing_call:
                raise OSError(28, "No space left on device")
            return do(path, *args, **options)

        return move

    with opened(tmp_path, new, max_shard_bytes=after) as writer:
        for name, tensor in new.items():
            writer.add(name, tensor)
        with monkeypatch.context() as patched:
            for name in ("replace", "rename", "unlink"):
                patched.setattr(Path, name, failing(name))
            with suppress(LoadError):
                writer.finish()
    try:
        with CheckpointIndex.open(tmp_path) as index:
            found = {name: float(index.map_tensor(name)[0]) for name in index}
    except LoadError:
        return
    assert found in ({"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0})


def test_what_a_killed_writer_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = opened(tmp_path, {"a": torch.zeros(4), "b": torch.zeros(4)})
    left.add("a", torch.zeros(4))
    left.shards.close()
    write(tmp_path, {"c": torch.zeros(4)})
    assert names_in(tmp_path) == ["model.safetensors"]


def test_files_under_way_have_names_of_their_own(tmp_path: Path) -> None:
    """Processes of two machines may have the same id."""
    with atomic_file(tmp_path / "a") as one, atomic_file(tmp_path / "a") as other:
        assert one != other
        one.write_text("1")
        other.write_text("2")
    assert names_in(tmp_path) == ["a"]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", {"a": torch.zeros(1)})
    assert (tmp_path / "link").is_symlink()
    assert names_in(tmp_path / "real") == ["model.safetensors"]


def test_what_a_writer_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="(?s)cannot write to.*File exists"):
        opened(tmp_path / "file", {})
    with pytest.raises(LoadError, match="(?s)cannot write to.*it is a URL"):
        opened("s3://bucket/out", {})
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(LoadError, match="cannot write to"):
        opened(tmp_path / "circle" / "out", {})
    for name in ("adapter_config.json", "manifest.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("{}")
    with pytest.raises(LoadError, match="(?s)holds an adapter.*would add it"):
        opened(tmp_path / "adapter_config.json", {})
    with pytest.raises(LoadError, match="(?s)holds a checkpoint.*would be replaced"):
        opened(tmp_path / "manifest.json", {})
