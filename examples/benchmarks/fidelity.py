"""`gemkv eval` over the whole text on real models, gathered in one result.

    python fidelity.py [--models gemma3-270m,smollm2-135m] [-- arguments of gemkv eval]
    python fidelity.py --from A.json B.json   # of runs that were made with gemkv eval --json

Without arguments: the parallel path over all tokens, every quantised format, 8 needles a cell. That takes hours on two
CPU cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import about, save

from gemkv_compile.cli.main import main as gemkv

DEFAULT = ["--path", "parallel", "--tokens", "0", "--formats", "int8,k8v4,k6v4,int4", "--needles", "8"]


def evaluated(model: str, extra: list[str]) -> dict[str, Any]:
    """The result of `gemkv eval` on one model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        if gemkv(["eval", model, *(extra or DEFAULT), "--json", str(path)]):
            sys.exit(f"gemkv eval {model} failed")
        result: dict[str, Any] = json.loads(path.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gemma3-270m,smollm2-135m")
    parser.add_argument("--from", dest="files", nargs="+", type=Path, default=[])
    parser.add_argument("--save-as", default="fidelity")
    parser.add_argument("extra", nargs="*")
    arguments = parser.parse_args()
    rows = [json.loads(path.read_text()) for path in arguments.files]
    rows = rows or [evaluated(model, arguments.extra) for model in arguments.models.split(",")]
    for row in rows:  # runs of several machines may stand in one file
        if "commit" not in row["about"]:
            row["about"] |= {key: about()[key] for key in ("date", "commit")}
    print(f"saved to {save(arguments.save_as, rows)}")


if __name__ == "__main__":
    main()
