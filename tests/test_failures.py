"""Failures injected everywhere: afterwards every page comes back, and the next call gives the right tokens."""

import gc
import itertools
import linecache
import sys
import threading

import pytest
import torch
from paged_tables import CPU, dense_rows, layout_of
from tiers import tiers
from tiny_models import build, generated, greedy, prompt, tuple_model

import gemkv_compile
from gemkv_compile.errors import PoolExhausted
from gemkv_compile.kernels import ops
from gemkv_compile.runtime import handle_refs, page_table, pool, reservation
from gemkv_compile.runtime.handle_refs import HandleRefs
from gemkv_compile.runtime.importing import import_dense
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool, pools

pytestmark = pytest.mark.shares_compiles


def in_use():
    gc.collect()
    return sum(each.in_use for each in pools.stats())


class Fails:
    """Lets the n-th call of a function fail, before or after it has done its work."""

    def __init__(self, monkeypatch, owner, name, at, error, after=False):
        self.calls, self.at, self.error, self.after = 0, at, error, after
        works = getattr(owner, name)

        def work(*args, **kwargs):
            self.calls += 1
            if self.calls == self.at and not self.after:
                raise self.error
            result = works(*args, **kwargs)
            if self.calls == self.at:
                raise self.error
            return result

        monkeypatch.setattr(owner, name, work)

    @property
    def has_failed(self):
        return self.calls >= self.at


def run(model, **kwargs):
    with torch.no_grad():
        return model.generate(prompt(2, 120), max_new_tokens=12, do_sample=False, **kwargs)


@pytest.mark.parametrize("at, where", tiers([(10, "layer")], [(1, "model"), (1, "layer"), (10, "model")]))
def test_exception_in_a_forward_hook(where, at):
    """A hook of the whole model runs between calls; one of a layer, in the middle of a call's two graphs."""
    model = gemkv_compile.compile(build("gemma3"), kv_format="model")
    before, calls = in_use(), itertools.count(1)

    @torch.compiler.disable
    def fail(*_):
        if next(calls) == at:
            raise KeyError("in a hook")

    hook = (model if where == "model" else model.model.layers[0]).register_forward_hook(fail)
    with pytest.raises(KeyError, match="in a hook"):
        run(model)
    assert in_use() == before
    assert torch.equal(run(model), generated("gemma3", 2, 120, 12))
    hook.remove()
    assert in_use() == before


POINTS = {
    "before begin": (PageTable, "begin", False),
    "after begin": (PageTable, "begin", True),
    "before commit": (PageTable, "commit", False),
    "after commit": (PageTable, "commit", True),
    "before a handle": (HandleRefs, "append", False),
    "after a handle": (HandleRefs, "append", True),
    "in the clean-up": (PageTable, "end", True),
}


@pytest.fixture(scope="module")
def compiled():
    """Compiled once, for the tests that need nothing of its first call."""
    return gemkv_compile.compile(build("gemma3"), kv_format="model", strict=True)


LESS = ("before begin", "after begin", "after commit", "before a handle")


@pytest.mark.parametrize("point", tiers([each for each in POINTS if each not in LESS], [(each,) for each in LESS]))
def test_interrupted_generate(point, monkeypatch, compiled):
    """In the prompt's first and second layer, and in the second layer of the step that completes a group."""
    expected, before = generated("gemma3", 2, 120, 12), in_use()
    for at in (1, 2, 2 + 2 * 7 + 2):
        owner, name, after = POINTS[point]
        with monkeypatch.context() as patch:
            failure = Fails(patch, owner, name, at, KeyboardInterrupt(), after)
            with pytest.raises(KeyboardInterrupt):
                run(compiled)
            assert failure.calls >= at  # the clean-up goes on
        del failure
        assert in_use() == before
    assert torch.equal(run(compiled), expected) and in_use() == before


@pytest.mark.parametrize("operator", ["append_kv", "attend_pages", "attend_chunk"])
@pytest.mark.parametrize("after", tiers([True], [(False,)]))
def test_interrupted_operator(operator, after, monkeypatch, compiled):
    expected, before, real = generated("gemma3", 2, 120, 12), in_use(), ops.implementation
    for at in (1, 2) if operator == "attend_chunk" else (1, 2, 2 * 8):
        with monkeypatch.context() as patch:
            works = type("Works", (), {operator: staticmethod(real(operator, CPU))})
            failure = Fails(patch, works, operator, at, KeyboardInterrupt(), after)
            choose = lambda name, device, works=works: getattr(works, name, None) or real(name, device)  # noqa: E731
            patch.setattr(ops, "implementation", choose)
            with pytest.raises(KeyboardInterrupt):
                run(compiled)
            assert failure.calls == at
        del failure
        assert in_use() == before
    assert torch.equal(run(compiled), expected) and in_use() == before


ERRORS = {
    "out of memory": lambda: torch.OutOfMemoryError("no memory"),
    "pool exhausted": lambda: PoolExhausted("test", 1, 1, 1),
}


ALLOCATIONS = tiers(
    [("allocate", "out of memory", 1, 3), ("_grow", "out of memory", 1, 2)],
    [("allocate", "pool exhausted", 3, 4)],
)


@pytest.mark.parametrize("name, error, beams, least", ALLOCATIONS)
def test_each_allocation_fails_in_turn(name, error, beams, least, monkeypatch, compiled):
    """For the first allocation, the second, ... until a run completes; slabs are given back in between."""
    before, failed = in_use(), 0
    expected = run(build("gemma3"), num_beams=beams)
    for at in itertools.count(1):
        pools.trim()
        with monkeypatch.context() as patch:
            failure = Fails(patch, PagePool, name, at, ERRORS[error]())
            try:
                assert torch.equal(run(compiled, num_beams=beams), expected)
            except (torch.OutOfMemoryError, PoolExhausted):
                failed += 1
            has_failed = failure.has_failed
            del failure
        assert in_use() == before
        if not has_failed:
            break
    assert failed == at - 1 >= least
    assert torch.equal(run(compiled, num_beams=beams), expected) and in_use() == before


def test_a_pool_of_each_size_that_is_too_small():
    """Real exhaustion, page by page, of a cache that the caller keeps: it stays right and can go on elsewhere."""
    plain, before, sizes = tuple_model(), in_use(), []
    expected, _, _ = greedy(plain, prompt(2, 60), 80)
    page = layout_of(page_size=256).page_bytes
    for count in range(1, 6):
        model = gemkv_compile.compile(tuple_model(), kv_format="model", pool_bytes=count * page, strict=True)
        ids, pasts, tokens = prompt(2, 60), None, []
        try:
            with torch.no_grad():
                while len(tokens) < 80:
                    logits, pasts = model(ids, pasts)
                    ids = logits[:, -1:].argmax(-1)
                    tokens.append(ids)
        except PoolExhausted:
            sizes.append(len(tokens))
        if len(tokens) < 80:
            dense = [tuple(handle.materialise() for handle in pair) for pair in pasts]
            tokens.append(greedy(plain, ids, 80 - len(tokens), dense)[0])
        assert torch.equal(torch.cat(tokens, 1), expected)
        del pasts, logits
        assert in_use() == before
    assert sizes == [4, 4, 4]  # 2 sequences of 2 layers; 60 tokens and 4 more fill the first group


LINES_OF = {module.__file__ for module in (page_table, handle_refs, pool, reservation)}
# CPython handles no signal at these lines: nothing is called between a lock and what protects it.
NO_SIGNAL = ("with self._lock:", "try:", "self._lock.release()")
# On the way into give_back, and while a pool takes pages in, an interrupt still loses the pages that are on their way.
ON_THEIR_WAY = ("give_back", "_take_in_returned", "_drop_spare_slabs")


def interrupted(at, work):
    """Run `work`, interrupted at the `at`-th line of the page tables' and pools' code; returns that line, or None."""
    seen, line = 0, None

    def trace_lines(frame, event, _):
        nonlocal seen, line
        if event == "line":
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            is_on_the_way = frame.f_code.co_name in ON_THEIR_WAY or text == "self.pool.give_back(leaving)"
            if not text.startswith(NO_SIGNAL) and not is_on_the_way:
                seen += 1
            if seen == at and line is None:
                line = text
                raise KeyboardInterrupt
        return trace_lines

    def trace_calls(frame, *_):
        return trace_lines if frame.f_code.co_filename in LINES_OF and frame.f_code.co_name != "__del__" else None

    before = sys.gettrace()
    sys.settrace(trace_calls)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return line


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("commits", [True, False])
def test_an_append_interrupted_at_every_line(is_shared, commits):
    """Whatever line of begin, commit or abort an interrupt comes at: all rows or none, and every page is accounted."""
    keys, values = dense_rows(2, 200)
    lines = []
    for at in itertools.count(1):
        own = PagePool(layout_of(page_size=128), CPU)
        table = import_dense(own, keys[:, :, :70], values[:, :, :70])
        other = table.fork(0, 70) if is_shared else None

        def work(table=table):
            table.begin(130, None)
            ops.append_kv(
                keys[:, :, 70:], values[:, :, 70:], table.page_table, table.seq_lens, table.tail, 128, "model", "test"
            )
            if commits:
                table.commit(130)
            else:
                table.abort()

        line = interrupted(at, work)
        if line is None:
            break
        lines.append(line)
        table.claim()
        table.end()
        assert not table.is_appending and table.length in ((70, 200) if commits else (70,)), line
        ours, others = (
            {p for pages in each.pages.values() for p in pages} if each else set() for each in (table, other)
        )
        own.stats()  # takes in what was given back
        named, shared = ours | others, ours & others
        assert own._references.keys() == named, line
        assert all(own._references[page] == 1 + (page in shared) for page in named), line
        if table.released:  # as documented: an abort that fails itself
            assert not commits and not table.pages and not table.page_table.any(), line
            continue
        for got, want in zip(table.read(0, table.length), (keys, values), strict=True):
            torch.testing.assert_close(got, want[:, :, : table.length], rtol=0, atol=0)
        if table.length == 70:
            work()
            assert table.length == (200 if commits else 70)
        del table, other, work
        assert own.stats().pages == 0 and own.stats().reserved == sum(s.memory.numel() for s in own._slabs.values())
        assert all(len(set(slab.free)) == len(slab.free) == slab.num_pages for slab in own._slabs.values()), line
    assert len(lines) > 60 and any("self._pick" in line for line in lines)


@pytest.mark.slow
def test_an_interrupt_in_one_thread_leaves_the_cache_to_others(monkeypatch):
    model, plain = gemkv_compile.compile(tuple_model(), kv_format="model", strict=True), tuple_model()
    _, _, pasts = greedy(model, prompt(1, 60), 3)
    _, _, dense = greedy(plain, prompt(1, 60), 3)
    for point in POINTS:
        if point == "in the clean-up":
            continue  # what fails after the last claim has ended cannot hold one
        owner, name, after = POINTS[point]
        with monkeypatch.context() as patch:
            Fails(patch, owner, name, 2, KeyboardInterrupt(), after)
            with pytest.raises(KeyboardInterrupt):
                greedy(model, prompt(1, 2, 5), 1, pasts)
        results = []
        thread = threading.Thread(target=lambda r=results: r.append(greedy(model, prompt(1, 2, 5), 70, pasts)[0]))
        thread.start()
        thread.join(300)
        assert results and torch.equal(results[0], greedy(plain, prompt(1, 2, 5), 70, dense)[0]), point
