"""What stands for a CUDA graph on a CPU."""

from contextlib import contextmanager

from gemkv_compile.runtime import recording
from gemkv_compile.runtime.state_slot import slots


class Replayed:
    """A recorded step that runs again, on the memory that it was recorded with and into its first results.

    What is copied in and out is the same as with a CUDA graph.
    """

    def __init__(self, function, device):
        self.function, self.results, self.replays = function, None, 0

    def replay(self):
        self.replays += 1
        results = self.function()
        if self.results is None:
            self.results = [None if each is None else each.clone() for each in results]
        for own, result in zip(self.results, results, strict=True):
            if own is not None:
                own.copy_(result)
        return self.results


@contextmanager
def replayed_on_cpu(monkeypatch):
    """Record and replay on a CPU; yields what was recorded."""
    made = []

    def record(function, device):
        made.append(Replayed(function, device))
        return made[-1]

    monkeypatch.setitem(recording.RECORDERS, "cpu", record)
    slots.clear()
    yield made
    slots.clear()
