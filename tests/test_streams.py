"""Work on memory that caches hand on to each other is ordered across CUDA streams."""

import threading

import pytest
import torch
from paged_tables import CPU, layout_of

from gemkv_compile.runtime.pool import PagePool
from gemkv_compile.runtime.streams import StreamOrder


class Stream:
    """Stands for a CUDA stream: notes what it waits for."""

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)

    def __ne__(self, other):  # as torch's streams have it
        return other is not None and self is not other


class Memory:
    """Stands for an allocation: notes which streams use it."""

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_another_stream_waits_and_the_same_one_does_not():
    first, second, memory = Stream(), Stream(), Memory()
    now = [first]
    order = StreamOrder(CPU, lambda: [memory], lambda device: now[0])
    for stream in (first, first, second, second, first):
        now[0] = stream
        with order:
            pass
    assert (first.waited_for, second.waited_for) == ([second], [first])
    assert memory.streams == [first, second, first]


def test_streams_of_torch_are_told_from_none():
    """Both operators of torch.Stream say False beside None: the first stream was once never noted for it."""
    stream = torch.Stream(device="cpu")
    order = StreamOrder(CPU, current=lambda device: stream)
    with order:
        pass
    assert order._last is stream


def test_one_thread_at_a_time():
    order, inside, seen = StreamOrder(CPU), threading.Event(), []

    def other():
        with order:
            seen.append(inside.is_set())

    with order:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and seen == []
        inside.set()
    thread.join()
    assert seen == [True]


def test_a_stream_that_fails_leaves_the_order_free():
    def fails(device):
        raise RuntimeError("no device")

    order = StreamOrder(CPU, current=fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no device"), order:
            pass


def test_a_pool_orders_those_who_take_pages():
    pool, first, second = PagePool(layout_of(), CPU), Stream(), Stream()
    now = [first]
    pool._order = StreamOrder(CPU, current=lambda device: now[0])
    pool.give_back(pool.allocate(2))
    now[0] = second
    pool.allocate(1)
    assert (first.waited_for, second.waited_for) == ([], [first])


@pytest.mark.gpu
def test_a_page_is_read_to_its_end_before_another_stream_writes_it():
    device = torch.device("cuda", 0)
    pool, streams = PagePool(layout_of(), device), [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):
        (page,) = pool.allocate(1)
        slab = next(iter(pool._slabs.values())).memory
        rows = slab[page - slab.data_ptr() :][: pool.layout.page_bytes]
        rows.fill_(1)
        torch.cuda._sleep(200_000_000)
        read = rows.clone()
        pool.give_back([page])
    with torch.cuda.stream(streams[1]):
        assert pool.allocate(1) == [page]
        rows.fill_(2)
    torch.cuda.synchronize()
    assert (read == 1).all() and (rows == 2).all()
