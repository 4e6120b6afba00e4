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

// What a lane of Keys::score answers with: of a tile, page lane / 4; of the group, heads
// 2 * (lane % 4) and the next (values 0, 1) and the same + 8 (2, 3).
struct Kept {
    Softmax over_keys[VALUES];

    DEVICE void logits(float (&value)[VALUES]) const {
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            value[i] = over_keys[i].maximum + logf(over_keys[i].sum);
    }
};

#if DTYPE == DTYPE_F32
#include "score_keys_simt.cuh"
#else
#include "score_keys_mma.cuh"
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
              pages, page, stride, lane);
    Softmax state[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) state[i] = {minus_infinity(), 0.f};

    for (; page < pages.last; page += stride) {
        float value[VALUES];
        keys.score(value, pages, page, lane);
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
