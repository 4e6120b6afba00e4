// Encode pages of the device into frames, and decode frames into pages, to the bit as the codecs in
// tierkv/codecs/ do.
//
// A frame is [kv_heads, head-page], in memory of the device or pinned and mapped host memory. An
// encoded head-page is a section for K and one for V and, if KEPT tokens have 8 bits, two more
// sections and their indices. A section is its codes, then parameters, in whole chunks of 16 bytes. To
// decode, a block of threads has all codes and parameters of a head-page under way at once, and a
// thread turns the codes of a unit into a chunk of the page. To encode, a warp takes a section, or
// all those of a head-page if tokens are kept. Pointers are multiples of 16, rows whole chunks.
#include "codec_affine.cuh"
#include "codec_fp8.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int MOST_LOADS = 5;  // units that a thread has under way
// Blocks of a processor: as many as registers allow without spilling.
constexpr int DECODING_BLOCKS = 4;
constexpr int ENCODING_BLOCKS = BITS == 4 || DTYPE == DTYPE_F16 ? 2 : 3;

template <bool FLOAT, int DIM, int ROWS, int COLUMNS>
struct Choose {
    using Section = Affine<PAGE_TOKENS, DIM, BITS, ROWS, COLUMNS>;
};
template <int DIM, int ROWS, int COLUMNS>
struct Choose<true, DIM, ROWS, COLUMNS> {
    using Section = Floats<PAGE_TOKENS, DIM>;
};
using Keys = Choose<FLOATS, K_DIM, K_ROWS, K_COLUMNS>::Section;
using Values = Choose<FLOATS, V_DIM, V_ROWS, V_COLUMNS>::Section;

// A section of a head-page, of K or of V, and which rows it holds.
template <typename S, bool OF_KEYS_, typename Rows_>
struct Part : S {
    using Section = S;
    using Rows = Rows_;
    static constexpr bool OF_KEYS = OF_KEYS_;
};

// All parts in order. A part begins at chunk AT of the head-page; in shared memory, which holds
// parameters only, its own begin at chunk SHARED_AT.
template <typename... P>
struct Parts {
    static constexpr int UNITS = (P::UNITS + ...), CHUNKS = (P::CHUNKS + ...);
    static constexpr int PARAMETERS = (P::PARAMETERS + ...);
};
template <typename P, int AT_, int SHARED_AT_>
struct Place : P {
    static constexpr int AT = AT_, SHARED_AT = SHARED_AT_;
};

// Call `f` with the place of unit `unit` of all parts, and which unit of its part it is.
template <int AT = 0, int SHARED_AT = 0, typename P, typename... Rest, typename F>
DEVICE void visit_unit(Parts<P, Rest...>, int unit, const F& f) {
    if (unit < P::UNITS) f(Place<P, AT, SHARED_AT>{}, unit);
    else if constexpr (sizeof...(Rest) > 0)
        visit_unit<AT + P::CHUNKS, SHARED_AT + P::PARAMETERS>(Parts<Rest...>{}, unit - P::UNITS,
                                                              f);
}

// Where chunk i of the parameters of all parts lies in a head-page.
template <int AT = 0, typename P, typename... Rest>
DEVICE int parameter_chunk(Parts<P, Rest...>, int i) {
    if constexpr (sizeof...(Rest) > 0)
        if (i >= P::PARAMETERS)
            return parameter_chunk<AT + P::CHUNKS>(Parts<Rest...>{}, i - P::PARAMETERS);
    return AT + P::CODES + i;
}

#if KEPT
#include "codec_importance.cuh"
using KeptKeys = Affine<KEPT, K_DIM, 8, 1, KEPT_K_COLUMNS>;
using KeptValues = Affine<KEPT, V_DIM, 8, 1, V_COLUMNS>;
using HeadPage = Parts<Part<Keys, true, OtherRows>, Part<Values, false, OtherRows>,
                       Part<KeptKeys, true, KeptRows>, Part<KeptValues, false, KeptRows>,
                       Part<Index, true, AllRows>>;
constexpr int CODE_WORDS = KeptKeys::CODE_WORDS;
constexpr int INDEX_AT = HeadPage::PARAMETERS - INDEX;               // in shared memory
constexpr int HEAD_CHUNKS = divide_up(HeadPage::CHUNKS, LINE) * LINE;  // from one to the next
#else
using HeadPage = Parts<Part<Keys, true, AllRows>, Part<Values, false, AllRows>>;
constexpr int CODE_WORDS = Keys::CODE_WORDS;
constexpr int INDEX_AT = 0;
constexpr int HEAD_CHUNKS = HeadPage::CHUNKS;
#endif
constexpr int LOADS = least(MOST_LOADS, divide_up(HeadPage::UNITS, THREADS));

// The whole block decodes one head-page. `parameters` is shared memory for those of all parts.
DEVICE void decode_head_page(const uint4* from, uint4* parameters, uint4* k, uint4* v) {
    for (int begin = 0; begin < HeadPage::UNITS; begin += THREADS * LOADS) {
        unsigned held[LOADS][CODE_WORDS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            visit_unit(HeadPage{}, begin + i * THREADS + threadIdx.x, [&](auto part, int unit) {
                using P = decltype(part);
                if constexpr (P::UNITS > 0) {
                    unsigned words[P::CODE_WORDS];
                    load_streaming<P::CODE_BYTES>(
                        words, reinterpret_cast<const unsigned char*>(from + P::AT)
                                   + unit * P::CODE_BYTES);
                    for (int w = 0; w < P::CODE_WORDS; ++w) held[i][w] = words[w];
                }
            });
        if (begin == 0) {  // after the codes are under way: storing them waits
            for (int i = threadIdx.x; i < HeadPage::PARAMETERS; i += THREADS)
                parameters[i] = load_streaming(from + parameter_chunk(HeadPage{}, i));
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            visit_unit(HeadPage{}, begin + i * THREADS + threadIdx.x, [&](auto part, int unit) {
                using P = decltype(part);
                if constexpr (P::UNITS > 0) {
                    const typename P::Rows rows(parameters + INDEX_AT);
                    const int row = unit / P::ROW_UNITS;
                    if (rows.skips(row)) return;
                    unsigned words[P::CODE_WORDS];
                    float x[UNIT];
                    for (int w = 0; w < P::CODE_WORDS; ++w) words[w] = held[i][w];
                    P::decode(words, unit, parameters + P::SHARED_AT, x);
                    (P::OF_KEYS ? k : v)[rows.row(row) * P::ROW_UNITS + unit % P::ROW_UNITS] =
                        narrow(x);
                }
            });
    }
    __syncthreads();
}

// Groups whose parameters a warp gathers in shared memory.
template <typename S>
DEVICE constexpr int gathered() {
    if constexpr (S::GROUPING == BY_TOKEN) return ByToken<S>::AT_ONCE;
    else return 1;
}

// What a warp that encodes has in shared memory.
struct Shared {
#if KEPT
    static constexpr int GROUPS = greatest(gathered<Values>(), greatest(gathered<KeptKeys>(),
                                                                        gathered<KeptValues>()));
    Choice choice;
#else
    static constexpr int GROUPS = greatest(gathered<Keys>(), gathered<Values>());
#endif
    unsigned bases[GROUPS];
    unsigned short scales[GROUPS];
};

template <typename S, typename Rows>
DEVICE void encode_section(const uint4* from, long long token, uint4* out, const Rows& rows,
                           Shared& shared) {
    if constexpr (S::GROUPING == WHOLE) encode_whole<S>(from, token, out);
    else if constexpr (S::GROUPING == BY_CHANNEL) encode_by_channel<S>(from, token, out, rows);
    else encode_by_token<S>(from, token, out, rows, shared.scales, shared.bases);
}

// Where the encoded head-page of `head` in frame `page` begins: addresses[page], or frames that
// follow each other by `frame` chunks. Null if the address is 0.
DEVICE uint4* head_page(const long long* addresses, uint4* frames, long long frame, int page,
                        int head) {
    uint4* const start =
        addresses ? reinterpret_cast<uint4*>(addresses[page]) : frames + page * frame;
    return start ? start + static_cast<long long>(head) * HEAD_CHUNKS : start;
}

// Encode page i of `count` into frame i. K of (head, page, token) lies at k + head * k_head + page *
// k_page + token * k_token, V likewise.
extern "C" __global__ void __launch_bounds__(THREADS, ENCODING_BLOCKS)
encode_pages(const long long* addresses, uint4* frames, long long frame, int count, int kv_heads,
             const uint4* k, long long k_head, long long k_page, long long k_token, const uint4* v,
             long long v_head, long long v_page, long long v_token) {
    constexpr int TASKS = KEPT ? 1 : 2;  // of a head-page
    __shared__ Shared all[WARPS];
    Shared& shared = all[threadIdx.x / 32];
    const int tasks = count * kv_heads * TASKS;
    for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < tasks; i += gridDim.x * WARPS) {
        const int page = i / TASKS / kv_heads, head = i / TASKS % kv_heads;
        uint4* const out = head_page(addresses, frames, frame, page, head);
        if (!out) continue;
        const uint4* const keys = k + head * k_head + page * k_page;
        const uint4* const values = v + head * v_head + page * v_page;
        uint4* const values_out = out + Keys::CHUNKS;
#if KEPT
        uint4* const kept_out = values_out + Values::CHUNKS;
        uint4* const kept_values_out = kept_out + KeptKeys::CHUNKS;
        uint4* const index_out = kept_values_out + KeptValues::CHUNKS;
        choose_tokens<Keys::ROW_UNITS>(keys, k_token, shared.choice);
        const UnkeptRows rest = {shared.choice};
        const KeptRows kept(shared.choice.index);
        encode_section<Keys>(keys, k_token, out, rest, shared);
        encode_section<Values>(values, v_token, values_out, rest, shared);
        encode_section<KeptKeys>(keys, k_token, kept_out, kept, shared);
        encode_section<KeptValues>(values, v_token, kept_values_out, kept, shared);
        uint4 zero;
        zero.x = zero.y = zero.z = zero.w = 0;
        for (int j = threadIdx.x % 32; j < out + HEAD_CHUNKS - index_out; j += 32)
            index_out[j] = j < INDEX ? shared.choice.index[j] : zero;
#else
        if (i % TASKS == 0) encode_section<Keys>(keys, k_token, out, AllRows(), shared);
        else encode_section<Values>(values, v_token, values_out, AllRows(), shared);
#endif
    }
}

// Decode frame i of `count` into device frame slots[i] (int32 or int64 by `slot_bytes`), or i if
// that is 0. The K of (head, frame) lies at k + head * k_head + frame * k_frame, V likewise.
extern "C" __global__ void __launch_bounds__(THREADS, DECODING_BLOCKS)
decode_pages(const long long* addresses, uint4* frames, long long frame, const void* slots,
             int slot_bytes, int count, int kv_heads, uint4* k, long long k_head,
             long long k_frame, uint4* v, long long v_head, long long v_frame) {
    __shared__ uint4 parameters[HeadPage::PARAMETERS];
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
// addresses[page], into device frame frames[h, i]; rows of `pages` and `frames` have `entries`. Of
// several sequences, the KV heads of one follow those of another; frames have `frame_heads`.
extern "C" __global__ void __launch_bounds__(THREADS, DECODING_BLOCKS)
decode_head_pages(const long long* addresses, const int* pages, const int* frames,
                  const int* counts, int entries, int kv_heads, int frame_heads, uint4* k,
                  long long k_head, long long k_frame, uint4* v, long long v_head,
                  long long v_frame) {
    __shared__ uint4 parameters[HeadPage::PARAMETERS];
    int head = 0, first = 0, here = counts[0];  // entries of the heads before this one, and its own
    for (int i = blockIdx.x;; i += gridDim.x) {
        while (i >= first + here) {
            if (++head == kv_heads) return;
            first += here;
            here = counts[head];
        }
        const long long entry = static_cast<long long>(head) * entries + (i - first);
        const long long frame = frames[entry];
        const int own = head % frame_heads;
        const uint4* const from = head_page(addresses, nullptr, 0, pages[entry], own);
        if (from)
            decode_head_page(from, parameters, k + own * k_head + frame * k_frame,
                             v + own * v_head + frame * v_frame);
    }
}
