"""Scratch memory, counters shared by threads, addresses and the clock, for Numba code."""

from __future__ import annotations

import time

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sluice.backends.cpu.llvm import byte_pointer, c_function, element_at, i32, i64


@intrinsic
def allocate(typingctx, nbytes):
    """The address of fresh memory, aligned to 16 bytes at least."""

    def codegen(context, builder, sig, args):
        malloc = c_function(builder, "malloc", byte_pointer, [i64])
        return builder.ptrtoint(builder.call(malloc, [args[0]]), i64)

    return types.int64(types.int64), codegen


@intrinsic
def release(typingctx, address):
    """Give back what `allocate` returned."""

    def codegen(context, builder, sig, args):
        free = c_function(builder, "free", ir.VoidType(), [byte_pointer])
        builder.call(free, [builder.inttoptr(args[0], byte_pointer)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def fetch_add(typingctx, address):
    """Add one to an int64 in memory shared by threads; returns the value before."""

    def codegen(context, builder, sig, args):
        where = builder.inttoptr(args[0], i64.as_pointer())
        return builder.atomic_rmw("add", where, i64(1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def fence(typingctx):
    """What was written past the caches is there for other threads before what is written next."""

    def codegen(context, builder, sig, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def nanoseconds(typingctx, clock):
    """The time on a clock that never goes back, from the ``clock_gettime`` at an address."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(i32, [i32, i64.as_pointer()]).as_pointer()
        with builder.goto_entry_block():
            timespec = builder.alloca(i64, 2)
        clock = builder.inttoptr(args[0], function)
        builder.call(clock, [i32(time.CLOCK_MONOTONIC), timespec])
        seconds, rest = (builder.load(builder.gep(timespec, [i64(i)])) for i in range(2))
        return builder.add(builder.mul(seconds, i64(1_000_000_000)), rest)

    return types.int64(types.int64), codegen


@intrinsic
def write_int(typingctx, address, value):
    """Write an int64 to an address."""

    def codegen(context, builder, sig, args):
        builder.store(args[1], builder.inttoptr(args[0], i64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_int(typingctx, address):
    """Call a C function without arguments that returns an int."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(i32, [])
        result = builder.call(builder.inttoptr(args[0], function.as_pointer()), [])
        return builder.sext(result, i64)

    return types.int64(types.int64), codegen


@intrinsic
def call_worker(typingctx, address, block):
    """Call a kernel."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(ir.VoidType(), [args[1].type])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, block), codegen


@intrinsic
def call_parallel(typingctx, address, worker, block, threads):
    """Let threads call a kernel, through the ``GOMP_parallel`` at an address."""

    def codegen(context, builder, sig, args):
        kinds = [i64, args[2].type, i32, i32]
        function = ir.FunctionType(ir.VoidType(), kinds).as_pointer()
        threads = builder.trunc(args[3], i32)
        builder.call(builder.inttoptr(args[0], function), [args[1], args[2], threads, i32(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, block, types.int64), codegen


@intrinsic
def address_of(typingctx, ptr):
    """The address a pointer holds."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(args[0], i64)

    return types.int64(ptr), codegen


@intrinsic(prefer_literal=True)
def read_int(typingctx, address, index, nbytes):
    """Element `index` of an array of signed integers of a constant size, as int64."""
    if not isinstance(nbytes, types.IntegerLiteral):
        return None
    kind = ir.IntType(8 * nbytes.literal_value)

    def codegen(context, builder, sig, args):
        base = builder.inttoptr(args[0], kind.as_pointer())
        value = builder.load(element_at(builder, base, args[1]))
        return value if kind == i64 else builder.sext(value, i64)

    return types.int64(types.int64, types.int64, nbytes), codegen
