// What scoring by any summary of vectors has in common: who scores which pages, and the softmax.
//
// Candidates are [first, last) with last = min(*sealed - recent, capacity), read when the kernel
// runs. A summary is PARTS vectors of K_DIM elements. It is read once, for all GROUP query heads of
// its KV head.
//
// -D: DTYPE, K_DIM, GROUP, PARTS.
#pragma once
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

//   query      [kv_heads * GROUP, K_DIM], rows aligned to 16 bytes
//   summaries  [kv_heads, capacity, PARTS, K_DIM], KV heads `summary_stride` elements apart
//   logits     [kv_heads * GROUP, row_pages]
//   states     [kv_heads, GROUP, gridDim.x], a block's part of the softmax
//   grid       any, kv_heads
//
// Query(query, head stride, lane).score(value, summaries, from, to, lane) gives scores of heads
// lane / 4 (values 0, 1) and lane / 4 + 8 (2, 3) for pages 2 * (lane % 4) and the next after
// `summaries`, as far as they lie in [from, to).
template <typename Query>
DEVICE void score_tiles(const Element* query, long long query_stride, const Element* summaries,
                        long long summary_stride, int capacity, const int* sealed, int first,
                        int recent, float scale, float* logits, int row_pages, Softmax* states) {
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
