"""PagedKVTensor is a truthful tensor: every operation gives what the dense tensor would, or a clear error."""

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from paged_tables import dense_rows, table_of
from tiny_models import prompt, tuple_model

import gemkv_compile
from gemkv_compile.errors import GemkvError, ReleasedHandle
from gemkv_compile.kernels.layout import KV_FORMATS
from gemkv_compile.runtime.handle import KEYS, VALUES, PagedKVTensor, make_handle
from gemkv_compile.runtime.importing import import_dense
from gemkv_compile.runtime.pool import pools


@pytest.fixture(params=KV_FORMATS)
def kv_format(request):
    return request.param


def handle_of(batch=3, tokens=100, seq_dim=2, kv_format="model", role=KEYS):
    table = table_of(batch, tokens, kv_format)
    return make_handle(table, role, 0, tokens, seq_dim)


@pytest.mark.parametrize("seq_dim", [1, 2])
def test_metadata_is_that_of_the_dense_tensor(seq_dim, kv_format):
    handle = handle_of(seq_dim=seq_dim, kv_format=kv_format)
    dense = handle.materialise()
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad"):
        assert getattr(handle, name) == getattr(dense, name), name
    for name in ("size", "numel", "dim", "stride", "element_size", "is_contiguous", "is_floating_point", "is_neg"):
        assert getattr(handle, name)() == getattr(dense, name)(), name
    assert len(handle) == len(dense) and hash(handle) == id(handle)
    assert "PagedKVTensor" in repr(handle) and kv_format in repr(handle)


def test_metadata_does_not_materialise(monkeypatch):
    handle = handle_of()
    monkeypatch.setattr(PagedKVTensor, "materialise", lambda self: pytest.fail("materialised"))
    assert handle.shape[-2] == 100 and handle.numel() and not handle.is_cuda and handle.grad_fn is None
    assert isinstance(handle.detach(), PagedKVTensor) and handle.to(torch.float32) is handle


def test_materialise_gives_what_was_stored():
    table = table_of(2, 130, "model")
    keys, values = dense_rows(2, 130)
    torch.testing.assert_close(make_handle(table, KEYS, 0, 130).materialise(), keys, rtol=0, atol=0)
    torch.testing.assert_close(make_handle(table, VALUES, 5, 130).materialise(), values[:, :, 5:], rtol=0, atol=0)


VIEWS = {
    "all": lambda x: x[:],
    "crop": lambda x: x[..., :-7, :],
    "last": lambda x: x[:, :, -20:, :],
    "window after crop": lambda x: x[:, :, -30:-5, :],
    "nothing left": lambda x: x[:, :, :0, :],
    "narrow": lambda x: x.narrow(2, 10, 30),
    "narrow by function": lambda x: torch.narrow(x, -2, 10, 30),
    "beams": lambda x: x.index_select(0, torch.tensor([2, 0, 0, 1])),
    "rows by list": lambda x: x[[1, 2]],
    "rows by tensor": lambda x: x[torch.tensor([1, -1]), ...],
    "rows by mask": lambda x: x[torch.tensor([True, False, True])],
    "rows by slice": lambda x: x[1:],
    "rows and crop": lambda x: x[1:3, :, 4:90],
    "repeat": lambda x: x.repeat_interleave(2, dim=0),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "same dtype": lambda x: x.to(torch.float32),
    "same device": lambda x: x.to("cpu"),
    "float": lambda x: x.float(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("name", VIEWS)
def test_known_views_are_handles(name, kv_format):
    handle = handle_of(kv_format=kv_format)
    view = VIEWS[name](handle)
    expected = VIEWS[name](handle.materialise())
    assert isinstance(view, PagedKVTensor) and view.shape == expected.shape
    # A group that a crop or a beam cuts is decoded from its page once more: the same bits.
    torch.testing.assert_close(view.materialise(), expected, rtol=0, atol=0)


ODD_VIEWS = {
    "one row": lambda x: x.index_select(0, torch.tensor(1)),
    "no rows": lambda x: x.index_select(0, torch.tensor([], dtype=torch.int64)),
    "rows by empty list": lambda x: x[[]],
    "no repeats": lambda x: x.repeat_interleave(0, dim=0),
    "mask of nothing": lambda x: x[torch.zeros(3, dtype=torch.bool)],
    "rows by bytes": lambda x: x[torch.tensor([1, 0, 1], dtype=torch.uint8)],
    "rows by bools": lambda x: x[[True, False, True]],
    "size of repeats": lambda x: x.repeat_interleave(2, dim=0, output_size=6),
    "narrow from the end": lambda x: x.narrow(2, -10, 5),
    "narrow to nothing": lambda x: x.narrow(2, 100, 0),
    "plain format": lambda x: x.contiguous(memory_format=torch.contiguous_format),
    "kept format": lambda x: x.clone(memory_format=torch.preserve_format),
    "every other row": lambda x: x[::2],
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", ODD_VIEWS)
def test_odd_views_are_handles_too(name):
    handle = handle_of()
    view, expected = ODD_VIEWS[name](handle), ODD_VIEWS[name](handle.materialise())
    assert isinstance(view, PagedKVTensor)
    torch.testing.assert_close(view.materialise(), expected, rtol=0, atol=0)


MISTAKES = {
    "narrow beyond the end": lambda x: x.narrow(2, 90, 30),
    "narrow from beyond the end": lambda x: x.narrow(2, 105, 3),
    "narrow to less than nothing": lambda x: x.narrow(2, 5, -1),
    "narrow of no dimension": lambda x: x.narrow(6, 5, 2),
    "negative row": lambda x: x.index_select(0, torch.tensor([-1])),
    "no such row": lambda x: x.index_select(0, torch.tensor([7])),
    "no such row by list": lambda x: x[[3]],
    "rows in two dimensions": lambda x: x.index_select(0, torch.tensor([[1]])),
    "rows of no dimension": lambda x: x.index_select(4, torch.tensor([1])),
    "rows by floats": lambda x: x.index_select(0, torch.tensor([1.0])),
    "short mask": lambda x: x[torch.tensor([True, False])],
    "long mask": lambda x: x[torch.tensor([True, False, True, True])],
    "backwards": lambda x: x[::-1],
    "negative repeats": lambda x: x.repeat_interleave(-1, dim=0),
    "repeats of no dimension": lambda x: x.repeat_interleave(2, dim=4),
    "wrong size of repeats": lambda x: x.repeat_interleave(2, dim=0, output_size=7),
    "too many indices": lambda x: x[0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_what_they_raise_for_a_dense_tensor(name):
    handle = handle_of()
    with pytest.raises(Exception) as theirs:
        MISTAKES[name](handle.materialise())
    with pytest.raises(theirs.type) as ours:
        MISTAKES[name](handle)
    assert str(ours.value) == str(theirs.value)


OTHERS = {
    "add": lambda x: x + 1,
    "matmul": lambda x: x @ x.mT,
    "transpose": lambda x: x.transpose(1, 2),
    "T of one": lambda x: x[0, 0].T,
    "head": lambda x: x[:, 1],
    "step": lambda x: x[:, :, ::2],
    "int row": lambda x: x[1],
    "reshape": lambda x: x.reshape(3, -1),
    "view": lambda x: x.view(3, -1),
    "expand": lambda x: x[:1].expand(2, -1, -1, -1),
    "permute": lambda x: x.permute(0, 2, 1, 3),
    "half": lambda x: x.half(),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "contiguous channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strides of channels last": lambda x: torch.tensor(x.clone(memory_format=torch.channels_last).stride()),
    "copy to": lambda x: x.to(torch.float32, copy=True),
    "cat": lambda x: torch.cat([x, torch.ones(3, 2, 1, 16)], 2),
    "cat of batches": lambda x: torch.cat([x, x], 0),
    "stack": lambda x: torch.stack([x, x]),
    "split": lambda x: x.split(50, dim=2)[1],
    "mean": lambda x: x.mean((0, 2)),
    "compare": lambda x: x > 0,
    "equal": lambda x: torch.tensor(torch.equal(x, x)),
    "item": lambda x: torch.tensor(x.sum().item()),
    "iterate": lambda x: torch.stack(list(x)),
    "unbind": lambda x: x.unbind(0)[2],
    "flatten": lambda x: x.flatten(1),
    "zeros_like": lambda x: torch.zeros_like(x),
    "new_empty": lambda x: torch.tensor(x.new_empty(2, 3).shape),
    "data": lambda x: x.data,
    "bool": lambda x: torch.tensor(bool((x == x).all())),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "asarray": lambda x: torch.from_numpy(np.asarray(x)),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "dlpack": lambda x: torch.from_dlpack(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "aten op": lambda x: torch.ops.aten.add.Tensor(x, x),
    "aten view": lambda x: torch.ops.aten.slice.Tensor(x, 2, 3, 9),
    "func": lambda x: torch.nn.functional.softmax(x, -1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_compute_on_a_dense_copy(name, kv_format):
    handle = handle_of(kv_format=kv_format)
    result = OTHERS[name](handle)
    expected = OTHERS[name](handle.materialise())
    assert type(result) is torch.Tensor
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_results_do_not_keep_the_pages_alive():
    for operation in (OTHERS["transpose"], OTHERS["head"], OTHERS["view"], OTHERS["aten view"], OTHERS["data"]):
        handle = handle_of()
        result, ref = operation(handle), weakref.ref(handle.table)
        del handle
        gc.collect()
        assert ref() is None and not isinstance(result._base, PagedKVTensor)


IN_PLACE = {
    "zero_": lambda x: x.zero_(),
    "mul_": lambda x: x.mul_(2),
    "copy_": lambda x: x.copy_(torch.ones(())),
    "fill_ by function": lambda x: torch.Tensor.fill_(x, 3),
    "setitem": lambda x: x.__setitem__((slice(None), 0, slice(3, 5)), 7.0),
    "iadd": lambda x: x.__iadd__(1),
    "data": lambda x: setattr(x, "data", torch.ones(3, 2, 100, 16)),
    "out": lambda x: torch.add(torch.ones(3, 2, 100, 16), 1, out=x),
    "index_copy_": lambda x: x.index_copy_(2, torch.tensor([4]), torch.ones(3, 2, 1, 16)),
    "aten mul_": lambda x: torch.ops.aten.mul_.Tensor(x, 2),
    "aten zero_": lambda x: torch.ops.aten.zero_.default(x),
    "foreach": lambda x: torch._foreach_mul_([torch.ones(2), x], 2),
    "foreach copy": lambda x: torch._foreach_copy_([x], [torch.zeros(3, 2, 100, 16)]),
    "inplace=True": lambda x: torch.nn.functional.relu(x, inplace=True),
    "dropout": lambda x: torch.nn.functional.dropout(x, 1.0, inplace=True),
    "init": lambda x: torch.nn.init.constant_(x, 3.0),
    "one of several outs": lambda x: torch.sort(
        torch.ones(3, 2, 100, 16), dim=0, out=(x, torch.empty(3, 2, 100, 16, dtype=torch.int64))
    ),
    "out and input": lambda x: torch.add(x, 1, out=x),
    "by keywords": lambda x: torch.Tensor.mul_(x, other=2),
    "apply_": lambda x: x.apply_(lambda value: value * 2),
    "under inference mode": lambda x: torch.inference_mode()(torch.Tensor.mul_)(x, 2),
    "subscript": lambda x: exec("x[:, :, 3:5] += 1", {"x": x}),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_are_never_lost(name):
    table = table_of(3, 100, "model")
    handle, twin = make_handle(table, KEYS, 0, 100), make_handle(table, KEYS, 0, 100)
    values, before = make_handle(table, VALUES, 0, 100), twin.materialise()
    expected = before.clone()
    IN_PLACE[name](handle)
    IN_PLACE[name](expected)
    torch.testing.assert_close(handle.materialise(), expected, rtol=0, atol=0)
    torch.testing.assert_close(twin.materialise(), before, rtol=0, atol=0)
    torch.testing.assert_close(values.materialise(), dense_rows(3, 100)[1], rtol=0, atol=0)


def test_changing_the_shape_in_place_is_an_error():
    with pytest.raises(GemkvError, match=r"shape \(3, 2, 100, 16\) cannot become .* Assign a new tensor"):
        handle_of().unsqueeze_(0)
    with pytest.raises(GemkvError, match="cannot become"):
        handle_of().data = torch.ones(1)
    with pytest.raises(GemkvError, match=r"cached torch.float32 tensor .* cannot become a torch.float16 tensor"):
        handle_of().data = torch.ones(3, 2, 100, 16, dtype=torch.float16)


def test_what_works_in_place_returns_the_handle():
    handle = handle_of()
    assert handle.mul_(2) is handle and torch.nn.functional.relu(handle, inplace=True) is handle
    assert handle.detach_() is handle and torch.Tensor.detach_(handle) is handle
    same = handle
    same += 1
    assert same is handle
    out = (handle, torch.tensor([], dtype=torch.int64))
    assert torch.sort(torch.ones(3, 2, 100, 16), out=out)[0] is handle


def test_keys_and_values_are_edited_in_one_call():
    table = table_of(2, 100)
    pair, dense = [make_handle(table, role, 0, 100) for role in (KEYS, VALUES)], dense_rows(2, 100)
    torch._foreach_mul_(pair, 2)
    for handle, rows in zip(pair, dense, strict=True):
        torch.testing.assert_close(handle.materialise(), 2 * rows, rtol=0, atol=0)


def test_saving_and_loading_gives_a_dense_tensor():
    handle, file = handle_of(), io.BytesIO()
    torch.save({"keys": handle}, file)
    file.seek(0)
    loaded = torch.load(file)["keys"]
    assert type(loaded) is torch.Tensor
    torch.testing.assert_close(loaded, handle.materialise(), rtol=0, atol=0)


def test_what_needs_memory_of_its_own_is_refused():
    handle = handle_of()
    for attempt in (handle.data_ptr, handle.share_memory_, lambda: handle.set_(torch.ones(1))):
        with pytest.raises(GemkvError, match=r"no storage.*materialise\(\)"):
            attempt()
    assert handle.untyped_storage().nbytes() == 0


def test_gradients_are_refused():
    handle = handle_of()
    for attempt in (
        handle.requires_grad_,
        lambda: setattr(handle, "requires_grad", True),
        lambda: torch.Tensor.requires_grad_(handle, True),
    ):
        with pytest.raises(GemkvError, match="outside autograd"):
            attempt()
    with pytest.raises(GemkvError, match="outside autograd"):
        handle.grad = torch.ones(3, 2, 100, 16)
    handle.grad = None
    assert handle.requires_grad_(False) is handle


def edit_past(model, past, present):
    for pair in past:
        for handle in pair:
            handle.zero_()
    present.clear()


def release_past(model, past, present):
    past[0][0].release()


def copy_shared_pages(model, past, present):
    """A fork shares the newest page; the cache goes on with a copy of it, and then the fork dies."""
    fork = [tuple(handle.index_select(0, torch.tensor([0])) for handle in pair) for pair in present]
    model(prompt(1, 70, seed=5), present)
    del fork


@pytest.mark.parametrize("change", [edit_past, release_past, copy_shared_pages])
def test_gradients_are_those_of_the_past_that_the_call_saw(change):
    gc.collect()
    before = sum(pool.pages for pool in pools.stats())
    plain, model = (tuple_model(layers=1) for _ in range(2))
    gemkv_compile.compile(model, kv_format="model", page_size=256)
    with torch.no_grad():
        _, past = model(prompt(1, 200))
    dense = [tuple(handle.materialise() for handle in pair) for pair in past]
    pool = past[0][0].table.pool
    ids = prompt(1, 5, seed=3)
    out, present = model(ids, past)
    with torch.no_grad():
        change(model, past, present)
        gc.collect()
        others = [import_dense(pool, *[torch.full((1, 2, 200, 16), 1e3)] * 2) for _ in range(12)]
    ours = torch.autograd.grad(out.square().sum(), model.layers[0].q.weight)[0]
    theirs = torch.autograd.grad(plain(ids, dense)[0].square().sum(), plain.layers[0].q.weight)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    del out, present, past, others
    gc.collect()
    assert sum(pool.pages for pool in pools.stats()) == before


def test_released_handles_say_so():
    handle = handle_of()
    handle.release()
    for attempt in (
        handle.materialise,
        handle.clone,
        lambda: handle + 1,
        lambda: handle[:, :, 1:],
        lambda: handle[[0]],
    ):
        with pytest.raises(ReleasedHandle, match="was released.*run the prompt again"):
            attempt()
    assert "released" in repr(handle)


def test_keys_and_values_of_selected_beams_stay_one_table():
    table, beams = table_of(3, 100, "int8"), torch.tensor([2, 2, 0])
    keys, values = (make_handle(table, role, 0, 100).index_select(0, beams) for role in (KEYS, VALUES))
    assert keys.table is values.table is not table


def test_copies_share_pages():
    handle = handle_of(tokens=640)
    before = handle.table.pool.stats().pages
    copies = [copy.deepcopy(handle), handle.clone(), handle.index_select(0, torch.tensor([0, 0, 0, 1]))]
    assert handle.table.pool.stats().pages == before and len(copies) == 3


def test_growing_outside_a_compiled_graph_warns_once():
    from gemkv_compile.runtime.handle import warn_dense_growth

    warn_dense_growth.cache_clear()
    handle, row = handle_of(), torch.ones(3, 2, 1, 16)
    with pytest.warns(UserWarning, match="recompile_limit.*model.compile"):
        torch.cat([handle, row], dim=-2)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cat([handle, row], dim=-2)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_other_backends_refuse_a_handle(backend):
    """They would trace the handle's shell and lose its values."""
    with pytest.raises(Exception, match=r"another backend compiles.*backend='gemkv'"), torch.no_grad():
        torch.compile(lambda x: x.sin(), backend=backend)(handle_of())
    torch._dynamo.reset()
    handle = handle_of()
    with torch.no_grad():
        result = torch.compile(lambda x: x.sin(), backend="eager")(handle)
    torch.testing.assert_close(result, handle.materialise().sin())
