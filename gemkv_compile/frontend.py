"""`gemkv_compile.compile`, `gemkv_compile.explain` and `gemkv_compile.report_of`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gemkv_compile.backend import Backend
from gemkv_compile.compat import graph_break_counts
from gemkv_compile.options import Options
from gemkv_compile.report import Report

_backends: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()  # by what `compile` returned


def compile(
    model: Any = None,
    /,
    *,
    mode: str | None = None,
    guard_filter_fn: Callable[[Sequence[Any]], Sequence[bool]] | None = None,
    **options: Any,
) -> Any:
    """Compile a module, a forward method or a function with the backend "gemkv".

    Args:
        model: An nn.Module: its forward is compiled in place, so that `model.generate` uses it, and the module itself
            is returned. A function or method: the compiled function is returned. None (`@compile(strict=True)`): a
            decorator is returned.
        mode: A mode of Inductor, which then is the inner compiler.
        guard_filter_fn: torch.compile's option of that name: which of Dynamo's guards each call checks; with PyTorch
            2.13 a third of the Python around a decode step. `torch.compiler.skip_guard_on_all_nn_modules_unsafe` leaves
            out those about modules, for a model that stays as it is from its first call on.
        options: See `Options`.
    Raises:
        InvalidOption: an option is unknown or has a value that this version does not have.
    """
    backend = Backend(Options.from_mapping(options), mode)
    how = {} if guard_filter_fn is None else {"options": {"guard_filter_fn": guard_filter_fn}}
    if model is None:
        return lambda target: _compile(target, backend, how)
    return _compile(model, backend, how)


def _compile(target: Any, backend: Backend, how: dict[str, Any]) -> Any:
    if isinstance(target, torch.nn.Module):
        target.compile(backend=backend, **how)
        _backends[target] = backend
        return target
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        raise TypeError("Decorate the forward method of a module class, or compile an instance, not the class itself.")
    if not callable(target):
        raise TypeError(f"gemkv_compile.compile takes an nn.Module or a function, got {type(target).__name__}.")
    compiled = torch.compile(target, backend=backend, **how)
    _backends[compiled] = backend
    return compiled


def report_of(model: Any) -> Report:
    """Report what a compiled model's calls have compiled to so far, with graph breaks and what the shadow has found.

    Args:
        model: What `compile` returned.
    Raises:
        TypeError: it was not compiled by `compile`.
    """
    backend = _backends.get(model)
    if backend is None:
        raise TypeError(
            f"report_of takes what gemkv_compile.compile returned, got another {type(model).__name__}. Compile it with "
            "gemkv_compile.compile(model, ...) instead of by the backend's name, or call gemkv_compile.explain."
        )
    return Report(tuple(backend.graphs), break_texts(backend))


def explain(model: Callable[..., Any], *args: Any, gemkv_options: Options | None = None, **kwargs: Any) -> Report:
    """Run one call and report what it compiles to.

    The call runs with the caller's grad mode, on a compile of its own: what the model has compiled before is neither
    used nor lost.

    Args:
        model: An nn.Module or a function.
        args, kwargs: The inputs of the call.
        gemkv_options: Options of the compile; default: `Options()`.
    Returns:
        A report of every graph of the call, its sites and its memory, and of Dynamo's graph breaks.
    """
    backend = Backend(gemkv_options or Options())
    target = model.forward if isinstance(model, torch.nn.Module) else model
    torch.compile(target, backend=backend)(*args, **kwargs)
    return Report(tuple(backend.graphs), break_texts(backend))


def break_texts(backend: Backend) -> tuple[str, ...]:
    """Graph breaks in Dynamo's words: those that ended a graph of the backend, with their places; and others.

    A break in a loop leaves the whole function uncompiled: no graph ends there, and Dynamo only counts it. So other
    breaks of this process since the backend was made are among them, another model's too.
    """
    placed = [f"{each.reason}\n  At {each.place}" for each in backend.breaks]
    known = {each.reason for each in backend.breaks}
    counts, before = graph_break_counts(), backend.counted_before
    others = [reason for reason, count in counts.items() if count > before.get(reason, 0) and reason not in known]
    return (*placed, *others)
