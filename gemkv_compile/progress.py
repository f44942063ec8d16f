"""A line on stderr when a compile takes long, and how long its stages take."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_SECONDS = 5.0


@contextmanager
def progress_line(what: str, quiet: float = QUIET_SECONDS) -> Iterator[None]:
    """Say on stderr what is going on if the block takes more than `quiet` seconds, and how long it took in the end."""
    begin = time.monotonic()
    spoken = threading.Event()

    def speak() -> None:
        spoken.set()
        print(f"gemkv: {what} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(quiet, speak)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if spoken.is_set():
            print(f"gemkv: {what}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a block as part of a stage."""
        begin = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin
