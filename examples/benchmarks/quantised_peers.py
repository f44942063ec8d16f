"""What quantised caches cost in text, by their bits: this package's formats beside Transformers' own quantised caches.

    python quantised_peers.py [--model smollm2-135m] [--tokens 8192] [--peers quanto4,quanto2,hqq8,hqq4]

On the decode path, each token in a call of its own, windows of 512 tokens after a prompt of 64: `gemkv eval`. "bits" is
what a number takes in a long cache, scales and zero-points of 16 bits included: of a page for this package's formats;
for the peers, whose groups of 64 numbers have a scale and a zero-point, their bits and half a bit. What either keeps in
the model's precision (the newest tokens, up to 64 here and 128 in the peers; and the first 64 in formats below 8 bits)
is not in it. Needs the extras `demo` and `peers`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import save

from gemkv_compile.cli.main import main as gemkv
from gemkv_compile.cli.models import named_model
from gemkv_compile.fidelity.formats import PEERS
from gemkv_compile.kernels.layout import CODE_BITS, PageLayout

GROUP = 64
SHAPE = ["--path", "decode", "--windows", "512", "--prompts", "64", "--needles", "0"]


def bits_of(name: str, head_dim: int) -> float:
    """Bits of a number in a long cache; 16 for what is no format."""
    if name in PEERS:
        peer = PEERS[name].peer
        assert peer is not None
        return peer[1] + 2 * 16 / GROUP
    if name in CODE_BITS:
        layout = PageLayout(1, head_dim, GROUP, GROUP, name, torch.bfloat16)
        return 8 * layout.group_bytes / (2 * GROUP * head_dim)
    return 16.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", default="8192", help="of the text; 0: all")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    config: Any = named_model(arguments.model)[0].config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        what = ["--formats", ",".join(CODE_BITS), "--peers", arguments.peers, "--tokens", arguments.tokens]
        if gemkv(["eval", arguments.model, *SHAPE, *what, "--device", arguments.device, "--json", str(path)]):
            sys.exit("gemkv eval failed")
        result: dict[str, Any] = json.loads(path.read_text())
    reference = result["about"]["formats"][0]
    rows = [
        row | {"model": result["about"]["model"], "bits": bits_of(row["format"], head_dim)}
        for row in result["rows"]
        if row["format"] != reference
    ]
    print(f"saved to {save('quantised_peers', rows)}")


if __name__ == "__main__":
    main()
