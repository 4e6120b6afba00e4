// Score the pages of a sequence by all their keys at 2 bits a channel: see selection/keys2.py.
//
// Candidates are [first, last) with last = min(*sealed - recent, capacity), read when the kernel
// runs. A summary is PARTS vectors of K_DIM elements: the lowest values, the steps, and words of 16
// bits with the steps of 8 tokens, the first token's lowest. It is read once, for all GROUP query
// heads of its KV head; a page's logit is the log-sum-exp over its keys' logits.
//
// -D: DTYPE, K_DIM, GROUP, PARTS (2 + page_tokens / 8).
#include "ptx.cuh"
#include "softmax.cuh"

constexpr int THREADS = 256;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr int TILE = 8;  // pages a warp takes one after the other
constexpr int HALVES = GROUP > 8 ? 2 : 1;
constexpr int VALUES = 2 * HALVES;  // scores of a lane: see Keys::score
constexpr int SLOTS = 3;  // chunks of pages that a warp has or awaits
constexpr int WORDS = PARTS - 2;  // of 8 tokens

#if DTYPE == DTYPE_F32
using Element = float;
#else
using Element = unsigned short;
#endif
static_assert(K_DIM * sizeof(Element) % 16 == 0, "vectors are read 16 bytes at a time");
static_assert(GROUP >= 1 && GROUP <= 16, "the group is padded to 8 or 16 columns");
static_assert(WORDS >= 2 && (WORDS & (WORDS - 1)) == 0, "a page has 16, 32, ... tokens");

struct Pages {
    const Element* summaries;
    int first, last;

    DEVICE bool contain(int page) const { return page >= first && page < last; }
    DEVICE const Element* operator[](int page) const {
        return summaries + static_cast<long long>(page) * (PARTS * K_DIM);
    }
};

// What a lane answers with. It learns the softmaxes over the keys of every page, and keeps those of
// page lane / 4 of a tile, for heads 2 * (lane % 4) and the next (values 0, 1) and 8 more (2, 3).
struct Kept {
    Softmax over_keys[VALUES];

    DEVICE void logits(float (&value)[VALUES]) const {
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            value[i] = over_keys[i].maximum + logf(over_keys[i].sum);
    }
};

#if DTYPE == DTYPE_F32
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
#else
constexpr int BLOCKS = HALVES == 1 ? 2 : 1;  // on a multiprocessor
constexpr int MANTISSA = DTYPE == DTYPE_BF16 ? 7 : 10;  // bits
constexpr unsigned BOTH = 0x00010001u;  // times 16 bits: those in both halves of a register

// 2^exponent, twice.
DEVICE constexpr unsigned power(int exponent) {
    return static_cast<unsigned>(exponent + (DTYPE == DTYPE_BF16 ? 127 : 15)) * (BOTH << MANTISSA);
}

// Tensor cores, keys [16 tokens, dims] times heads [dims, 8], 32 dims in two multiplications. A
// dot product may take the dims in any order if both sides take the same: lane i reads 8 dims from
// 8 * (i % 4) on as they come. See multiply_add for who holds what.
//
//   q . key = q . low + (q * step) . code
//
// q * step is one factor: 16 bits take it as the sum of two numbers. (In fp16 it must be below
// 65504.) Codes are the other: 2 bits put behind the exponent of 16 or 4 read 16 + code or
// 4 + code, and the surplus is computed by keys of 16 or 4 and taken off. A group of up to 4 has
// its heads twice, columns 4.. for what the numbers of columns ..4 lack: half the multiplications.
struct Keys {
    static constexpr int STEPS = (K_DIM + 31) / 32;
    static constexpr bool TWICE = GROUP <= 4;
    // So many of a page's words make up the rows of MATRICES at once: rows lane / 4 and the same
    // + 8 are tokens 4 * matrix + 2 * (lane / 4 % SHARING) and the next of word lane / 4 / SHARING.
    static constexpr int COLUMNS = WORDS < 4 ? WORDS : 4, SHARING = 8 / COLUMNS;
    static constexpr int CHUNKS = WORDS / COLUMNS, MATRICES = COLUMNS / 2;
    static constexpr int SLOT = (2 + COLUMNS) * K_DIM;  // elements of a chunk: low, steps, words

    uint4 query[HALVES][STEPS];  // dims in the order x, z, y, w
    float scale;
    Element* slots;  // [SLOTS, SLOT] in shared memory, those of this warp
    int slot, coming_page, coming_chunk, stride;

    DEVICE Keys(const Element* rows, long long head_stride, float scale, const Pages& pages,
                int page, int stride, int lane)
        : scale(scale), slot(0), coming_page(page), coming_chunk(0), stride(stride) {
        SHARED_MEMORY(shared);
        slots = reinterpret_cast<Element*>(shared) + threadIdx.x / LANES * (SLOTS * SLOT);
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int head = TWICE ? lane / 4 % 4 : lane / 4 + 8 * half;
                const int dim = step * 32 + lane % 4 * 8;
                uint4 q = {0, 0, 0, 0};
                if (head < GROUP && dim < K_DIM)
                    q = *reinterpret_cast<const uint4*>(rows + head * head_stride + dim);
                query[half][step] = {q.x, q.z, q.y, q.w};
            }
        for (int i = 0; i < SLOTS - 1; ++i) fetch(pages, i, lane);
    }

    // Start copying the next chunk that this warp comes to. Past the last page there is none.
    DEVICE void fetch(const Pages& pages, int slot, int lane) {
        if (coming_page < pages.last) {
            const Element* const from = pages[coming_page];
#pragma unroll
            for (int at = lane * 8; at < SLOT; at += LANES * 8)
                copy_async(slots + slot * SLOT + at,
                           from + at + (at < 2 * K_DIM ? 0 : coming_chunk * COLUMNS * K_DIM));
        }
        copy_async_commit();
        if (++coming_chunk < CHUNKS) return;
        coming_chunk = 0;
        if (++coming_page % TILE == 0) coming_page += stride - TILE;
    }

    static DEVICE constexpr int exponent(int lower) { return 4 - 2 * lower; }

    // How a lane finds the codes of its tokens in its word.
    struct Codes {
        int turn;  // brings the first token's code behind the exponent; the next is beside it
        unsigned masks[2];

        // The grid is one block deep. Not knowing that, the compiler keeps masks in registers
        // instead of making them again for every use.
        DEVICE Codes(int lane) : turn(MANTISSA - exponent(0) - 4 * (lane / 4 % SHARING)) {
            for (int lower = 0; lower < 2; ++lower)
                masks[lower] = 3u * (BOTH << (MANTISSA - exponent(lower))) * gridDim.z;
        }
        // 2^exponent(lower) + code of row lane / 4 (`lower` 0) or lane / 4 + 8 (1), in two dims.
        DEVICE unsigned operator()(unsigned words, int matrix, int lower) const {
            const unsigned turned = __funnelshift_l(words, words, turn - 8 * matrix);
            return (turned & masks[lower]) | power(exponent(lower));
        }
    };

    // Sums of products, [tokens, heads].
    struct Products {
        float even[4], odd[4];  // low . q of dims in x and z or y and w; of rows 8.. or ..8 not used
        float surplus[4], codes[MATRICES][4];

        // Multiply 32 dims; q is ordered x, z, y, w.
        DEVICE void add(uint4 q, uint4 low, uint4 step, uint4 words, const Codes& codes_of,
                        int lane) {
            const unsigned lows[4] = {low.x, low.y, low.z, low.w};
            multiply_add<DTYPE>(even, lows, q.x, q.y);
            multiply_add<DTYPE>(odd, lows, q.z, q.w);
            add(q.x, q.y, step.x, step.z, words.x, words.z, codes_of, lane);
            add(q.z, q.w, step.y, step.w, words.y, words.w, codes_of, lane);
        }
        DEVICE void add(unsigned q_0, unsigned q_1, unsigned step_0, unsigned step_1,
                        unsigned words_0, unsigned words_1, const Codes& codes_of, int lane) {
            constexpr unsigned upper = power(exponent(0));
            constexpr unsigned lower = power(exponent(1));
            const unsigned constant[4] = {upper, lower, upper, lower};
            unsigned high[2], rest[2];
            split_product<DTYPE>(q_0, step_0, high[0], rest[0]);
            split_product<DTYPE>(q_1, step_1, high[1], rest[1]);
            if (TWICE && lane >= LANES / 2) {
                high[0] = rest[0];
                high[1] = rest[1];
            }
            multiply_add<DTYPE>(surplus, constant, high[0], high[1]);
            if (!TWICE) multiply_add<DTYPE>(surplus, constant, rest[0], rest[1]);
#pragma unroll
            for (int matrix = 0; matrix < MATRICES; ++matrix) {
                const unsigned keys[4] = {
                    codes_of(words_0, matrix, 0), codes_of(words_0, matrix, 1),
                    codes_of(words_1, matrix, 0), codes_of(words_1, matrix, 1)};
                multiply_add<DTYPE>(codes[matrix], keys, high[0], high[1]);
                if (!TWICE) multiply_add<DTYPE>(codes[matrix], keys, rest[0], rest[1]);
            }
        }
        DEVICE float sum(int matrix, int column) const {
            float sum = codes[matrix][column] - surplus[column];
            if (TWICE) sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            return sum + even[column % 2] + odd[column % 2 + 2];
        }
    };

    // Softmax over 16 * MATRICES keys of head 2 * (lane % 4) + `right`, the same in all lane / 4.
    DEVICE Softmax over_keys(const Products& products, int right) {
        float logit[2 * MATRICES], top = minus_infinity();
#pragma unroll
        for (int i = 0; i < 2 * MATRICES; ++i) {
            logit[i] = scale * products.sum(i / 2, i % 2 * 2 + right);
            top = fmaxf(top, logit[i]);
        }
#pragma unroll
        for (int distance = 4; distance < LANES; distance *= 2)
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, distance));
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * MATRICES; ++i) sum += exp2_fast(LOG2_E * (logit[i] - top));
#pragma unroll
        for (int distance = 4; distance < LANES; distance *= 2)
            sum += __shfl_xor_sync(ALL_LANES, sum, distance);
        return {top, sum};
    }

    // Logits of this warp's next tile, see Kept.
    DEVICE void score(float (&value)[VALUES], const Pages& pages, int, int lane) {
        const Codes codes_of(lane);
        const int word = 2 + lane / 4 / SHARING;
        Kept kept = {};
#pragma unroll 1
        for (int unit = 0; unit < TILE * CHUNKS; ++unit) {
            copy_async_wait<SLOTS - 2>();
            __syncwarp();  // the chunk is there for all lanes, and all have read the one before
            fetch(pages, slot == 0 ? SLOTS - 1 : slot - 1, lane);
            const Element* const low = slots + slot * SLOT + lane % 4 * 8;
            slot = slot + 1 == SLOTS ? 0 : slot + 1;
            Products products[HALVES] = {};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const uint4 none = {0, 0, 0, 0};
                const bool inside = K_DIM % 32 == 0 || step * 32 + lane % 4 * 8 < K_DIM;
                const uint4 lows = inside ? load_shared(low + step * 32) : none;
                const uint4 steps = inside ? load_shared(low + K_DIM + step * 32) : none;
                const uint4 words = inside ? load_shared(low + word * K_DIM + step * 32) : none;
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
                    products[half].add(query[half][step], lows, steps, words, codes_of, lane);
            }
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                Softmax here = over_keys(products[i / 2], i % 2);
                if (lane / 4 != unit / CHUNKS) continue;
                if (unit % CHUNKS != 0) here.add(kept.over_keys[i]);
                kept.over_keys[i] = here;
            }
        }
        kept.logits(value);
    }
};
#endif

//   query      [kv_heads * GROUP, K_DIM], rows aligned to 16 bytes
//   summaries  [kv_heads, capacity, PARTS, K_DIM], KV heads `summary_stride` elements apart
//   logits     [kv_heads * GROUP, row_pages]
//   states     [kv_heads, GROUP, gridDim.x], a block's part of the softmax over pages
//   grid       any, kv_heads
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
score_pages(const Element* query, long long query_stride, const Element* summaries,
            long long summary_stride, int capacity, const int* sealed, int first, int recent,
            float scale, float* logits, int row_pages, Softmax* states) {
    __shared__ Softmax shared_states[WARPS][GROUP];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, kv_head = blockIdx.y;
    const Pages pages = {summaries + kv_head * summary_stride, first,
                         min(*sealed - recent, capacity)};
    const int stride = gridDim.x * WARPS * TILE;
    int page = (first / TILE + blockIdx.x * WARPS + warp) * TILE;
    Keys keys(query + static_cast<long long>(kv_head) * GROUP * query_stride, query_stride, scale,
              pages, page, stride, lane);
    Softmax state[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) state[i] = {minus_infinity(), 0.f};

    for (; page < pages.last; page += stride) {
        float value[VALUES];
        keys.score(value, pages, page, lane);
        const int here = page + lane / 4;
        if (!pages.contain(here)) continue;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int head = lane % 4 * 2 + i % 2 + i / 2 * 8;
            if (head >= GROUP) continue;
            logits[(static_cast<long long>(kv_head) * GROUP + head) * row_pages + here] = value[i];
            state[i].add({value[i], 1.f});
        }
    }

#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
#pragma unroll
        for (int distance = 4; distance < LANES; distance *= 2) state[i].add_lane(distance);
        const int head = lane % 4 * 2 + i % 2 + i / 2 * 8;
        if (lane < 4 && head < GROUP) shared_states[warp][head] = state[i];
    }
    __syncthreads();
    if (threadIdx.x >= GROUP) return;
    Softmax whole = shared_states[0][threadIdx.x];
    for (int other = 1; other < WARPS; ++other) whole.add(shared_states[other][threadIdx.x]);
    states[(kv_head * GROUP + threadIdx.x) * gridDim.x + blockIdx.x] = whole;
}
