"""Memory sizes as people write them: "24GiB", "80 GB", or the name of a GPU."""

from __future__ import annotations

import re

from gemkv_compile.errors import GemkvError

UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
# Gigabytes as the manufacturer names them, read as 10^9 bytes each: what a driver reports differs by a few per cent.
GPUS = {
    "H200": (141, "nvidia.com/en-us/data-center/h200"),
    "H100": (80, "nvidia.com/en-us/data-center/h100"),
    "A100-80": (80, "nvidia.com/en-us/data-center/a100"),
    "A100-40": (40, "nvidia.com/en-us/data-center/a100"),
    "RTX 5090": (32, "nvidia.com/en-us/geforce/graphics-cards/50-series/rtx-5090"),
    "RTX 4090": (24, "nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090"),
}


def memory_size(text: str) -> int:
    """Bytes that a text names: a number with a unit (GB is 10^9, GiB 2^30), or a GPU of `GPUS`.

    Raises:
        GemkvError: it is neither.
    """
    plain = _plain(text)
    for name, (gigabytes, _) in GPUS.items():
        if plain == _plain(name):
            return gigabytes * 10**9
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", text.strip().lower())
    unit = match and (match[2] if match[2].endswith("b") or not match[2] else match[2] + "b")
    if not match or unit not in UNITS or float(match[1]) <= 0:
        raise GemkvError(f"{text!r} is no memory size; write 24GiB, 80GB or one of {', '.join(GPUS)}.")
    return int(float(match[1]) * UNITS[unit])


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|gb$", "", name.lower())
