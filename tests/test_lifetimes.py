"""`memory.track`: every page's life, leaks that are made on purpose, and the two classic ones, which do not happen."""

import gc
import itertools
import threading

import pytest
import torch
from paged_tables import CPU, dense_rows, layout_of
from tiers import tiers
from tiny_models import build, generated, greedy, prompt, tuple_model
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

import gemkv_compile
from gemkv_compile import memory
from gemkv_compile.memory import BOUND, RELEASED, RESERVED, SHARED
from gemkv_compile.runtime.handle import KEYS, VALUES, make_handle
from gemkv_compile.runtime.importing import import_dense
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import pools
from gemkv_compile.runtime.reservation import HeldPages

LIMIT = 1 << 29  # a pool of these tests' own


def own_pool():
    return pools.get(layout_of(page_size=64), CPU, LIMIT)


def cache_of(tokens, batch=1):
    table = import_dense(own_pool(), *dense_rows(batch, tokens))
    return [make_handle(table, role, 0, tokens) for role in (KEYS, VALUES)]


def in_use():
    gc.collect()
    return sum(pool.in_use for pool in pools.stats())


def states(life):
    return [state for _, state in life.transitions]


def test_a_page_is_reserved_bound_shared_and_released():
    with memory.track() as tracker:
        keys, values = cache_of(128)
        (fork,) = [keys.index_select(0, torch.tensor([0]))]
        assert [life.state for life in tracker.live()] == [SHARED, SHARED]
        del keys, values
        assert [life.state for life in tracker.live()] == [BOUND, BOUND]
        assert tracker.leaks() == []
        del fork
        assert tracker.live() == []
    lives = tracker.pages()
    assert [states(life) for life in lives] == [[RESERVED, BOUND, SHARED, BOUND, RELEASED]] * 2
    steps = [moment.step for moment in tracker.timeline()]
    assert steps == sorted(set(steps)) and {step for life in lives for step, _ in life.transitions} <= set(steps)
    assert {life.num_bytes for life in lives} == {own_pool().layout.page_bytes}
    assert all(life.pool == own_pool().name for life in lives)


def test_an_append_that_is_undone_was_never_bound():
    with memory.track() as tracker:
        table = PageTable(own_pool(), 1)
        table.begin(64, None)
        assert [life.state for life in tracker.live()] == [RESERVED] and tracker.leaks() == []
        table.abort()
    assert [states(life) for life in tracker.pages()] == [[RESERVED, RELEASED]]


def test_an_address_lives_again():
    with memory.track() as tracker:
        for _ in range(3):
            del [cache_of(64)][0]
    lives = tracker.pages()
    assert len(lives) == 3 and len({life.address for life in lives}) == 1
    ends = [step for life in lives for step, _ in life.transitions]
    assert ends == sorted(ends)


def test_the_stack_names_who_allocated():
    with memory.track() as tracker:
        kept = cache_of(64)
    (life,) = tracker.live()
    assert "begin" in "".join(life.stack[:3]) and any("cache_of" in frame for frame in life.stack)
    assert not any("/torch/" in frame for frame in life.stack) and len(life.stack) <= 12
    assert kept
    with memory.track(depth=2) as tracker:
        more = cache_of(64)
    assert [len(life.stack) for life in tracker.live()] == [0, 2] and more  # the first was there before


def test_timeline_adds_up():
    page = own_pool().layout.page_bytes
    with memory.track() as tracker:
        kept = cache_of(128, batch=2)
        forks = [handle.index_select(0, torch.tensor([1, 1])) for handle in kept]
    moments = tracker.timeline()
    assert [(m.reserved, m.bound, m.shared) for m in moments[:2]] == [(4 * page, 0, 0), (0, 4 * page, 0)]
    assert (moments[-1].bound, moments[-1].shared) == (2 * page, 2 * page) and forks


LEAKS = {
    "no table refers to it": lambda: own_pool().allocate(1),
    "no handle can show its rows": lambda: import_dense(own_pool(), *dense_rows(1, 64)),
    "it has 2 references, of which 1 are held": lambda: shared_once_too_often(),
}


def shared_once_too_often():
    pair = cache_of(64)
    own_pool().share(pair[0].table.pages[0])
    return pair


def test_a_table_that_outlives_its_handles_is_a_leak():
    with memory.track() as tracker:
        pair = cache_of(64)
        table = pair[0].table
        assert tracker.leaks() == []
        pair[0].mul_(2)  # stands for a table of its own from now on
        del pair[1]
        (leak,) = tracker.leaks()
        assert leak.page.address in table.pages[0] and leak.reason == "no handle can show its rows"
        del table, pair
        assert tracker.leaks() == [] and tracker.live() == []


@pytest.mark.parametrize("reason", LEAKS)
def test_leaks_are_found_with_their_stack(reason):
    before = set(own_pool()._references)
    with memory.track() as tracker:
        kept = LEAKS[reason]()
        innocent = cache_of(100)
        (leak,) = tracker.leaks()
    assert leak.reason == reason and tracker.leaks() == [leak]
    assert "test_leaks_are_found_with_their_stack" in str(leak) and reason in str(leak)
    del kept, innocent
    gc.collect()
    own_pool().give_back([page for page in own_pool()._references if page not in before])
    assert set(own_pool()._references) == before


def test_pages_held_for_a_backward_pass_are_no_leak():
    with memory.track() as tracker:
        pair = cache_of(64)
        held = HeldPages([pair[0].table])
        del pair
        assert [life.state for life in tracker.live()] == [BOUND] and tracker.leaks() == []
        del held
    assert [life.state for life in tracker.pages()] == [RELEASED]


def test_nothing_is_recorded_outside_and_trackers_are_independent():
    with memory.track() as outer:
        first = cache_of(64)
        with memory.track() as inner:
            second = cache_of(64)
        third = cache_of(64)
    fourth = cache_of(64)
    assert all(pool.observers == () for pool in pools._pools.values()) and pools._observers == ()
    assert len(outer.live()) == 3 and len(inner.live()) == 2 and first and second and third and fourth


def test_the_tracker_survives_an_exception_and_many_threads():
    def work():
        for _ in range(30):
            pair = cache_of(130)
            pair[0].index_select(0, torch.tensor([0, 0]))

    with pytest.raises(KeyError), memory.track() as tracker:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raise KeyError
    assert tracker.live() == [] and len(tracker.pages()) == 4 * 30 * 2 and tracker.leaks() == []
    allowed = {(RESERVED, BOUND), (BOUND, SHARED), (SHARED, BOUND), (SHARED, RELEASED), (BOUND, RELEASED)}
    for life in tracker.pages():
        assert set(itertools.pairwise(states(life))) <= allowed


class Letters:
    """As much of a tokenizer as TextIteratorStreamer needs."""

    def decode(self, ids, **_):
        return " ".join(chr(97 + int(i) % 26) for i in ids)


class Stops(StoppingCriteria):
    """Stops, or raises, at a number of tokens."""

    def __init__(self, at, raises):
        self.at, self.raises = at, raises

    def __call__(self, input_ids, scores, **_):
        if input_ids.shape[1] >= self.at and self.raises:
            raise ValueError("stopped")
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.at)


@pytest.mark.parametrize("reads, raises", tiers([(3, True)], [(3, False), (1000, True), (1000, False)]))
def test_stopping_while_streaming_leaves_no_page(reads, raises):
    """Leak 1: a thread generates, its consumer goes away, and it is stopped or fails; then everything is given back."""
    model = gemkv_compile.compile(build("gemma3"), kv_format="model")
    before, errors = in_use(), []

    def work(streamer):
        stops = StoppingCriteriaList([Stops(100, raises)])
        try:
            model.generate(
                prompt(1, 70), max_new_tokens=80, do_sample=False, stopping_criteria=stops, streamer=streamer
            )
        except ValueError as error:
            errors.append(str(error))
            streamer.end()

    with memory.track() as tracker:
        for _ in range(2):
            streamer = TextIteratorStreamer(Letters(), timeout=300)
            thread = threading.Thread(target=work, args=(streamer,))
            thread.start()
            for _ in itertools.islice(streamer, reads):
                pass  # after that nobody reads on
            thread.join()
    assert errors == ["stopped"] * 2 * raises
    assert tracker.leaks() == [] and tracker.live() == [] and len(tracker.pages()) > 0
    assert in_use() == before
    out = model.generate(prompt(1, 10), max_new_tokens=20, do_sample=False)
    assert torch.equal(out, generated("gemma3", 1, 10, 20))


def test_an_abandoned_generator_leaves_no_page():
    model = gemkv_compile.compile(tuple_model(), kv_format="model", strict=True)
    before = in_use()

    def stream(ids):
        pasts = None
        with torch.no_grad():
            while True:
                logits, pasts = model(ids, pasts)
                ids = logits[:, -1:].argmax(-1)
                yield ids

    with memory.track() as tracker:
        tokens = stream(prompt(2, 100))
        for _ in itertools.islice(tokens, 5):
            pass
        assert len(tracker.live()) > 0 and tracker.leaks() == []
        del tokens
        assert in_use() == before
    assert tracker.live() == []


def test_a_cache_kept_across_batches_holds_its_own_pages_only():
    """Leak 2: what a loop keeps of a batch (its cache, for the next turn) is replaced, and the rest is given back."""
    model, plain = gemkv_compile.compile(build("llama"), kv_format="model"), build("llama")
    before, sizes, cache = in_use(), [], None
    with memory.track() as tracker:
        for batch in range(3):
            ids = prompt(2, 60, batch)
            with torch.no_grad():
                out = model.generate(ids, max_new_tokens=70, do_sample=False, return_dict_in_generate=True)
                longer = torch.cat([out.sequences, prompt(2, 5, batch + 10)], 1)
                cache = out.past_key_values  # instead of the last batch's
                second = model.generate(longer, max_new_tokens=10, do_sample=False, past_key_values=cache)
                assert torch.equal(second, plain.generate(longer, max_new_tokens=10, do_sample=False))
            del out
            sizes.append(in_use())
        assert len(set(sizes)) == 1 and sizes[0] - before == sum(life.num_bytes for life in tracker.live())
        del cache
        assert in_use() == before
    assert tracker.leaks() == [] and tracker.live() == []


def test_a_cache_given_to_a_batch_of_another_size_is_given_back():
    model = gemkv_compile.compile(tuple_model(), kv_format="model", strict=True)
    before = in_use()
    with memory.track() as tracker:
        _, _, pasts = greedy(model, prompt(2, 100), 5)
        with pytest.raises(Exception, match="Sizes of tensors must match"):
            greedy(model, prompt(3, 1), 1, pasts)
        assert tracker.leaks() == []
        pasts = None
        assert in_use() == before
    assert tracker.live() == []
