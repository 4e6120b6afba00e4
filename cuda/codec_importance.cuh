// Which tokens of a head-page are kept in 8 bits, as tierkv/codecs/int4_importance.py says: the
// KEPT whose keys lie farthest, in some channel, from the middle of the page's range.
#pragma once
#include "codec_pages.cuh"

constexpr int BLOCKS_OF_TOKENS = divide_up(PAGE_TOKENS, 32);
constexpr int INDEX = divide_up(KEPT, 16);  // chunks of the indices of kept tokens

// The indices of kept tokens, as a section without codes.
struct Index {
    static constexpr int UNITS = 0, CODES = 0, PARAMETERS = INDEX, CHUNKS = INDEX;
};

// What one warp knows of its head-page, in shared memory.
struct Choice {
    uint4 index[INDEX];               // bytes: the kept tokens in order, then zeros
    unsigned kept[BLOCKS_OF_TOKENS];  // a bit for each token
    float scores[PAGE_TOKENS];
};

// Rows of a page that are not kept: to encode those of a choice, to decode those of an index.
struct UnkeptRows {
    const Choice& choice;
    DEVICE int row(int i) const { return i; }
    DEVICE bool skips(int i) const { return choice.kept[i / 32] >> i % 32 & 1; }
};
struct OtherRows {
    const unsigned char* index;
    DEVICE explicit OtherRows(const void* chunks)
        : index(static_cast<const unsigned char*>(chunks)) {}
    DEVICE int row(int i) const { return i; }
    DEVICE bool skips(int i) const {
        bool found = false;
#pragma unroll
        for (int j = 0; j < KEPT; ++j) found |= index[j] == i;
        return found;
    }
};
struct KeptRows {
    const unsigned char* index;
    DEVICE explicit KeptRows(const void* chunks)
        : index(static_cast<const unsigned char*>(chunks)) {}
    DEVICE int row(int i) const { return index[i]; }
    DEVICE bool skips(int) const { return false; }
};

DEVICE float greater(float a, float b) {  // NaN if one of them is
    return __uint_as_float(max_words<DTYPE_F32>(__float_as_uint(a), __float_as_uint(b)));
}

// Find the score of each token: the largest distance of a channel from its middle.
template <int ROW_UNITS>
DEVICE void score_tokens(const uint4* k, long long token, Choice& choice) {
    constexpr int WIDE = 8, DOWN = 32 / WIDE;
    constexpr int DEEP = least(MOST_UNITS, PAGE_TOKENS / DOWN), AT_ONCE = DEEP * DOWN;
    const int x = threadIdx.x % WIDE, y = threadIdx.x % 32 / WIDE;
    uint4 held[DEEP];
    for (int left = 0; left < ROW_UNITS; left += WIDE) {
        const uint4* const from = k + least(left + x, ROW_UNITS - 1);
        auto load = [&](int first) {
#pragma unroll
            for (int i = 0; i < DEEP; ++i)
                held[i] = load_streaming(from + (first + i * DOWN + y) * token);
        };
        Range ranges[4];
        for (int first = 0; first < PAGE_TOKENS; first += AT_ONCE) {
            load(first);
#pragma unroll
            for (int i = 0; i < DEEP; ++i) {
#pragma unroll
                for (int w = 0; w < 4; ++w) ranges[w].take(word_of(held[i], w));
            }
        }
        unsigned lows[4], highs[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            ranges[w].over_lanes(WIDE, 32);
            lows[w] = ranges[w].low, highs[w] = ranges[w].high;
        }
        float middle[UNIT], high[UNIT];
        widen(chunk_of(lows), middle);
        widen(chunk_of(highs), high);
#pragma unroll
        for (int j = 0; j < UNIT; ++j)
            middle[j] = multiply(middle[j], 0.5f) + multiply(high[j], 0.5f);
        for (int first = 0; first < PAGE_TOKENS; first += AT_ONCE) {
            if constexpr (PAGE_TOKENS > AT_ONCE) load(first);
#pragma unroll
            for (int i = 0; i < DEEP; ++i) {
                const int row = first + i * DOWN + y;
                float values[UNIT], most = 0.0f;
                widen(held[i], values);
#pragma unroll
                for (int j = 0; j < UNIT; ++j) {
                    const unsigned distance = __float_as_uint(values[j] - middle[j]);
                    most = greater(most, __uint_as_float(distance & 0x7fffffff));
                }
#pragma unroll
                for (int bit = 1; bit < WIDE; bit *= 2)
                    most = greater(most, __shfl_xor_sync(ALL_LANES, most, bit));
                if (x == 0) choice.scores[row] = left ? greater(choice.scores[row], most) : most;
            }
        }
    }
}

// Choose the tokens of one head-page; the whole warp does.
template <int ROW_UNITS>
DEVICE void choose_tokens(const uint4* k, long long token, Choice& choice) {
    const int lane = threadIdx.x % 32;
    unsigned char* const index = reinterpret_cast<unsigned char*>(choice.index);
    __syncwarp();  // nobody reads the last choice any more
    score_tokens<ROW_UNITS>(k, token, choice);
    for (int i = lane; i < INDEX * 16; i += 32) index[i] = 0;
    __syncwarp();
    for (int i = lane; i < PAGE_TOKENS; i += 32)  // what is not a number comes first
        if (!(choice.scores[i] <= -minus_infinity())) choice.scores[i] = -minus_infinity();
    __syncwarp();
    int before = 0;  // kept tokens of earlier blocks
    for (int block = 0; block < BLOCKS_OF_TOKENS; ++block) {
        const int i = block * 32 + lane;
        int rank = i < PAGE_TOKENS ? 0 : KEPT;
        const float score = choice.scores[least(i, PAGE_TOKENS - 1)];
        for (int other = 0; other < PAGE_TOKENS; ++other) {
            const float theirs = choice.scores[other];
            rank += theirs > score || (theirs == score && other < i);
        }
        const bool kept = rank < KEPT;
        const unsigned mask = __ballot_sync(ALL_LANES, kept);
        if (kept) index[before + __popc(mask & (1u << lane) - 1)] = static_cast<unsigned char>(i);
        if (lane == 0) choice.kept[block] = mask;
        before += __popc(mask);
    }
    __syncwarp();
}
