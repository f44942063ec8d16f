"""Programs of an interpreted kernel that take turns at each access to memory, as on a GPU they might."""

import inspect
import math
import random
import threading

from triton.runtime import interpreter

ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_rmw")


class Turns:
    """Runs one call per index of a grid, each in a thread; one goes on at a time, chosen at random at each `pause`."""

    def __init__(self, seed):
        self.chooser = random.Random(seed)
        self.switches = 0
        self._own = threading.local()

    def run(self, indices, call):
        self._indices, self._waiting, self._errors = indices, list(range(len(indices))), []
        self._wake = [threading.Semaphore(0) for _ in indices]
        self._ended = threading.Semaphore(0)
        threads = [threading.Thread(target=self._program, args=(i, call), daemon=True) for i in self._waiting]
        for thread in threads:
            thread.start()
        self._hand_over()
        self._ended.acquire()
        for error in self._errors:
            raise error

    def pause(self):
        """Let another program go on, or this one again."""
        number = getattr(self._own, "number", None)
        if number is not None:
            self._waiting.append(number)
            self._hand_over()
            self._wake[number].acquire()

    def _program(self, number, call):
        self._own.number = number
        self._wake[number].acquire()
        try:
            call()
        except Exception as error:
            self._errors.append(error)
        self._hand_over()

    def _hand_over(self):
        if not self._waiting:
            self._ended.release()
            return
        self.switches += 1
        number = self._waiting.pop(self.chooser.randrange(len(self._waiting)))
        interpreter.interpreter_builder.set_grid_idx(*self._indices[number])
        self._wake[number].release()


def interleave(monkeypatch, seed):
    """Let the programs of every launch take turns from now on; returns the `Turns`."""
    turns = Turns(seed)

    def launch(self, *args, **kwargs):
        names = inspect.getfullargspec(self.fn).args
        scope = interpreter._patch_lang(self.fn)
        try:
            given = inspect.getcallargs(self.fn, *args, **{name: x for name, x in kwargs.items() if name in names})
            values = {n: x if n in self.constexprs else interpreter._implicit_cvt(x) for n, x in given.items()}
            grid = (*self.grid, 1, 1)[:3]
            interpreter.interpreter_builder.set_grid_dim(*grid)
            parts = [math.prod(grid[i + 1 :]) for i in range(3)]
            places = range(math.prod(grid))
            indices = [tuple(n // part % size for part, size in zip(parts, grid, strict=True)) for n in places]
            turns.run(indices, lambda: self.fn(**values))
        finally:
            scope.restore()

    def paused(access):
        def run(self, *args, **kwargs):
            turns.pause()
            return access(self, *args, **kwargs)

        return run

    kind = interpreter.InterpreterBuilder
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    for name in ACCESSES:
        monkeypatch.setattr(kind, name, paused(getattr(kind, name)))
    return turns
