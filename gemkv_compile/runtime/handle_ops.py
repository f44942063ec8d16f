"""What tensor operations do to a handle: a known view gives a handle, anything else computes on a dense copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from gemkv_compile.errors import GemkvError
from gemkv_compile.runtime.handle import KEYS, VALUES, PagedKVTensor, warn_dense_growth
from gemkv_compile.runtime.handle_views import known_view
from gemkv_compile.runtime.importing import import_dense, used_rows

METADATA_METHODS = frozenset(
    "size dim ndimension numel nelement stride element_size get_device storage_offset untyped_storage has_names "
    "_is_view __len__ __hash__ __dir__ __format__".split()
)
VALUE_QUERIES = frozenset(["is_nonzero", "is_set_to"])  # named like a metadata query, and none
METADATA_PROPERTIES = frozenset(
    "shape dtype device layout ndim requires_grad is_leaf grad grad_fn is_cpu is_cuda is_meta is_sparse is_nested "
    "is_quantized is_mkldnn is_xpu is_mps itemsize names _base _version _grad output_nr _backward_hooks".split()
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
        if name == "detach_":
            return args[0]
        if name == "requires_grad_":
            return args[0].requires_grad_(*args[1:], **kwargs)
        view = known_view(name, args[0], args[1:], kwargs)
        if view is not None:
            return view
    if name in ("cat", "concat", "concatenate"):
        _notice_growth(args, kwargs)
    return _densely(func, name, args, kwargs)


def replace_rows(handle: PagedKVTensor, dense: torch.Tensor) -> None:
    """Make a handle stand for the values of `dense` (same shape), in a table of its own."""
    other = handle.copy()
    other.role = VALUES - handle.role
    pair = (dense, other.materialise()) if handle.role == KEYS else (other.materialise(), dense)
    rows = dense.shape[handle.seq_dim] if handle.places is None else used_rows(pair, handle.seq_dim)
    keys, values = (part.narrow(handle.seq_dim, 0, rows) for part in pair)
    table = import_dense(handle.table.pool, keys, values, handle.seq_dim)
    handle.stand_for(table, 0, rows)


def _plainly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on handles themselves: it asks for metadata, or the handle is a shell under tracing."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _densely(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on dense copies, one per handle; a handle whose copy it changed stands for the new values.

    What a function has changed is told by the versions of the copies, because functions change their arguments under
    many names; apply_ and map_ make no new version, so a method's name counts as well.
    """
    handles = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PagedKVTensor)}
    copies = {key: handle.materialise() for key, handle in handles.items()}
    versions = {key: copy._version for key, copy in copies.items()}
    args, kwargs = tree_map_only(PagedKVTensor, lambda handle: copies[id(handle)], (args, kwargs))
    result = func(*args, **kwargs)
    edited = {key for key, copy in copies.items() if copy._version != versions[key]}
    if name.endswith("_") and not name.endswith("__") and args:
        edited |= {key for key, copy in copies.items() if copy is args[0]}
    if not edited:
        return result
    for key in edited:
        _check_values(handles[key], copies[key])
        replace_rows(handles[key], copies[key])
    back = {id(copies[key]): handles[key] for key in edited}
    return tree_map_only(torch.Tensor, lambda tensor: back.get(id(tensor), tensor), result)


def _property(func: Any, name: str, args: tuple[Any, ...]) -> Any:
    attribute = func.__self__.__name__
    if name == "__set__":
        return _set_property(attribute, *args)
    if attribute in METADATA_PROPERTIES:
        return _plainly(func, args, {})
    return func(args[0].materialise())


def _set_property(attribute: str, handle: PagedKVTensor, value: Any) -> None:
    if attribute == "data":
        value = value.materialise() if isinstance(value, PagedKVTensor) else value
        _check_values(handle, value)
        replace_rows(handle, value)
    elif attribute == "requires_grad":
        handle.requires_grad_(value)
    elif value is not None:
        raise GemkvError(f"The {attribute} of a cached key or value cannot be set: the cache is outside autograd.")


def _check_values(handle: PagedKVTensor, value: torch.Tensor) -> None:
    """Raise GemkvError unless a handle can stand for a dense tensor."""
    own, given = ((x.dtype, x.device, tuple(x.shape)) for x in (handle, value))
    if given != own:
        raise GemkvError(
            f"A cached {own[0]} tensor on {own[1]} of shape {own[2]} cannot become a {given[0]} tensor on {given[1]} "
            f"of shape {given[2]} in place. Assign a new tensor to the cache instead."
        )


def _notice_growth(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = args[0] if args else kwargs.get("tensors", ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = tensors[0] if tensors else None
    if isinstance(first, PagedKVTensor) and dim in (first.seq_dim, first.seq_dim - 4):
        warn_dense_growth()
