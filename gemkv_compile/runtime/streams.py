"""The order of work on CUDA streams for memory that one cache hands on to another.

PyTorch's allocator gives memory that was freed on a stream to that stream only. Pages, and the fixed state and results
of captured steps, pass from cache to cache without it, so whoever takes them on another stream waits first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch


def current_stream(device: torch.device) -> Any:
    """The stream that work on a device goes to now, or None where there are none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class StreamOrder:
    """Keeps the users of some memory in order, whatever streams they are on.

    Args:
        device: Where the memory is.
        memory: The allocations, asked for when the stream changes: they must not be freed under a stream's work.
        current: The stream that work goes to now.
    What is launched after `follow` comes after all that was launched on the stream of the `follow` before; its callers
    keep other threads out. As a context it does so itself, until the context ends.
    """

    def __init__(
        self,
        device: torch.device,
        memory: Callable[[], Iterable[torch.Tensor]] = tuple,
        current: Callable[[torch.device], Any] = current_stream,
    ) -> None:
        self._device = device
        self._memory = memory
        self._current = current
        self._last: Any = None
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Let the current stream wait for the last one, if that is another."""
        stream = self._current(self._device)
        if stream is None:
            return
        last = self._last
        if last is None or stream != last:  # `!=` of torch's streams is False beside None
            if last is not None:
                stream.wait_stream(last)
            for tensor in self._memory():
                tensor.record_stream(stream)
            self._last = stream

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self.follow()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
