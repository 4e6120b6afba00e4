// Arithmetic of score_keys.cu on tensor cores, for bf16 and fp16: keys [16 tokens, dims] times
// heads [dims, 8], 32 dims in two multiplications. A dot product may take the dims in any order if
// both sides take the same: lane i takes 8 dims from 8 * (i % 4) on as they come. See multiply_add
// for who holds what.
//
//   q . key = q . low + (q * step) . code
//
// q * step is one factor: the sum of two numbers of 16 bits is all of it. (In fp16 it must be below
// 65504.) Codes are the other: 2 bits put behind the exponent of 16 or 4 read 16 + code or
// 4 + code, and the surplus is computed by keys of 16 and 4 and taken off. A group of up to 4 has
// its heads twice, columns 4.. for what the numbers of columns ..4 lack: half the multiplications.
#pragma once

constexpr int BLOCKS = K_DIM <= 128 && HALVES == 1 ? 2 : 1;  // on a multiprocessor
constexpr int SLOTS = 3;  // chunks of pages that a warp has or awaits
constexpr int MANTISSA = DTYPE == DTYPE_BF16 ? 7 : 10;  // bits
constexpr unsigned BOTH = 0x00010001u;  // times 16 bits: those in both halves of a register
constexpr unsigned NEGATIVE = 0x8000u * BOTH;

// 2^exponent, twice.
DEVICE constexpr unsigned power(int exponent) {
    return static_cast<unsigned>(exponent + (DTYPE == DTYPE_BF16 ? 127 : 15)) * (BOTH << MANTISSA);
}

struct Keys {
    static constexpr int STEPS = (K_DIM + 31) / 32;
    static constexpr bool TWICE = GROUP <= 4;
    // So many of a page's words make up the rows of MATRICES at once: rows lane / 4 and the same
    // + 8 are tokens 4 * matrix + 2 * (lane / 4 % SHARING) and the next of word lane / 4 / SHARING.
    static constexpr int COLUMNS = WORDS < 4 ? WORDS : 4, SHARING = 8 / COLUMNS;
    static constexpr int CHUNKS = WORDS / COLUMNS, MATRICES = COLUMNS / 2;
    static constexpr int SLOT = (2 + COLUMNS) * K_DIM;  // elements of a chunk: low, steps, words

    uint4 query[HALVES][STEPS];  // dims in the order x, z, y, w
    uint4 opposite[STEPS] = {};  // TWICE: -query, or 0 in lanes that take the number itself
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
                if (TWICE && lane >= LANES / 2)
                    opposite[step] = {q.x ^ NEGATIVE, q.z ^ NEGATIVE, q.y ^ NEGATIVE,
                                      q.w ^ NEGATIVE};
            }
        for (int i = 0; i < SLOTS - 1; ++i) fetch(pages, i, lane);
    }

    // Start copying the next chunk that this warp comes to. Past the last page there is none.
    DEVICE void fetch(const Pages& pages, int slot, int lane) {
        if (coming_page < pages.last) {
            const Element* const from = pages[coming_page];
#pragma unroll
            for (int at = lane * 8; at < SLOT; at += LANES * 8) {
                const bool shared_by_chunks = CHUNKS == 1 || at < 2 * K_DIM;
                copy_async(slots + slot * SLOT + at,
                           from + at + (shared_by_chunks ? 0 : coming_chunk * COLUMNS * K_DIM));
            }
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
        float even[4], odd[4];  // low . q; what counts is rows ..8 of the one, 8.. of the other
        float surplus[4], codes[MATRICES][4];

        // Multiply 32 dims; q is ordered x, z, y, w.
        DEVICE void add(uint4 q, uint4 opposite, uint4 low, uint4 step, uint4 words,
                        const Codes& codes_of) {
            const unsigned lows[4] = {low.x, low.y, low.z, low.w};
            multiply_add<DTYPE>(even, lows, q.x, q.y);
            multiply_add<DTYPE>(odd, lows, q.z, q.w);
            add(q.x, q.y, opposite.x, opposite.y, step.x, step.z, words.x, words.z, codes_of);
            add(q.z, q.w, opposite.z, opposite.w, step.y, step.w, words.y, words.w, codes_of);
        }
        DEVICE void add(unsigned q_0, unsigned q_1, unsigned opposite_0, unsigned opposite_1,
                        unsigned step_0, unsigned step_1, unsigned words_0, unsigned words_1,
                        const Codes& codes_of) {
            constexpr unsigned upper = power(exponent(0));
            constexpr unsigned lower = power(exponent(1));
            const unsigned constant[4] = {upper, lower, upper, lower};
            const unsigned high[2] = {multiply_add_pairs<DTYPE>(q_0, step_0, 0),
                                      multiply_add_pairs<DTYPE>(q_1, step_1, 0)};
            unsigned rest[2] = {high[0] ^ NEGATIVE, high[1] ^ NEGATIVE};
            if (TWICE) {
                rest[0] = multiply_add_pairs<DTYPE>(opposite_0, step_0, 0);
                rest[1] = multiply_add_pairs<DTYPE>(opposite_1, step_1, 0);
            }
            rest[0] = multiply_add_pairs<DTYPE>(q_0, step_0, rest[0]);
            rest[1] = multiply_add_pairs<DTYPE>(q_1, step_1, rest[1]);
            if (!TWICE) multiply_add<DTYPE>(surplus, constant, high[0], high[1]);
            multiply_add<DTYPE>(surplus, constant, rest[0], rest[1]);
#pragma unroll
            for (int matrix = 0; matrix < MATRICES; ++matrix) {
                const unsigned keys[4] = {
                    codes_of(words_0, matrix, 0), codes_of(words_0, matrix, 1),
                    codes_of(words_1, matrix, 0), codes_of(words_1, matrix, 1)};
                if (!TWICE) multiply_add<DTYPE>(codes[matrix], keys, high[0], high[1]);
                multiply_add<DTYPE>(codes[matrix], keys, rest[0], rest[1]);
            }
        }
        DEVICE float sum(int matrix, int column) const {
            float sum = codes[matrix][column] - surplus[column];
            if (TWICE) sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            return sum + (even[column % 2] + odd[column % 2 + 2]);
        }
    };

    // Softmax over 16 * MATRICES keys of head 2 * (lane % 4) + `right`, the same in all lane / 4.
    DEVICE Softmax over_keys(const Products& products, int right) {
        float product[2 * MATRICES], top = minus_infinity();
#pragma unroll
        for (int i = 0; i < 2 * MATRICES; ++i) {
            product[i] = products.sum(i / 2, i % 2 * 2 + right);
            top = fmaxf(top, product[i]);
        }
#pragma unroll
        for (int distance = 4; distance < LANES; distance *= 2)
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, distance));
        const float factor = LOG2_E * scale, base = factor * top;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * MATRICES; ++i) sum += exp2_fast(factor * product[i] - base);
#pragma unroll
        for (int distance = 4; distance < LANES; distance *= 2)
            sum += __shfl_xor_sync(ALL_LANES, sum, distance);
        return {scale * top, sum};
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
                const uint4 none = {0, 0, 0, 0};  // 0 * q is 0, other memory may be NaN
                const bool inside = K_DIM % 32 == 0 || step * 32 + lane % 4 * 8 < K_DIM;
                const uint4 lows = inside ? load_shared(low + step * 32) : none;
                const uint4 steps = inside ? load_shared(low + K_DIM + step * 32) : none;
                const uint4 words = inside ? load_shared(low + word * K_DIM + step * 32) : none;
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
                    products[half].add(query[half][step], opposite[step], lows, steps, words,
                                       codes_of);
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
