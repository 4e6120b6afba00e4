// Single PTX instructions as functions, and conversions between element types. Needs no other
// header, so NVRTC alone compiles it. sm_80 or newer.
#pragma once

#define DTYPE_F32 0
#define DTYPE_F16 1
#define DTYPE_BF16 2

#define DEVICE __device__ __forceinline__
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]

constexpr unsigned ALL_LANES = 0xffffffffu;

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

DEVICE unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Load 16 bytes that nobody writes while the kernel runs; L1 keeps nothing of them, so the next
// launch reads what memory holds then, whoever wrote it.
DEVICE uint4 load_streaming(const void* from) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from));
    return value;
}

// The same of 2, 4 or 8 bytes, as words; the upper half of a word of 2 bytes is 0.
template <int BYTES>
DEVICE void load_streaming(unsigned (&words)[(BYTES + 3) / 4], const void* from) {
    if constexpr (BYTES == 8)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(words[0]), "=r"(words[1]) : "l"(from));
    else if constexpr (BYTES == 4)
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
    else
        asm volatile("{ .reg .u16 half; ld.global.nc.L1::no_allocate.u16 half, [%1];"
                     " cvt.u32.u16 %0, half; }" : "=r"(words[0]) : "l"(from));
}

// Load 16 bytes of shared memory here, not earlier: they are not to occupy registers until then.
DEVICE uint4 load_shared(const void* from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(shared_address(from)) : "memory");
    return value;
}

// Start copying 16 bytes from global to shared memory, past L1.
DEVICE void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                 :: "r"(shared_address(to)), "l"(from) : "memory");
}

// The same, but write zeros and read nothing unless `wanted`.
DEVICE void copy_async_or_zero(void* to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

// Close this thread's current group of copies; a group may be empty.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `PENDING` of this thread's groups are unfinished.
template <int PENDING>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// Load four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix
// i / 8 (16 bytes) and receives, of each matrix, elements 2 * (i % 4) and the next of row i / 4.
DEVICE void load_matrices(unsigned (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row)) : "memory");
}

// The same, each matrix transposed.
DEVICE void load_matrices_transposed(unsigned (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row)) : "memory");
}

// d += a b with a [16, 16] by rows, b [16, 8] by columns, d [16, 8] float32. With g = lane / 4 and
// t = 2 * (lane % 4), a lane holds (two neighbours each):
//   a: [g, t], [g + 8, t], [g, t + 8], [g + 8, t + 8]    b: [t, g], [t + 8, g] (along k)
//   d: [g, t], [g, t + 1], [g + 8, t], [g + 8, t + 1]
template <int DATA_TYPE>
DEVICE void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (DATA_TYPE == DTYPE_BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Round two floats to 16 bits; `low` comes first in memory.
template <int DATA_TYPE>
DEVICE unsigned pack(float low, float high) {
    unsigned packed;
    if constexpr (DATA_TYPE == DTYPE_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Widen two 16-bit values; the reverse of pack.
template <int DATA_TYPE>
DEVICE void unpack(unsigned packed, float& low, float& high) {
    if constexpr (DATA_TYPE == DTYPE_BF16) {
        low = __uint_as_float(packed << 16);
        high = __uint_as_float(packed & 0xffff0000u);
    } else {
        asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
            : "=f"(low), "=f"(high) : "r"(packed));
    }
}

// a * b + c of two pairs of 16-bit numbers, each rounded once.
template <int DATA_TYPE>
DEVICE unsigned multiply_add_pairs(unsigned a, unsigned b, unsigned c) {
    unsigned sum;
    if constexpr (DATA_TYPE == DTYPE_BF16)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// Bytes 0 and 1 of a word (or 2 and 3, if `upper` is 1), each added to 1024, as a pair of fp16.
DEVICE unsigned bytes_above_1024(unsigned word, int upper) {
    return __byte_perm(word, 0x64646464u, upper ? 0x4342 : 0x4140);
}

// The lesser of two floats or of two pairs of 16-bit numbers; NaN if one of them is.
template <int DATA_TYPE>
DEVICE unsigned min_words(unsigned a, unsigned b) {
    unsigned least;
    if constexpr (DATA_TYPE == DTYPE_F32)
        asm("min.NaN.f32 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    else if constexpr (DATA_TYPE == DTYPE_BF16)
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    else
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
}

// The greater, likewise.
template <int DATA_TYPE>
DEVICE unsigned max_words(unsigned a, unsigned b) {
    unsigned most;
    if constexpr (DATA_TYPE == DTYPE_F32)
        asm("max.NaN.f32 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    else if constexpr (DATA_TYPE == DTYPE_BF16)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    else
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}

// The product, rounded: never one step with an addition that follows.
DEVICE float multiply(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

// a * b + c, rounded once.
DEVICE float multiply_add(float a, float b, float c) {
    float sum;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
    return sum;
}

// 1 / x within one unit in the last place.
DEVICE float reciprocal_fast(float x) {
    float result;
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Round to the nearest integer, halves to even; 0 for what is negative or NaN.
DEVICE unsigned round_to_unsigned(float x) {
    unsigned result;
    asm("cvt.rni.u32.f32 %0, %1;" : "=r"(result) : "f"(x));
    return result;
}

// Round two floats to e4m3, at most 448; `low` comes first in memory. Needs sm_89.
DEVICE unsigned pack_e4m3(float low, float high) {
    unsigned short packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Sum over the warp, for every lane.
DEVICE unsigned add_over_warp(unsigned value) {
    unsigned sum;
    asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(value));
    return sum;
}

// Bits set in any lane, for every lane.
DEVICE unsigned or_over_warp(unsigned value) {
    unsigned all;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(all) : "r"(value));
    return all;
}

// 2^x within 2^-22 of the value; 0 for -inf.
DEVICE float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
