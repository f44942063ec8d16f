"""Entry point of the `gemkv` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from gemkv_compile.cli.eval_arguments import add_eval
from gemkv_compile.cli.memory_arguments import add_memory
from gemkv_compile.cli.tune import add_tune
from gemkv_compile.errors import GemkvError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit status (0 fine, 1 something is wrong, 2 bad usage)."""
    arguments = _parser().parse_args(argv)
    console = Console()
    try:
        return arguments.run(arguments, console)
    except (GemkvError, FileNotFoundError, ImportError) as error:
        Console(stderr=True).print(f"gemkv: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        print("gemkv: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gemkv", description="Inspect and try the gemkv torch.compile backend.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor", help="versions, GPU, usable engines and kernels; what is wrong and how to mend it"
    )
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="one prompt on a real small model, eager beside gemkv")
    demo.add_argument("--prompt", default=None, help="text to continue (default: a page of English prose)")
    demo.add_argument("--tokens", type=int, default=64, help="tokens to generate (default 64)")
    demo.add_argument("--kv-format", default="int8", help="int8 (default), k8v4, k6v4, int4 or model")
    demo.set_defaults(run=_demo)

    explain = commands.add_parser("explain", help="what gemkv does to a model, attention by attention, and why")
    explain.add_argument("model", metavar="MODEL_FOLDER_OR_GGUF")
    explain.add_argument("--kv-format", default="int8", help="int8 (default), k8v4, k6v4, int4 or model")
    explain.add_argument("--attention", default="sdpa", help="Transformers' attn_implementation (default sdpa)")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    explain.set_defaults(run=_explain)

    add_eval(commands).set_defaults(run=_eval)
    add_memory(commands).set_defaults(run=_memory)
    add_tune(commands).set_defaults(run=_tune)
    return parser


def _doctor(_: argparse.Namespace, console: Console) -> int:
    from gemkv_compile.cli.doctor import doctor

    return doctor(console)


def _demo(arguments: argparse.Namespace, console: Console) -> int:
    from gemkv_compile.cli.demo import demo

    return demo(console, arguments.prompt, arguments.tokens, arguments.kv_format)


def _explain(arguments: argparse.Namespace, console: Console) -> int:
    from gemkv_compile.cli.explain import explain_model

    return explain_model(console, arguments.model, arguments.kv_format, arguments.attention, arguments.json)


def _eval(arguments: argparse.Namespace, console: Console) -> int:
    from gemkv_compile.cli.eval import evaluate

    return evaluate(console, arguments)


def _memory(arguments: argparse.Namespace, console: Console) -> int:
    from gemkv_compile.cli.memory import memory

    return memory(console, arguments)


def _tune(arguments: argparse.Namespace, console: Console) -> int:
    from gemkv_compile.cli.tune import tune

    return tune(console, arguments)
