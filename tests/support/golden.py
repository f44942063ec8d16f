"""Golden files: compared in tests, accepted by `make goldens` (GEMKV_ACCEPT_GOLDENS=1)."""

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "goldens"


def check_golden(name, text):
    """Compare with the file of that name, or write it if goldens are being accepted."""
    path = FOLDER / f"{name}.expected"
    if os.environ.get("GEMKV_ACCEPT_GOLDENS") == "1":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"no golden {path.name}; look at the text and run `make goldens`:\n{text}"
    expected = path.read_text()
    changes = "\n".join(difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "now", lineterm=""))
    assert text == expected, f"{path.name} differs; if the new text is right, run `make goldens`\n{changes}"
