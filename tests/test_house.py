"""The house keeps its own rules: who imports whom, what a wheel holds, what is documented."""

import ast
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = {"errors", "compat", "compat_flex", "plan", "reasons"}
# Who may import whom, by part of the package; "front" is what a user calls.
ARROWS = {
    "backend": {"passes", "runtime", "kernels", "options", "report", "inner", "memory_formula", "prefill", "progress"}
    | {"report_parts"},
    "inner": {"passes", "runtime"},
    "passes": {"kernels", "report"},
    "runtime": {"drop", "kernels"},
    "kernels": set(),
    "report": {"memory_formula", "report_parts"},
    "report_parts": set(),
    "options": {"drop", "kernels"},
    "drop": set(),
    "prefill": {"kernels", "passes", "report_parts"},
    "progress": set(),
    "memory_formula": {"kernels"},
    "memory": {"runtime"},
    "plan": {"kernels"},
    "estimate": {"backend", "kernels", "memory_formula", "options", "passes", "report"},
    "errors": set(),
    "compat": set(),
    "compat_flex": set(),
    "reasons": set(),
    "frontend": {"backend", "options", "report"},
    "fidelity": {"drop", "kernels", "options"},
    "cli": {"backend", "estimate", "fidelity", "frontend", "kernels", "memory_formula", "options", "report", "runtime"},
    "__init__": {"drop", "frontend", "memory", "options", "report", "runtime"},
}
PASSES_MAY_USE = {
    "ops",
    "ops_linear",
    "ops_prompt",
    "ops_rope",
    "layout",
    "validate",
    "results",
}  # of the kernels: schemas and layout, no implementation


def sources():
    for folder, prefix in (("gemkv_compile", ""), ("passes", "passes"), ("kernels", "kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield path, prefix or parts[0]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_one_way():
    for path, part in sources():
        for name in imports(path):
            if not name.startswith("gemkv_compile."):
                continue
            target = name.split(".")[1]
            allowed = ARROWS[part] | LEAVES | {part}
            assert target in allowed, f"{path.relative_to(ROOT)} ({part}) imports {name}"
            if part == "passes" and target == "kernels":
                assert set(name.split(".")[2:3]) <= PASSES_MAY_USE, f"{path} imports {name}"


def test_outside_packages_stay_where_they_belong():
    """Core parts import neither Transformers nor Triton; kernel files may, and are imported when they run."""
    for path, part in sources():
        tree = ast.parse(path.read_text())
        top = {
            alias.name.split(".")[0]
            for node in tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])
        }
        allowed = {"triton"} if path.name.startswith("kernel") else set()
        assert not top & {"transformers", "triton", "gguf", "matplotlib", "peft"} - allowed, path
        assert part == "cli" or "transformers" not in path.read_text().split("import")[0], path


def test_nothing_hides_the_package_called_kernels():
    spec = importlib.util.find_spec("kernels")
    assert spec is None or ROOT not in [Path(p).parent for p in spec.submodule_search_locations or ()]


def test_files_are_short_and_public_functions_documented():
    for path, _ in sources():
        text = path.read_text()
        assert len(text.splitlines()) <= 310, f"{path}: {len(text.splitlines())} lines"
        tree = ast.parse(text)
        assert ast.get_docstring(tree) or not text.strip(), f"{path} has no docstring"
        for node in tree.body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            assert not public or ast.get_docstring(node), f"{path}: {node.name} has no docstring"


def test_no_trace_of_where_it_was_written():
    """No path of a machine in anything that is committed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        text = path.read_text(errors="ignore")
        assert not any(word in text for word in ("/work/", "/tmp/", "/root/")), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the tree."""
    import shutil

    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", ".typecheck", "__pycache__", ".whl")
    shutil.copytree(ROOT, source, ignore=ignored)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, source]
    subprocess.run([str(part) for part in build], check=True, cwd=folder)
    return next(folder.glob("*.whl"))


def test_wheel_holds_the_three_packages_and_no_top_level_kernels(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gemkv_compile"}
    for path, _ in sources():
        inside = path.relative_to(ROOT)
        inside = inside if inside.parts[0] == "gemkv_compile" else Path("gemkv_compile") / inside
        assert str(inside) in names, inside
    assert {"gemkv_compile/py.typed", "gemkv_compile/kernels/engines/shipped.json"} <= set(names)


def test_wheel_works_from_another_folder(wheel, tmp_path):
    """Installed beside nothing else: the backend, the operators and the command are there."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, cwd=tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, gemkv_compile, gemkv_compile.kernels.ops, gemkv_compile.passes.rewrite\n"
        "assert gemkv_compile.__file__.startswith(sys.argv[1]), gemkv_compile.__file__\n"
        "from gemkv_compile.cli.main import main\n"
        "attend = torch.nn.functional.scaled_dot_product_attention\n"
        "f = lambda q, k, v: (attend(q, k * 1, v * 1, is_causal=True), k * 1)\n"
        "print(gemkv_compile.compile(f)(*[torch.ones(1, 1, 4, 16)] * 3)[0].shape)\n"
    )
    # Not through an editable install's finder: it would find the checkout first.
    out = subprocess.run([sys.executable, "-S", "-c", _with_packages(code), str(site)], cwd=tmp_path, check=True)
    assert out.returncode == 0


def _with_packages(code):
    """Code that runs without site hooks, with the packages of this environment but no editable finder."""
    paths = [path for path in sys.path if path.endswith("site-packages")]
    return f"import sys; sys.path += {paths!r}\n{code}"


def test_every_reason_is_documented():
    from gemkv_compile.reasons import REASONS

    documented = (ROOT / "docs" / "reasons.md").read_text()
    assert [code for code in REASONS if f"| `{code}` |" not in documented] == []


def test_readme_names_every_option_and_its_tables_are_those_of_the_results():
    from dataclasses import fields

    from gemkv_compile.options import Options

    readme = (ROOT / "README.md").read_text()
    assert [field.name for field in fields(Options) if f"`{field.name}`" not in readme] == []
    tables = ROOT / "examples" / "benchmarks" / "tables.py"
    assert subprocess.run([sys.executable, str(tables), "--check"], check=False).returncode == 0
