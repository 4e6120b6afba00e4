// Move pages between host frames and device frames as tables in device memory say.
//
// A host frame is [kv_heads, K | V], pinned and mapped, reached over the link by plain loads and
// stores. A warp copies pieces of a head-page, LOADS loads of 16 bytes per lane in flight, and
// takes every gridDim.x * WARPS-th piece, so a few blocks saturate the link whatever the page
// size. Addresses are multiples of 16; the page at address 0 is in no host frame and left alone.
#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr int LOADS = 8;
constexpr int PIECE = LANES * LOADS;  // in chunks of 16 bytes, as are all sizes below

// A head-page of `k_chunks + v_chunks`, in host memory in one run and in device memory in two.
template <bool TO_DEVICE>
DEVICE void copy_piece(uint4* host, uint4* k, uint4* v, int k_chunks, int v_chunks, int piece) {
    const int begin = piece * PIECE + threadIdx.x % LANES, end = k_chunks + v_chunks;
    uint4 held[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int chunk = begin + i * LANES;
        uint4* const device = chunk < k_chunks ? k + chunk : v + (chunk - k_chunks);
        if (chunk < end) held[i] = load_streaming(TO_DEVICE ? host + chunk : device);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int chunk = begin + i * LANES;
        uint4* const device = chunk < k_chunks ? k + chunk : v + (chunk - k_chunks);
        if (chunk < end) *(TO_DEVICE ? device : host + chunk) = held[i];
    }
}

// Page i of `count`: host address addresses[i], device frame slots[i] (int32 or int64 by
// `slot_bytes`) or i if that is 0. The K of (head, frame) lies at k + head * k_head + frame *
// k_frame, V likewise.
template <bool TO_DEVICE>
DEVICE void copy_pages(const long long* addresses, const void* slots, int slot_bytes, int count,
                       int kv_heads, uint4* k, long long k_head, long long k_frame, uint4* v,
                       long long v_head, long long v_frame, int k_chunks, int v_chunks) {
    const int pieces = (k_chunks + v_chunks + PIECE - 1) / PIECE, all = count * kv_heads * pieces;
    for (int i = blockIdx.x * WARPS + threadIdx.x / LANES; i < all; i += gridDim.x * WARPS) {
        const int page = i / pieces / kv_heads, head = i / pieces % kv_heads;
        long long frame = page;
        if (slot_bytes == 4) frame = static_cast<const int*>(slots)[page];
        if (slot_bytes == 8) frame = static_cast<const long long*>(slots)[page];
        uint4* const host = reinterpret_cast<uint4*>(addresses[page]);
        if (host)
            copy_piece<TO_DEVICE>(host + static_cast<long long>(head) * (k_chunks + v_chunks),
                                  k + head * k_head + frame * k_frame,
                                  v + head * v_head + frame * v_frame, k_chunks, v_chunks,
                                  i % pieces);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gather_pages(const long long* addresses, const void* slots, int slot_bytes, int count,
             int kv_heads, uint4* k, long long k_head, long long k_frame, uint4* v,
             long long v_head, long long v_frame, int k_chunks, int v_chunks) {
    copy_pages<true>(addresses, slots, slot_bytes, count, kv_heads, k, k_head, k_frame, v, v_head,
                     v_frame, k_chunks, v_chunks);
}

extern "C" __global__ void __launch_bounds__(THREADS)
scatter_pages(const long long* addresses, const void* slots, int slot_bytes, int count,
              int kv_heads, uint4* k, long long k_head, long long k_frame, uint4* v,
              long long v_head, long long v_frame, int k_chunks, int v_chunks) {
    copy_pages<false>(addresses, slots, slot_bytes, count, kv_heads, k, k_head, k_frame, v, v_head,
                      v_frame, k_chunks, v_chunks);
}

// Head-pages to the device. For KV head h and i < counts[h]: page pages[h, i], host address
// addresses[page], into frame frames[h, i]; rows of `pages` and `frames` have `entries` entries. Of
// several sequences, the KV heads of one follow those of another; frames have `frame_heads`.
extern "C" __global__ void __launch_bounds__(THREADS)
fetch_head_pages(const long long* addresses, const int* pages, const int* frames,
                 const int* counts, int entries, int kv_heads, int frame_heads, uint4* k,
                 long long k_head, long long k_frame, uint4* v, long long v_head,
                 long long v_frame, int k_chunks, int v_chunks) {
    const int pieces = (k_chunks + v_chunks + PIECE - 1) / PIECE;
    int head = 0, first = 0, here = counts[0];  // entries of the heads before this one, and its own
    for (int i = blockIdx.x * WARPS + threadIdx.x / LANES;; i += gridDim.x * WARPS) {
        while (i / pieces >= first + here) {
            if (++head == kv_heads) return;
            first += here;
            here = counts[head];
        }
        const long long entry = static_cast<long long>(head) * entries + (i / pieces - first);
        const long long frame = frames[entry];
        uint4* const host = reinterpret_cast<uint4*>(addresses[pages[entry]]);
        const long long own = head % frame_heads;
        if (host)
            copy_piece<true>(host + own * (k_chunks + v_chunks), k + own * k_head + frame * k_frame,
                             v + own * v_head + frame * v_frame, k_chunks, v_chunks, i % pieces);
    }
}
