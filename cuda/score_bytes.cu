// Score the pages of a sequence by what `tierkv.selection.cuboid8` keeps: q . centre + |q| .
// radius.
//
// Of eight channels 16 bytes: 8 centres above -128 and 8 radii of 7 bits, in steps that are powers
// of two; the highest bits of the radii are the exponents, four bits each, above LEAST_EXPONENT.
//
// -D: DTYPE, K_DIM, GROUP, PARTS (1).
#include "score_tiles.cuh"

constexpr int LEAST_EXPONENT = -11;
constexpr int EIGHTS = (K_DIM + 7) / 8;
static_assert(PARTS == 1 && EIGHTS * 16 <= K_DIM * sizeof(Element), "a row has room for the bytes");

// The exponents of eight channels, from their radii: bits 0-3 the centres', 4-7 the radii's.
DEVICE unsigned exponents_of(unsigned first, unsigned second) {
    // A product moves bits 7, 15, 23 and 31 to 28, 29, 30 and 31.
    const unsigned low = (first & 0x80808080u) * 0x00204081u >> 28;
    const unsigned high = (second & 0x80808080u) * 0x00204081u >> 28;
    return low | high << 4;
}

#if DTYPE == DTYPE_F32
struct Query {
    const float* rows[HALVES];  // heads lane / 4 and lane / 4 + 8; null past the group

    DEVICE Query(const float* query, long long head_stride, int lane) {
        for (int half = 0; half < HALVES; ++half) {
            const int head = lane / 4 + 8 * half;
            rows[half] = head < GROUP ? query + head * head_stride : nullptr;
        }
    }

    DEVICE void score(float (&value)[VALUES], const float* summaries, int from, int to, int lane) {
        for (int i = 0; i < VALUES; ++i) {
            const int page = lane % 4 * 2 + i % 2;
            value[i] = 0.f;
            if (page < from || page >= to || !rows[i / 2]) continue;
            const uint4* const eights = reinterpret_cast<const uint4*>(summaries + page * K_DIM);
            for (int eight = 0; eight < EIGHTS; ++eight) {
                const uint4 bytes = eights[eight];
                const unsigned centres[2] = {bytes.x, bytes.y}, radii[2] = {bytes.z, bytes.w};
                const unsigned exponents = exponents_of(bytes.z, bytes.w);
                float centre = 0.f, radius = 0.f;
                for (int j = 0; j < 8 && eight * 8 + j < K_DIM; ++j) {
                    const float q = rows[i / 2][eight * 8 + j];
                    const int stored = centres[j / 4] >> j % 4 * 8 & 255;
                    centre += q * (stored - 128);
                    radius += fabsf(q) * (radii[j / 4] >> j % 4 * 8 & 127);
                }
                value[i] += ldexpf(centre, LEAST_EXPONENT + static_cast<int>(exponents & 15)) +
                            ldexpf(radius, LEAST_EXPONENT + static_cast<int>(exponents >> 4));
            }
        }
    }
};
#else
// Tensor cores on fp16, which holds a byte in steps of a power of two exactly; a query is rounded
// to fp16, at most 65504. See score.cu for who reads what.
struct Query {
    static constexpr int STEPS = (K_DIM + 31) / 32;  // of 32 dims, 8 for each of 4 lanes
    uint4 (*operands)[2][HALVES][LANES];  // q and |q|, in shared memory

    static DEVICE unsigned narrow(unsigned two) {
        float low, high;
        unpack<DTYPE>(two, low, high);
        return pack<DTYPE_F16>(fminf(fmaxf(low, -65504.f), 65504.f),
                               fminf(fmaxf(high, -65504.f), 65504.f));
    }

    DEVICE Query(const Element* query, long long head_stride, int lane) {
        __shared__ uint4 shared[STEPS][2][HALVES][LANES];
        operands = shared;
        for (int i = threadIdx.x / LANES; i < STEPS * HALVES; i += WARPS) {
            const int step = i / HALVES, half = i % HALVES;
            const int head = lane / 4 + 8 * half, dim = step * 32 + lane % 4 * 8;
            uint4 q = {0, 0, 0, 0};
            if (head < GROUP && dim < K_DIM)
                q = *reinterpret_cast<const uint4*>(query + head * head_stride + dim);
            q = {narrow(q.x), narrow(q.y), narrow(q.z), narrow(q.w)};
            constexpr unsigned POSITIVE = 0x7fff7fffu;
            shared[step][0][half][lane] = q;
            shared[step][1][half][lane] = {q.x & POSITIVE, q.y & POSITIVE, q.z & POSITIVE,
                                           q.w & POSITIVE};
        }
        __syncthreads();
    }

    // Eight bytes, less `less`, times 2^(LEAST_EXPONENT + exponent), as fp16. A byte below 1024 is
    // the last bits of that number in fp16.
    static DEVICE uint4 expand(unsigned first, unsigned second, unsigned exponent, int less) {
        const unsigned step = (15 + LEAST_EXPONENT + exponent) * 0x04000400u;  // twice
        const unsigned base = multiply_add_pairs<DTYPE_F16>(less == 0 ? 0xe400e400u : 0xe480e480u,
                                                            step, 0);  // -1024 or -1152 steps
        return {multiply_add_pairs<DTYPE_F16>(bytes_above_1024(first, 0), step, base),
                multiply_add_pairs<DTYPE_F16>(bytes_above_1024(first, 1), step, base),
                multiply_add_pairs<DTYPE_F16>(bytes_above_1024(second, 0), step, base),
                multiply_add_pairs<DTYPE_F16>(bytes_above_1024(second, 1), step, base)};
    }

    DEVICE void score(float (&value)[VALUES], const Element* summaries, int from, int to,
                      int lane) {
        const int page = lane / 4;
        uint4 bytes[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int dim = step * 32 + lane % 4 * 8;
            bytes[step] = {0, 0, 0, 0};
            if (page >= from && page < to && dim < K_DIM)
                bytes[step] = load_streaming(summaries + page * K_DIM + dim);
        }
        float sums[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const uint4 four = bytes[step];
            const unsigned exponents = exponents_of(four.z, four.w);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint4 low = load_shared(&operands[step][part][0][lane]);
                uint4 high = {0, 0, 0, 0};
                if (HALVES == 2) high = load_shared(&operands[step][part][HALVES - 1][lane]);
                const unsigned first[4] = {low.x, high.x, low.y, high.y};
                const unsigned second[4] = {low.z, high.z, low.w, high.w};
                constexpr unsigned LOW = 0x7f7f7f7fu;
                const uint4 keys =
                    part == 0 ? expand(four.x, four.y, exponents & 15, 128)
                              : expand(four.z & LOW, four.w & LOW, exponents >> 4, 0);
                multiply_add<DTYPE_F16>(sums[part], first, keys.x, keys.y);
                multiply_add<DTYPE_F16>(sums[part], second, keys.z, keys.w);
            }
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) value[i] = sums[0][i] + sums[1][i];
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
