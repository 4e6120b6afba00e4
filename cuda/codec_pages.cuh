// What encoding and decoding share: chunks of a page as numbers, their range, codes in memory.
#pragma once
#include "ptx.cuh"

constexpr int SIZE = DTYPE == DTYPE_F32 ? 4 : 2;
constexpr int UNIT = 16 / SIZE;  // elements in a chunk of a page
constexpr int PER_WORD = UNIT / 4;
constexpr int LINE = 8;  // chunks that cross the link together
constexpr int MOST_UNITS = FLOATS ? 16 : 8;     // chunks of a page that a lane holds
constexpr float LIMIT = 8.507059173023462e37f;  // 2^126
constexpr unsigned FINEST_SCALE = 0x0d80;       // 2^-100 in bfloat16, as are the next two
constexpr unsigned NAN_SCALE = 0x7fc0;
constexpr float LARGEST_F16 = 65504.0f;
constexpr unsigned INFINITIES = DTYPE == DTYPE_F32   ? 0x7f800000u
                                : DTYPE == DTYPE_F16 ? 0x7c007c00u
                                                     : 0x7f807f80u;
constexpr unsigned SIGNS = DTYPE == DTYPE_F32 ? 0x80000000u : 0x80008000u;

enum Grouping { BY_TOKEN, BY_CHANNEL, WHOLE };

DEVICE constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
DEVICE constexpr int least(int a, int b) { return a < b ? a : b; }
DEVICE constexpr int greatest(int a, int b) { return a > b ? a : b; }

// Lanes for `items` things: a power of two, at most a warp.
DEVICE constexpr int lanes_for(int items) {
    int lanes = 1;
    while (lanes < items && lanes < 32) lanes *= 2;
    return lanes;
}

DEVICE uint4 chunk_of(const unsigned (&words)[4]) {
    uint4 chunk;
    chunk.x = words[0], chunk.y = words[1], chunk.z = words[2], chunk.w = words[3];
    return chunk;
}

DEVICE unsigned word_of(const uint4& chunk, int w) {
    return w == 0 ? chunk.x : w == 1 ? chunk.y : w == 2 ? chunk.z : chunk.w;
}

DEVICE void widen_word(unsigned word, float (&x)[PER_WORD]) {
    if constexpr (DTYPE == DTYPE_F32) x[0] = __uint_as_float(word);
    else unpack<DTYPE>(word, x[0], x[PER_WORD - 1]);
}

DEVICE unsigned narrow_word(const float (&x)[PER_WORD]) {
    if constexpr (DTYPE == DTYPE_F32) return __float_as_uint(x[0]);
    else return pack<DTYPE>(x[0], x[PER_WORD - 1]);
}

DEVICE void widen(const uint4& chunk, float (&x)[UNIT]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float word[PER_WORD];
        widen_word(word_of(chunk, w), word);
#pragma unroll
        for (int c = 0; c < PER_WORD; ++c) x[w * PER_WORD + c] = word[c];
    }
}

// Round to the element type; what is beyond its largest number saturates.
DEVICE uint4 narrow(float (&x)[UNIT]) {
    unsigned words[4];
#pragma unroll
    for (int j = 0; j < UNIT; ++j)
        if constexpr (DTYPE == DTYPE_F16)
            x[j] = x[j] > LARGEST_F16 ? LARGEST_F16 : x[j] < -LARGEST_F16 ? -LARGEST_F16 : x[j];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float word[PER_WORD];
#pragma unroll
        for (int c = 0; c < PER_WORD; ++c) word[c] = x[w * PER_WORD + c];
        words[w] = narrow_word(word);
    }
    return chunk_of(words);
}

// The least and the greatest of words; NaN if one of them is.
struct Range {
    unsigned low = INFINITIES, high = INFINITIES | SIGNS;

    DEVICE void take(unsigned word) {
        low = min_words<DTYPE>(low, word);
        high = max_words<DTYPE>(high, word);
    }
    DEVICE void take(const uint4& chunk) {
        take(chunk.x), take(chunk.y), take(chunk.z), take(chunk.w);
    }
    // Over lanes whose number differs in the bits from `from` to `to`, powers of two.
    DEVICE void over_lanes(int from, int to) {
#pragma unroll
        for (int bit = from; bit < to; bit *= 2) {
            low = min_words<DTYPE>(low, __shfl_xor_sync(ALL_LANES, low, bit));
            high = max_words<DTYPE>(high, __shfl_xor_sync(ALL_LANES, high, bit));
        }
    }
    // Over both halves of each word.
    DEVICE void ends(float& first, float& last) {
        if constexpr (DTYPE == DTYPE_F32) {
            first = __uint_as_float(low), last = __uint_as_float(high);
        } else {
            float unused;
            unpack<DTYPE>(min_words<DTYPE>(low, low << 16 | low >> 16), first, unused);
            unpack<DTYPE>(max_words<DTYPE>(high, high << 16 | high >> 16), last, unused);
        }
    }
};

// x / divisor to the bit, if `inverse` is 1 / divisor and the divisor a bfloat16: one step of
// Newton's method is enough for each of the 128 significands that it can have.
DEVICE float divide(float x, float divisor, float inverse) {
    const float near = multiply(x, inverse);
    return multiply_add(multiply_add(-near, divisor, x), inverse, near);
}

// 1 / scale to the bit, likewise; 0 if the scale is 0 or NaN.
DEVICE float inverse_of(float scale) {
    const float near = reciprocal_fast(scale);
    return scale > 0.0f ? multiply_add(near, multiply_add(-scale, near, 1.0f), near) : 0.0f;
}

// Bits of the bfloat16 scale by which codes up to CODES cover `extent`.
template <int CODES>
DEVICE unsigned scale_for(float extent, bool bad) {
    const float step = divide(extent, CODES, 1.0f / CODES);
    const unsigned bits = (__float_as_uint(step) + 0xffff) >> 16;
    const unsigned coarse = extent > 0.0f && bits < FINEST_SCALE ? FINEST_SCALE : bits;
    return bad ? NAN_SCALE : coarse;
}

// Store `BYTES` bytes of codes or scales, aligned.
template <int BYTES>
DEVICE void store_codes(void* to, const unsigned (&words)[(BYTES + 3) / 4]) {
    if constexpr (BYTES == 16) {
        *static_cast<uint4*>(to) = chunk_of(words);
    } else if constexpr (BYTES == 8) {
        uint2 both;
        both.x = words[0], both.y = words[1];
        *static_cast<uint2*>(to) = both;
    } else if constexpr (BYTES == 4) {
        *static_cast<unsigned*>(to) = words[0];
    } else {
        *static_cast<unsigned short*>(to) = static_cast<unsigned short>(words[0]);
    }
}

// Which row of a page is row i of a section, and which rows it leaves to another one.
struct AllRows {
    DEVICE explicit AllRows(const void* = nullptr) {}
    DEVICE int row(int i) const { return i; }
    DEVICE bool skips(int) const { return false; }
};
