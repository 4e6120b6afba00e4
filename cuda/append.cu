// Put a new token of each sequence where the attention of its step reads it: K and V into a token
// slot of a layer, and queries into dense rows in the one place where prepared launches read them.
//
// One warp a row, of whole 16 bytes; all strides are in chunks of 16 bytes.
#include "ptx.cuh"

constexpr int THREADS = 128;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;

DEVICE void copy_row(uint4* to, const uint4* from, int chunks) {
    for (int chunk = threadIdx.x % LANES; chunk < chunks; chunk += LANES) to[chunk] = from[chunk];
}

//   query, key, value  rows by sequence and head
//   queries            [batch, heads, k_chunks]
//   k, v               a layer's tokens by KV head; a sequence's new one is token slots[sequence]
//   grid               ceil((heads + 2 * kv_heads) / WARPS), batch
extern "C" __global__ void __launch_bounds__(THREADS)
append_token(const uint4* query, long long query_row, long long query_head, const uint4* key,
             long long key_row, long long key_head, const uint4* value, long long value_row,
             long long value_head, uint4* queries, uint4* k, long long k_head, uint4* v,
             long long v_head, const long long* slots, int heads, int kv_heads, int k_chunks,
             int v_chunks) {
    const long long row = blockIdx.y, slot = slots[row];
    int head = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (head < heads) {
        copy_row(queries + (row * heads + head) * k_chunks,
                 query + row * query_row + head * query_head, k_chunks);
        return;
    }
    head -= heads;
    if (head < kv_heads) {
        copy_row(k + head * k_head + slot * k_chunks, key + row * key_row + head * key_head,
                 k_chunks);
        return;
    }
    head -= kv_heads;
    if (head < kv_heads)
        copy_row(v + head * v_head + slot * v_chunks, value + row * value_row + head * value_head,
                 v_chunks);
}
