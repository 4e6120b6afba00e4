// Encode pages of the device into frames, and decode frames into pages: integers of BITS bits with
// a scale and a base per group, as tierkv/codecs/affine.py says, to the bit.
//
// A frame is [kv_heads, K section | V section], in memory of the device or pinned and mapped host
// memory. A section is codes, bfloat16 scales, bases, each in whole chunks of 16 bytes; groups are
// blocks of ROWS tokens x COLUMNS channels. A block of threads works on one head-page at a time:
// decoding, it has all codes and parameters under way at once; encoding, it keeps a slab of tokens
// in shared memory and writes whole chunks. Pointers are multiples of 16, rows whole chunks.
#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int LOADS = 2;               // chunks of codes that a thread has under way
constexpr int SIZE = DTYPE == DTYPE_F32 ? 4 : 2;
constexpr int UNIT = 16 / SIZE;        // elements in a chunk
constexpr int VALUES = 128 / BITS;     // codes in a chunk
constexpr int LEVELS = (1 << BITS) - 1;
constexpr float LIMIT = 8.507059173023462e37f;  // 2^126
constexpr float LARGEST_F16 = 65504.0f;
constexpr unsigned NAN_SCALE = 0x7fc0;

DEVICE constexpr int chunks(int bytes) { return (bytes + 15) / 16; }

template <int DIM_, int ROWS_, int COLUMNS_>
struct Section {
    static constexpr int DIM = DIM_, ROWS = ROWS_, COLUMNS = COLUMNS_;
    static constexpr int ROW_GROUPS = DIM / COLUMNS;  // groups beside each other
    static constexpr int GROUPS = PAGE_TOKENS / ROWS * ROW_GROUPS;
    static constexpr int CODES = PAGE_TOKENS * DIM / VALUES;  // sizes from here on in chunks
    static constexpr int SCALES = chunks(2 * GROUPS);
    static constexpr int PARAMETERS = SCALES + chunks(SIZE * GROUPS);
    static constexpr int CHUNKS = CODES + PARAMETERS;
    static constexpr int SLAB = ROWS > 1 ? ROWS : (PAGE_TOKENS < 32 ? PAGE_TOKENS : 32);  // tokens
    static constexpr int SLAB_UNITS = SLAB * DIM / UNIT;
    static_assert(DIM % UNIT == 0 && PAGE_TOKENS % SLAB == 0 && SLAB * DIM % VALUES == 0, "rows");
    static_assert(COLUMNS == 1 || COLUMNS % UNIT == 0, "a chunk of a row lies in one group");
};
using Keys = Section<K_DIM, K_ROWS, K_COLUMNS>;
using Values = Section<V_DIM, V_ROWS, V_COLUMNS>;

DEVICE void widen(const uint4& chunk, float (&x)[UNIT]) {
    const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (DTYPE == DTYPE_F32) x[i] = __uint_as_float(words[i]);
        else unpack<DTYPE>(words[i], x[2 * i], x[2 * i + 1]);
    }
}

DEVICE uint4 narrow_all(const float (&x)[UNIT]) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (DTYPE == DTYPE_F32) words[i] = __float_as_uint(x[i]);
        else words[i] = pack<DTYPE>(x[2 * i], x[2 * i + 1]);
    }
    uint4 chunk;
    chunk.x = words[0], chunk.y = words[1], chunk.z = words[2], chunk.w = words[3];
    return chunk;
}

// One element of a run of them.
DEVICE float load_element(const void* from, int index) {
    if constexpr (DTYPE == DTYPE_F32) {
        return static_cast<const float*>(from)[index];
    } else {
        float low, high;
        unpack<DTYPE>(static_cast<const unsigned short*>(from)[index], low, high);
        return low;
    }
}

// Scale and base of a group. `parameters` holds a section's scales, then its bases.
template <typename S>
DEVICE void load_parameters(const uint4* parameters, int group, float& scale, float& base) {
    const unsigned bits = reinterpret_cast<const unsigned short*>(parameters)[group];
    scale = __uint_as_float(bits << 16);
    base = load_element(parameters + S::SCALES, group);
}

// Decode chunk `index` of a section's codes into the head-page at `out`.
template <typename S>
DEVICE void decode_chunk(const uint4& codes, int index, const uint4* parameters, uint4* out) {
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int u = 0; u < VALUES / UNIT; ++u) {
        const int first = index * VALUES + u * UNIT, row = first / S::DIM, column = first % S::DIM;
        const int group = row / S::ROWS * S::ROW_GROUPS + column / S::COLUMNS;
        float x[UNIT], scale, base;
        if constexpr (S::COLUMNS > 1) load_parameters<S>(parameters, group, scale, base);
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            const int bit = (u * UNIT + j) * BITS;
            const unsigned code = words[bit / 32] >> bit % 32 & LEVELS;
            if constexpr (S::COLUMNS == 1) load_parameters<S>(parameters, group + j, scale, base);
            x[j] = static_cast<float>(code) * scale + base;  // the product is exact
            if constexpr (DTYPE == DTYPE_F16)
                x[j] = x[j] > LARGEST_F16 ? LARGEST_F16 : x[j] < -LARGEST_F16 ? -LARGEST_F16 : x[j];
        }
        out[first / UNIT] = narrow_all(x);
    }
}

// The whole block decodes one head-page. `parameters` is shared memory for those of K, then V.
DEVICE void decode_head_page(const uint4* from, uint4* parameters, uint4* k, uint4* v) {
    constexpr int BOTH = Keys::CODES + Values::CODES;
    const uint4* const values = from + Keys::CHUNKS;
    for (int i = threadIdx.x; i < Keys::PARAMETERS + Values::PARAMETERS; i += THREADS)
        parameters[i] = load_streaming(i < Keys::PARAMETERS
                                           ? from + Keys::CODES + i
                                           : values + Values::CODES + (i - Keys::PARAMETERS));
    for (int begin = 0; begin < BOTH; begin += THREADS * LOADS) {
        uint4 held[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int chunk = begin + i * THREADS + threadIdx.x;
            if (chunk < BOTH)
                held[i] = load_streaming(chunk < Keys::CODES ? from + chunk
                                                             : values + (chunk - Keys::CODES));
        }
        if (begin == 0) __syncthreads();
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int chunk = begin + i * THREADS + threadIdx.x;
            if (chunk < Keys::CODES)
                decode_chunk<Keys>(held[i], chunk, parameters, k);
            else if (chunk < BOTH)
                decode_chunk<Values>(held[i], chunk - Keys::CODES, parameters + Keys::PARAMETERS,
                                     v);
        }
    }
    __syncthreads();
}

// Find scale and base of group `group` of the slab in `tile`.
template <typename S>
DEVICE void measure(const uint4* tile, int group, unsigned& scale_bits, float& base) {
    const int row = group / S::ROW_GROUPS * S::ROWS, column = group % S::ROW_GROUPS * S::COLUMNS;
    float low = -minus_infinity(), high = minus_infinity();
    bool bad = false;
    auto take = [&](float x) {
        bad |= !(x >= -LIMIT && x <= LIMIT);
        low = fminf(low, x);
        high = fmaxf(high, x);
    };
    for (int r = row; r < row + S::ROWS; ++r) {
        if constexpr (S::COLUMNS == 1) {
            take(load_element(tile, r * S::DIM + column));
        } else {
            constexpr int UNITS = S::COLUMNS / UNIT;
            for (int i = 0; i < UNITS; ++i) {  // each thread starts elsewhere: other banks
                float x[UNIT];
                widen(tile[(r * S::DIM + column) / UNIT + (i + group) % UNITS], x);
#pragma unroll
                for (int j = 0; j < UNIT; ++j) take(x[j]);
            }
        }
    }
    low += 0.0f;  // turns -0 into 0
    high += 0.0f;
    scale_bits = bad ? NAN_SCALE : (__float_as_uint((high - low) / LEVELS) + 0xffff) >> 16;
    base = bad ? 0.0f : low;
}

template <typename S>
DEVICE void store_parameters(uint4* parameters, int group, unsigned scale_bits, float base) {
    reinterpret_cast<unsigned short*>(parameters)[group] =
        static_cast<unsigned short>(scale_bits);
    if constexpr (DTYPE == DTYPE_F32)
        reinterpret_cast<float*>(parameters + S::SCALES)[group] = base;
    else
        reinterpret_cast<unsigned short*>(parameters + S::SCALES)[group] =
            static_cast<unsigned short>(pack<DTYPE>(base, 0.0f) & 0xffff);
}

// Encode chunk `index` of the codes of the slab in `tile`, whose first group is `first_group`.
template <typename S>
DEVICE uint4 encode_chunk(const uint4* tile, int index, const uint4* parameters, int first_group) {
    unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int u = 0; u < VALUES / UNIT; ++u) {
        const int first = index * VALUES + u * UNIT, row = first / S::DIM, column = first % S::DIM;
        const int group = first_group + row / S::ROWS * S::ROW_GROUPS + column / S::COLUMNS;
        float x[UNIT], scale, base;
        widen(tile[first / UNIT], x);
        if constexpr (S::COLUMNS > 1) load_parameters<S>(parameters, group, scale, base);
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            if constexpr (S::COLUMNS == 1) load_parameters<S>(parameters, group + j, scale, base);
            float code = scale > 0.0f ? rintf((x[j] - base) / scale) : 0.0f;
            code = fminf(fmaxf(code, 0.0f), static_cast<float>(LEVELS));
            const int bit = (u * UNIT + j) * BITS;
            words[bit / 32] |= static_cast<unsigned>(code) << bit % 32;
        }
    }
    uint4 codes;
    codes.x = words[0], codes.y = words[1], codes.z = words[2], codes.w = words[3];
    return codes;
}

// The whole block encodes K or V of one head-page, whose tokens are `token` chunks apart.
template <typename S>
DEVICE void encode_section(const uint4* from, long long token, uint4* out, uint4* tile) {
    constexpr int ROW_UNITS = S::DIM / UNIT, SLAB_CODES = S::SLAB * S::DIM / VALUES;
    constexpr int SLAB_GROUPS = S::SLAB / S::ROWS * S::ROW_GROUPS;
    uint4* const parameters = tile + S::SLAB_UNITS;
    for (int i = threadIdx.x; i < S::PARAMETERS; i += THREADS) {  // padding stays 0
        uint4 zero;
        zero.x = zero.y = zero.z = zero.w = 0;
        parameters[i] = zero;
    }
    for (int slab = 0; slab < PAGE_TOKENS / S::SLAB; ++slab) {
        for (int i = threadIdx.x; i < S::SLAB_UNITS; i += THREADS)
            tile[i] = load_streaming(from + (slab * S::SLAB + i / ROW_UNITS) * token
                                     + i % ROW_UNITS);
        __syncthreads();
        for (int group = threadIdx.x; group < SLAB_GROUPS; group += THREADS) {
            unsigned scale_bits;
            float base;
            measure<S>(tile, group, scale_bits, base);
            store_parameters<S>(parameters, slab * SLAB_GROUPS + group, scale_bits, base);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < SLAB_CODES; i += THREADS)
            out[slab * SLAB_CODES + i] =
                encode_chunk<S>(tile, i, parameters, slab * SLAB_GROUPS);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < S::PARAMETERS; i += THREADS) out[S::CODES + i] = parameters[i];
    __syncthreads();
}

// Where the encoded head-page of `head` in frame `page` begins: addresses[page], or frames that
// follow each other by `frame` chunks. Null if the address is 0.
DEVICE uint4* head_page(const long long* addresses, uint4* frames, long long frame, int page,
                        int head) {
    uint4* const start =
        addresses ? reinterpret_cast<uint4*>(addresses[page]) : frames + page * frame;
    return start ? start + static_cast<long long>(head) * (Keys::CHUNKS + Values::CHUNKS) : start;
}

// Encode page i of `count` into frame i. K of (head, page, token) lies at k + head * k_head + page *
// k_page + token * k_token, V likewise.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
encode_pages(const long long* addresses, uint4* frames, long long frame, int count, int kv_heads,
             const uint4* k, long long k_head, long long k_page, long long k_token, const uint4* v,
             long long v_head, long long v_page, long long v_token) {
    SHARED_MEMORY(shared);
    uint4* const tile = reinterpret_cast<uint4*>(shared);
    for (int i = blockIdx.x; i < count * kv_heads; i += gridDim.x) {
        const int page = i / kv_heads, head = i % kv_heads;
        uint4* const out = head_page(addresses, frames, frame, page, head);
        if (!out) continue;
        encode_section<Keys>(k + head * k_head + page * k_page, k_token, out, tile);
        encode_section<Values>(v + head * v_head + page * v_page, v_token, out + Keys::CHUNKS, tile);
    }
}

// Decode frame i of `count` into device frame slots[i] (int32 or int64 by `slot_bytes`), or i if
// that is 0. The K of (head, frame) lies at k + head * k_head + frame * k_frame, V likewise.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
decode_pages(const long long* addresses, uint4* frames, long long frame, const void* slots,
             int slot_bytes, int count, int kv_heads, uint4* k, long long k_head,
             long long k_frame, uint4* v, long long v_head, long long v_frame) {
    __shared__ uint4 parameters[Keys::PARAMETERS + Values::PARAMETERS];
    for (int i = blockIdx.x; i < count * kv_heads; i += gridDim.x) {
        const int page = i / kv_heads, head = i % kv_heads;
        const uint4* const from = head_page(addresses, frames, frame, page, head);
        if (!from) continue;
        long long slot = page;
        if (slot_bytes == 4) slot = static_cast<const int*>(slots)[page];
        if (slot_bytes == 8) slot = static_cast<const long long*>(slots)[page];
        decode_head_page(from, parameters, k + head * k_head + slot * k_frame,
                         v + head * v_head + slot * v_frame);
    }
}

// Decode head-pages. For KV head h and i < counts[h]: page pages[h, i], in the frame at
// addresses[page], into device frame frames[h, i]; rows of `pages` and `frames` have `entries`.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
decode_head_pages(const long long* addresses, const int* pages, const int* frames,
                  const int* counts, int entries, int kv_heads, uint4* k, long long k_head,
                  long long k_frame, uint4* v, long long v_head, long long v_frame) {
    __shared__ uint4 parameters[Keys::PARAMETERS + Values::PARAMETERS];
    int head = 0, first = 0, here = counts[0];  // entries of the heads before this one, and its own
    for (int i = blockIdx.x;; i += gridDim.x) {
        while (i >= first + here) {
            if (++head == kv_heads) return;
            first += here;
            here = counts[head];
        }
        const long long entry = static_cast<long long>(head) * entries + (i - first);
        const long long frame = frames[entry];
        const uint4* const from = head_page(addresses, nullptr, 0, pages[entry], head);
        if (from)
            decode_head_page(from, parameters, k + head * k_head + frame * k_frame,
                             v + head * v_head + frame * v_frame);
    }
}
