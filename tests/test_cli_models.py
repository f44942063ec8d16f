"""Loading for the command: a tokenizer that a version of Transformers reads wrongly."""

import pytest
import tokenizers

from gemkv_compile.cli import models
from gemkv_compile.errors import GemkvError


class Read:
    """A tokenizer of one kind; remembers where it is saved."""

    def __init__(self, kind):
        self.backend_tokenizer = tokenizers.Tokenizer(kind())
        self.saved = []

    def save_pretrained(self, folder):
        self.saved.append(folder)


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    return path


def reads(monkeypatch, version, of_gguf, of_folder=None):
    """Let Transformers of a version read these."""
    import transformers  # not above: a test before this one may have imported it anew

    def from_pretrained(folder, gguf_file=None):
        return of_gguf if gguf_file else of_folder

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(transformers, "__version__", version)


def test_wrong_pieces_are_refused(gguf, monkeypatch):
    """Of a GGUF file, by the version that gets it wrong, and only if it has."""
    wrong, right = Read(tokenizers.models.Unigram), Read(tokenizers.models.BPE)
    reads(monkeypatch, "5.17.0", wrong, wrong)
    with pytest.raises(GemkvError, match=r"Transformers 5\.17\.0 .*model\.gguf .*pip install 'transformers>=5\.18'"):
        models.load_tokenizer(gguf)
    assert models.load_tokenizer(gguf.parent) is wrong  # a folder says itself what its tokenizer is
    reads(monkeypatch, "5.17.0", right)
    assert models.load_tokenizer(gguf) is right
    reads(monkeypatch, "5.18.0", wrong)
    assert models.load_tokenizer(gguf) is wrong


def test_a_copy_with_wrong_pieces_is_mended(gguf, tmp_path, monkeypatch):
    wrong, right = Read(tokenizers.models.Unigram), Read(tokenizers.models.BPE)
    monkeypatch.setattr(models, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(models, "load_model", lambda path, dtype=None: path)
    copy = tmp_path / "name-0"
    copy.mkdir()
    (copy / "done").touch()
    reads(monkeypatch, "5.18.0", right, wrong)
    assert models._converted(gguf, "name", None) == (copy, right)
    assert right.saved == [copy]
    reads(monkeypatch, "5.17.0", wrong, wrong)
    with pytest.raises(GemkvError, match="Install a newer one"):
        models._converted(gguf, "name", None)
