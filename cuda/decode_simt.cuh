// CUDA-core arithmetic of decode.cu for float32. Scores: lane i takes token i % 16 and every other
// 16-byte chunk of its key. Values: lane i takes chunks i, i + 32 ... of every token.
#pragma once

struct Query {
    static constexpr int PADDED_GROUP = (GROUP + 3) / 4 * 4;
    static constexpr int WEIGHTS = TILE * PADDED_GROUP;  // [TILE, PADDED_GROUP] of each warp
    static constexpr int SHARED_BYTES_USED = sizeof(float) * (GROUP * K_DIM + WARPS * WEIGHTS);
    static constexpr int K_CHUNKS = K_DIM / CHUNK, V_CHUNKS = V_DIM / CHUNK;
    static constexpr int V_STEPS = (V_CHUNKS + LANES - 1) / LANES;

    const float* q;  // [GROUP, K_DIM] in shared memory
    float* weights;
    float out[PADDED_GROUP][V_STEPS][4];
    float maximum[GROUP], sum[GROUP];  // the sum only of this lane's tokens

    DEVICE Query(const Element* query, long long head_stride, unsigned char* shared, int warp,
                 int lane) {
        float* const target = reinterpret_cast<float*>(shared);
        q = target;
        weights = target + GROUP * K_DIM + warp * WEIGHTS;
        for (int i = warp * LANES + lane; i < GROUP * K_DIM; i += WARPS * LANES)
            target[i] = query[i / K_DIM * head_stride + i % K_DIM];
        __syncthreads();
#pragma unroll
        for (int head = 0; head < PADDED_GROUP; ++head)
#pragma unroll
            for (int i = 0; i < V_STEPS * 4; ++i) out[head][i / 4][i % 4] = 0.f;
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
            maximum[head] = minus_infinity();
            sum[head] = 0.f;
        }
    }

    // Attend to a tile in shared memory; only its tokens [from, to) are seen.
    DEVICE void attend(const Element* k, const Element* v, int from, int to, float scale,
                       float softcap, int lane) {
        const int token = lane % TILE;
        float score[GROUP] = {};
#pragma unroll 4
        for (int chunk = lane / TILE; chunk < K_CHUNKS; chunk += 2) {
            const float4 a = *reinterpret_cast<const float4*>(k + token * K_PITCH + chunk * 4);
#pragma unroll
            for (int head = 0; head < GROUP; ++head) {
                const float4 b = *reinterpret_cast<const float4*>(q + head * K_DIM + chunk * 4);
                score[head] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
        }
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
            float t = score[head] + __shfl_xor_sync(ALL_LANES, score[head], 16);
            t = token < from || token >= to ? minus_infinity() : to_score(t, scale, softcap);
            float top = fmaxf(maximum[head], t);
#pragma unroll
            for (int distance = 8; distance > 0; distance /= 2)
                top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, distance));
            const float base = top == minus_infinity() ? 0.f : top;
            const float shrink = exp2_fast(maximum[head] - base);
            t = exp2_fast(t - base);
            maximum[head] = top;
            sum[head] = sum[head] * shrink + t;
            if (lane < TILE) weights[token * PADDED_GROUP + head] = t;
#pragma unroll
            for (int i = 0; i < V_STEPS * 4; ++i) out[head][i / 4][i % 4] *= shrink;
        }
        __syncwarp();
#pragma unroll 4
        for (int t = 0; t < TILE; ++t) {
            float4 value[V_STEPS];
#pragma unroll
            for (int step = 0; step < V_STEPS; ++step) {
                const int chunk = lane + step * LANES;
                value[step] = {0.f, 0.f, 0.f, 0.f};
                if (chunk < V_CHUNKS)
                    value[step] = *reinterpret_cast<const float4*>(v + t * V_PITCH + chunk * 4);
            }
#pragma unroll
            for (int four = 0; four < PADDED_GROUP; four += 4) {
                const float4 w =
                    *reinterpret_cast<const float4*>(weights + t * PADDED_GROUP + four);
                const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int step = 0; step < V_STEPS; ++step) {
                        if (four + i >= GROUP) continue;
                        out[four + i][step][0] += weight[i] * value[step].x;
                        out[four + i][step][1] += weight[i] * value[step].y;
                        out[four + i][step][2] += weight[i] * value[step].z;
                        out[four + i][step][3] += weight[i] * value[step].w;
                    }
            }
        }
        __syncwarp();  // the next tile overwrites the weights
    }

    // Write this warp's result: outs [GROUP, V_DIM], states [GROUP].
    DEVICE void store(float* outs, Softmax* states, int lane) {
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
#pragma unroll
            for (int distance = 8; distance > 0; distance /= 2)
                sum[head] += __shfl_xor_sync(ALL_LANES, sum[head], distance);
            if (lane == 0) states[head] = {maximum[head], sum[head]};
#pragma unroll
            for (int step = 0; step < V_STEPS; ++step) {
                const int chunk = lane + step * LANES;
                if (chunk >= V_CHUNKS) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    outs[head * V_DIM + chunk * 4 + i] = out[head][step][i];
            }
        }
    }
};
