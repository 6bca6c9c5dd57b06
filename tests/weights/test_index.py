import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.errors import LoadError
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.lazy import LazyTensor
from shardwise.weights.locate import locate_source

pytestmark = pytest.mark.single

TENSORS = {
    "a": torch.arange(24.0).view(4, 6),
    "b.half": torch.arange(7).to(torch.bfloat16),
    "c.scalar": torch.tensor(5, dtype=torch.int64),
    "d.empty": torch.zeros(0, 3),
    "e.flags": torch.tensor([True, False, True]),
    "f.tiny": torch.arange(5.0).to(torch.float8_e4m3fn),
}


def read(index, key, box=None, **options):
    return LazyTensor.of_node(index.node(key)).read(box, **options)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    shards = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b.half", "c.scalar"]}
    for name, keys in shards.items():
        save_file({key: TENSORS[key] for key in keys}, tmp_path / name)
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def test_reads_every_dtype_whole(single: Path) -> None:
    with CheckpointIndex.open(single) as index:
        assert set(index) == set(TENSORS)
        for key, expected in TENSORS.items():
            got = read(index, key)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert got.view(-1).tolist() == expected.view(-1).tolist()
        assert index.bytes_read == sum(tensor.nbytes for tensor in TENSORS.values())


def test_reads_a_box_and_counts_only_it(single: Path) -> None:
    with CheckpointIndex.open(str(single)) as index:
        got = read(index, "a", ((1, 3), (2, 5)), dtype=torch.float64)
        assert torch.equal(got, TENSORS["a"][1:3, 2:5].double())
        assert got.untyped_storage().nbytes() == got.nbytes  # owns its storage, and no more than it needs
        assert index.bytes_read == 2 * 3 * 4
    assert got.sum() > 0  # outlives the index


def test_tensors_need_not_be_aligned(tmp_path: Path) -> None:
    values = torch.arange(2.0**15)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**15], "data_offsets": [0, values.nbytes]}}).encode()
    header += b" " * (-(len(header) + 8) % 4 + 1)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    with CheckpointIndex.open(tmp_path) as index:
        assert index.map_tensor("a").data_ptr() % 4 != 0
        assert torch.equal(read(index, "a"), values)
        assert index.node("a").map_rows(((0, 2**15),)) is None, "what is not aligned is copied"


def test_reads_shards(sharded: Path) -> None:
    with CheckpointIndex.open(sharded) as index:
        assert torch.equal(read(index, "a"), TENSORS["a"])
        assert read(index, "c.scalar").item() == 5


def test_variants_and_subfolders(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    save_file(TENSORS, tmp_path / "unet" / "model.fp16.safetensors")
    with CheckpointIndex.open(tmp_path, variant="fp16", subfolder="unet") as index:
        assert len(index) == len(TENSORS)
    with pytest.raises(LoadError, match=r"found model\.fp16\.safetensors"):
        CheckpointIndex.open(tmp_path, subfolder="unet")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/dir", "a/b/c"])
def test_a_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(LoadError, match="there is no such directory"):
        CheckpointIndex.open(name)


def test_a_hub_id_that_is_not_cached() -> None:
    with pytest.raises(LoadError, match="nobody/nothing") as caught:
        CheckpointIndex.open("nobody/nothing", local_files_only=True)
    assert caught.value.fix


@pytest.mark.parametrize("form", ["single", "sharded"])
def test_a_cached_hub_id(tmp_path: Path, request: pytest.FixtureRequest, form: str) -> None:
    directory = request.getfixturevalue(form)
    cached = tmp_path / "cache" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(directory, cached / "snapshots" / ("0" * 40), ignore=shutil.ignore_patterns("cache"))
    with CheckpointIndex.open("some/model", cache_dir=tmp_path / "cache", local_files_only=True) as index:
        assert torch.equal(read(index, "a"), TENSORS["a"])


def test_a_file_instead_of_its_directory(single: Path) -> None:
    with pytest.raises(LoadError, match="it is a file"):
        CheckpointIndex.open(single / "model.safetensors")


def test_directories_without_weights(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="holds no model.safetensors"):
        CheckpointIndex.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(LoadError, match="only pickled weights") as caught:
        CheckpointIndex.open(tmp_path)
    assert "save_pretrained" in str(caught.value.fix)


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match=r"1 of 2 shards are missing: model-00002-of-00002\.safetensors"):
        CheckpointIndex.open(sharded)


def test_an_index_and_shards_that_disagree(sharded: Path) -> None:
    save_file({"other": TENSORS["a"]}, sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(LoadError, match=r"2 of 3 tensors are not in the shard") as caught:
        CheckpointIndex.open(sharded)
    assert "b.half (in model-00002-of-00002.safetensors)" in str(caught.value.why)


def test_of_a_tensor_that_two_shards_hold_the_index_names_one(sharded: Path) -> None:
    one, two = (sharded / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    save_file({**load_file(two), "a": TENSORS["a"] + 1}, two)
    with CheckpointIndex.open(sharded) as index:
        assert index["a"].path == one and torch.equal(index.map_tensor("a"), TENSORS["a"])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": ["x.safetensors"]}}'])
def test_a_damaged_index_file(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LoadError, match=r"model\.safetensors\.index\.json"):
        CheckpointIndex.open(sharded)


def header_of(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def f32(shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


DAMAGE = {
    "empty": b"",
    "no length": b"\x01\x02",
    "another kind of file": b"\xff" * 16,
    "cut in the header": (100).to_bytes(8, "little") + b"{}",
    "no JSON": (3).to_bytes(8, "little") + b"{a}",
    "no object": (2).to_bytes(8, "little") + b"[]",
    "no entry": header_of(a=[1]),
    "no shape": header_of(a=f32([-1], 0, 4)),
    "wrong offsets": header_of(a=f32([3], 0, 8)) + b"\0" * 8,
    "overlap": header_of(a=f32([1], 0, 4), b=f32([2], 2, 10)) + b"\0" * 10,
    "hole": header_of(a=f32([1], 0, 4), b=f32([1], 8, 12)) + b"\0" * 12,
    "cut in a tensor": header_of(a=f32([3], 0, 12)) + b"\0" * 11,
    "too long": header_of(a=f32([1], 0, 4)) + b"\0" * 5,
    "unknown dtype": header_of(a={"dtype": "F5", "shape": [2], "data_offsets": [0, 1]}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGE[damage])
    with pytest.raises(LoadError, match="model.safetensors is not a usable safetensors file") as caught:
        CheckpointIndex.open(tmp_path)
    assert caught.value.at == str(path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(LoadError, match=r"model.safetensors is a pointer of Git LFS[\s\S]*git lfs pull"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("form", ["single", "sharded"])
def test_a_file_that_may_not_be_read_is_not_said_to_be_missing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    def refuse(path: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    directory = request.getfixturevalue(form)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(LoadError, match=r"cannot read \S*model.safetensors[\s\S]*why: Permission denied"):
        CheckpointIndex.open(directory)


def test_every_byte_cut_off_is_noticed(single: Path) -> None:
    path = single / "model.safetensors"
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(LoadError):
            CheckpointIndex.open(single)


def test_adopted_rows_are_private_pages_with_a_storage_of_their_own(tmp_path: Path) -> None:
    rows = torch.arange(4 * 2**15, dtype=torch.float32).view(4, -1)
    save_file({"rows": rows}, tmp_path / "model.safetensors")
    with CheckpointIndex.open(tmp_path) as index:
        mapped = index.node("rows").map_rows(((1, 3), (0, 2**15)))
        assert mapped is not None
        assert index.bytes_read == mapped.nbytes == mapped.untyped_storage().nbytes()
        assert index.node("rows").map_rows(((0, 4), (0, 2**14))) is None, "columns do not lie together"
        assert index.node("rows").map_rows(((0, 0), (0, 2**15))) is None
    assert torch.equal(mapped, rows[1:3])
    mapped.add_(1)
    with CheckpointIndex.open(tmp_path) as index:
        assert torch.equal(read(index, "rows"), rows), "writing does not reach the file"


def test_the_hub_is_asked_once_and_only_for_what_the_cache_lacks(tmp_path, monkeypatch):
    asked = []

    def ask(url, token=None):
        asked.append((url, token))
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    with pytest.raises(LoadError, match="cannot reach the hub for 'owner/name'") as raised:
        locate_source("owner/name", cache_dir=tmp_path, token="secret", revision="v2")
    assert "no route" in str(raised.value) and "secret" not in str(raised.value)
    assert [(url.rpartition("/owner/")[2], token) for url, token in asked] == [
        ("name/resolve/v2/config.json", "secret")
    ]
    assert locate_source("owner/name", cache_dir=tmp_path, local_files_only=True) is None
    (tmp_path / "models--owner--name").mkdir()
    assert locate_source("owner/name", cache_dir=tmp_path) is None
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["a/b/c", "./a", "a\0b", "x" * 300, Path("owner/name")])
def test_a_name_that_can_be_nothing_is_an_error(name):
    with pytest.raises(LoadError, match="nothing can be loaded from") as raised:
        locate_source(name)
    assert "not a hub id either" in str(raised.value)
