"""The PTX that makes float16 numbers of codes, run here instruction by instruction."""

import random
import struct

import pytest

from gemkv_compile.kernels.attend_pages import kernel_codes as codes


def permuted(a, b, selector):
    """PTX's prmt: four of the eight bytes of a and b."""
    every = [(word >> 8 * i) & 255 for word in (a, b) for i in range(4)]
    return sum(every[(selector >> 4 * i) & 7] << 8 * i for i in range(4))


INSTRUCTIONS = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: (a << b) & 0xFFFFFFFF,
    "shr": lambda a, b: a >> b,
    "prmt": permuted,
}


def run(asm, *words):
    """The four float16 numbers that PTX makes of the 32-bit words $2, $3, ..."""
    registers = {f"${i}": word for i, word in enumerate(words, 2)}
    for line in asm.value.strip("{} ").split(";"):
        operation, _, operands = line.strip().partition(" ")
        if not operation or operation.startswith("."):
            continue
        target, *sources = (each.strip() for each in operands.split(","))
        values = (registers[each] if each in registers else int(each, 0) for each in sources)
        registers[target] = INSTRUCTIONS[operation.split(".")[0]](*values)
    return struct.unpack("<4e", struct.pack("<2I", registers["$0"], registers["$1"]))


def signed(number, bits):
    return number - (1 << bits) if number >> (bits - 1) else number


@pytest.mark.parametrize("high", [False, True])
def test_every_kind_of_code(high):
    numbers = random.Random(0)
    for word, others in ((numbers.getrandbits(32), numbers.getrandbits(32)) for _ in range(1000)):
        stored, rests = word.to_bytes(4, "little"), others.to_bytes(4, "little")
        assert run(codes.OF_BYTES, word) == tuple(codes.BIAS.value + signed(byte, 8) for byte in stored)
        nibbles = [signed(byte >> 4 if high else byte & 15, 4) for byte in stored]
        asm = codes.OF_HIGH if high else codes.OF_LOW
        assert run(asm, word) == tuple(codes.NIBBLE_BIAS.value + nibble for nibble in nibbles)
        asm = codes.OF_HIGH_AND_REST if high else codes.OF_LOW_AND_REST
        for shift in (0, 2, 4, 6):
            six = [4 * nibble + (rest >> shift & 3) for nibble, rest in zip(nibbles, rests, strict=True)]
            assert run(asm, word, shift * 0x01010101, others) == tuple(codes.SIX_BIAS.value + code for code in six)
