// Attention of one new token per sequence over paged K and V (flash decoding, GQA).
//
// A block serves one KV head of one sequence and one of `gridDim.x` splits of its tokens; the GROUP
// query heads that share the KV head are rows of one small matrix, so every K and V element is
// read once. Each warp walks over tiles of 16 tokens of its own and keeps STAGES - 1 of them in
// flight by cp.async; warps meet only at the end. 16-bit types use tensor cores with the group
// padded to 16 rows, float32 the CUDA cores; softmax and sums are float32, base 2 inside.
// Pages are raw, or encoded by integers or floats: then a warp decodes each tile that has arrived,
// as codec.cu does, before it attends to it.
//
// -D: DTYPE, K_DIM, V_DIM, GROUP, PAGE_TOKENS, WARPS, STAGES, SHARED_BYTES. For encoded pages also
// those of codec.cu.
#include "ptx.cuh"

constexpr int TILE = 16;  // tokens a warp takes at once; divides every page
constexpr int LANES = 32;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

#if DTYPE == DTYPE_F32
using Element = float;
constexpr int K_WIDTH = K_DIM;
constexpr int V_WIDTH = V_DIM;
#else
using Element = unsigned short;
constexpr int K_WIDTH = (K_DIM + 15) / 16 * 16;  // whole matrices
constexpr int V_WIDTH = (V_DIM + 15) / 16 * 16;
#endif
constexpr int CHUNK = 16 / sizeof(Element);  // elements copied at once
constexpr int K_PITCH = K_WIDTH + CHUNK;  // shifts each row by 16 bytes: no bank conflicts
constexpr int V_PITCH = V_WIDTH + CHUNK;
constexpr int TILE_BYTES = sizeof(Element) * TILE * (K_PITCH + V_PITCH);  // K then V

static_assert(K_DIM % CHUNK == 0 && V_DIM % CHUNK == 0, "rows are copied 16 bytes at a time");
static_assert(PAGE_TOKENS % TILE == 0, "a tile lies inside one page");
static_assert(GROUP >= 1 && GROUP <= 16, "the group is padded to 16 rows");
static_assert(STAGES >= 2, "one tile is read while another arrives");

// What a warp knows of its rows after its tiles; `maximum` and `sum` are base 2.
struct Softmax {
    float maximum, sum;
};

// Score of a query and a key in base 2: log2(e) * (scaled, then soft-capped product).
DEVICE float to_score(float product, float scale, float softcap) {
    if (softcap > 0.f) {  // tanh(x) = 1 - 2 / (1 + e^2x), right at both infinities
        float power = exp2_fast(2.f * LOG2_E * scale / softcap * product);
        return LOG2_E * softcap * (1.f - 2.f / (1.f + power));
    }
    return LOG2_E * scale * product;
}

#ifdef BITS
#include "decode_encoded.cuh"
#else
#include "decode_raw.cuh"
#endif
#if DTYPE == DTYPE_F32
#include "decode_simt.cuh"
#else
#include "decode_mma.cuh"
#endif

constexpr int COMBINE_FLOATS = WARPS * GROUP * (V_DIM + 2);
constexpr int WARP_BYTES = STAGES * Tiles::STAGE_BYTES + Tiles::DECODED_BYTES;
static_assert(SHARED_BYTES >= Query::SHARED_BYTES_USED + WARPS * WARP_BYTES &&
              SHARED_BYTES >= sizeof(float) * COMBINE_FLOATS, "SHARED_BYTES is too small");

DEVICE long long frame_of(const void* table, int table_bytes, long long at,
                          long long first_frame) {
    if (table_bytes == 8) return static_cast<const long long*>(table)[at];
    if (table_bytes == 4) return static_cast<const int*>(table)[at];
    return first_frame + at;
}

// Strides count elements. Sequences `first_row` up to `first_row + rows` of the batch take part;
// `table`, `tokens_of` and `first_visible_of` belong to those sequences only. The others, and
// splits that see no token, report a log-sum-exp of -inf and leave `partial_out` alone.
//
//   query             [batch, heads, K_DIM], heads = GROUP * kv_heads
//   k, v              see Tiles; everything 16-byte aligned
//   table             frames, int32 or int64 by `table_bytes`: page p of sequence r and KV head h
//                     at r * table_stride + h * table_head_stride + p; if `table_bytes` is 0, that
//                     page lies in frame first_frame + the same
//   tokens_of         [rows, tokens_heads] tokens to see, tokens_heads being 1 for all KV heads or
//                     their number; or null for `tokens` everywhere
//   first_visible_of  [rows] or null; tokens before it are hidden, `position` being that of the
//                     first token of the table
//   partial_out       [slots, batch, heads, V_DIM] normalised; this launch fills slots
//                     slot .. slot + gridDim.x - 1
//   partial_lse       [slots, batch, heads] natural logarithm
extern "C" __global__ void __launch_bounds__(WARPS * LANES)
attend_pages(const Element* query, long long query_row_stride, long long query_head_stride,
             const Stored* k, long long k_head_stride, long long k_frame_stride,
             const Stored* v, long long v_head_stride, long long v_frame_stride,
             const void* table, int table_bytes, long long table_stride,
             long long table_head_stride, long long first_frame, const int* tokens_of,
             int tokens_heads, int tokens, const int* first_visible_of, int position,
             int first_row, int rows, float scale, float softcap,
             float* partial_out, float* partial_lse, int slot) {
    SHARED_MEMORY(shared);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int kv_head = blockIdx.y, row = static_cast<int>(blockIdx.z) - first_row;
    const long long cell = (static_cast<long long>(slot + blockIdx.x) * gridDim.z + blockIdx.z) *
                           (gridDim.y * GROUP) + kv_head * GROUP;  // in partial_lse

    int start = 0, stop = 0;
    if (row >= 0 && row < rows) {
        stop = tokens;
        if (tokens_of) stop = tokens_of[row * tokens_heads + (tokens_heads > 1 ? kv_head : 0)];
        if (first_visible_of) start = max(first_visible_of[row] - position, 0);
    }
    const int first = start / TILE;
    const int count = stop > start ? (stop + TILE - 1) / TILE - first : 0;
    const int begin = first + static_cast<long long>(count) * blockIdx.x / gridDim.x;
    const int end = first + static_cast<long long>(count) * (blockIdx.x + 1) / gridDim.x;
    if (begin == end) {
        if (threadIdx.x < GROUP) partial_lse[cell + threadIdx.x] = minus_infinity();
        return;
    }

    const Tiles tiles = {k + kv_head * k_head_stride, k_frame_stride, v + kv_head * v_head_stride,
                         v_frame_stride};
    unsigned char* const stages = shared + Query::SHARED_BYTES_USED + warp * WARP_BYTES;
    if (K_WIDTH != K_DIM || V_WIDTH != V_DIM) {  // padding must hold numbers: 0 * NaN is NaN
        for (int i = lane * 4; i < WARP_BYTES; i += LANES * 4)
            *reinterpret_cast<unsigned*>(stages + i) = 0;
        __syncwarp();
    }

    constexpr int TILES_PER_PAGE = PAGE_TOKENS / TILE;
    const long long first_page = row * table_stride + kv_head * table_head_stride;
    auto look_up = [&](int tile) {
        const long long at = first_page + tile / TILES_PER_PAGE;
        return tile < end ? frame_of(table, table_bytes, at, first_frame) : 0;
    };
    auto fetch_tile = [&](int tile, long long frame, int stage) {
        if (tile < end)
            tiles.fetch(stages + stage * Tiles::STAGE_BYTES, frame, tile % TILES_PER_PAGE * TILE,
                        start - tile * TILE, stop - tile * TILE, lane);
        copy_async_commit();  // a group per tile, also past the end, so that waits can count
    };

    int tile = begin + warp;  // this warp: begin + warp, + WARPS, + 2 * WARPS ...
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage)
        fetch_tile(tile + stage * WARPS, look_up(tile + stage * WARPS), stage);
    Query queries(query + blockIdx.z * query_row_stride +
                  static_cast<long long>(kv_head) * GROUP * query_head_stride, query_head_stride,
                  shared, warp, lane);
    int ahead = tile + (STAGES - 1) * WARPS;
    long long frame = look_up(ahead);  // one tile early: the look-up must not stall the copies
    int reading = 0, writing = STAGES - 1;
    for (; tile < end; tile += WARPS) {
        copy_async_wait<STAGES - 2>();
        __syncwarp();  // every lane's copies are here, and every lane is done with `writing`
        fetch_tile(ahead, frame, writing);
        ahead += WARPS;
        frame = look_up(ahead);
        const int from = start - tile * TILE, to = stop - tile * TILE;
        const Element* const here =
            tiles.decoded(stages + reading * Tiles::STAGE_BYTES,
                          stages + STAGES * Tiles::STAGE_BYTES, from, to, lane);
        queries.attend(here, here + TILE * K_PITCH, from, to, scale, softcap, lane);
        writing = reading;
        reading = reading + 1 == STAGES ? 0 : reading + 1;
    }

    copy_async_wait<0>();
    __syncthreads();  // from here on the stages hold each warp's result
    float* const outs = reinterpret_cast<float*>(shared);  // [WARPS, GROUP, V_DIM]
    Softmax* const states = reinterpret_cast<Softmax*>(outs + WARPS * GROUP * V_DIM);
    queries.store(outs + warp * GROUP * V_DIM, states + warp * GROUP, lane);
    __syncthreads();
    for (int i = threadIdx.x * 4; i < GROUP * V_DIM; i += WARPS * LANES * 4) {
        const int head = i / V_DIM;
        float maximum = minus_infinity(), sum = 0.f;
        for (int w = 0; w < WARPS; ++w)
            maximum = fmaxf(maximum, states[w * GROUP + head].maximum);
        const float base = maximum == minus_infinity() ? 0.f : maximum;
        float4 total = {0.f, 0.f, 0.f, 0.f};
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_fast(states[w * GROUP + head].maximum - base);
            const float4 part = *reinterpret_cast<const float4*>(outs + w * GROUP * V_DIM + i);
            sum += weight * states[w * GROUP + head].sum;
            total.x += weight * part.x;
            total.y += weight * part.y;
            total.z += weight * part.z;
            total.w += weight * part.w;
        }
        const float share = sum == 0.f ? 0.f : 1.f / sum;
        total = {total.x * share, total.y * share, total.z * share, total.w * share};
        *reinterpret_cast<float4*>(partial_out + cell * V_DIM + i) = total;
        if (i % V_DIM == 0) partial_lse[cell + head] = LN_2 * (base + log2f(sum));
    }
}
