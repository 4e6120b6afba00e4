// Combine attention over disjoint sets of tokens by log-sum-exp; see attention/merge.py.
//
// One block per (head, sequence). A slot whose log-sum-exp is -inf saw nothing: its weight is 0 and
// its output is not read.
//
// -D: DTYPE (of `out`), V_DIM.
#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int COLUMNS = V_DIM / 4;  // threads that share a slot, 4 dims each
constexpr int SLOTS_AT_ONCE = THREADS / COLUMNS;
static_assert(V_DIM % 4 == 0 && COLUMNS <= THREADS, "rows are read 16 bytes at a time");

#if DTYPE == DTYPE_F32
using Element = float;
#else
using Element = unsigned short;
#endif

DEVICE void put(Element* to, float4 value) {
#if DTYPE == DTYPE_F32
    *reinterpret_cast<float4*>(to) = value;
#else
    uint2 packed = {pack<DTYPE>(value.x, value.y), pack<DTYPE>(value.z, value.w)};
    *reinterpret_cast<uint2*>(to) = packed;
#endif
}

// Combine one float per thread over the block; every thread receives the result.
template <typename Operation>
DEVICE float over_block(float value, float* scratch, Operation operation) {
    for (int distance = 16; distance > 0; distance /= 2)
        value = operation(value, __shfl_xor_sync(ALL_LANES, value, distance));
    __syncthreads();  // an earlier use of the scratch is over
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[0];
    for (int warp = 1; warp < THREADS / 32; ++warp) value = operation(value, scratch[warp]);
    return value;
}

//   partial_out  [slots, batch, heads, V_DIM] float32, normalised
//   partial_lse  [slots, batch, heads] natural logarithm
//   sinks        [heads] float32 logits without a value, or null; `lse` leaves them out
//   out          [batch, heads, V_DIM] with strides in elements, rows aligned to 4 elements
//   lse          [batch, heads] float32 or null
extern "C" __global__ void __launch_bounds__(THREADS)
merge_slots(const float* partial_out, const float* partial_lse, int slots, const float* sinks,
            Element* out, long long out_row_stride, long long out_head_stride, float* lse) {
    __shared__ float scratch[THREADS / 32];
    __shared__ float4 columns[THREADS];
    const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x;
    const long long cell = static_cast<long long>(row) * heads + head;
    const long long cells = static_cast<long long>(gridDim.y) * heads;

    float top = minus_infinity(), sum = 0.f;
    for (int slot = threadIdx.x; slot < slots; slot += THREADS)
        top = fmaxf(top, partial_lse[slot * cells + cell]);
    top = over_block(top, scratch, [](float a, float b) { return fmaxf(a, b); });
    const float base = top == minus_infinity() ? 0.f : top;
    for (int slot = threadIdx.x; slot < slots; slot += THREADS)
        sum += expf(partial_lse[slot * cells + cell] - base);
    sum = over_block(sum, scratch, [](float a, float b) { return a + b; });

    const int column = threadIdx.x % COLUMNS;
    float4 total = {0.f, 0.f, 0.f, 0.f};
    if (threadIdx.x < SLOTS_AT_ONCE * COLUMNS) {
#pragma unroll 4
        for (int slot = threadIdx.x / COLUMNS; slot < slots; slot += SLOTS_AT_ONCE) {
            const float weight = expf(partial_lse[slot * cells + cell] - base);
            if (weight == 0.f) continue;
            const float4 part = *reinterpret_cast<const float4*>(
                partial_out + (slot * cells + cell) * V_DIM + column * 4);
            total.x += weight * part.x;
            total.y += weight * part.y;
            total.z += weight * part.z;
            total.w += weight * part.w;
        }
    }
    columns[threadIdx.x] = total;
    __syncthreads();

    const float whole = base + logf(sum);
    if (threadIdx.x == 0 && lse) lse[cell] = whole;
    if (threadIdx.x >= COLUMNS) return;
    for (int other = 1; other < SLOTS_AT_ONCE; ++other) {
        const float4 part = columns[other * COLUMNS + column];
        total.x += part.x;
        total.y += part.y;
        total.z += part.z;
        total.w += part.w;
    }
    float share = sum == 0.f ? 0.f : 1.f / sum;
    if (sinks) share /= 1.f + expf(sinks[head] - whole);
    total = {total.x * share, total.y * share, total.z * share, total.w * share};
    put(out + row * out_row_stride + head * out_head_stride + column * 4, total);
}
