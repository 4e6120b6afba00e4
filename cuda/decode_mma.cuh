// Tensor-core arithmetic of decode.cu for bf16 and fp16: scores = Q K^T, out += P V, by m16n8k16
// with the GROUP query heads as the first of 16 rows. See multiply_add for who holds what.
#pragma once

struct Query {
    static constexpr int SHARED_BYTES_USED = 0;
    static constexpr int HALVES = GROUP > 8 ? 2 : 1;  // rows 8..15 are computed only if used
    static constexpr int K_STEPS = K_WIDTH / 16, V_STEPS = V_WIDTH / 16;

    unsigned q[K_STEPS][4];
    float out[2 * V_STEPS][4];  // not yet divided by the sums
    float maximum[HALVES], sum[HALVES];  // the sum only of this lane's tokens

    // Heads past the group and dims past K_DIM count as zeros.
    DEVICE Query(const Element* query, long long head_stride, unsigned char*, int, int lane) {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int head = lane / 4 + part % 2 * 8;
                const int dim = step * 16 + part / 2 * 8 + lane % 4 * 2;
                q[step][part] = 0;
                if (head < GROUP && dim < K_DIM) {
                    const Element* const two = query + head * head_stride + dim;
                    q[step][part] = two[0] | static_cast<unsigned>(two[1]) << 16;
                }
            }
#pragma unroll
        for (int i = 0; i < 2 * V_STEPS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i][j] = 0.f;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            maximum[half] = minus_infinity();
            sum[half] = 0.f;
        }
    }

    // Attend to a tile in shared memory; only its tokens [from, to) are seen.
    DEVICE void attend(const Element* k, const Element* v, int from, int to, float scale,
                       float softcap, int lane) {
        float score[2][4] = {};  // tokens 8 * first index + 2 * (lane % 4) and the next
        const Element* const k_row = k + (lane / 16 * 8 + lane % 8) * K_PITCH + lane / 8 % 2 * 8;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            unsigned keys[4];  // tokens 0-7: dims 0-7, 8-15; tokens 8-15: the same
            load_matrices(keys, k_row + step * 16);
            multiply_add<DTYPE>(score[0], q[step], keys[0], keys[1]);
            multiply_add<DTYPE>(score[1], q[step], keys[2], keys[3]);
        }

        unsigned weights[4] = {};
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            float t[4], top = maximum[half];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                t[i] = to_score(score[i / 2][2 * half + i % 2], scale, softcap);
                const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
                if (token < from || token >= to) t[i] = minus_infinity();
                top = fmaxf(top, t[i]);
            }
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
            const float base = top == minus_infinity() ? 0.f : top;
            const float shrink = exp2_fast(maximum[half] - base);
            maximum[half] = top;
#pragma unroll
            for (int i = 0; i < 4; ++i) t[i] = exp2_fast(t[i] - base);
            sum[half] = sum[half] * shrink + (t[0] + t[1]) + (t[2] + t[3]);
            weights[half] = pack<DTYPE>(t[0], t[1]);
            weights[2 + half] = pack<DTYPE>(t[2], t[3]);
#pragma unroll
            for (int i = 0; i < 2 * V_STEPS; ++i) {
                out[i][2 * half] *= shrink;
                out[i][2 * half + 1] *= shrink;
            }
        }

        const Element* const v_row = v + lane % 16 * V_PITCH + lane / 16 * 8;
#pragma unroll
        for (int step = 0; step < V_STEPS; ++step) {
            unsigned values[4];  // dims 0-7: tokens 0-7, 8-15; dims 8-15: the same
            load_matrices_transposed(values, v_row + step * 16);
            multiply_add<DTYPE>(out[2 * step], weights, values[0], values[1]);
            multiply_add<DTYPE>(out[2 * step + 1], weights, values[2], values[3]);
        }
    }

    // Write this warp's result: outs [GROUP, V_DIM], states [GROUP].
    DEVICE void store(float* outs, Softmax* states, int lane) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 1);
            sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 2);
            const int head = lane / 4 + half * 8;
            if (head >= GROUP) continue;
            if (lane % 4 == 0) states[head] = {maximum[half], sum[half]};
#pragma unroll
            for (int i = 0; i < 2 * V_STEPS; ++i) {
                const int dim = i * 8 + lane % 4 * 2;
                if (dim >= V_DIM) continue;
                outs[head * V_DIM + dim] = out[i][2 * half];
                outs[head * V_DIM + dim + 1] = out[i][2 * half + 1];
            }
        }
    }
};
