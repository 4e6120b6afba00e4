// Score the pages of a sequence by vectors: two corners, upper and lower, or one mean.
//
// -D: DTYPE, K_DIM, GROUP, PARTS (1 or 2).
#include "score_tiles.cuh"

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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
score_pages(const Element* query, long long query_stride, const Element* summaries,
            long long summary_stride, int capacity, const int* sealed, int first, int recent,
            float scale, float* logits, int row_pages, Softmax* states) {
    score_tiles<Query>(query, query_stride, summaries, summary_stride, capacity, sealed, first,
                       recent, scale, logits, row_pages, states);
}
