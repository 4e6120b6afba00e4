// Put a new token where the attention of its step reads it: K and V into a token slot of a layer,
// and its queries, which prepared launches look for in one place, into dense rows there.
//
// One warp a row, of whole 16 bytes; all strides are in chunks of 16 bytes.
#include "ptx.cuh"

constexpr int THREADS = 128;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;

// Rows to copy: `chunks` chunks each.
struct Rows {
    const uint4* from;
    long long from_stride;
    uint4* to;
    long long to_stride;
    int chunks;

    DEVICE void copy(int row) const {
        for (int chunk = threadIdx.x % LANES; chunk < chunks; chunk += LANES)
            to[row * to_stride + chunk] = from[row * from_stride + chunk];
    }
};

//   query, key, value  rows of `heads`, `kv_heads`, `kv_heads` heads
//   queries            [heads, k_chunks]
//   k, v               a layer's tokens by KV head; the new one goes to token *slot
//   grid               ceil((heads + 2 * kv_heads) / WARPS)
extern "C" __global__ void __launch_bounds__(THREADS)
append_token(const uint4* query, long long query_stride, const uint4* key, long long key_stride,
             const uint4* value, long long value_stride, uint4* queries, uint4* k,
             long long k_stride, uint4* v, long long v_stride, const long long* slot, int heads,
             int kv_heads, int k_chunks, int v_chunks) {
    const int row = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (row < heads) {
        Rows{query, query_stride, queries, k_chunks, k_chunks}.copy(row);
    } else if (row < heads + kv_heads) {
        Rows{key, key_stride, k + *slot * k_chunks, k_stride, k_chunks}.copy(row - heads);
    } else if (row < heads + 2 * kv_heads) {
        Rows{value, value_stride, v + *slot * v_chunks, v_stride, v_chunks}
            .copy(row - heads - kv_heads);
    }
}
