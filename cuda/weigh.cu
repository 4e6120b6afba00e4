// Turn the scores of pages into shares of attention.
//
// Candidates are [first, last) with last = min(*sealed - recent, capacity), read when the kernel
// runs.
//
// -D: GROUP.
#include "ptx.cuh"
#include "softmax.cuh"

constexpr int THREADS = 256;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr float LEAST = 1.17549435e-38f;  // mass of a page whose share underflows, so above 0

// Mass of a page: the mean over the group of the softmax over candidates, at least LEAST; 0 if all
// its logits are -inf. Pages that are no candidates get 0 or are left alone.
//
//   mass    [kv_heads, row_pages], rows of whole 16 bytes as those of `logits`
//   states  [kv_heads, GROUP, blocks]
//   grid    ceil(row_pages / (4 * THREADS)), kv_heads
extern "C" __global__ void __launch_bounds__(THREADS)
weigh_pages(const float* logits, int row_pages, const Softmax* states, int blocks, int capacity,
            const int* sealed, int first, int recent, float* mass) {
    __shared__ float tops[GROUP], shares[GROUP];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, kv_head = blockIdx.y;
    const int last = min(*sealed - recent, capacity);
    const int begin = first / 4 * 4 + blockIdx.x * (4 * THREADS);
    if (begin >= last) return;
    for (int head = warp; head < GROUP; head += WARPS) {
        Softmax whole = {minus_infinity(), 0.f};
        for (int block = lane; block < blocks; block += LANES)
            whole.add(states[(kv_head * GROUP + head) * blocks + block]);
        for (int distance = 16; distance > 0; distance /= 2) whole.add_lane(distance);
        if (lane == 0) {
            tops[head] = whole.maximum == minus_infinity() ? 0.f : whole.maximum;
            shares[head] = whole.sum == 0.f ? 0.f : 1.f / (GROUP * whole.sum);
        }
    }
    __syncthreads();

    const int page = begin + threadIdx.x * 4;
    if (page >= last) return;
    float4 sum = {0.f, 0.f, 0.f, 0.f}, top = {minus_infinity(), minus_infinity(),
                                              minus_infinity(), minus_infinity()};
#pragma unroll
    for (int head = 0; head < GROUP; ++head) {
        const float4 logit = *reinterpret_cast<const float4*>(
            logits + (static_cast<long long>(kv_head) * GROUP + head) * row_pages + page);
        const float base = tops[head], share = shares[head];
        top = {fmaxf(top.x, logit.x), fmaxf(top.y, logit.y), fmaxf(top.z, logit.z),
               fmaxf(top.w, logit.w)};
        sum.x += share * exp2_fast(LOG2_E * (logit.x - base));
        sum.y += share * exp2_fast(LOG2_E * (logit.y - base));
        sum.z += share * exp2_fast(LOG2_E * (logit.z - base));
        sum.w += share * exp2_fast(LOG2_E * (logit.w - base));
    }
    auto finish = [&](float sum, float top, int page) {
        return page < first || page >= last || top == minus_infinity() ? 0.f : fmaxf(sum, LEAST);
    };
    *reinterpret_cast<float4*>(mass + static_cast<long long>(kv_head) * row_pages + page) = {
        finish(sum.x, top.x, page), finish(sum.y, top.y, page + 1),
        finish(sum.z, top.z, page + 2), finish(sum.w, top.w, page + 3)};
}
