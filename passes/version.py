"""The version of passes and operators: part of every operator call, so that no compile cache outlives a change."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from gemkv_compile.kernels import layout


@functools.cache
def pass_version() -> str:
    """A hash of the source of every pass and operator, with the version of the page format."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(layout.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return f"{layout.FORMAT_VERSION}-{digest.hexdigest()[:12]}"
