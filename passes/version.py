"""The version of the passes: part of every operator call, so that no compile cache outlives a change to them."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from gemkv_compile.kernels.layout import FORMAT_VERSION


@functools.cache
def pass_version() -> str:
    """A hash of the source of every pass, with the version of the page format."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{FORMAT_VERSION}-{digest.hexdigest()[:12]}"
