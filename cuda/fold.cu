// Merge two partial attentions of many queries by log-sum-exp; see attention/merge.py.
//
// A thread takes WIDTH neighbouring elements of one row, a block whole rows of one head. Blocks
// that run together take the same queries of all heads, so memory that is dense over heads and
// queries, in either order, is read and written in long runs.
//
// -D: A_DTYPE, B_DTYPE, OUT_DTYPE, V_DIM, WIDTH (4 or 8).
#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int COLUMNS = V_DIM / WIDTH;  // threads of a row
constexpr int ROWS = THREADS / COLUMNS;
static_assert(V_DIM % WIDTH == 0 && COLUMNS <= THREADS, "a row belongs to one block");
static_assert(WIDTH == 4 || WIDTH == 8, "8 to 32 bytes are read at once");

template <int DATA_TYPE>
struct Row {
    using Element = unsigned short;
    struct alignas(2 * WIDTH) Packed {
        unsigned two[WIDTH / 2];
    };
    static DEVICE void load(float (&values)[WIDTH], const Element* from) {
        const Packed packed = *reinterpret_cast<const Packed*>(from);
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i)
            unpack<DATA_TYPE>(packed.two[i], values[2 * i], values[2 * i + 1]);
    }
    static DEVICE void store(Element* to, const float (&values)[WIDTH]) {
        Packed packed;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i)
            packed.two[i] = pack<DATA_TYPE>(values[2 * i], values[2 * i + 1]);
        *reinterpret_cast<Packed*>(to) = packed;
    }
};

template <>
struct Row<DTYPE_F32> {
    using Element = float;
    static DEVICE void load(float (&values)[WIDTH], const Element* from) {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            values[i] = four.x;
            values[i + 1] = four.y;
            values[i + 2] = four.z;
            values[i + 3] = four.w;
        }
    }
    static DEVICE void store(Element* to, const float (&values)[WIDTH]) {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) {
            const float4 four = {values[i], values[i + 1], values[i + 2], values[i + 3]};
            *reinterpret_cast<float4*>(to + i) = four;
        }
    }
};

// Strides count elements, in the order batch, head, query; rows are dense and aligned to WIDTH
// elements or 16 bytes, whichever is less. A side whose log-sum-exp is -inf saw nothing: its
// output does not count, whatever it is; where both sides saw nothing, `out` is 0 and `lse` -inf.
//
//   a_out, b_out  [batch, heads, queries, V_DIM]    a_lse, b_lse  [batch, heads, queries]
//   out           [batch, heads, queries, V_DIM], may be a_out or b_out
//   lse           [batch, heads, queries], may be a_lse or b_lse
//   grid          heads * ceil(queries / ROWS), batch
extern "C" __global__ void __launch_bounds__(THREADS)
fold_partials(const Row<A_DTYPE>::Element* a_out, long long a_batch, long long a_head,
              long long a_query, const float* a_lse, long long a_lse_batch, long long a_lse_head,
              long long a_lse_query, const Row<B_DTYPE>::Element* b_out, long long b_batch,
              long long b_head, long long b_query, const float* b_lse, long long b_lse_batch,
              long long b_lse_head, long long b_lse_query, Row<OUT_DTYPE>::Element* out,
              long long out_batch, long long out_head, long long out_query, float* lse,
              long long lse_batch, long long lse_head, long long lse_query, int heads,
              int queries) {
    const int batch = blockIdx.y, head = blockIdx.x % heads;
    const int query = blockIdx.x / heads * ROWS + threadIdx.x / COLUMNS;
    const int column = threadIdx.x % COLUMNS * WIDTH;
    const bool mine = threadIdx.x < ROWS * COLUMNS && query < queries;
    float a[WIDTH], b[WIDTH], a_sum = minus_infinity(), b_sum = minus_infinity();
    if (mine) {
        a_sum = a_lse[batch * a_lse_batch + head * a_lse_head + query * a_lse_query];
        b_sum = b_lse[batch * b_lse_batch + head * b_lse_head + query * b_lse_query];
        Row<A_DTYPE>::load(a, a_out + batch * a_batch + head * a_head + query * a_query + column);
        Row<B_DTYPE>::load(b, b_out + batch * b_batch + head * b_head + query * b_query + column);
    }
    __syncthreads();  // every thread of a row has read what `lse` may overwrite
    if (!mine) return;

    const float top = fmaxf(a_sum, b_sum);
    const float base = top == minus_infinity() ? 0.f : top;
    const float a_weight = expf(a_sum - base), b_weight = expf(b_sum - base);
    const float total = a_weight + b_weight, scale = total == 0.f ? 0.f : 1.f / total;
    const float a_share = a_weight * scale, b_share = b_weight * scale;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
        a[i] = (a_share == 0.f ? 0.f : a_share * a[i]) + (b_share == 0.f ? 0.f : b_share * b[i]);
    Row<OUT_DTYPE>::store(out + batch * out_batch + head * out_head + query * out_query + column,
                          a);
    if (column == 0)
        lse[batch * lse_batch + head * lse_head + query * lse_query] = base + logf(total);
}
