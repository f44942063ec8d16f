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

from gemkv_compile.errors import GemkvError, ReleasedHandle
from gemkv_compile.runtime.handle import KEYS, VALUES, PagedKVTensor, make_handle


@pytest.fixture(params=["model", "int8"])
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
    for attempt in (handle.requires_grad_, lambda: setattr(handle, "requires_grad", True)):
        with pytest.raises(GemkvError, match="outside autograd"):
            attempt()
    with pytest.raises(GemkvError, match="outside autograd"):
        handle.grad = torch.ones(3, 2, 100, 16)
    handle.grad = None
    assert handle.requires_grad_(False) is handle


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
