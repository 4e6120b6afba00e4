"""Run the CUDA sources on the CPU: the same kernel text, with the instructions of ptx.cuh emulated.

Every thread of a block is a fiber; lanes run in random order between the points where they meet
(in every second launch, one warp ahead of the others), an asynchronous copy happens at once or only
when it is waited for, and shared memory starts as NaN. So a missing wait or barrier shows, and so
does a wrong index, without a GPU. Slow: for small problems. Fragment layouts follow the PTX ISA,
sections on ldmatrix and mma.m16n8k16.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from tierkv.kernels.build import Kernel, source_directory

COMPILER = shutil.which("g++")
BLOCK_LIMIT, PROCESSOR_LIMIT = 232448, 233472
"""Shared memory in bytes, as an H200 has it."""

PTX = r"""
#pragma once
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <utility>
#include <vector>
#define DTYPE_F32 0
#define DTYPE_F16 1
#define DTYPE_BF16 2
#define DEVICE inline
#define SHARED_MEMORY(name) unsigned char* const name = emulated_shared
#define __global__ static
#define __launch_bounds__(...)
#define __align__(...)
#define __shared__ alignas(16) static
using std::max;
using std::min;
struct uint3_ { unsigned x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
static uint3_ threadIdx, blockIdx, gridDim;
static unsigned char* emulated_shared;
constexpr unsigned ALL_LANES = 0xffffffffu;
static inline float minus_infinity() { return -INFINITY; }
#define REQUIRE(what) \
    do { if (!(what)) { std::fprintf(stderr, "emulator: %s line %d\n", #what, __LINE__); \
                        std::abort(); } } while (0)

struct Copy { void* to; const void* from; bool wanted; };
struct Meeting { unsigned arrived, generation; };
struct Fiber {
    ucontext_t context;  // for the first start; from then on jumps, which need no system call
    jmp_buf place;
    bool started, done;
    const Meeting* meeting;  // where it waits, as long as that has generation
    unsigned generation;
    bool ready() const {
        return !done && (meeting == nullptr || meeting->generation != generation);
    }
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};
static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static unsigned running, seed = 1;
static Meeting warps[32], block;
static unsigned char exchange_buffer[32][32][64];
static unsigned random_number() { return seed = seed * 1664525u + 1013904223u, seed >> 8; }

static void meet(Meeting& meeting, unsigned members) {
    if (++meeting.arrived == members) {
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    Fiber& fiber = fibers[running];
    fiber.meeting = &meeting;
    fiber.generation = meeting.generation;
    if (!_setjmp(fiber.place)) _longjmp(scheduler, 1);
}
// Run the fiber `running` until it waits or is done.
static __attribute__((noinline)) void resume() {
    if (_setjmp(scheduler)) return;
    Fiber& fiber = fibers[running];
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}
static void __syncwarp() { meet(warps[threadIdx.x / 32], 32); }
static void __syncthreads() { meet(block, static_cast<unsigned>(fibers.size())); }

// Every lane offers some bytes; returns those of all lanes. Call release() after reading.
static unsigned char (*offer(const void* bytes, size_t size))[64] {
    const unsigned warp = threadIdx.x / 32;
    std::memcpy(exchange_buffer[warp][threadIdx.x % 32], bytes, size);
    __syncwarp();
    return exchange_buffer[warp];
}
template <typename T>
static T from_lane(T value, unsigned lane) {
    T result;
    std::memcpy(&result, offer(&value, sizeof(T))[lane], sizeof(T));
    __syncwarp();
    return result;
}
template <typename T> static T __shfl_xor_sync(unsigned, T value, int mask) {
    return from_lane(value, threadIdx.x % 32 ^ mask);
}
template <typename T> static T __shfl_up_sync(unsigned, T value, unsigned distance) {
    const unsigned lane = threadIdx.x % 32;
    return from_lane(value, lane < distance ? lane : lane - distance);
}
template <typename T> static T __shfl_sync(unsigned, T a, int lane) { return from_lane(a, lane); }
static unsigned __ballot_sync(unsigned, int predicate) {
    const unsigned char mine = predicate != 0;
    auto all = offer(&mine, 1);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane][0]) << lane;
    return __syncwarp(), bits;
}
template <typename T> static T atomicAdd(T* to, T value) {
    const T before = *to;
    *to += value;
    return before;
}
static unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>((high * (1ull << 32) | low) << by % 32 >> 32);
}
static unsigned bytes_above_1024(unsigned word, int upper) {
    return 0x64006400 | (word >> 16 * upper & 0xff) | (word >> 16 * upper & 0xff00) << 8;
}
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
template <typename Operation>
static unsigned over_warp(unsigned value, Operation combine) {
    for (int mask = 1; mask < 32; mask *= 2)
        value = combine(value, __shfl_xor_sync(ALL_LANES, value, mask));
    return value;
}
static unsigned add_over_warp(unsigned value) { return over_warp(value, std::plus<unsigned>()); }
static unsigned or_over_warp(unsigned value) { return over_warp(value, std::bit_or<unsigned>()); }
static float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static uint4 load_streaming(const void* from) {
    REQUIRE(reinterpret_cast<size_t>(from) % 16 == 0);
    return *static_cast<const uint4*>(from);
}
template <int BYTES>
static void load_streaming(unsigned (&words)[(BYTES + 3) / 4], const void* from) {
    REQUIRE(reinterpret_cast<size_t>(from) % BYTES == 0);
    words[0] = 0;
    std::memcpy(words, from, BYTES);
}
static uint4 load_shared(const void* from) { return load_streaming(from); }

static void perform(const Copy& copy) {
    copy.wanted ? std::memcpy(copy.to, copy.from, 16) : std::memset(copy.to, 0, 16);
}
static void copy_async_or_zero(void* to, const void* from, bool wanted) {
    REQUIRE(reinterpret_cast<size_t>(to) % 16 == 0 && reinterpret_cast<size_t>(from) % 16 == 0);
    if (random_number() % 2) perform({to, from, wanted});
    else fibers[running].open.push_back({to, from, wanted});
}
static void copy_async(void* to, const void* from) { copy_async_or_zero(to, from, true); }
static void copy_async_commit() {
    Fiber& fiber = fibers[running];
    fiber.groups.push_back(fiber.open);
    fiber.open.clear();
}
template <int PENDING>
static void copy_async_wait() {
    auto& groups = fibers[running].groups;
    while (groups.size() > PENDING) {
        for (const Copy& copy : groups.front()) perform(copy);
        groups.erase(groups.begin());
    }
}

static void load_matrices_any(unsigned (&out)[4], const void* row, bool transposed) {
    REQUIRE(reinterpret_cast<size_t>(row) % 16 == 0);
    auto rows = offer(&row, sizeof(row));
    const unsigned lane = threadIdx.x % 32;
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        unsigned short two[2];
        for (unsigned i = 0; i < 2; ++i) {
            const unsigned r = transposed ? lane % 4 * 2 + i : lane / 4;
            const unsigned c = transposed ? lane / 4 : lane % 4 * 2 + i;
            const unsigned short* source;
            std::memcpy(&source, rows[matrix * 8 + r], sizeof(source));
            two[i] = source[c];
        }
        out[matrix] = two[0] | static_cast<unsigned>(two[1]) << 16;
    }
    __syncwarp();
}
static void load_matrices(unsigned (&out)[4], const void* row) {
    load_matrices_any(out, row, false);
}
static void load_matrices_transposed(unsigned (&out)[4], const void* row) {
    load_matrices_any(out, row, true);
}

template <int DATA_TYPE>
static float widen(unsigned short bits) {
    if (DATA_TYPE == DTYPE_BF16) {
        const unsigned wide = static_cast<unsigned>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return half;
}
template <int DATA_TYPE>
static unsigned short narrow(float value) {
    unsigned short bits;
    if (DATA_TYPE == DTYPE_BF16) {
        unsigned wide;
        std::memcpy(&wide, &value, 4);
        if (value != value) return 0x7fff;
        bits = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    } else {
        const _Float16 half = static_cast<_Float16>(value);
        std::memcpy(&bits, &half, 2);
    }
    return bits;
}
template <int DATA_TYPE>
static unsigned pack(float low, float high) {
    return narrow<DATA_TYPE>(low) | static_cast<unsigned>(narrow<DATA_TYPE>(high)) << 16;
}

template <int DATA_TYPE>
static void unpack(unsigned packed, float& low, float& high) {
    low = widen<DATA_TYPE>(packed & 0xffff);
    high = widen<DATA_TYPE>(packed >> 16);
}
template <int DATA_TYPE>
static unsigned multiply_add_pairs(unsigned a, unsigned b, unsigned c) {
    float x[2], y[2], z[2];
    unpack<DATA_TYPE>(a, x[0], x[1]);
    unpack<DATA_TYPE>(b, y[0], y[1]);
    unpack<DATA_TYPE>(c, z[0], z[1]);
    return pack<DATA_TYPE>(x[0] * y[0] + z[0], x[1] * y[1] + z[1]);
}

template <int DATA_TYPE, bool LEAST>
static unsigned extreme_words(unsigned a, unsigned b) {
    const auto choose = [](float x, float y) {
        if (x != x || y != y) return std::nanf("");
        return LEAST == (x < y) ? x : y;
    };
    if (DATA_TYPE == DTYPE_F32)
        return __float_as_uint(choose(__uint_as_float(a), __uint_as_float(b)));
    float x[2], y[2];
    unpack<DATA_TYPE>(a, x[0], x[1]);
    unpack<DATA_TYPE>(b, y[0], y[1]);
    return pack<DATA_TYPE>(choose(x[0], y[0]), choose(x[1], y[1]));
}
template <int DATA_TYPE>
static unsigned min_words(unsigned a, unsigned b) { return extreme_words<DATA_TYPE, true>(a, b); }
template <int DATA_TYPE>
static unsigned max_words(unsigned a, unsigned b) { return extreme_words<DATA_TYPE, false>(a, b); }
static float multiply(float a, float b) { return a * b; }
static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
static float reciprocal_fast(float x) {  // as wrong as it may be
    const float exact = 1 / x;
    return random_number() % 2 ? std::nextafter(exact, random_number() % 2 ? 0.0f : 2 * exact)
                               : exact;
}
static unsigned round_to_unsigned(float x) { return x > 0 ? std::lrint(x) : 0; }

template <int DATA_TYPE>
static void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    auto all = offer(mine, sizeof(mine));
    const unsigned lane = threadIdx.x % 32;
    auto element = [&](unsigned owner, unsigned index, unsigned half) {
        unsigned word;
        std::memcpy(&word, all[owner] + 4 * index, 4);
        return widen<DATA_TYPE>(half ? word >> 16 : word & 0xffff);
    };
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 16; ++k)
            d[i] += element(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2) *
                    element(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    }
    __syncwarp();
}
static float exp2_fast(float x) { return std::exp2(x); }
"""

LAUNCHER = r"""
template <typename... A, size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}
template <typename... A>
static void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}
static void** current_arguments;
static void fiber_main() {
    call(KERNEL, current_arguments);
    fibers[running].done = true;
    _longjmp(scheduler, 1);
}
extern "C" void launch(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared,
                       unsigned random_seed, void** arguments) {
    constexpr size_t STACK = 256 << 10, GUARD = 64;
    current_arguments = arguments;
    seed = random_seed;
    gridDim = {x, y, z};
    const size_t room = (shared + GUARD + 127) / 128 * 128;
    emulated_shared = static_cast<unsigned char*>(std::aligned_alloc(128, room));
    fibers.resize(threads);
    unsigned char* const stacks = static_cast<unsigned char*>(std::malloc(STACK * threads));
    for (unsigned b = 0; b < x * y * z; ++b) {
        blockIdx = {b % x, b / x % y, b / x / y};
        std::memset(emulated_shared, 0xff, shared + GUARD);
        for (unsigned i = 0; i < threads; ++i) {
            getcontext(&fibers[i].context);
            fibers[i].context.uc_stack.ss_sp = stacks + i * STACK;
            fibers[i].context.uc_stack.ss_size = STACK;
            fibers[i].started = fibers[i].done = false;
            fibers[i].meeting = nullptr;
            fibers[i].groups.clear();
            makecontext(&fibers[i].context, fiber_main, 0);
        }
        unsigned left = threads, ahead = 0;
        while (left) {
            running = random_number() % threads;
            if (random_seed % 2 && random_number() % 4)
                running = (ahead * 32 + running % 32) % threads;
            if (random_number() % 128 == 0) ahead = random_number() % threads / 32;
            unsigned waiting = 0;
            for (; !fibers[running].ready(); running = (running + 1) % threads)
                REQUIRE(++waiting < threads);  // or all wait for one that has left
            threadIdx = {running, 0, 0};
            resume();
            left -= fibers[running].done;
        }
        for (size_t i = 0; i < GUARD; ++i) REQUIRE(emulated_shared[shared + i] == 0xff);
    }
    std::free(stacks);
    std::free(emulated_shared);
}
"""


def kernel(
    stem: str,
    name: str,
    defines: tuple[tuple[str, int], ...],
    device: torch.device,
    threads: int,
    shared_bytes: int = 0,
) -> Kernel:
    """Stand in for `tierkv.kernels.build.kernel`."""
    assert device.type == "cpu"
    library = compile_library(stem, name, defines)
    seeds = iter(range(1, 1 << 30))

    def function(grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        values = [(ctypes.c_char * scalar.nbytes)(*scalar.tobytes()) for scalar in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        library.launch(*grid, block[0], shared_mem, next(seeds), pointers)

    return EmulatedKernel(function, device, threads, shared_bytes, 264)


class EmulatedKernel(Kernel):
    def launch(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        self.function(grid, (self.threads, 1, 1), arguments, shared_mem=self.shared_bytes)


def shared_memory(device: torch.device) -> tuple[int, int]:
    """Stand in for the function of that name."""
    return BLOCK_LIMIT, PROCESSOR_LIMIT


@functools.cache
def compile_library(stem: str, name: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile a kernel's source with the emulated ptx.cuh beside it."""
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for file in source_directory().iterdir():
            if file.suffix in (".cu", ".cuh") and file.name != "ptx.cuh":
                shutil.copy(file, folder)
        (folder / "ptx.cuh").write_text(PTX)
        shutil.copy(Path(__file__).with_name("host.cuh"), folder)
        main = f'#include "{stem}.cu"\n#define KERNEL {name}\n{LAUNCHER}'
        (folder / "main.cpp").write_text(main.replace('extern "C" __global__', "__global__"))
        source = (folder / f"{stem}.cu").read_text()
        (folder / f"{stem}.cu").write_text(source.replace('extern "C" __global__', "__global__"))
        library = folder / "kernel.so"
        command = [
            COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-w",
            "-U_FORTIFY_SOURCE",  # it takes jumps between stacks for errors
            "-fno-gnu-unique",  # or kernels share the shared memory of functions of one name
            "-o", str(library), str(folder / "main.cpp"),
            *(f"-D{key}={value}" for key, value in defines),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return ctypes.CDLL(str(library))
