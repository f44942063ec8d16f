"""How long engines took: times that are shipped, and times measured here, in a file of the user's cache folder.

A row is {"dtype", "head_dim", "groups", "causal", "window", "softcap", "tokens", "us": {engine: microseconds}}; tokens
is a bucket, the power of two up to a prompt's length. A file of measured times is for one GPU and one set of versions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemkv_compile.kernels.engines.engine import OWN, Place, Prompt
from gemkv_compile.kernels.engines.registry import ENGINES, exact_engines

log = logging.getLogger(__name__)
SHIPPED = Path(__file__).parent / "shipped.json"
FORMAT = 1


@dataclass(frozen=True)
class Known:
    """Times of a class of prompts.

    Args:
        prompt, tokens: The class and the bucket that were timed, which may be near those that were asked for.
        us: Microseconds by engine.
        source: "measured here", or where the shipped times are from.
    """

    prompt: Prompt
    tokens: int
    us: dict[str, float]
    source: str


def bucket_of(tokens: int) -> int:
    """The bucket of a prompt's length: the largest power of two that is not above it."""
    return 1 << (max(tokens, 1).bit_length() - 1)


def known_times(prompt: Prompt, bucket: int, place: Place) -> Known | None:
    """The times that say most about a class: of the nearest class, then the nearest length, then measured ones.

    Near are other numbers of query heads for a K/V head, other windows, and the other half precision. A length stands
    for every longer one, and for half of itself; what is shorter is not known from it.
    """
    found = [(distance, rank, known) for rank, known in enumerate(_all(place)) for distance in _distance(known, prompt)]
    near = [(*each[0], each[1], each[2]) for each in found if each[2].tokens <= 2 * bucket]
    if not near:
        return None
    return min(near, key=lambda each: (each[0], abs(math.log2(each[2].tokens / bucket)), each[1]))[2]


def save_times(prompt: Prompt, bucket: int, us: dict[str, float], place: Place) -> Path:
    """Add a row to this place's file; another process that reads it sees the old rows or all rows."""
    path, row = _path(place), _row(prompt, bucket) | {"us": us}
    rows = [each for each in _read(path) if {**each, "us": us} != row] + [row]
    content = {"format": FORMAT, "gpu": place.name, "versions": versions(), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def cache_folder() -> Path:
    """$GEMKV_CACHE_DIR, or gemkv_compile in the user's cache folder."""
    if named := os.environ.get("GEMKV_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemkv_compile"


def versions() -> dict[str, str]:
    """What measured times depend on: PyTorch, the engines that are there, this package's kernel."""
    there = {name: ENGINES[name].version() for name in exact_engines() if ENGINES[name].missing() is None}
    return {"torch": torch.__version__, OWN: _own_version(), **there}


@functools.cache
def _own_version() -> str:
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "attend_chunk").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _all(place: Place) -> list[Known]:
    rows = [(row, "measured here") for row in _read(_path(place))]
    shipped = json.loads(SHIPPED.read_text()).get(place.name, {"rows": []})
    rows += [(row, shipped["about"]) for row in shipped["rows"]]
    return [Known(_prompt(row), row["tokens"], row["us"], source) for row, source in rows]


def _distance(known: Known, prompt: Prompt) -> Iterable[tuple[float]]:
    """How far a class that was timed is from another one; nothing if it says nothing about it."""
    mine, other = known.prompt, prompt
    same = (mine.head_dim, mine.causal, mine.window is None, mine.softcap is None, mine.dtype.itemsize)
    if same == (other.head_dim, other.causal, other.window is None, other.softcap is None, other.dtype.itemsize):
        windows = abs(math.log2((mine.window or 1) / (other.window or 1)))
        yield (abs(math.log2(mine.groups / other.groups)) + windows,)


def _path(place: Place) -> Path:
    key = json.dumps([FORMAT, place.name, versions()], sort_keys=True)
    return cache_folder() / f"prefill-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none, with a line in the log, if it is not what this package writes."""
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
        for row in rows:
            if set(row) != {*_row(_prompt(row), row["tokens"]), "us"} or not all(t > 0 for t in row["us"].values()):
                raise ValueError(f"a row {row}")
        return rows
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning(
            "gemkv: %s is no file of prefill times (%s: %s), so it is ignored.", path, type(error).__name__, error
        )
        return []


def _row(prompt: Prompt, tokens: int) -> dict[str, Any]:
    return {
        "dtype": str(prompt.dtype).removeprefix("torch."),
        "head_dim": prompt.head_dim,
        "groups": prompt.groups,
        "causal": prompt.causal,
        "window": prompt.window,
        "softcap": prompt.softcap,
        "tokens": tokens,
    }


def _prompt(row: dict[str, Any]) -> Prompt:
    dtype = getattr(torch, row["dtype"])
    return Prompt(dtype, row["head_dim"], row["groups"], row["causal"], row["window"], row["softcap"])
