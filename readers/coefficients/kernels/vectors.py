"""Loads, stores, bits and vectors that numba has no names for, as pieces of LLVM's intermediate representation.

The first half are functions that write such pieces, for the intrinsics of the other modules; the second half are
intrinsics. Nothing is aligned. An address is an int64.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = [
    "I8",
    "I16",
    "I32",
    "I64",
    "add_i16",
    "bits_set",
    "byte_swapped",
    "call",
    "constant",
    "copy_32",
    "fill_8",
    "first_bit",
    "load",
    "load_i16",
    "load_u8",
    "load_u16",
    "load_u32",
    "load_u64",
    "nothing",
    "pack_bits",
    "repeated",
    "shuffle",
    "splat",
    "spread_bits",
    "spread_bytes",
    "squeeze_bytes",
    "store",
    "store_i16",
    "store_u8",
    "store_u32",
    "store_u64",
    "vector",
]

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_ODD_BYTES = 0x0101010101010101


def vector(item, lanes):
    return ir.VectorType(item, lanes)


def load(builder, kind, address, offset=0):
    place = builder.add(address, I64(offset)) if offset else address
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def store(builder, value, address, offset=0):
    place = builder.add(address, I64(offset)) if offset else address
    builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=1)


def constant(item, values):
    return ir.Constant(vector(item, len(values)), list(values))


def splat(item, lanes, value):
    return constant(item, [value] * lanes)


def repeated(builder, value, lanes):
    """A vector of one value that is not a constant."""
    one = builder.insert_element(vector(value.type, lanes)(ir.Undefined), value, I32(0))
    return shuffle(builder, one, one, [0] * lanes)


def shuffle(builder, first, second, lanes):
    """Lanes of two vectors, by number; those of the second follow those of the first."""
    return builder.shuffle_vector(first, second, constant(I32, list(lanes)))


def call(builder, name, result, *arguments):
    """Call a function of LLVM or an instruction of the CPU."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [one.type for one in arguments]), name)
    return builder.call(function, arguments)


def spread_bits(builder, value, mask):
    """The low bits of `value` at the set bits of `mask`."""
    return call(builder, "llvm.x86.bmi.pdep.64", I64, value, mask)


def pack_bits(builder, value, mask):
    """The bits of `value` at the set bits of `mask`, packed."""
    return call(builder, "llvm.x86.bmi.pext.64", I64, value, mask)


def nothing(context):
    return context.get_dummy_value()


def _whole_bytes(builder, bits):
    """A mask of 64 bits with whole bytes set, from 8 bits."""
    spread = spread_bits(builder, bits, I64(_ODD_BYTES))
    return builder.sub(builder.shl(spread, I64(8)), spread)


@intrinsic
def load_u8(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.zext(load(builder, I8, arguments[0]), I64)

    return types.int64(types.int64), generate


@intrinsic
def load_i16(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.sext(load(builder, I16, arguments[0]), I64)

    return types.int64(types.int64), generate


@intrinsic
def load_u16(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.zext(load(builder, I16, arguments[0]), I64)

    return types.int64(types.int64), generate


@intrinsic
def load_u32(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.zext(load(builder, I32, arguments[0]), I64)

    return types.int64(types.int64), generate


@intrinsic
def load_u64(typing, address):
    def generate(context, builder, signature, arguments):
        return load(builder, I64, arguments[0])

    return types.uint64(types.int64), generate


@intrinsic
def store_u8(typing, address, value):
    def generate(context, builder, signature, arguments):
        store(builder, builder.trunc(arguments[1], I8), arguments[0])
        return nothing(context)

    return types.void(types.int64, types.int64), generate


@intrinsic
def store_i16(typing, address, value):
    def generate(context, builder, signature, arguments):
        store(builder, builder.trunc(arguments[1], I16), arguments[0])
        return nothing(context)

    return types.void(types.int64, types.int64), generate


@intrinsic
def add_i16(typing, address, value):
    """Add to the int16 at an address; overflow wraps."""

    def generate(context, builder, signature, arguments):
        address, value = arguments
        store(builder, builder.add(load(builder, I16, address), builder.trunc(value, I16)), address)
        return nothing(context)

    return types.void(types.int64, types.int64), generate


@intrinsic
def store_u32(typing, address, value):
    """The low 32 bits of a number."""

    def generate(context, builder, signature, arguments):
        store(builder, builder.trunc(arguments[1], I32), arguments[0])
        return nothing(context)

    return types.void(types.int64, types.int64), generate


@intrinsic
def store_u64(typing, address, value):
    def generate(context, builder, signature, arguments):
        store(builder, arguments[1], arguments[0])
        return nothing(context)

    return types.void(types.int64, types.uint64), generate


@intrinsic
def byte_swapped(typing, value):
    def generate(context, builder, signature, arguments):
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def bits_set(typing, value):
    """How many bits of an uint64 are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def first_bit(typing, value):
    """The number of the lowest set bit of an uint64 that is not 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def spread_bytes(typing, value, bits):
    """The low bytes of `value` where one of 8 bits is set, 0 elsewhere."""

    def generate(context, builder, signature, arguments):
        return spread_bits(builder, arguments[0], _whole_bytes(builder, arguments[1]))

    return types.uint64(types.uint64, types.int64), generate


@intrinsic
def squeeze_bytes(typing, value, bits):
    """The bytes of `value` where one of 8 bits is set, packed."""

    def generate(context, builder, signature, arguments):
        return pack_bits(builder, arguments[0], _whole_bytes(builder, arguments[1]))

    return types.uint64(types.uint64, types.int64), generate


@intrinsic
def copy_32(typing, source, target):
    """32 bytes."""

    def generate(context, builder, signature, arguments):
        store(builder, load(builder, vector(I8, 32), arguments[0]), arguments[1])
        return nothing(context)

    return types.void(types.int64, types.int64), generate


@intrinsic
def fill_8(typing, value, address, stride):
    """8 x 8 bytes of one value, `stride` bytes from line to line."""

    def generate(context, builder, signature, arguments):
        value, address, stride = arguments
        line = builder.mul(value, I64(_ODD_BYTES))
        for _ in range(8):
            store(builder, line, address)
            address = builder.add(address, stride)
        return nothing(context)

    return types.void(types.int64, types.int64, types.int64), generate
