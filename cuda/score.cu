// Score the pages of a sequence by their summaries.
//
// Candidates are [first, last) with last = min(*sealed - recent, capacity), read when the kernel
// runs. A summary is PARTS vectors of K_DIM elements: two corners, upper and lower, or
// one mean. It is read once, for all GROUP query heads of its KV head.
//
// -D: DTYPE, K_DIM, GROUP, PARTS (1 or 2).
#include "ptx.cuh"
#include "softmax.cuh"

constexpr int THREADS = 256;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr int TILE = 8;  // pages a warp takes at once
constexpr int HALVES = GROUP > 8 ? 2 : 1;
constexpr int BLOCKS = K_DIM <= 128 ? 4 : 2;  // on a multiprocessor: enough bytes in flight
constexpr int VALUES = 2 * HALVES;  // scores of a lane: see Query::score

#if DTYPE == DTYPE_F32
using Element = float;
#else
using Element = unsigned short;
#endif
static_assert(K_DIM * sizeof(Element) % 16 == 0, "vectors are read 16 bytes at a time");
static_assert(GROUP >= 1 && GROUP <= 16, "the group is padded to 16 rows");
static_assert(PARTS == 1 || PARTS == 2, "a summary is two corners or a mean");

#if DTYPE == DTYPE_F32
struct Query {
    const float* rows[HALVES];  // heads lane / 4 and lane / 4 + 8; null past the group

    DEVICE Query(const float* query, long long head_stride, int lane) {
        for (int half = 0; half < HALVES; ++half) {
            const int head = lane / 4 + 8 * half;
            rows[half] = head < GROUP ? query + head * head_stride : nullptr;
        }
    }

    static DEVICE float dot(float4 a, float4 b) {
        return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }

    // Scores of heads lane / 4 (values 0, 1) and lane / 4 + 8 (2, 3) for pages 2 * (lane % 4) and
    // the next after `summaries`, as far as they lie in [from, to).
    DEVICE void score(float (&value)[VALUES], const float* summaries, int from, int to, int lane) {
        for (int i = 0; i < VALUES; ++i) {
            const int page = lane % 4 * 2 + i % 2;
            value[i] = 0.f;
            if (page < from || page >= to || !rows[i / 2]) continue;
            const float* const vectors = summaries + page * (PARTS * K_DIM);
#pragma unroll 4
            for (int dim = 0; dim < K_DIM; dim += 4) {
                const float4 q = *reinterpret_cast<const float4*>(rows[i / 2] + dim);
                const float4 upper = *reinterpret_cast<const float4*>(vectors + dim);
                if constexpr (PARTS == 1) {
                    value[i] += dot(q, upper);
                } else {
                    const float4 lower = *reinterpret_cast<const float4*>(vectors + K_DIM + dim);
                    value[i] += dot({fmaxf(q.x, 0.f), fmaxf(q.y, 0.f), fmaxf(q.z, 0.f),
                                     fmaxf(q.w, 0.f)}, upper) +
                                dot({fminf(q.x, 0.f), fminf(q.y, 0.f), fminf(q.z, 0.f),
                                     fminf(q.w, 0.f)}, lower);
                }
            }
        }
    }
};
#else
// Tensor cores, Q [16, dims] times summaries [dims, 8 pages]. A dot product may take the dims in
// any order if both sides take the same: lane i reads 16 bytes of page i / 4, which are the
// operands of two multiplications as they come. See multiply_add for who holds what.
struct Query {
    static constexpr int STEPS = (K_DIM + 31) / 32;  // of 32 dims, 8 for each of 4 lanes
    uint4 (*operands)[PARTS][HALVES][LANES];  // in shared memory: registers hold bytes in flight

    // Of two 16-bit numbers, those that are not negative (part 0) or that are (part 1); others
    // become 0. A mean counts with all of them.
    static DEVICE unsigned only(unsigned two, int part) {
        const unsigned negative = (two >> 15 & 0x00010001u) * 0xffffu;
        return PARTS == 1 ? two : part == 0 ? two & ~negative : two & negative;
    }

    DEVICE Query(const Element* query, long long head_stride, int lane) {
        __shared__ uint4 shared[STEPS][PARTS][HALVES][LANES];
        operands = shared;
        for (int i = threadIdx.x / LANES; i < STEPS * HALVES; i += WARPS) {
            const int step = i / HALVES, half = i % HALVES;
            const int head = lane / 4 + 8 * half, dim = step * 32 + lane % 4 * 8;
            uint4 q = {0, 0, 0, 0};
            if (head < GROUP && dim < K_DIM)
                q = *reinterpret_cast<const uint4*>(query + head * head_stride + dim);
            for (int part = 0; part < PARTS; ++part)
                shared[step][part][half][lane] = {only(q.x, part), only(q.y, part),
                                                  only(q.z, part), only(q.w, part)};
        }
        __syncthreads();
    }

    // Scores of heads lane / 4 (values 0, 1) and lane / 4 + 8 (2, 3) for pages 2 * (lane % 4) and
    // the next after `summaries`, as far as they lie in [from, to).
    DEVICE void score(float (&value)[VALUES], const Element* summaries, int from, int to,
                      int lane) {
        const int page = lane / 4;
        uint4 w[PARTS][STEPS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int dim = step * 32 + lane % 4 * 8;
                w[part][step] = {0, 0, 0, 0};
                if (page >= from && page < to && dim < K_DIM)
                    w[part][step] = load_streaming(summaries + (page * PARTS + part) * K_DIM + dim);
            }
        float sums[PARTS][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const uint4 low = load_shared(&operands[step][part][0][lane]);
                uint4 high = {0, 0, 0, 0};
                if (HALVES == 2) high = load_shared(&operands[step][part][HALVES - 1][lane]);
                const unsigned first[4] = {low.x, high.x, low.y, high.y};
                const unsigned second[4] = {low.z, high.z, low.w, high.w};
                const uint4 keys = w[part][step];
                multiply_add<DTYPE>(sums[part], first, keys.x, keys.y);
                multiply_add<DTYPE>(sums[part], second, keys.z, keys.w);
            }
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            value[i] = PARTS == 1 ? sums[0][i] : sums[0][i] + sums[PARTS - 1][i];
    }
};
#endif

//   query      [kv_heads * GROUP, K_DIM], rows aligned to 16 bytes
//   summaries  [kv_heads, capacity, PARTS, K_DIM], KV heads `summary_stride` elements apart
//   logits     [kv_heads * GROUP, row_pages]
//   states     [kv_heads, GROUP, gridDim.x], a block's part of the softmax
//   grid       any, kv_heads
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
score_pages(const Element* query, long long query_stride, const Element* summaries,
            long long summary_stride, int capacity, const int* sealed, int first, int recent,
            float scale, float* logits, int row_pages, Softmax* states) {
    __shared__ Softmax shared_states[WARPS][GROUP];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, kv_head = blockIdx.y;
    const int last = min(*sealed - recent, capacity);
    Query rows(query + static_cast<long long>(kv_head) * GROUP * query_stride, query_stride, lane);
    summaries += kv_head * summary_stride;
    Softmax state[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; ++half) state[half] = {minus_infinity(), 0.f};

    for (int page = (first / TILE + blockIdx.x * WARPS + warp) * TILE; page < last;
         page += gridDim.x * WARPS * TILE) {
        float value[VALUES];
        rows.score(value, summaries + static_cast<long long>(page) * (PARTS * K_DIM), first - page,
                   last - page, lane);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int head = lane / 4 + i / 2 * 8, here = page + lane % 4 * 2 + i % 2;
            if (head >= GROUP || here < first || here >= last) continue;
            const float logit = scale * value[i];
            logits[(static_cast<long long>(kv_head) * GROUP + head) * row_pages + here] = logit;
            state[i / 2].add({logit, logit == minus_infinity() ? 0.f : 1.f});
        }
    }

#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        state[half].add_lane(1);
        state[half].add_lane(2);
        const int head = lane / 4 + 8 * half;
        if (lane % 4 == 0 && head < GROUP) shared_states[warp][head] = state[half];
    }
    __syncthreads();
    if (threadIdx.x >= GROUP) return;
    Softmax whole = shared_states[0][threadIdx.x];
    for (int other = 1; other < WARPS; ++other) whole.add(shared_states[other][threadIdx.x]);
    states[(kv_head * GROUP + threadIdx.x) * gridDim.x + blockIdx.x] = whole;
}
