// Score the pages of a sequence by all their keys at 2 bits a channel: see selection/keys2.py.
//
// Candidates are [first, last) with last = min(*sealed - recent, capacity), read when the kernel
// runs. A summary is PARTS vectors of K_DIM elements: the lowest values, the steps, and words of 16
// bits with the steps of 8 tokens, the first token's lowest. It is read once, for all GROUP query
// heads of its KV head; a page's logit is the log-sum-exp over its keys' logits.
//
// -D: DTYPE, K_DIM, GROUP, PARTS (2 + page_tokens / 8).
#include "ptx.cuh"
#include "softmax.cuh"

constexpr int THREADS = 256;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr int TILE = 8;  // pages a warp takes one after the other
constexpr int HALVES = GROUP > 8 ? 2 : 1;
constexpr int VALUES = 2 * HALVES;  // scores of a lane: see Keys::score
constexpr int WORDS = PARTS - 2;  // of 8 tokens

#if DTYPE == DTYPE_F32
using Element = float;
#else
using Element = unsigned short;
#endif
static_assert(K_DIM * sizeof(Element) % 16 == 0, "vectors are read 16 bytes at a time");
static_assert(GROUP >= 1 && GROUP <= 16, "the group is padded to 8 or 16 columns");
static_assert(WORDS >= 2 && (WORDS & (WORDS - 1)) == 0, "a page has 16, 32, ... tokens");

struct Pages {
    const Element* summaries;
    int first, last;

    DEVICE bool contain(int page) const { return page >= first && page < last; }
    DEVICE const Element* operator[](int page) const {
        return summaries + static_cast<long long>(page) * (PARTS * K_DIM);
    }
};

// What a lane answers with. It learns the softmaxes over the keys of every page, and keeps those of
// page lane / 4 of a tile, for heads 2 * (lane % 4) and the next (values 0, 1) and 8 more (2, 3).
struct Kept {
    Softmax over_keys[VALUES];

    DEVICE void logits(float (&value)[VALUES]) const {
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            value[i] = over_keys[i].maximum + logf(over_keys[i].sum);
    }
};

#if DTYPE == DTYPE_F32
constexpr int BLOCKS = 1;

// A lane has every 32nd token of a page. Words are stored as numbers.
struct Keys {
    const float* query;
    long long head_stride;
    float scale;

    DEVICE Keys(const float* query, long long head_stride, float scale, const Pages&, int, int)
        : query(query), head_stride(head_stride), scale(scale) {}

    static DEVICE float key(float low, float step, float word, int shift) {
        return low + step * static_cast<float>(static_cast<unsigned>(word) >> shift & 3u);
    }

    DEVICE void score(float (&value)[VALUES], const Pages& pages, int page, int, int lane) {
        Kept kept = {};
#pragma unroll 1
        for (int i = 0; i < TILE; ++i) {
            if (!pages.contain(page + i)) continue;
            const float* const low = pages[page + i];
            Softmax over_keys[GROUP];
#pragma unroll
            for (int head = 0; head < GROUP; ++head) over_keys[head] = {minus_infinity(), 0.f};
#pragma unroll 1
            for (int token = lane; token < 8 * WORDS; token += LANES) {
                const float* const words = low + (2 + token / 8) * K_DIM;
                const int shift = 2 * (token % 8);
                float sums[GROUP] = {};
#pragma unroll 1
                for (int dim = 0; dim < K_DIM; dim += 4) {
                    const float4 a = *reinterpret_cast<const float4*>(low + dim);
                    const float4 b = *reinterpret_cast<const float4*>(low + K_DIM + dim);
                    const float4 w = *reinterpret_cast<const float4*>(words + dim);
                    const float4 k = {key(a.x, b.x, w.x, shift), key(a.y, b.y, w.y, shift),
                                      key(a.z, b.z, w.z, shift), key(a.w, b.w, w.w, shift)};
#pragma unroll
                    for (int head = 0; head < GROUP; ++head) {
                        const float4 q =
                            *reinterpret_cast<const float4*>(query + head * head_stride + dim);
                        sums[head] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
                    }
                }
#pragma unroll
                for (int head = 0; head < GROUP; ++head)
                    over_keys[head].add({scale * sums[head], 1.f});
            }
#pragma unroll
            for (int head = 0; head < GROUP; ++head) {
#pragma unroll
                for (int distance = 16; distance > 0; distance /= 2)
                    over_keys[head].add_lane(distance);
                if (lane / 4 == i && lane % 4 == head % 8 / 2)
                    kept.over_keys[head / 8 * 2 + head % 2] = over_keys[head];
            }
        }
        kept.logits(value);
    }
};
#else
constexpr int BLOCKS = HALVES == 1 ? 2 : 1;  // on a multiprocessor: enough bytes in flight
constexpr int MANTISSA = DTYPE == DTYPE_BF16 ? 7 : 10;  // bits
constexpr unsigned BOTH = 0x00010001u;  // times 16 bits: those in both halves of a register
constexpr unsigned NEGATIVE = 0x8000u * BOTH;

// 2^exponent, twice.
DEVICE constexpr unsigned power(int exponent) {
    return static_cast<unsigned>(exponent + (DTYPE == DTYPE_BF16 ? 127 : 15)) * (BOTH << MANTISSA);
}

// Steps loaded ahead: as many as divide all steps, for a ring that needs no index at run time.
DEVICE constexpr int ring(int steps) { return steps % 4 == 0 ? 4 : steps % 3 == 0 ? 3 : 2 - steps % 2; }

// Tensor cores, keys [16 tokens, dims] times heads [dims, 8], 32 dims in two multiplications. A
// dot product may take the dims in any order if both sides take the same: lane i reads 8 dims from
// 8 * (i % 4) on as they come. See multiply_add for who holds what.
//
//   q . key = q . low + (q * step) . code
//
// q * step is one factor: 16 bits take it as the sum of two numbers. (In fp16 it must be below
// 65504.) Codes are the other: 2 bits put behind the exponent of 16 or 4 read 16 + code or
// 4 + code, and the surplus is taken off again by keys of -16 or -4.
struct Keys {
    static constexpr int STEPS = (K_DIM + 31) / 32, AHEAD = ring(STEPS);
    // So many of a page's words make up the rows of MATRICES at once: rows lane / 4 and the same
    // + 8 are tokens 4 * matrix + 2 * (lane / 4 / COLUMNS) and the next of word lane / 4 % COLUMNS.
    static constexpr int COLUMNS = WORDS < 4 ? WORDS : 4;
    static constexpr int CHUNKS = WORDS / COLUMNS, MATRICES = COLUMNS / 2;

    struct Vectors {
        uint4 low, step, words;
    };
    uint4 (*query)[HALVES][LANES];  // in shared memory: registers hold bytes in flight
    Vectors ahead[AHEAD];
    float scale;

    DEVICE Keys(const Element* rows, long long head_stride, float scale, const Pages& pages,
                int page, int lane)
        : scale(scale) {
        __shared__ uint4 shared[STEPS][HALVES][LANES];
        query = shared;
        for (int i = threadIdx.x / LANES; i < STEPS * HALVES; i += WARPS) {
            const int step = i / HALVES, half = i % HALVES;
            const int head = lane / 4 + 8 * half, dim = step * 32 + lane % 4 * 8;
            uint4 q = {0, 0, 0, 0};
            if (head < GROUP && dim < K_DIM)
                q = *reinterpret_cast<const uint4*>(rows + head * head_stride + dim);
            shared[step][half][lane] = q;
        }
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) ahead[step] = load(pages, page, 0, step, lane);
        __syncthreads();
    }

    static DEVICE Vectors load(const Pages& pages, int page, int chunk, int step, int lane) {
        const int dim = step * 32 + lane % 4 * 8;
        if (!pages.contain(page) || (K_DIM % 32 != 0 && dim >= K_DIM)) return {};
        const Element* const low = pages[page] + dim;
        const int word = 2 + chunk * COLUMNS + lane / 4 % COLUMNS;
        return {load_streaming(low), load_streaming(low + K_DIM),
                load_streaming(low + word * K_DIM)};
    }

    // Codes of a matrix's rows lane / 4 (`lower` 0) or lane / 4 + 8 (1), plus 2^exponent(lower).
    // `turn` brings the code of the first behind the exponent, the next one is beside it.
    static DEVICE constexpr int exponent(int lower) { return 4 - 2 * lower; }
    static DEVICE unsigned codes(unsigned words, int turn, int matrix, int lower) {
        const unsigned turned = __funnelshift_l(words, words, turn - 8 * matrix);
        return (turned & 3u * (BOTH << (MANTISSA - exponent(lower)))) | power(exponent(lower));
    }

    // Multiply 16 dims; x, y hold 4 of a lane's 8.
    static DEVICE void multiply(float (&base)[4], float (&sums)[MATRICES][4], unsigned q_x,
                                unsigned q_y, unsigned low_x, unsigned low_y, unsigned step_x,
                                unsigned step_y, unsigned words_x, unsigned words_y, int turn) {
        const unsigned low[4] = {low_x, low_x, low_y, low_y};
        const unsigned surplus[4] = {power(exponent(0)) | NEGATIVE, power(exponent(1)) | NEGATIVE,
                                     power(exponent(0)) | NEGATIVE, power(exponent(1)) | NEGATIVE};
        unsigned high_x, high_y, rest_x, rest_y;
        split_product<DTYPE>(q_x, step_x, high_x, rest_x);
        split_product<DTYPE>(q_y, step_y, high_y, rest_y);
        multiply_add<DTYPE>(base, low, q_x, q_y);
        multiply_add<DTYPE>(base, surplus, high_x, high_y);
        multiply_add<DTYPE>(base, surplus, rest_x, rest_y);
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; ++matrix) {
            const unsigned keys[4] = {
                codes(words_x, turn, matrix, 0), codes(words_x, turn, matrix, 1),
                codes(words_y, turn, matrix, 0), codes(words_y, turn, matrix, 1)};
            multiply_add<DTYPE>(sums[matrix], keys, high_x, high_y);
            multiply_add<DTYPE>(sums[matrix], keys, rest_x, rest_y);
        }
    }

    // Softmax over 16 * MATRICES keys of head 2 * (lane % 4) + `right`, the same in all lane / 4.
    DEVICE Softmax over_keys(const float (&base)[4], const float (&sums)[MATRICES][4], int right) {
        float logit[2 * MATRICES], top = minus_infinity();
#pragma unroll
        for (int i = 0; i < 2 * MATRICES; ++i) {
            const int column = i % 2 * 2 + right;
            logit[i] = scale * (base[column] + sums[i / 2][column]);
            top = fmaxf(top, logit[i]);
        }
#pragma unroll
        for (int distance = 4; distance < LANES; distance *= 2)
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, distance));
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * MATRICES; ++i) sum += exp2_fast(LOG2_E * (logit[i] - top));
#pragma unroll
        for (int distance = 4; distance < LANES; distance *= 2)
            sum += __shfl_xor_sync(ALL_LANES, sum, distance);
        return {top, sum};
    }

    // Logits of a tile that begins at `page`, see Kept; `after` is where the warp's next begins.
    DEVICE void score(float (&value)[VALUES], const Pages& pages, int page, int after, int lane) {
        const int turn = MANTISSA - exponent(0) - 4 * (lane / 4 / COLUMNS);
        Kept kept = {};
#pragma unroll 1
        for (int unit = 0; unit < TILE * CHUNKS; ++unit) {
            const int next = (unit + 1) / CHUNKS, next_chunk = (unit + 1) % CHUNKS;
            const int next_page = next < TILE ? page + next : after;
            float base[HALVES][4] = {}, sums[HALVES][MATRICES][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const Vectors now = ahead[step % AHEAD];
                ahead[step % AHEAD] =
                    step + AHEAD < STEPS
                        ? load(pages, page + unit / CHUNKS, unit % CHUNKS, step + AHEAD, lane)
                        : load(pages, next_page, next_chunk, step + AHEAD - STEPS, lane);
#pragma unroll
                for (int half = 0; half < HALVES; ++half) {
                    const uint4 q = load_shared(&query[step][half][lane]);
                    multiply(base[half], sums[half], q.x, q.y, now.low.x, now.low.y, now.step.x,
                             now.step.y, now.words.x, now.words.y, turn);
                    multiply(base[half], sums[half], q.z, q.w, now.low.z, now.low.w, now.step.z,
                             now.step.w, now.words.z, now.words.w, turn);
                }
            }
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                Softmax here = over_keys(base[i / 2], sums[i / 2], i % 2);
                if (lane / 4 != unit / CHUNKS) continue;
                if (unit % CHUNKS != 0) here.add(kept.over_keys[i]);
                kept.over_keys[i] = here;
            }
        }
        kept.logits(value);
    }
};
#endif

//   query      [kv_heads * GROUP, K_DIM], rows aligned to 16 bytes
//   summaries  [kv_heads, capacity, PARTS, K_DIM], KV heads `summary_stride` elements apart
//   logits     [kv_heads * GROUP, row_pages]
//   states     [kv_heads, GROUP, gridDim.x], a block's part of the softmax over pages
//   grid       any, kv_heads
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
score_pages(const Element* query, long long query_stride, const Element* summaries,
            long long summary_stride, int capacity, const int* sealed, int first, int recent,
            float scale, float* logits, int row_pages, Softmax* states) {
    __shared__ Softmax shared_states[WARPS][GROUP];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, kv_head = blockIdx.y;
    const Pages pages = {summaries + kv_head * summary_stride, first,
                         min(*sealed - recent, capacity)};
    const int stride = gridDim.x * WARPS * TILE;
    int page = (first / TILE + blockIdx.x * WARPS + warp) * TILE;
    Keys keys(query + static_cast<long long>(kv_head) * GROUP * query_stride, query_stride, scale,
              pages, page, lane);
    Softmax state[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) state[i] = {minus_infinity(), 0.f};

    for (; page < pages.last; page += stride) {
        float value[VALUES];
        keys.score(value, pages, page, page + stride, lane);
        const int here = page + lane / 4;
        if (!pages.contain(here)) continue;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int head = lane % 4 * 2 + i % 2 + i / 2 * 8;
            if (head >= GROUP) continue;
            logits[(static_cast<long long>(kv_head) * GROUP + head) * row_pages + here] = value[i];
            state[i].add({value[i], 1.f});
        }
    }

#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
#pragma unroll
        for (int distance = 4; distance < LANES; distance *= 2) state[i].add_lane(distance);
        const int head = lane % 4 * 2 + i % 2 + i / 2 * 8;
        if (lane < 4 && head < GROUP) shared_states[warp][head] = state[i];
    }
    __syncthreads();
    if (threadIdx.x >= GROUP) return;
    Softmax whole = shared_states[0][threadIdx.x];
    for (int other = 1; other < WARPS; ++other) whole.add(shared_states[other][threadIdx.x]);
    states[(kv_head * GROUP + threadIdx.x) * gridDim.x + blockIdx.x] = whole;
}
