// Arithmetic of score_keys.cu on CUDA cores, for float32.
#pragma once

constexpr int BLOCKS = 1;

// A lane has every 32nd token of a page. Words are stored as numbers.
struct Keys {
    const float* query;
    long long head_stride;
    float scale;

    DEVICE Keys(const float* query, long long head_stride, float scale, const Pages&, int, int,
                int)
        : query(query), head_stride(head_stride), scale(scale) {}

    static DEVICE float key(float low, float step, float word, int shift) {
        return low + step * static_cast<float>(static_cast<unsigned>(word) >> shift & 3u);
    }

    DEVICE void score(float (&value)[VALUES], const Pages& pages, int page, int lane) {
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
