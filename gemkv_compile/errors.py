"""Every error a user can meet: one class per mistake; messages say what was expected, what was given, what to do."""

from __future__ import annotations


class GemkvError(Exception):
    """Base class of all errors raised by gemkv_compile."""


class InvalidOption(GemkvError, ValueError):
    """An option has a name or a value that this version does not have."""


class UnsupportedHeadDim(GemkvError, ValueError):
    """A head size that is no multiple of 16 in [16, 512]."""

    def __init__(self, head_dim: int) -> None:
        super().__init__(
            f"head_dim must be a multiple of 16 between 16 and 512, got {head_dim}. "
            "Such an attention is kept as it is; pad the heads to use the paged cache."
        )


class UnsupportedDtype(GemkvError, TypeError):
    """A dtype of keys, values, queries, or rows and weights, that the kernels do not have."""

    def __init__(self, dtype: object, where: str = "K/V", expected: str = "float16, bfloat16 or float32") -> None:
        super().__init__(f"{where} must be {expected}, got {dtype}. Cast the model, e.g. model.to(torch.bfloat16).")


class UnsupportedGroups(GemkvError, ValueError):
    """Query heads are not a small multiple of the key/value heads."""

    def __init__(self, num_q_heads: int, num_kv_heads: int) -> None:
        super().__init__(
            f"num_q_heads must be 1 to 16 times num_kv_heads, got {num_q_heads} and {num_kv_heads}. "
            "Such an attention is kept as it is."
        )


class ShapeMismatch(GemkvError, ValueError):
    """Tensors given to an operator or a cache do not belong together."""


class CacheMismatch(GemkvError, ValueError):
    """A past handed to a compiled call does not fit the new keys and values."""


class ReleasedHandle(GemkvError, RuntimeError):
    """A handle is read or continued after its rows were given back."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} was released: its pages have been given back to the pool, so its keys and values are gone. "
            "Keep the cache alive (copy.deepcopy(cache) is cheap, it shares pages), or run the prompt again."
        )


class DroppedRows(ReleasedHandle):
    """Rows are read, or cut out, that the option `drop` has given back."""

    def __init__(self, first: int, last: int) -> None:
        GemkvError.__init__(
            self,
            f"Some of the rows {first} to {last} of a paged key/value cache were dropped by the policy in the option "
            "drop, so their keys and values are gone; compiled calls go on without them. Read other rows "
            "(handle[:, :, a:b]), crop the cache elsewhere, or compile without drop and run the prompt again.",
        )


class PoolExhausted(GemkvError, MemoryError):
    """A page pool has reached its limit; the caches that exist stay valid."""

    def __init__(self, pool: str, need: int, limit: int, in_use: int) -> None:
        super().__init__(
            f"page pool {pool} is full: {need} more bytes needed, {in_use} of {limit} bytes in use. "
            "Every cache is still valid. Raise the option pool_bytes, drop a cache, or use a smaller batch."
        )


class SequenceTooLong(GemkvError, ValueError):
    """An append would make a sequence longer than the kernels can count; the cache stays valid."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(
            f"a paged key/value cache holds sequences of fewer than {limit} tokens, and this call would make one of "
            f"{length}. The cache is still valid. Begin a new one, with the newest tokens as its prompt."
        )


class StrictError(GemkvError, RuntimeError):
    """strict=True, and an attention in the graph was not rewritten. The message holds the table of sites."""


class RewriteFailed(UserWarning):
    """A graph runs as it was because of an error of this package; strict=True raises that error instead."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"gemkv could not rewrite a graph because of an error of its own ({type(error).__name__}: {error}), so the "
            "graph runs as it was, with a dense cache. Please report it; strict=True shows where it comes from."
        )


class UncompiledGenerate(UserWarning):
    """`generate` was taken from the result of torch.compile(model, backend="gemkv"), which runs the model eagerly."""

    def __init__(self) -> None:
        super().__init__(
            'torch.compile(model, backend="gemkv").generate runs the model as it is: torch.compile hands generate on '
            'to the model itself, which is not compiled. Write model.compile(backend="gemkv"); model.generate(...).'
        )
