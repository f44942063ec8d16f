"""What tensor operations do to a handle: a known view gives a handle, anything else computes on a dense copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from gemkv_compile.errors import GemkvError
from gemkv_compile.runtime.handle import KEYS, VALUES, PagedKVTensor, make_handle, warn_dense_growth
from gemkv_compile.runtime.importing import import_dense
from gemkv_compile.runtime.page_table import PageTable

METADATA_METHODS = frozenset(
    "size dim ndimension numel nelement stride element_size get_device storage_offset untyped_storage has_names "
    "_is_view __len__ __hash__ __dir__ __format__".split()
)
VALUE_QUERIES = frozenset(["is_nonzero", "is_set_to"])  # named like a metadata query, and none
METADATA_PROPERTIES = frozenset(
    "shape dtype device layout ndim requires_grad is_leaf grad grad_fn is_cpu is_cuda is_meta is_sparse is_nested "
    "is_quantized is_mkldnn is_xpu is_mps itemsize names _base _version _grad output_nr _backward_hooks".split()
)
# Return the tensor itself where nothing changes.
CONVERSIONS = frozenset("to type type_as float double half bfloat16 cpu cuda contiguous".split())
IN_PLACE_DUNDERS = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ "
    "__iand__ __ior__ __ixor__ __ilshift__ __irshift__".split()
)


def apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function of which an argument is a handle."""
    name = getattr(func, "__name__", "")
    if any(isinstance(leaf, PagedKVTensor) and leaf.is_shell for leaf in tree_leaves((args, kwargs))):
        return _plainly(func, args, kwargs)
    if name in ("__get__", "__set__"):
        return _property(func, name, args)
    if name in METADATA_METHODS or (name.startswith("is_") and name not in VALUE_QUERIES):
        return _plainly(func, args, kwargs)
    if args and isinstance(args[0], PagedKVTensor):
        view = _known_view(name, args[0], args[1:], kwargs)
        if view is not None:
            return view
        if name in IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__")):
            return _in_place(func, args, kwargs)
    if isinstance(kwargs.get("out"), PagedKVTensor):
        return _into(func, args, kwargs)
    if name in ("cat", "concat", "concatenate"):
        _notice_growth(args, kwargs)
    args, kwargs = _dense((args, kwargs))
    return func(*args, **kwargs)


def select_rows(handle: PagedKVTensor, rows: Sequence[int]) -> PagedKVTensor:
    """The handle of the sequences `rows` of a batch, sharing pages; keys and values of a table stay together."""
    table, key = handle.table, (handle.start, handle.length, tuple(rows))
    known: tuple[Any, weakref.ref[PageTable]] | None = getattr(table, "last_selection", None)
    selected = known[1]() if known and known[0] == key else None
    if selected is None or selected.released:
        selected = table.fork(handle.start, handle.length, rows)
        table.last_selection = (key, weakref.ref(selected))  # type: ignore[attr-defined]
    return make_handle(selected, handle.role, handle.start, handle.length, handle.seq_dim)


def _plainly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on handles themselves: it asks for metadata, or the handle is a shell under tracing."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def replace_rows(handle: PagedKVTensor, dense: torch.Tensor) -> None:
    """Make a handle stand for the values of `dense` (same shape), in a table of its own."""
    other = make_handle(handle.table, VALUES - handle.role, handle.start, handle.length, handle.seq_dim).materialise()
    pair = (dense, other) if handle.role == KEYS else (other, dense)
    handle.table = import_dense(handle.table.pool, *pair, handle.seq_dim)
    handle.start, handle.length = 0, handle.length - handle.start
    handle.table.register(handle)


def _property(func: Any, name: str, args: tuple[Any, ...]) -> Any:
    attribute = func.__self__.__name__
    if name == "__set__":
        return _set_property(attribute, *args)
    if attribute in METADATA_PROPERTIES:
        return _plainly(func, args, {})
    return func(*_dense(args))


def _set_property(attribute: str, handle: PagedKVTensor, value: Any) -> None:
    if attribute == "data":
        _check_shape(handle, value)
        replace_rows(handle, _dense(value))
    elif attribute == "requires_grad":
        handle.requires_grad_(value)
    elif value is not None:
        raise GemkvError(f"The {attribute} of a cached key or value cannot be set: the cache is outside autograd.")


def _known_view(name: str, handle: PagedKVTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a view that a handle knows, or None."""
    if name in CONVERSIONS:
        converted = getattr(torch.Tensor, name)(handle._marker, *args, **kwargs)
        return handle if converted is handle._marker else None
    if name in ("clone", "detach", "__copy__", "alias"):
        return handle.with_rows(handle.start, handle.length)
    if name == "__getitem__":
        return _index(handle, args[0])
    if name == "narrow" and len(args) == 3 and args[0] % 4 == handle.seq_dim:
        first = int(args[1]) % max(handle.shape[handle.seq_dim], 1)
        return handle.with_rows(handle.start + first, handle.start + first + int(args[2]))
    if name == "index_select" and len(args) == 2 and args[0] % 4 == 0:
        return select_rows(handle, args[1].tolist())
    if name == "repeat_interleave" and args and isinstance(args[0], int):
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if dim is not None and dim % 4 == 0:
            return select_rows(handle, [row for row in range(handle.shape[0]) for _ in range(args[0])])
    return None


def _index(handle: PagedKVTensor, key: Any) -> PagedKVTensor | None:
    """handle[key] as a handle, where key keeps whole rows and picks sequences or tokens; else None."""
    parts = list(key) if isinstance(key, tuple) else [key]
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (5 - len(parts))
    parts += [slice(None)] * (4 - len(parts))
    other_dims = [part for dim, part in enumerate(parts) if dim not in (0, handle.seq_dim)]
    if len(parts) != 4 or any(not _is_full(part) for part in other_dims):
        return None
    tokens = parts[handle.seq_dim]
    if not isinstance(tokens, slice) or tokens.step not in (None, 1):
        return None
    rows = _row_indices(parts[0], handle.shape[0])
    if rows is None:
        return None
    first, last, _ = tokens.indices(handle.shape[handle.seq_dim])
    view = handle.with_rows(handle.start + first, handle.start + max(first, last))
    return view if rows == list(range(handle.shape[0])) else select_rows(view, rows)


def _is_full(part: Any) -> bool:
    return isinstance(part, slice) and part.start in (None, 0) and part.stop is None and part.step in (None, 1)


def _row_indices(part: Any, batch: int) -> list[int] | None:
    """The sequences that an index along the batch dimension picks, or None if it does more than that."""
    if isinstance(part, slice):
        return list(range(batch))[part]
    if isinstance(part, list):
        part = torch.tensor(part)
    if not isinstance(part, torch.Tensor) or part.ndim != 1:
        return None
    rows = part.nonzero().flatten().tolist() if part.dtype == torch.bool else part.tolist()
    return [row % batch for row in rows] if all(-batch <= row < batch for row in rows) else None


def _in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedKVTensor:
    handle = args[0]
    dense = handle.materialise()
    rest, kwargs = _dense((args[1:], kwargs))
    func(dense, *rest, **kwargs)
    _check_shape(handle, dense)
    replace_rows(handle, dense)
    return handle


def _into(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedKVTensor:
    handle = kwargs["out"]
    args, rest = _dense((args, {key: value for key, value in kwargs.items() if key != "out"}))
    result = func(*args, **rest)
    _check_shape(handle, result)
    replace_rows(handle, result.to(handle.dtype))
    return handle


def _check_shape(handle: PagedKVTensor, value: torch.Tensor) -> None:
    if value.shape != handle.shape:
        raise GemkvError(
            f"A cached tensor of shape {tuple(handle.shape)} cannot become {tuple(value.shape)} in place. "
            "Assign a new tensor to the cache instead."
        )


def _notice_growth(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = args[0] if args else kwargs.get("tensors", ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = tensors[0] if tensors else None
    if isinstance(first, PagedKVTensor) and dim % 4 == first.seq_dim:
        warn_dense_growth()


def _dense(tree: Any) -> Any:
    """The tree with dense copies in place of handles, one copy per handle."""
    copies = {id(leaf): leaf.materialise() for leaf in tree_leaves(tree) if isinstance(leaf, PagedKVTensor)}
    return tree_map_only(PagedKVTensor, lambda handle: copies[id(handle)], tree)
