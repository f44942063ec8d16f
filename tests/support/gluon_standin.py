"""A stand-in for a Hopper GPU that runs Gluon kernels from their source, on CPU tensors.

It knows what the Hopper prefill kernel uses, and its rules for memory that warps share: barriers have counts, bytes and
phases; a copy lands at some later time, and until then its target is NaN; a product of matrices reads shared memory at
some time before it is waited for, and its result cannot be used earlier. Partitions take turns at every such operation,
in an order that the seed chooses; if none can go on, that is a deadlock, and an error. Layouts are ignored: what the
compiler says of them is another test's.
"""

import builtins
import importlib
import itertools
import random
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path

import torch

MODULES = "kernel_hopper_load", "kernel_hopper_rows", "kernel_hopper"
PACKAGE = "gemkv_compile.kernels.attend_chunk"


class Fault(AssertionError):
    """What a GPU would answer with a wrong result, or never."""


class Machine:
    """One program on one multiprocessor: its partitions, copies in flight, and who goes next."""

    def __init__(self, program, programs, seed):
        self.program, self.programs, self.random = program, programs, random.Random(seed)
        self.tasks, self.copies, self.running, self.failure = [], [], None, None

    def run(self, functions):
        self.tasks = [Task(self, function) for function in functions]
        for task in self.tasks:
            task.thread.start()
        self.pick().turn.release()
        for task in self.tasks:
            task.thread.join()
        if self.failure is not None:
            raise self.failure
        if self.copies:
            raise Fault("the program ends while copies are in flight")

    def pick(self):
        """The partition that goes next; copies may land before."""
        while True:
            ready = [task for task in self.tasks if not task.done and (self.failure or task.ready())]
            chosen = self.random.choice(ready + self.copies) if ready or self.copies else None
            if isinstance(chosen, Copy):
                self.copies.remove(chosen)
                try:
                    chosen.land()
                except BaseException as failure:
                    self.failure = self.failure or failure
                continue
            if chosen is None and not all(task.done for task in self.tasks):
                self.failure = Fault("deadlock: " + "; ".join(task.waits for task in self.tasks if not task.done))
                continue
            self.running = chosen
            return chosen

    def pause(self, ready=lambda: True, waits=""):
        """Let others run until the partition is ready again."""
        task = self.running
        task.ready, task.waits = ready, waits
        other = self.pick()
        if other is not task:
            other.turn.release()
            task.turn.acquire()
        if self.failure is not None:
            raise SystemExit


class Task:
    def __init__(self, machine, function):
        self.machine, self.function, self.done, self.waits = machine, function, False, ""
        self.ready, self.turn = (lambda: True), threading.Semaphore(0)
        self.pending, self.owed = [], []  # products not waited for, and registers that they may still read
        self.thread = threading.Thread(target=self.main, daemon=True)

    def main(self):
        self.turn.acquire()
        MACHINE.value = self.machine
        try:
            if self.machine.failure is None:
                self.function()
            if (self.pending or self.owed) and self.machine.failure is None:
                raise Fault("a partition ends before its products are waited for, with the registers that they read")
        except SystemExit:
            pass
        except BaseException as failure:
            self.machine.failure = self.machine.failure or failure
        self.done = True
        if (other := self.machine.pick()) is not None:
            other.turn.release()


class _Current(threading.local):
    value = None


MACHINE = _Current()


class Shared:
    """A view of shared memory; barriers are views of a list."""

    def __init__(self, data):
        self.data = data

    dtype = property(lambda self: self.data.dtype)

    def index(self, place):
        return Shared(self.data[int(place)]) if isinstance(self.data, torch.Tensor) else self.data[int(place)]

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def slice(self, start, length, dim):
        return Shared(self.data.narrow(dim, start, length))

    def load(self, layout):
        return self.data.clone()

    def permute(self, order):
        return Shared(self.data.permute(order))


class Barrier:
    def __init__(self):
        self.count, self.phase, self.arrivals, self.bytes = None, 0, 0, 0

    def settle(self):
        if self.arrivals > self.count:
            raise Fault("more arrivals at a barrier than its count")
        if self.arrivals == self.count and self.bytes == 0:
            self.phase, self.arrivals = self.phase + 1, 0

    def arrive(self, size=0):
        self.bytes += size
        self.arrivals += 1
        self.settle()


@dataclass(eq=False)
class Copy:
    source: torch.Tensor
    target: torch.Tensor
    barrier: Barrier

    def land(self):
        self.target.copy_(self.source)
        self.barrier.bytes -= self.target.numel() * self.target.element_size()
        self.barrier.settle()


@dataclass(eq=False)
class Descriptor:
    """The host's TMA descriptor: of a tensor [...], for tiles of a shape."""

    base: torch.Tensor
    shape: list
    strides: list
    block_shape: list
    layout: object

    def __post_init__(self):
        unit = self.base.element_size()
        if self.base.data_ptr() % 16 or any(step * unit % 16 or step <= 0 for step in self.strides[:-1]):
            raise Fault(f"TMA takes no strides {self.strides}")
        if self.strides[-1] != 1 or any(size > 256 for size in self.block_shape[:-1]):
            raise Fault(f"TMA takes no tile {self.block_shape} with strides {self.strides}")

    dtype = property(lambda self: self.base.dtype)

    @property
    def block_type(self):
        size = torch.Size(self.block_shape).numel() * self.base.element_size()
        return types.SimpleNamespace(shape=list(self.block_shape), nbytes=size)

    def tile(self, place):
        """A tile from a place on; what lies outside is 0."""
        tile = torch.zeros(self.block_shape, dtype=self.dtype)
        whole = self.base.as_strided(self.shape, self.strides)
        ends = [min(at + size, limit) for at, size, limit in zip(place, self.block_shape, self.shape, strict=True)]
        if any(at < 0 for at in place):
            raise Fault(f"a tile at {place}")
        if all(at < end for at, end in zip(place, ends, strict=True)):
            slices = tuple(slice(at, end) for at, end in zip(place, ends, strict=True))
            tile[tuple(slice(0, s.stop - s.start) for s in slices)] = whole[slices]
        return tile


class Pointer:
    """A tensor's memory from an offset on, or pointers at many offsets."""

    def __init__(self, tensor, offset=0):
        self.tensor, self.offset = tensor, offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)

    def storage(self):
        memory = self.tensor.untyped_storage()
        flat = torch.empty(0, dtype=self.tensor.dtype).set_(memory)
        return flat, self.offset + self.tensor.storage_offset()


class Constant(int):
    """A number that the compiler knows."""

    value = property(int)


class Pending:
    """A result that the tensor cores still work on."""

    def __init__(self, compute, acc):
        self.compute, self.acc, self.value = compute, acc, None

    dtype = torch.float32

    def finish(self):
        if self.value is None:
            self.value = self.compute()
        return self.value


class Function:
    """A jit function: called by kernels as it is, launched by a host over a grid."""

    def __init__(self, function):
        self.fn = function

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, num_warps, maxnreg):
            arguments = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
            for program in range(grid[0]):
                MACHINE.value = Machine(program, grid[0], next(SEEDS))
                self.fn(*arguments)

        return launch


SEEDS = itertools.count()


def _binary(torch_function, plain):
    def run(a, b):
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            return plain(a, b)
        return torch_function(torch.as_tensor(a), torch.as_tensor(b))

    return run


def _where(condition, a, b):
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def _load(pointer):
    flat, offset = pointer.storage()
    return int(flat[offset])


def _store(pointer, value, mask):
    flat, offset = pointer.storage()
    offset, value, mask = torch.broadcast_tensors(offset, value, mask)
    if not torch.isnan(flat[offset[mask]]).all():
        raise Fault("a result is written twice")
    flat[offset[mask]] = value[mask]


def _mma(a, b, acc, use_acc=True, is_async=False):
    task = MACHINE.value.running
    if isinstance(a, Pending) or (isinstance(acc, Pending) and acc is not task.pending[-1]):
        raise Fault("a product of what is not there yet")
    operands = [x.data if isinstance(x, Shared) else x for x in (a, b)]

    def compute():
        product = operands[0].float() @ operands[1].float()
        if not use_acc:
            return product
        return product + (acc.finish() if isinstance(acc, Pending) else acc)

    result = Pending(compute, acc)
    if not isinstance(a, Shared):
        task.owed.append(a)
    task.pending.append(result)
    MACHINE.value.pause()
    if MACHINE.value.random.random() < 0.5:
        result.finish()
    return result


def _mma_wait(number, deps):
    machine = MACHINE.value
    pending = machine.running.pending
    done, machine.running.pending = pending[: len(pending) - number], pending[len(pending) - number :]
    for result in done:
        result.finish()
        if not any(x is result for x in deps) and not any(other.acc is result for other in done):
            raise Fault("a product is waited for without its result")
    machine.running.owed = [a for a in machine.running.owed if not any(x is a for x in deps)]
    if any(x is result for x in deps for result in machine.running.pending):
        raise Fault("a product is used before it is waited for")
    values = tuple(x.value if isinstance(x, Pending) else x for x in deps)
    return values[0] if len(values) == 1 else values


def _copy(desc, place, barrier, target):
    target.data.fill_(float("nan"))
    MACHINE.value.copies.append(Copy(desc.tile([int(x) for x in place]), target.data, barrier))
    MACHINE.value.pause()


def _wait(barrier, phase):
    if phase not in (0, 1):
        raise Fault(f"a phase of {phase}")
    MACHINE.value.pause(lambda: barrier.phase & 1 != phase, f"a wait for phase {phase} of a barrier in {barrier.phase}")


def _arrive(barrier, count=1):
    barrier.arrive()
    MACHINE.value.pause()


def _expect(barrier, size):
    barrier.arrive(size)
    MACHINE.value.pause()


def _init(barrier, count):
    barrier.count = count


def _allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Shared([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def _specialize(parts, warps, numbers):
    if len(parts) != len(warps) + 1 or len(warps) != len(numbers):
        raise Fault("warps and registers for other partitions than there are")
    MACHINE.value.run([lambda f=function, a=args: f(*a) for function, args in parts])


def _jit(function=None, **options):
    return Function if function is None else Function(function)


def _layout(*args):
    return args


_layout.get_default_for = _layout


def _modules():
    """The modules that the kernels import, by name."""
    language = dict(
        constexpr=lambda x: Constant(x) if isinstance(x, int) else x,
        int32=torch.int32, int64=torch.int64, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
        NVMMADistributedLayout=_layout, NVMMASharedLayout=_layout, DotOperandLayout=_layout, SliceLayout=_layout,
        static_range=range, cdiv=lambda a, b: -(-a // b), cast=lambda x, dtype: x,
        program_id=lambda axis: MACHINE.value.program, num_programs=lambda axis: MACHINE.value.programs,
        arange=lambda a, b, layout: torch.arange(a, b), convert_layout=lambda x, layout: x,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        maximum=_binary(torch.maximum, builtins.max), minimum=_binary(torch.minimum, builtins.min), where=_where,
        max=torch.amax, sum=torch.sum, exp2=torch.exp2, log2=torch.log2, rsqrt=torch.rsqrt, load=_load, store=_store,
        allocate_shared_memory=_allocate, warp_specialize=_specialize,
    )  # fmt: skip
    barriers = dict(init=_init, wait=_wait, arrive=_arrive, expect=_expect, MBarrierLayout=_layout)
    hopper = dict(
        mbarrier=types.SimpleNamespace(**barriers),
        tma=types.SimpleNamespace(async_copy_global_to_shared=_copy),
        warpgroup_mma=_mma,
        warpgroup_mma_wait=_mma_wait,
        fence_async_shared=lambda: None,
    )
    contents = {
        "": dict(jit=_jit, language=types.SimpleNamespace(**language)),
        ".language": language,
        ".language.nvidia.hopper": hopper,
        ".nvidia.hopper": dict(TensorDescriptor=Descriptor),
    }
    made = {}
    for name, content in contents.items():
        made[f"triton.experimental.gluon{name}"] = types.ModuleType(name)
        made[f"triton.experimental.gluon{name}"].__dict__.update(content)
    made["triton.experimental"] = types.ModuleType("experimental")  # a package gives what it has imported before
    made["triton.experimental"].gluon = made["triton.experimental.gluon"]
    return made


def hopper_kernel(changes=()):
    """The module `kernel_hopper`, read anew with this stand-in for Gluon, after some (old, new) changes to its text."""
    names = [f"{PACKAGE}.{name}" for name in MODULES]
    fakes = _modules()
    folder = Path(importlib.import_module(PACKAGE).__file__).parent
    texts = [(folder / f"{name}.py").read_text() for name in MODULES]
    for old, _ in changes:
        if sum(text.count(old) for text in texts) != 1:
            raise LookupError(f"not once in the kernel: {old}")
    before = {name: sys.modules.pop(name, None) for name in (*names, *fakes)}
    sys.modules.update(fakes)
    try:
        for name, text in zip(names, texts, strict=True):
            for old, new in changes:
                text = text.replace(old, new)
            module = sys.modules[name] = types.ModuleType(name)
            exec(compile(text, name, "exec"), module.__dict__)
        return sys.modules[names[-1]]
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
