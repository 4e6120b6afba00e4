// Floats of 8 bits (e4m3) with one scale for a whole section, as tierkv/codecs/fp8.py says.
//
// A section is codes, then a line of which the first 4 bytes are the scale, in float32 with the bits
// of a bfloat16.
#pragma once
#include "codec_pages.cuh"

constexpr int LARGEST_E4M3 = 448;

template <int TOKENS_, int DIM_>
struct Floats {
    static constexpr int TOKENS = TOKENS_, DIM = DIM_;
    static constexpr int ROW_UNITS = DIM / UNIT, UNITS = TOKENS * ROW_UNITS;
    static constexpr int CODE_BYTES = UNIT, CODE_WORDS = UNIT / 4;  // of a unit
    static constexpr int CODES = divide_up(TOKENS * DIM, 16);       // in chunks
    static constexpr int PARAMETERS = LINE, CHUNKS = CODES + PARAMETERS;
    static constexpr Grouping GROUPING = WHOLE;
    static_assert(DIM % UNIT == 0, "rows are whole chunks");

    // Decode a unit: a code moved into a float16 is 2^-8 of what it stands for.
    static DEVICE void decode(const unsigned (&codes)[CODE_WORDS], int, const uint4* parameters,
                              float (&x)[UNIT]) {
        const float scale = __uint_as_float(parameters[0].x) * 256.0f;
#pragma unroll
        for (int i = 0; i < UNIT / 2; ++i) {
            const unsigned two = codes[i / 2] >> 16 * (i % 2);
            const unsigned high = (two & 0xff) << 8 | (two & 0xff00) << 16;
            unpack<DTYPE_F16>((high & 0x80008000) | (high & 0x7f007f00) >> 1, x[2 * i],
                              x[2 * i + 1]);
            x[2 * i] *= scale;
            x[2 * i + 1] *= scale;
        }
    }
};

// Bits of the nearest e4m3, halves to even, of a number from 0 to 448.
DEVICE unsigned e4m3_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x < 0.015625f) return __float_as_uint(x + 16384.0f) - __float_as_uint(16384.0f);
    return (bits + 0x7ffff + (bits >> 20 & 1) - (120u << 23)) >> 20;
}

DEVICE unsigned e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    return pack_e4m3(low, high);
#else
    return e4m3_bits(low) | e4m3_bits(high) << 8;
#endif
}

// A warp encodes a section: a first look for the scale, a second one at what does not fit its
// registers.
template <typename S>
DEVICE void encode_whole(const uint4* from, long long token, uint4* out) {
    constexpr int HELD = least(MOST_UNITS, divide_up(S::UNITS, 32)), AT_ONCE = 32 * HELD;
    const int lane = threadIdx.x % 32;
    uint4 held[HELD];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int unit = least(first + i * 32 + lane, S::UNITS - 1);
            held[i] =
                load_streaming(from + unit / S::ROW_UNITS * token + unit % S::ROW_UNITS);
        }
    };
    Range range;
    for (int first = 0; first < S::UNITS; first += AT_ONCE) {
        load(first);
#pragma unroll
        for (int i = 0; i < HELD; ++i) range.take(held[i]);
    }
    range.over_lanes(1, 32);
    float low, high;
    range.ends(low, high);
    const float largest = -low > high ? -low : high;
    const bool bad = !(low >= -LIMIT && high <= LIMIT);
    const unsigned bits = scale_for<LARGEST_E4M3>(largest, bad) << 16;
    const float scale = __uint_as_float(bits), inverse = inverse_of(scale);
    for (int first = 0; first < S::UNITS; first += AT_ONCE) {
        if constexpr (S::UNITS > AT_ONCE) load(first);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int unit = first + i * 32 + lane;
            float x[UNIT];
            unsigned codes[S::CODE_WORDS] = {};
            widen(held[i], x);
#pragma unroll
            for (int j = 0; j < UNIT; j += 2) {
                const float a = __uint_as_float(__float_as_uint(x[j]) & 0x7fffffff);
                const float b = __uint_as_float(__float_as_uint(x[j + 1]) & 0x7fffffff);
                const unsigned signs = __float_as_uint(x[j]) >> 24 & 0x80
                                       | __float_as_uint(x[j + 1]) >> 16 & 0x8000;
                const unsigned two =
                    e4m3_pair(divide(a, scale, inverse), divide(b, scale, inverse)) | signs;
                codes[j / 4] |= two << 8 * (j % 4);
            }
#pragma unroll
            for (int w = 0; w < S::CODE_WORDS; ++w) codes[w] = bad ? 0 : codes[w];
            if (unit < S::UNITS)
                store_codes<S::CODE_BYTES>(
                    reinterpret_cast<unsigned char*>(out) + unit * S::CODE_BYTES, codes);
        }
    }
    uint4 parameters;
    parameters.x = lane == 0 ? bits : 0, parameters.y = parameters.z = parameters.w = 0;
    if (lane < S::PARAMETERS) out[S::CODES + lane] = parameters;
}
