"""Decode steps as CUDA graphs: captured once for a batch size, replayed for every length, prompt and cache."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemkv_compile.compat import same_addresses
from gemkv_compile.plan import AlignedPadding, Argument, CallPlan, SizeTensor, State
from gemkv_compile.runtime.handle import PagedKVTensor
from gemkv_compile.runtime.padding import Paddings, columns_of, copy_aligned
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.recording import RECORDERS
from gemkv_compile.runtime.state_slot import StateSlot, slots
from gemkv_compile.runtime.streams import StreamOrder

log = logging.getLogger(__name__)
MAX_CAPTURES = 16
SMALL_INPUT = 1 << 16  # bytes; a larger input is read where it is, while it stays there
MIN_PADDING_COLUMNS = 4096


@functools.cache
def _order(device: torch.device) -> StreamOrder:
    """Recordings of a device share memory: one runs after another, and its results are copied before the next."""
    return StreamOrder(device)


@dataclass
class Capture:
    """The inputs of a recorded step, by their position in the rewritten graph.

    Args:
        slot: State of the caches.
        inputs: What the recorded step reads: own buffers and the slot's tensors; None for what is read where it is,
            which would be kept alive.
        copied: Positions of buffers that each call's argument is copied to.
        fixed, addresses: Positions of tensors that are read where they are, and their addresses.
        paddings: Buffers of padding masks, bool [batch, columns], and the numbers of the masks that are in each.
    """

    slot: StateSlot
    inputs: list[Any]
    copied: tuple[int, ...]
    fixed: tuple[int, ...]
    addresses: list[int]
    paddings: list[tuple[torch.Tensor, list[int]]]
    recording: Any = None
    is_warm: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Choice:
    """A capture, the arguments that it copies with its buffers for them, and what picks those it reads in place."""

    capture: Capture
    copied: list[tuple[int, torch.Tensor]]
    fixed: Callable[[Sequence[Any]], tuple[Any, ...]]


class StepGraphs:
    """Runs the decode steps of an executable as CUDA graphs.

    Args:
        inner: The compiled rewritten graph, proven to be one and the same for every length of its caches.
        plan: How to call it.
        captures: What this and other executables of the same inner compile have captured, newest first.
        say: Takes each sentence about what was captured, or why it was not.
    A batch size's first step runs as it is, on the captured step's memory, so that kernels are compiled and loaded;
    the second is recorded and replayed, as all later ones are.
    """

    def __init__(
        self, inner: Callable[..., Any], plan: CallPlan, captures: list[Capture], say: Callable[[str], None]
    ) -> None:
        self._inner = inner
        self._plan = plan
        self._captures = captures
        self._moved: set[int] = set()  # positions of inputs that were not where they had been
        self._say = say
        self._said: set[str] = set()
        self._sizes = [(i, source.size) for i, source in enumerate(plan.inputs) if isinstance(source, SizeTensor)]
        self._paddings = Paddings(plan.paddings)
        self._keeps = [table.keep for table in plan.tables]
        self._last: Choice | None = None

    def run(self, args: Sequence[Any], tables: Sequence[PageTable], starts: Sequence[int]) -> list[Any] | None:
        """The outputs of a step over tables that have begun their append; None if the caller has to run it itself.

        Outputs are memory of their own: no later step overwrites them.
        """
        keys = self._paddings.keys(args, starts)
        chosen = self._choose(args, tables, keys)
        if chosen is None or chosen.capture.failed:
            return None
        slot = chosen.capture.slot
        if not slot.lock.acquire(blocking=False):
            return None
        try:
            with _order(slot.device):
                return self._run(chosen, args, tables, keys)
        finally:
            slot.lock.release()

    def _run(
        self, chosen: Choice, args: Sequence[Any], tables: Sequence[PageTable], keys: Sequence[tuple[int, int]]
    ) -> list[Any] | None:
        capture = chosen.capture
        if not capture.slot.bind(tables):
            return None
        for buffer, (number, *_) in capture.paddings:
            source, shift = keys[number]
            copy_aligned(args[source], shift, buffer)
        for position, size in self._sizes:
            capture.inputs[position].fill_(size if isinstance(size, int) else size(args))
        if chosen.copied:
            torch._foreach_copy_(
                [_once(buffer) for _, buffer in chosen.copied], [_once(args[index]) for index, _ in chosen.copied]
            )
        outputs = self._step(capture, args, chosen.fixed)
        if self._plan.written:
            for index, buffer in chosen.copied:
                if index in self._plan.written:
                    args[index].copy_(buffer)
        return None if outputs is None else [_own(output) for output in outputs]

    def _step(
        self, capture: Capture, args: Sequence[Any], fixed: Callable[[Sequence[Any]], tuple[Any, ...]]
    ) -> Sequence[Any] | None:
        if capture.recording is None:
            inputs, device = list(capture.inputs), capture.slot.device
            for position, tensor in zip(capture.fixed, fixed(args), strict=True):
                inputs[position] = tensor
            if not capture.is_warm:
                outputs: Sequence[Any] = self._inner(*inputs)
                capture.is_warm = True
                return outputs
            try:
                capture.recording = RECORDERS[device.type](lambda: self._inner(*inputs), device)
            except Exception as error:  # nothing has run: recording does no work
                capture.failed = True
                self._tell(f"this step cannot be captured: {type(error).__name__}: {error}")
                return None
            self._tell(f"captured for {capture.slot.batches[0]} sequences")
        replayed: Sequence[Any] = capture.recording.replay()
        return replayed

    def _choose(
        self, args: Sequence[Any], tables: Sequence[PageTable], keys: Sequence[tuple[int, int]]
    ) -> Choice | None:
        """The capture that serves a call, and the arguments that it copies and that it reads where they are."""
        if self._last is not None and self._fits(self._last, args, tables, keys):
            return self._last
        for capture in self._captures:
            found = self._choice(capture)
            if self._fits(found, args, tables, keys):
                self._last = found
                return found
        made = self._make(args, tables, keys)
        if made is None:
            return None
        self._captures.insert(0, made)
        if len(self._captures) > MAX_CAPTURES:
            if made.slot.device.type == "cuda":
                torch.cuda.synchronize(made.slot.device)  # their memory may be in use on any stream
            del self._captures[MAX_CAPTURES:]
        self._last = self._choice(made)
        return self._last

    def _choice(self, capture: Capture) -> Choice:
        buffers = [capture.inputs[position] for position in capture.copied]
        copied = list(zip(self._arguments(capture.copied), buffers, strict=True))
        return Choice(capture, copied, _picker(self._arguments(capture.fixed)))

    def _arguments(self, positions: Sequence[int]) -> list[int]:
        sources = [self._plan.inputs[position] for position in positions]
        return [source.index for source in sources if isinstance(source, Argument)]

    def _fits(
        self, choice: Choice, args: Sequence[Any], tables: Sequence[PageTable], keys: Sequence[tuple[int, int]]
    ) -> bool:
        capture = choice.capture
        if not capture.slot.has_room_for(tables):
            return False
        for index, buffer in choice.copied:
            value = args[index]
            if isinstance(value, PagedKVTensor) or value.shape != buffer.shape:
                return False
        for buffer, numbers in capture.paddings:
            source, shift = key = keys[numbers[0]]
            if columns_of(args[source], shift) > buffer.shape[1] or any(keys[number] != key for number in numbers):
                return False
        return same_addresses(choice.fixed(args), capture.addresses)

    def _make(
        self, given: Sequence[Any], tables: Sequence[PageTable], keys: Sequence[tuple[int, int]]
    ) -> Capture | None:
        device = tables[0].pool.device
        if any(table.pool.device != device for table in tables):
            self._tell("not captured: its caches are on several devices")
            return None
        self._note_moved(given)
        slot = slots.get(tables, self._keeps)
        inputs: list[Any] = []
        copied, fixed, addresses = [], [], []
        paddings: dict[tuple[int, int, int], tuple[torch.Tensor, list[int]]] = {}
        for position, source in enumerate(self._plan.inputs):
            if isinstance(source, State):
                inputs.append(getattr(slot.states[source.table], source.field))
            elif isinstance(source, SizeTensor):
                with torch.inference_mode(False):
                    inputs.append(torch.empty((), dtype=torch.int64, device=source.device))
            elif isinstance(source, AlignedPadding):
                batch = tables[self._plan.paddings[source.padding].table].batch
                key = (*keys[source.padding], batch)
                if key not in paddings:
                    columns = columns_of(given[key[0]], key[1])
                    with torch.inference_mode(False):
                        paddings[key] = _mask_buffer(batch, columns, device), []
                buffer, numbers = paddings[key]
                numbers.append(source.padding)
                inputs.append(buffer)
            else:
                value = given[source.index]
                if isinstance(value, PagedKVTensor):
                    self._tell("not captured: a paged tensor is an argument and no cache of this graph")
                    return None
                if isinstance(value, torch.Tensor):
                    if value.device != device:
                        self._tell(f"not captured: an input is on {value.device}")
                        return None
                    if self._stays(position, value):
                        fixed.append(position)
                        addresses.append(value.data_ptr())
                        value = None
                    else:
                        copied.append(position)
                        with torch.inference_mode(False):
                            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                inputs.append(value)
        return Capture(slot, inputs, tuple(copied), tuple(fixed), addresses, list(paddings.values()))

    def _stays(self, position: int, value: torch.Tensor) -> bool:
        """Whether an input is read where it is: what belongs to the model, and what is large and has not moved yet."""
        if isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None:
            return True
        return value.nbytes > SMALL_INPUT and position not in self._moved

    def _note_moved(self, given: Sequence[Any]) -> None:
        for capture in self._captures:
            for position, address in zip(capture.fixed, capture.addresses, strict=True):
                (index,) = self._arguments([position])
                if given[index].data_ptr() != address:
                    self._moved.add(position)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.info("gemkv: CUDA graph: %s", sentence)
            self._say(sentence)


def _mask_buffer(batch: int, columns: int, device: torch.device) -> torch.Tensor:
    """Room for a mask that grows: each row that a longer one needs is another capture."""
    width = max(MIN_PADDING_COLUMNS, 2 << (columns - 1).bit_length())
    return torch.ones(batch, width, dtype=torch.bool, device=device)


def _picker(indices: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Takes the arguments at `indices`; hundreds are taken at once."""
    return operator.itemgetter(*indices) if len(indices) > 1 else lambda args: tuple(args[i] for i in indices)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor in which each element is memory of its own: an expanded dimension once."""
    if 0 in tensor.stride():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _own(output: Any) -> Any:
    """A copy that no replay overwrites."""
    return output.clone() if isinstance(output, torch.Tensor) else output
