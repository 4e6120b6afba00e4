// Integers of WIDTH bits with a scale and a base per group, as tierkv/codecs/affine.py says.
//
// A section is codes, bfloat16 scales, bases, each in whole chunks of 16 bytes; groups are blocks
// of ROWS tokens x COLUMNS channels, and one of both is 1. A warp encodes a section from registers.
#pragma once
#include "codec_pages.cuh"

template <int TOKENS_, int DIM_, int WIDTH_, int ROWS_, int COLUMNS_>
struct Affine {
    static constexpr int TOKENS = TOKENS_, DIM = DIM_, ROWS = ROWS_, COLUMNS = COLUMNS_;
    static constexpr int WIDTH = WIDTH_, LEVELS = (1 << WIDTH) - 1;  // bits of a code
    static constexpr int ROW_UNITS = DIM / UNIT, UNITS = TOKENS * ROW_UNITS;
    static constexpr int CODE_BYTES = UNIT * WIDTH / 8;  // of a unit
    static constexpr int CODE_WORDS = (CODE_BYTES + 3) / 4;
    static constexpr int ROW_GROUPS = DIM / COLUMNS;  // groups beside each other
    static constexpr int GROUPS = TOKENS / ROWS * ROW_GROUPS;
    static constexpr int CODES = divide_up(TOKENS * DIM * WIDTH / 8, 16);  // in chunks, from here on
    static constexpr int SCALES = divide_up(2 * GROUPS, 16);
    static constexpr int PARAMETERS = SCALES + divide_up(SIZE * GROUPS, 16);
    static constexpr int CHUNKS = CODES + PARAMETERS;
    static constexpr Grouping GROUPING = COLUMNS == 1 ? BY_CHANNEL : BY_TOKEN;
    static_assert(DIM % UNIT == 0 && TOKENS % ROWS == 0, "rows are whole chunks");
    static_assert(COLUMNS == 1 || (ROWS == 1 && COLUMNS % UNIT == 0), "a unit has one group");

    // Decode a unit. `parameters` holds the scales, then the bases.
    static DEVICE void decode(const unsigned (&codes)[CODE_WORDS], int unit,
                              const uint4* parameters, float (&x)[UNIT]) {
        const int row = unit / ROW_UNITS, column = unit % ROW_UNITS * UNIT;
        const int group = row / ROWS * ROW_GROUPS + column / COLUMNS;
        const uint4* const bases = parameters + SCALES;
        float scale[UNIT], base[UNIT];
        if constexpr (COLUMNS == 1) {
            unsigned pairs[UNIT / 2];
            for (int i = 0; i < UNIT / 2; ++i)
                pairs[i] = reinterpret_cast<const unsigned*>(parameters)[group / 2 + i];
#pragma unroll
            for (int i = 0; i < UNIT / 2; ++i)
                unpack<DTYPE_BF16>(pairs[i], scale[2 * i], scale[2 * i + 1]);
            widen(bases[group / UNIT], base);
        } else {
            const unsigned bits = reinterpret_cast<const unsigned short*>(parameters)[group];
            float one, unused;
            if constexpr (DTYPE == DTYPE_F32)
                one = reinterpret_cast<const float*>(bases)[group];
            else
                unpack<DTYPE>(reinterpret_cast<const unsigned short*>(bases)[group], one, unused);
#pragma unroll
            for (int j = 0; j < UNIT; ++j) scale[j] = __uint_as_float(bits << 16), base[j] = one;
        }
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            const int bit = j * WIDTH;
            x[j] = static_cast<float>(codes[bit / 32] >> bit % 32 & LEVELS) * scale[j] + base[j];
        }
    }
};

template <int LEVELS>
struct Group {
    unsigned bits;  // of the scale
    float base, scale, inverse;

    DEVICE void measure(float low, float high) {
        low += 0.0f;  // turns -0 into 0
        high += 0.0f;
        const bool bad = !(low >= -LIMIT && low <= high && high <= LIMIT);
        bits = scale_for<LEVELS>(high - low, bad);
        base = bad ? 0.0f : low;
        scale = __uint_as_float(bits << 16);
        inverse = inverse_of(scale);
    }
    // What x becomes; 0 in a group that decodes to NaN.
    DEVICE unsigned code(float x) const {
        return round_to_unsigned(divide(x - base, scale, inverse));
    }
};

DEVICE unsigned base_bits(float base) {
    if constexpr (DTYPE == DTYPE_F32) return __float_as_uint(base);
    else return pack<DTYPE>(base, 0.0f) & 0xffff;
}

// How a warp takes groups that lie within one token: LANES lanes a group, STEPS times.
template <typename S>
struct ByToken {
    static constexpr int UNITS = S::COLUMNS / UNIT;  // of a group
    static constexpr int LANES = lanes_for(UNITS), PER_LANE = divide_up(UNITS, LANES);
    static constexpr int BESIDE = 32 / LANES;
    static constexpr int STEPS = least(MOST_UNITS / PER_LANE, divide_up(S::GROUPS, BESIDE));
    static constexpr int AT_ONCE = STEPS * BESIDE;  // groups
    static_assert(PER_LANE <= MOST_UNITS, "a group fits the registers of a warp");
};

// Encode a section whose groups lie within one token. Row i is at from + rows.row(i) * token; a
// skipped one decodes to NaN. `found_scales` and `found_bases` are shared memory of this warp, for
// AT_ONCE groups: neighbours leave for the frame together.
template <typename S, typename Rows>
DEVICE void encode_by_token(const uint4* from, long long token, uint4* out, const Rows& rows,
                            unsigned short* found_scales, unsigned* found_bases) {
    using By = ByToken<S>;
    const int lane = threadIdx.x % 32, x = lane % By::LANES, y = lane / By::LANES;
    unsigned char* const codes = reinterpret_cast<unsigned char*>(out);
    unsigned short* const scales = reinterpret_cast<unsigned short*>(out + S::CODES);
    unsigned short* const bases = reinterpret_cast<unsigned short*>(out + S::CODES + S::SCALES);
    for (int first = 0; first < S::GROUPS; first += By::AT_ONCE) {
        uint4 held[By::STEPS][By::PER_LANE];
#pragma unroll
        for (int i = 0; i < By::STEPS; ++i) {
#pragma unroll
            for (int p = 0; p < By::PER_LANE; ++p) {  // too many lanes or steps: the last again
                const int group = least(first + i * By::BESIDE + y, S::GROUPS - 1);
                const int unit = least(x + p * By::LANES, By::UNITS - 1);
                held[i][p] = load_streaming(from + rows.row(group / S::ROW_GROUPS) * token
                                            + group % S::ROW_GROUPS * By::UNITS + unit);
            }
        }
#pragma unroll
        for (int i = 0; i < By::STEPS; ++i) {
            const int group = first + i * By::BESIDE + y;
            Range range;
#pragma unroll
            for (int p = 0; p < By::PER_LANE; ++p) range.take(held[i][p]);
            range.over_lanes(1, By::LANES);
            float low, high;
            range.ends(low, high);
            if (rows.skips(least(group, S::GROUPS - 1) / S::ROW_GROUPS))
                low = -minus_infinity(), high = -low;
            Group<S::LEVELS> found;
            found.measure(low, high);
            if (x == 0) {
                found_scales[group - first] = static_cast<unsigned short>(found.bits);
                found_bases[group - first] = base_bits(found.base);
            }
#pragma unroll
            for (int p = 0; p < By::PER_LANE; ++p) {
                const int unit = x + p * By::LANES;
                float values[UNIT];
                unsigned words[S::CODE_WORDS] = {};
                widen(held[i][p], values);
#pragma unroll
                for (int j = 0; j < UNIT; ++j) {
                    const int bit = j * S::WIDTH;
                    words[bit / 32] |= found.code(values[j]) << bit % 32;
                }
                if (unit < By::UNITS && group < S::GROUPS)
                    store_codes<S::CODE_BYTES>(
                        codes + (group * By::UNITS + unit) * S::CODE_BYTES, words);
            }
        }
        __syncwarp();
        for (int i = lane; i < least(By::AT_ONCE, S::GROUPS - first); i += 32) {
            scales[first + i] = found_scales[i];
            if constexpr (DTYPE == DTYPE_F32)
                reinterpret_cast<unsigned*>(bases)[first + i] = found_bases[i];
            else
                bases[first + i] = static_cast<unsigned short>(found_bases[i]);
        }
        __syncwarp();
    }
    for (int i = S::GROUPS + lane; i < S::SCALES * 8; i += 32) scales[i] = 0;
    for (int i = S::GROUPS * SIZE / 2 + lane; i < (S::PARAMETERS - S::SCALES) * 8; i += 32)
        bases[i] = 0;
}

// Encode a section whose groups are ROWS tokens of one channel. Skipped rows do not count, and
// their codes are 0.
template <typename S, typename Rows>
DEVICE void encode_by_channel(const uint4* from, long long token, uint4* out, const Rows& rows) {
    // Lanes beside each other: as few as make 64 bytes of codes, which the link takes at once, if
    // registers allow.
    constexpr int WIDE = S::WIDTH == 8 || KEPT > 8 || S::ROW_UNITS % 16 ? 8 : 16;
    constexpr int DOWN = 32 / WIDE, DEEP = S::ROWS / DOWN;
    static_assert(S::ROWS % DOWN == 0 && DEEP <= 16, "a group fits the registers of a warp");
    const int x = threadIdx.x % WIDE, y = threadIdx.x % 32 / WIDE;
    unsigned char* const codes = reinterpret_cast<unsigned char*>(out);
    for (int first = 0; first < S::TOKENS; first += S::ROWS) {
        for (int left = 0; left < S::ROW_UNITS; left += WIDE) {
            const int unit = least(left + x, S::ROW_UNITS - 1);
            uint4 held[DEEP];
#pragma unroll
            for (int i = 0; i < DEEP; ++i)
                held[i] = load_streaming(from + rows.row(first + i * DOWN + y) * token + unit);
            unsigned rows_codes[DEEP][S::CODE_WORDS] = {}, scales[UNIT / 2] = {}, bases[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {  // a word is one channel or two
                Range range;
#pragma unroll
                for (int i = 0; i < DEEP; ++i)
                    if (!rows.skips(first + i * DOWN + y)) range.take(word_of(held[i], w));
                range.over_lanes(WIDE, 32);
                float low[PER_WORD], high[PER_WORD], base[PER_WORD];
                widen_word(range.low, low);
                widen_word(range.high, high);
#pragma unroll
                for (int c = 0; c < PER_WORD; ++c) {
                    const int j = w * PER_WORD + c, bit = j * S::WIDTH;
                    Group<S::LEVELS> found;
                    found.measure(low[c], high[c]);
                    base[c] = found.base;
                    scales[j / 2] |= found.bits << j % 2 * 16;
#pragma unroll
                    for (int i = 0; i < DEEP; ++i) {
                        float x[PER_WORD];
                        widen_word(word_of(held[i], w), x);
                        rows_codes[i][bit / 32] |= found.code(x[c]) << bit % 32;
                    }
                }
                bases[w] = narrow_word(base);
            }
            const bool mine = left + x < S::ROW_UNITS;
            if (y == 0 && mine) {
                const int group = first / S::ROWS * S::DIM + unit * UNIT;
                store_codes<2 * UNIT>(reinterpret_cast<unsigned short*>(out + S::CODES) + group,
                                      scales);
                out[S::CODES + S::SCALES + group / UNIT] = chunk_of(bases);
            }
#pragma unroll
            for (int i = 0; i < DEEP; ++i) {
                const int row = first + i * DOWN + y;
#pragma unroll
                for (int w = 0; w < S::CODE_WORDS; ++w)
                    rows_codes[i][w] = rows.skips(row) ? 0 : rows_codes[i][w];
                if (mine)
                    store_codes<S::CODE_BYTES>(
                        codes + (row * S::ROW_UNITS + unit) * S::CODE_BYTES, rows_codes[i]);
            }
        }
    }
    if constexpr (S::GROUPS % 8) {
        uint2 zero;
        zero.x = zero.y = 0;
        if (x + y == 0) reinterpret_cast<uint2*>(out + S::CODES)[S::GROUPS / 4] = zero;
    }
}
