"""Options of a compile: names, values, checks. Nothing is accepted that has no effect."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gemkv_compile.drop import Policy, check_policy
from gemkv_compile.errors import InvalidOption
from gemkv_compile.kernels.engines.engine import OWN
from gemkv_compile.kernels.engines.registry import AUTO, ENGINES, check_engine
from gemkv_compile.kernels.layout import KV_FORMATS

INNER_COMPILERS = ("auto", "inductor", "eager")


@dataclass(frozen=True)
class Options:
    """How to compile.

    Args:
        kv_format: What pages hold. "int8": 64-token groups with a scale and zero-point per channel; "k8v4": values of
            4 bits instead, with a scale per channel and one per token; "k6v4" and "int4": keys of 6 or 4 bits as well;
            "model": keys and values in the model's own dtype, exact.
        page_size: Tokens in a page, a multiple of group_size. None: 256, and 64 for windowed layers and with `drop`.
        group_size: Tokens that share a scale and zero-point.
        strict: Raise StrictError when an attention of a graph is kept.
        cuda_graphs: Replay decode steps as CUDA graphs, where the graph is proven to be the same at every length of its
            caches and these are on a GPU; the report says what was captured. Elsewhere it changes nothing.
        inner: Compiler of the rewritten graph: "auto" (Inductor on a GPU, the graph as it is on a CPU), "inductor",
            "eager", the name of another torch.compile backend, or a backend function.
        split_layers: Compile the layers of a graph one by one, equal ones once, when Inductor compiles it, in a quarter
            of its time for 34 layers; no fusion across layers. Graphs that need gradients are compiled as a whole.
        fuse_linears: Compute products of at most 16 rows with 16-bit weights, as decode steps have them, by this
            package's kernel on a GPU, those of one input in one launch; not in graphs that need gradients.
        fuse_rope: Make a decode step's queries and keys from their projections (RMSNorm, rotary embedding) by one
            launch a layer on a GPU, where the graph has a known form of them; not in graphs that need gradients.
        prefill: Who attends to a prompt that nothing is stored before and that has no padding: "auto" (the fastest by
            times known for this GPU, of the engines that are installed and do it exactly), "triton" (this package's
            kernel), "fa3", "fa2" or "cudnn" where they do it exactly, or "int8" (this package's kernel with scores of
            int8 codes, an approximation that "auto" never takes). The report says which was taken, and why.
        drop: Policy that gives pages of cached tokens back early, see `gemkv_compile.drop`; later attention does not
            see them. Pages of layers without a window are then one group by default. None: nothing is dropped.
        pool_bytes: Most bytes that one page pool may reserve. None: no limit.
        shadow: Run the graph as it was beside this number of the first calls of each rewritten graph; the drift is in
            its report. Dense copies of the cache are kept meanwhile.
    Raises:
        InvalidOption: a value is out of range, or its feature is not in this version.
    """

    kv_format: str = "int8"
    page_size: int | None = None
    group_size: int = 64
    strict: bool = False
    cuda_graphs: bool = True
    inner: str | Callable[..., Any] = "auto"
    split_layers: bool = True
    fuse_linears: bool = True
    fuse_rope: bool = True
    prefill: str = "auto"
    drop: Policy | None = None
    pool_bytes: int | None = None
    shadow: int = 0

    def __post_init__(self) -> None:
        _one_of("kv_format", self.kv_format, KV_FORMATS)
        _positive("group_size", self.group_size)
        if self.group_size % 16:
            raise InvalidOption(f"group_size must be a multiple of 16, got {self.group_size}.")
        if self.page_size is not None:
            _positive("page_size", self.page_size)
            if self.page_size % self.group_size:
                raise InvalidOption(
                    f"page_size must be a multiple of group_size ({self.group_size}), got {self.page_size}."
                )
        if self.pool_bytes is not None:
            _positive("pool_bytes", self.pool_bytes)
        if not isinstance(self.strict, bool):
            raise InvalidOption(f"strict must be True or False, got {self.strict!r}.")
        if not callable(self.inner) and not (isinstance(self.inner, str) and self.inner):
            raise InvalidOption(
                f"inner must be one of {INNER_COMPILERS}, a backend's name or a function, got {self.inner!r}."
            )
        for name in ("cuda_graphs", "split_layers", "fuse_linears", "fuse_rope"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidOption(f"{name} must be True or False, got {getattr(self, name)!r}.")
        _one_of("prefill", self.prefill, (AUTO, OWN, *ENGINES))
        check_engine(self.prefill)
        if not isinstance(self.shadow, int) or isinstance(self.shadow, bool) or self.shadow < 0:
            raise InvalidOption(f"shadow must be an int of at least 0, a number of calls, got {self.shadow!r}.")
        if self.drop is not None:
            check_policy(self.drop)
            if self.shadow:
                raise InvalidOption(
                    "shadow and drop exclude each other: the graph as it was needs every cached token, and dropped "
                    "ones are gone. Check the model with shadow first, then with `gemkv eval --drop`."
                )

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any] | None) -> Options:
        """Options from a dict, such as torch.compile's `options`.

        Raises:
            InvalidOption: a key is unknown, and the message names the nearest right one; or it is no mapping.
        """
        if given is not None and not isinstance(given, Mapping):
            raise InvalidOption(f"options must be a dict of names and values, got {given!r}.")
        known = [field.name for field in fields(cls)]
        for key in given or {}:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Options are: {', '.join(known)}."
                raise InvalidOption(f"gemkv has no option {key!r}.{hint}")
        return cls(**(given or {}))


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), [str(a) for a in allowed], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidOption(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}")


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidOption(f"{name} must be a positive int, got {value!r}.")
