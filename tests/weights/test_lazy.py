import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UnsupportedError
from shardwise.sharding.boxes import shape_of, volume
from shardwise.sharding.layout import Piece
from shardwise.weights.lazy import LazyTensor
from shardwise.weights.nodes import StoredTensor, reshape_boxes

pytestmark = pytest.mark.single


class MemoryStore:
    """Tensors in memory that count what is copied from them."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.bytes_read = 0

    def map_tensor(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def count(self, nbytes: int) -> None:
        self.bytes_read += nbytes

    def lazy(self, key: str) -> LazyTensor:
        return LazyTensor.of_node(StoredTensor(self, key, tuple(self.tensors[key].shape), self.tensors[key].dtype))


def some_dim(draw: st.DrawFn, tensor: torch.Tensor) -> int:
    return draw(st.integers(-tensor.ndim, tensor.ndim - 1))


def draw_operation(
    draw: st.DrawFn, x: torch.Tensor
) -> tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """An operation on (the tensor so far, the other source), drawn to fit `x`."""
    names = ["clone", "double", "unsqueeze", "stack", "flatten", "bfloat16"]
    if x.ndim:
        names += [
            "transpose",
            "chunk",
            "split",
            "cat",
            "select",
            "slice",
            "strided",
            "unbind",
            "fold",
            "squeeze",
            "flip",
        ]
    name = draw(st.sampled_from(names))
    dim = some_dim(draw, x) if x.ndim else 0
    other = some_dim(draw, x) if x.ndim else 0
    size = x.shape[dim] if x.ndim else 1
    at = draw(st.integers(0, size - 1))
    order = draw(st.permutations(range(x.ndim)))
    sizes = [at, size - at]
    folded = (*x.shape[:dim], 2, size // 2, *x.shape[dim:][1:]) if size % 2 == 0 else tuple(x.shape)
    operations = {
        "clone": lambda t, u: t.permute(order).contiguous(),
        "double": lambda t, u: t + t,
        "unsqueeze": lambda t, u: t.unsqueeze(dim),
        "stack": lambda t, u: torch.stack([t, t.clone()], dim=dim),
        "flatten": lambda t, u: t.reshape(-1) if t.ndim != 2 else torch.cat([t.reshape(-1), u.reshape(-1)]),
        "bfloat16": lambda t, u: t.to(torch.bfloat16),
        "transpose": lambda t, u: torch.transpose(t, dim, other),
        "chunk": lambda t, u: torch.chunk(t, 2, dim=dim)[-1],
        "split": lambda t, u: torch.split(t, sizes, dim=dim)[1],
        "cat": lambda t, u: torch.cat([t, t.narrow(dim, at, size - at)], dim=dim),
        "select": lambda t, u: t.select(dim, at - size),
        "slice": lambda t, u: t[min(at, t.shape[0] - 1) :],
        "strided": lambda t, u: t[::2],
        "unbind": lambda t, u: torch.unbind(t, dim)[at],
        "fold": lambda t, u: t.reshape(folded).transpose(dim, other).reshape(folded[0], -1),
        "squeeze": lambda t, u: t.squeeze(dim),
        "flip": lambda t, u: t.flip(dim),
    }
    return name, operations[name]


@given(st.data())
def test_a_box_of_a_lazy_chain_is_the_box_of_the_chain(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    a = torch.arange(float(torch.Size(shape).numel())).view(shape)
    store = MemoryStore(a=a, more=a + 1000, b=-torch.arange(6.0).view(2, 3))
    eager, lazy = a, store.lazy("a")
    if data.draw(st.booleans()):  # no longer a view of one stored tensor, so that boxes have to be pulled back
        dim = data.draw(st.integers(0, len(shape)))
        eager, lazy = torch.stack([a, a + 1000], dim), torch.stack([lazy, store.lazy("more")], dim)
    is_rearranged = True
    for _ in range(data.draw(st.integers(1, 6))):
        _, operation = draw_operation(data.draw, eager)
        eager, lazy = operation(eager, store.tensors["b"]), operation(lazy, store.lazy("b"))
        if not isinstance(lazy, LazyTensor):  # a conversion may go on with what was computed
            lazy, is_rearranged = LazyTensor.of_value(lazy), False
        if eager.numel() > 10_000:
            break
    assert (lazy.shape, lazy.dtype) == (eager.shape, eager.dtype)
    assert not is_rearranged or lazy.is_contiguous() == eager.is_contiguous()
    box = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in eager.shape)
    store.bytes_read = 0
    got = lazy.read(box)
    assert torch.equal(got, eager[tuple(slice(*i) for i in box)])
    assert got.untyped_storage().nbytes() == got.nbytes
    if is_rearranged and lazy.dtype == torch.float32:
        assert store.bytes_read == got.nbytes  # of what is only rearranged, nothing but the box is read


def test_every_order_of_dims_is_pulled_back() -> None:
    a = torch.arange(24.0).view(2, 3, 4)
    store = MemoryStore(a=a, more=a + 100)
    both, lazy = torch.stack([a, a + 100]), torch.stack([store.lazy("a"), store.lazy("more")])
    for order in itertools.permutations(range(4)):
        expected = both.permute(order)[:, 1:, :2, 1:]
        box = tuple((start, stop) for start, stop in zip((0, 1, 0, 1), (both.shape[d] for d in order), strict=True))
        box = (*box[:2], (0, 2), box[3])
        assert torch.equal(lazy.permute(order).read(box), expected)


def test_a_reshape_into_strides_that_do_not_allow_it() -> None:
    a = torch.arange(24.0).view(4, 6)
    store = MemoryStore(a=a, more=a + 100)
    # The columns of the flattened pairs are filled through a transposed result, which has no view in pairs.
    lazy = torch.cat([store.lazy("a"), store.lazy("more")]).view(4, 2, 2, 3).transpose(0, 3).reshape(12, 4).t()
    expected = torch.cat([a, a + 100]).view(4, 2, 2, 3).transpose(0, 3).reshape(12, 4).t()
    assert torch.equal(lazy.read(), expected)
    assert torch.equal(lazy.read(((1, 3), (2, 9))), expected[1:3, 2:9])


def test_a_dtype_on_the_way_rounds() -> None:
    store = MemoryStore(a=torch.tensor([1.0, 1.001]))
    there_and_back = store.lazy("a").to(torch.bfloat16).to(torch.float32)
    assert there_and_back.read().tolist() == [1.0, 1.0]
    assert store.lazy("a").to(torch.bfloat16).read(dtype=torch.float32).tolist() == [1.0, 1.0]


def test_operations_outside_the_algebra_are_run_at_once() -> None:
    store = MemoryStore(a=torch.arange(8.0))
    found = store.lazy("a").exp().view(2, 4)
    assert not isinstance(found, LazyTensor)
    assert torch.equal(found, torch.arange(8.0).exp().view(2, 4))
    assert store.bytes_read == 8 * 4
    joined = torch.cat([found[0], store.lazy("a")])
    assert isinstance(joined, LazyTensor) and joined.read().tolist() == [*found[0].tolist(), *range(8)]


def test_values_that_decide_are_read_at_once() -> None:
    store = MemoryStore(a=torch.tensor([2.0, 3.0]))
    assert store.lazy("a")[1].item() == 3.0
    assert torch.equal(store.lazy("a"), torch.tensor([2.0, 3.0]))


def test_a_wrong_operation_fails_in_torchs_words() -> None:
    store = MemoryStore(a=torch.zeros(2, 3), b=torch.zeros(4, 4))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([store.lazy("a"), store.lazy("b")])


def test_a_lazy_tensor_refuses_to_be_written() -> None:
    store = MemoryStore(a=torch.zeros(2))
    with pytest.raises(UnsupportedError, match="would write into a lazy tensor"):
        store.lazy("a").add_(1)
    written = torch.ones(2)
    written.copy_(store.lazy("a"))  # the other way round is a read
    assert written.tolist() == [0.0, 0.0]


def test_read_local_owns_its_storage() -> None:
    a = torch.arange(30.0).view(5, 6)
    store = MemoryStore(a=a)
    pieces = [Piece(((0, 2), (1, 3)), ((0, 2), (0, 2))), Piece(((3, 5), (1, 3)), ((2, 4), (0, 2)))]
    got = store.lazy("a").read_local(pieces, (4, 2), dtype=torch.float64)
    assert torch.equal(got, torch.cat([a[0:2, 1:3], a[3:5, 1:3]]).double())
    assert got.is_contiguous()
    assert got.untyped_storage().nbytes() == got.nbytes
    assert store.bytes_read == 8 * 4


def test_scalars_and_empty_tensors() -> None:
    store = MemoryStore(a=torch.tensor(3.0), b=torch.zeros(0, 4))
    assert store.lazy("a").read().item() == 3.0
    assert store.lazy("a").read_local([Piece((), ())], ()).item() == 3.0
    assert torch.cat([store.lazy("b"), store.lazy("b")]).read().shape == (0, 4)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
    """A source shape, another shape of as many elements, and a box of the latter."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=6))

    def shape() -> tuple[int, ...]:
        order = draw(st.permutations(factors))
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
        parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
        return tuple(math.prod(part) for part in parts)

    target = shape()
    box = tuple(tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in target)
    return shape(), target, box


@given(reshapes())
def test_the_pieces_are_the_box(case: tuple) -> None:
    source_shape, shape, box = case
    values = torch.arange(math.prod(shape))
    seen = values.view(shape)
    covered = torch.zeros(shape, dtype=torch.int)
    for source_box, part in reshape_boxes(box, shape, source_shape):
        assert volume(source_box) == volume(part) > 0
        mine = seen[tuple(slice(*i) for i in part)]
        theirs = values.view(source_shape)[tuple(slice(*i) for i in source_box)]
        assert theirs.reshape(shape_of(part)).tolist() == mine.tolist()
        covered[tuple(slice(*i) for i in part)] += 1
    wanted = torch.zeros(shape, dtype=torch.int)
    wanted[tuple(slice(*i) for i in box)] = 1
    assert covered.tolist() == wanted.tolist()


def test_dims_that_stay_are_not_taken_apart() -> None:
    # Rows split into (heads, 2, half) while the columns stay: two whole heads of some columns are one box.
    assert reshape_boxes(((2, 4), (0, 2), (0, 4), (1, 3)), (8, 2, 4, 16), (64, 16)) == [
        (((16, 32), (1, 3)), ((2, 4), (0, 2), (0, 4), (1, 3)))
    ]
