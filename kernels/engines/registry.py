"""The engines by name, and whether one is there."""

from __future__ import annotations

from gemkv_compile.errors import InvalidOption
from gemkv_compile.kernels.engines import cudnn, fa2, fa3, int8
from gemkv_compile.kernels.engines.engine import OWN, Engine

ENGINES: dict[str, Engine] = {each.ENGINE.name: each.ENGINE for each in (fa3, fa2, cudnn, int8)}
AUTO = "auto"


def exact_engines() -> tuple[str, ...]:
    """Names of the engines that may be taken without being named."""
    return tuple(name for name, engine in ENGINES.items() if not engine.error)


def check_engine(name: str) -> None:
    """Raise InvalidOption if an engine that was asked for by name is not there."""
    if name in (AUTO, OWN):
        return
    why = ENGINES[name].missing()
    if why is not None:
        raise InvalidOption(f"prefill={name!r}: {why}. prefill='auto' takes the fastest engine that is there.")


def device_kinds(option: str) -> frozenset[str]:
    """Types of devices on which an option of `prefill` may bring in an engine that is there."""
    names = exact_engines() if option == AUTO else {option} & ENGINES.keys()
    return frozenset(kind for name in names if ENGINES[name].missing() is None for kind in ENGINES[name].kinds)
