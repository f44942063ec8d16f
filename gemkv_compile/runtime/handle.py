"""PagedKVTensor: stands where a model keeps its keys or values, and is a truthful tensor to everybody else."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from gemkv_compile.compat import is_tracing_aten
from gemkv_compile.compat_flex import trace_flex_attention_with
from gemkv_compile.errors import GemkvError, ReleasedHandle
from gemkv_compile.runtime.page_table import PageTable

KEYS, VALUES = 0, 1
_plainly: Any = torch._C._disabled_torch_function_impl
_TENSOR: Any = torch.Tensor
# Dynamo takes sizes from each handle at each call; `generate` and caches ask for lengths.
_ASKED_EACH_STEP = frozenset(
    [_TENSOR.size, _TENSOR.stride, _TENSOR.dim, _TENSOR.numel]
    + [getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "device", "ndim")]
)


class PagedKVTensor(torch.Tensor):
    """Rows [start, length) of a page table's keys or values, as a tensor value that owns no storage.

    Shape [batch, num_kv_heads, length - start, head_dim] (sequence dimension 2) or
    [batch, length - start, num_kv_heads, head_dim] (sequence dimension 1); dtype and device of the model.
    A static cache's handle has `places` rows instead: those of the table, and zeros after them; a compiled call that
    writes into the cache makes it stand for the longer table.
    A handle is a value: rows are appended to its table but never changed, so copies share pages. Compiled calls read
    the pages; any other operation computes on a dense copy in the model's precision, right but slower.

    In a quantised format the tokens of the newest, incomplete group are kept in the model's precision, and a group is
    rounded once, when its last token comes. From then on every handle of the table shows the rounded rows, those made
    before too: the same tokens, at most half a scale away from what it showed. Only a crop or an older handle that is
    continued inside a complete group has rows rounded again, with the neighbours that they get.

    An operation that changes the handle itself gives it a table of its own: `h[...] = x`, `h.op_()`, `op(h,
    inplace=True)`, `out=h`. What an operation returns is no view of the handle: after `h[:, :, 3:5].zero_()` or
    `h.transpose(1, 2).mul_(2)` the handle is what it was, since a slice is a copy.

    It has no memory that another tensor could take over, and torch does not ask a handle before it tries: never write
    `tensor.data = handle` on a plain tensor or parameter, which leaves it without memory and crashes the process at its
    next use. `tensor.data = handle.materialise()` is right, and `handle.data = tensor` is too.

    Raises:
        ReleasedHandle: the rows were given back with `release`.
    """

    rows: tuple[PageTable, int, int, int, int | None]  # one object for keys and values where they are made together
    role: int
    _marker: torch.Tensor

    @staticmethod
    def __new__(cls, shape: Any, dtype: torch.dtype, device: torch.device) -> PagedKVTensor:
        """Make an empty shell; use `make_handle`."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, storage_size=0)

    # What tracing needs. A traced handle is a shell around an empty marker: identity, table and length stay out of the
    # metadata that Dynamo guards on, so that no handle causes a recompile.

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_marker"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: None, shape: Any, stride: Any) -> PagedKVTensor:
        marker = inner["_marker"]
        shell = PagedKVTensor(shape, marker.dtype, marker.device)
        shell._marker = marker
        return shell

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ASKED_EACH_STEP or torch.compiler.is_dynamo_compiling():
            return _plainly(func, types, args, kwargs or {})
        from gemkv_compile.runtime.handle_ops import apply

        return apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(PagedKVTensor, _stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def table(self) -> PageTable:
        """Where the rows are."""
        return self.rows[0]

    @property
    def start(self) -> int:
        """The first row."""
        return self.rows[1]

    @property
    def length(self) -> int:
        """The end of the rows: tokens of the table when the handle was made."""
        return self.rows[2]

    @property
    def seq_dim(self) -> int:
        """The dimension of the tokens, 1 or 2."""
        return self.rows[3]

    @property
    def places(self) -> int | None:
        """Rows that a static cache has room for; None for a cache that grows."""
        return self.rows[4]

    @property
    def is_shell(self) -> bool:
        """Whether this is a traced stand-in that has a shape and nothing else."""
        return "rows" not in self.__dict__

    def materialise(self) -> torch.Tensor:
        """The rows as a dense tensor of its own, in the model's precision."""
        rows = self.table.read(self.start, self.length)[self.role]
        if self.places is not None:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, self.places - rows.shape[2]))
        return rows if self.seq_dim == 2 else rows.transpose(1, 2).contiguous()

    def release(self) -> None:
        """Give the table's pages back now; every handle of this table then raises ReleasedHandle when used."""
        self.table.release()

    def with_rows(self, start: int, length: int) -> PagedKVTensor:
        """A handle of rows [start, length) of the same table."""
        return make_handle(self.table, self.role, start, length, self.seq_dim)

    def copy(self) -> PagedKVTensor:
        """Another handle of the same rows."""
        return make_handle(self.table, self.role, self.start, self.length, self.seq_dim, self.places)

    def stand_for(self, table: PageTable, start: int, length: int) -> None:
        """Become the handle of other rows, of the same shape."""
        former, self.rows = self.table, (table, start, length, *self.rows[3:])
        if former is not table:
            table.register(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.is_shell:
            return f"PagedKVTensor(shell, shape={tuple(self.shape)})"
        what, state = ("keys", "values")[self.role], " (released)" if self.table.released else ""
        kv_format = self.table.pool.layout.kv_format
        return f"PagedKVTensor({what}, shape={tuple(self.shape)}, dtype={self.dtype}, pages={kv_format!r}{state})"

    def __copy__(self) -> PagedKVTensor:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVTensor:
        memo[id(self)] = copy = self.copy()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialise().__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialise().__array__(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """A NumPy array of a dense copy."""
        return self.materialise().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """Nested lists of a dense copy."""
        return self.materialise().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.materialise().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._marker.__dlpack_device__()

    def _no_storage(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise GemkvError("A PagedKVTensor has no storage: its values are quantised pages. Use handle.materialise().")

    data_ptr = share_memory_ = set_ = _no_storage

    def detach_(self) -> PagedKVTensor:
        """The handle itself: it is outside autograd."""
        return self

    def requires_grad_(self, requires_grad: bool = True) -> PagedKVTensor:
        """Cached keys and values never require grad."""
        if requires_grad:
            raise GemkvError(
                "A cached key or value cannot require grad: the cache is outside autograd. For prefix tuning pass "
                "handle.materialise().requires_grad_() as the past; the attention is then kept as it is."
            )
        return self


def make_handle(
    table: PageTable, role: int, start: int, length: int, seq_dim: int = 2, places: int | None = None
) -> PagedKVTensor:
    """A handle of rows [start, length) of `table`, of a static cache with room for `places`; role: KEYS or VALUES."""
    if table.released:
        raise ReleasedHandle("A paged key/value cache")
    shape, marker = table.shape_of(length - start if places is None else places, seq_dim), table.marker
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            handle = PagedKVTensor(shape, marker.dtype, marker.device)
    else:
        handle = PagedKVTensor(shape, marker.dtype, marker.device)
    handle._marker = marker
    handle.rows, handle.role = (table, start, length, seq_dim, places), role
    table.register(handle)
    return handle


def _stand_in(handle: PagedKVTensor) -> torch.Tensor:
    """Under fake tensors an empty tensor of the handle's shape, else the dense values."""
    if handle.is_shell:
        if is_tracing_aten():
            raise GemkvError(
                "A PagedKVTensor went into a graph that another backend compiles, which would lose its values. "
                "Compile with backend='gemkv', or pass handle.materialise()."
            )
        return torch.empty(handle.shape, dtype=handle.dtype, device=handle.device)
    return handle.materialise()


trace_flex_attention_with(lambda arguments: tree_map_only(PagedKVTensor, _stand_in, arguments))


@functools.cache
def warn_dense_growth() -> None:
    """Say once that a cache is growing outside compiled code."""
    warnings.warn(
        "gemkv: a paged cache was concatenated outside a compiled graph, so its values are dense again. Dynamo gave up "
        "on this call (often its recompile limit: raise torch._dynamo.config.recompile_limit; TORCH_LOGS=recompiles "
        "says why), or the model runs without compile: use model.compile(backend='gemkv').",
        stacklevel=2,
    )
