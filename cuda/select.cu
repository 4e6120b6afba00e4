// Choose the pages of largest mass per KV head, and plan which frames they are read from.
//
// One block per KV head does everything, so nothing has to wait for another block, and every
// result is the same at every run: equal keys are taken in order of their index.
//
// Of many keys few can be among the largest `want`: a thread that has seen some of them knows
// their maximum, and no key below the want-th largest of these maxima is. So threads look at all
// keys once for their maximum, those whose maximum reaches that bound look at theirs again to mark
// what can be chosen, and only what is marked is searched.
//
// -D: THREADS.
#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr int BITS = 11;  // of a key that one pass looks at
constexpr int BINS = 1 << BITS;
constexpr int BINS_EACH = BINS / THREADS;
constexpr int AT_ONCE = 4;  // keys a thread loads before it looks at one
constexpr int QUADS = 8;    // the same of four masses from global memory
constexpr int SLACK = 32;   // maxima by which the bound may be too low
constexpr unsigned NEVER = 0xffffffffu;  // a target of mass that is not reached
static_assert(THREADS % LANES == 0 && WARPS <= LANES && BINS % THREADS == 0, "see scan");

struct Sum {
    unsigned count, mass;
};
DEVICE Sum operator+(Sum a, Sum b) { return {a.count + b.count, a.mass + b.mass}; }

struct __align__(16) Scratch {
    unsigned counts[BINS], masses[BINS];
    Sum warps[WARPS];
    Sum above, bin;  // of the keys above the bin where the cut lies, and of that bin
    int digit;
};

DEVICE Sum from_lane(Sum value, int lane) {
    return {__shfl_sync(ALL_LANES, value.count, lane), __shfl_sync(ALL_LANES, value.mass, lane)};
}

// Sum over the lanes before this one and itself.
DEVICE Sum scan_warp(Sum value) {
    for (int distance = 1; distance < LANES; distance *= 2) {
        const Sum other = {__shfl_up_sync(ALL_LANES, value.count, distance),
                           __shfl_up_sync(ALL_LANES, value.mass, distance)};
        if (threadIdx.x % LANES >= distance) value = value + other;
    }
    return value;
}

// Every warp brings a sum and receives those of all warps, one a lane.
DEVICE Sum exchange(Sum own, Scratch& scratch) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    __syncthreads();  // an earlier use of `warps` is over
    if (lane == 0) scratch.warps[warp] = own;
    __syncthreads();
    return lane < WARPS ? scratch.warps[lane] : Sum{0, 0};
}

// Sum over the warps before this one; `total` receives the sum over all.
DEVICE Sum scan_warps(Sum own, Sum& total, Scratch& scratch) {
    const int warp = threadIdx.x / LANES;
    const Sum warps = scan_warp(exchange(own, scratch));
    const Sum before = from_lane(warps, max(warp - 1, 0));
    total = from_lane(warps, WARPS - 1);
    return warp == 0 ? Sum{0, 0} : before;
}

// Sum over the threads before this one; `total` receives the sum over all.
DEVICE Sum scan(Sum own, Sum& total, Scratch& scratch) {
    const Sum within = scan_warp(own);
    const Sum before = scan_warps(from_lane(within, LANES - 1), total, scratch);
    return {before.count + within.count - own.count, before.mass + within.mass - own.mass};
}

// Mass in units of 2^-31, rounded down; sums of integers do not depend on their order.
DEVICE unsigned fixed(unsigned key) {
    return static_cast<unsigned>(fminf(__uint_as_float(key), 1.f) * 2147483648.f);
}

// Which keys to take: those above `threshold`, and the first `ties` of those equal to it.
struct Cut {
    unsigned threshold, ties;
};

// Where to cut to take the `want` largest of n keys, or as few as hold the mass `target`; less than
// `slack` too many may be taken. Keys of 0 never are. Every thread receives the cut.
template <typename Key>
DEVICE Cut find_cut(int n, unsigned want, unsigned target, unsigned slack, Scratch& scratch,
                    Key key_of) {
    const int lane = threadIdx.x % LANES;
    unsigned ones = 0, zeros = 0;  // bits that are 1, and that are 0, in some key
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const unsigned key = key_of(i);
        ones |= key;
        zeros |= key ? ~key : 0;
    }
    const Sum bits = exchange({or_over_warp(ones), or_over_warp(zeros)}, scratch);
    ones = or_over_warp(bits.count);
    zeros = or_over_warp(bits.mass);
    if (ones == 0) return {0, 0};

    int high = LANES - __clz(ones & zeros);  // from this bit on keys are equal, or as `prefix` is
    unsigned prefix = high < LANES ? ones >> high << high : 0;
    Sum above = {0, 0}, total;
    for (bool begun = false;; begun = true) {
        const int shift = max(high - BITS, 0);
        for (int i = threadIdx.x; i < BINS / 2; i += THREADS)
            reinterpret_cast<uint4*>(scratch.counts)[i] = {0, 0, 0, 0};  // and the masses behind
        __syncthreads();
        for (int base = threadIdx.x - lane; base < n; base += THREADS * AT_ONCE) {
            unsigned keys[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int i = base + j * THREADS + lane;
                keys[j] = i < n ? key_of(i) : 0;
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                // Most lanes often share a bin; the first lane's bin is counted by one atomic.
                const bool counts = keys[j] && (!begun || (keys[j] ^ prefix) >> high == 0);
                const unsigned who = __ballot_sync(ALL_LANES, counts);
                if (who == 0) continue;
                const int leader = __ffs(who) - 1;
                const unsigned bin = keys[j] >> shift & (BINS - 1);
                const unsigned common = __shfl_sync(ALL_LANES, bin, leader);
                const bool same = counts && bin == common;
                const unsigned together = __popc(__ballot_sync(ALL_LANES, same));
                if (lane == leader) atomicAdd(&scratch.counts[common], together);
                if (counts && !same) atomicAdd(&scratch.counts[bin], 1u);
                if (target == NEVER) continue;
                const unsigned mass = counts ? fixed(keys[j]) : 0;
                const unsigned sum = add_over_warp(same ? mass : 0);
                if (lane == leader && sum) atomicAdd(&scratch.masses[common], sum);
                if (!same && mass) atomicAdd(&scratch.masses[bin], mass);
            }
        }
        __syncthreads();

        Sum own = {0, 0};  // of this thread's bins, the largest keys first
        for (int j = 0; j < BINS_EACH; ++j) {
            const int bin = BINS - 1 - (threadIdx.x * BINS_EACH + j);
            own = own + Sum{scratch.counts[bin], scratch.masses[bin]};
        }
        Sum before = above + scan(own, total, scratch);
        if (!begun && total.count < want && total.mass < target) return {0, 0};  // take all
        for (int j = 0; j < BINS_EACH; ++j) {
            const int digit = BINS - 1 - (threadIdx.x * BINS_EACH + j);
            const Sum bin = {scratch.counts[digit], scratch.masses[digit]};
            const Sum after = before + bin;
            if (before.count < want && before.mass < target &&
                (after.count >= want || after.mass >= target)) {  // true of exactly one bin
                scratch.above = before;
                scratch.bin = bin;
                scratch.digit = digit;
            }
            before = after;
        }
        __syncthreads();
        above = scratch.above;
        prefix |= static_cast<unsigned>(scratch.digit) << shift;
        if (shift == 0) break;
        const unsigned count = scratch.bin.count;
        if (count <= slack || (target == NEVER && above.count + count == want))
            return {prefix ? prefix - 1 : 0, 0};  // the whole bin
        high = shift;
    }
    unsigned ties = min(want - above.count, scratch.bin.count);
    const unsigned mass = target == NEVER ? 0 : fixed(prefix);
    if (mass) ties = min(ties, (target - above.mass + mass - 1) / mass);
    return {prefix, ties};
}

// Call put(i, kind, before) for the i < n whose kind is not 0, in any order. `before` says how many
// come before i of kinds 1 (count) and 2 (mass). Returns how many there are. What `put` writes is
// visible to all threads afterwards.
template <typename Kind, typename Put>
DEVICE Sum walk(int n, Scratch& scratch, Kind kind_of, Put put) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int each = (n + THREADS - 1) / THREADS * LANES;  // a run of indices per warp
    const int begin = warp * each, end = min(n, begin + each);
    Sum own = {0, 0}, total;
#pragma unroll 4
    for (int i = begin + lane; i < end; i += LANES) {
        const int kind = kind_of(i);
        own = own + Sum{kind == 1, kind == 2};
    }
    Sum before = scan_warps({add_over_warp(own.count), add_over_warp(own.mass)}, total, scratch);
    const unsigned lower_lanes = (1u << lane) - 1;
#pragma unroll 4
    for (int base = begin; base < end; base += LANES) {
        const int i = base + lane, kind = i < end ? kind_of(i) : 0;
        if (__ballot_sync(ALL_LANES, kind) == 0) continue;
        const unsigned ones = __ballot_sync(ALL_LANES, kind == 1);
        const unsigned twos = __ballot_sync(ALL_LANES, kind == 2);
        const Sum lower = {static_cast<unsigned>(__popc(ones & lower_lanes)),
                           static_cast<unsigned>(__popc(twos & lower_lanes))};
        if (kind) put(i, kind, before + lower);
        before = before + Sum{static_cast<unsigned>(__popc(ones)),
                              static_cast<unsigned>(__popc(twos))};
    }
    __syncthreads();
    return total;
}

// Call take(rank, i) for the i < n that the cut takes, ranks in ascending order of i; return their
// number. What `take` writes is visible to all threads afterwards.
template <typename Key, typename Take>
DEVICE int take_in_order(int n, Cut cut, Scratch& scratch, Key key_of, Take take) {
    const Sum found = walk(
        n, scratch,
        [&](int i) {
            const unsigned key = key_of(i);
            return key > cut.threshold ? 1 : key && key == cut.threshold && cut.ties ? 2 : 0;
        },
        [&](int i, int kind, Sum before) {
            if (kind == 2 && before.mass >= cut.ties) return;
            take(static_cast<int>(before.count + min(before.mass, cut.ties)), i);
        });
    return static_cast<int>(found.count + min(found.mass, cut.ties));
}

// The same of the indices marked in `above`, and the first `ties` of those marked in `equal`.
template <typename Take>
DEVICE int list_marked(const unsigned* above, const unsigned* equal, int words, unsigned ties,
                       Scratch& scratch, Take take) {
    const int each = (words + THREADS - 1) / THREADS;  // a run of words per thread
    const int begin = min(words, static_cast<int>(threadIdx.x) * each);
    const int end = min(words, begin + each);
    Sum own = {0, 0}, total;  // mass: of `equal`
    for (int word = begin; word < end; ++word)
        own = own + Sum{static_cast<unsigned>(__popc(above[word])),
                        static_cast<unsigned>(__popc(equal[word]))};
    Sum before = scan(own, total, scratch);
    for (int word = begin; word < end; ++word)
        for (unsigned left = above[word] | equal[word]; left; left &= left - 1) {
            const int bit = __ffs(left) - 1;
            const bool tie = equal[word] >> bit & 1;
            if (!tie || before.mass < ties)
                take(static_cast<int>(before.count + min(before.mass, ties)), word * LANES + bit);
            before = before + Sum{!tie, tie};
        }
    __syncthreads();
    return static_cast<int>(total.count + min(total.mass, ties));
}

constexpr int MISS = -1, MISSING = -2;  // instead of a frame

// The rules, per KV head; the rows of KV heads follow each other, those of one sequence after those
// of another: `sequence_heads` each. The first `cached` masses are kept in shared memory; a list of
// candidates has room for `listed`. Rows of `mass` are of whole 16 bytes.
//
// Sequence s has the addresses from s * capacity on, and pages in `fetch_pages` and `missing` count
// from there; its slots begin at frame first_frame + s * sequence_frames, its last frame is
// last_frame + s. What follows speaks of the first sequence.
//
// Choose: of candidates [first, last), last = min(*sealed - recent, capacity), those of largest
// mass, `budget` at most, or as few as hold share * 2^-32 of the candidates' mass if `share` is not
// 0; of equal ones those of lower index. Mass 0 or NaN is never chosen.
// -> selected [budget], ascending, -1 past chosen_count.
//
// Plan: a chosen page that has a frame (where[page] >= 0) is a hit and keeps it. Else, if
// addresses[page] is 0, it is missing: it is reported and, unless `waits`, not attended to. Else,
// or if `waits`, it is a miss and gets a slot of those that hold no chosen page: empty ones first,
// then those of the oldest stamp; of equal ones those of lower index. The i-th miss gets the i-th
// such slot, both in ascending order; the page that was there loses its frame. Slot s is frame
// first_frame + s, held[s] its page or -1, stamp[s] the step (read from *step) at which that page
// was last chosen. Frames that are no slots are the caller's: never evicted.
// -> table [table_offset ..]: the frames of hits and misses, ascending by page; count: how many;
//    tokens: (table_offset + count) * page_tokens; fetch_pages, fetch_frames, fetch_count: the
//    misses; missing, missing_count; stats [4] += hits, misses that are not missing, missing, and
//    hits in slots stamped *step already. If `last_tokens` is not null, the table ends with one
//    more frame, `last_frame`, and tokens counts *last_tokens more; `count` leaves it out.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
choose_pages(const float* mass, int mass_pages, int capacity, const int* sealed, int first,
             int recent, int cached, int listed, int budget, unsigned long long share,
             const long long* addresses, int* where, int* held, int* stamp, int slots,
             int first_frame, const int* step, int* selected, int* chosen_count, int* table,
             int table_pages, int table_offset, int page_tokens, const int* last_tokens,
             int last_frame, int* count, int* tokens,
             int* fetch_pages, int* fetch_frames, int* fetch_count, int* missing,
             int* missing_count, unsigned long long* stats, int waits, int sequence_heads,
             int sequence_frames) {
    SHARED_MEMORY(shared);
    __shared__ Scratch scratch;
    __shared__ unsigned again;  // hits that were chosen in this step before
    unsigned* const keys = reinterpret_cast<unsigned*>(shared);  // [cached] from page `origin` on
    unsigned* const list = keys + cached;                        // [listed] candidates' keys
    int* const list_pages = reinterpret_cast<int*>(list + listed);        // [listed] and pages
    unsigned* const marks = reinterpret_cast<unsigned*>(list_pages + listed);  // 2 bits a candidate
    unsigned* const slot_keys = marks + 2 * ((capacity + LANES - 1) / LANES);  // [slots]
    int* const pages = reinterpret_cast<int*>(slot_keys + slots);  // [budget] chosen
    int* const frames = pages + budget;   // [budget] theirs, or of a miss its place in the table
    int* const misses = frames + budget;  // [budget] indices of both
    const long long head = blockIdx.x;
    const int sequence = blockIdx.x / sequence_heads, base_page = sequence * capacity;
    const int origin = first / 4 * 4;
    addresses += base_page;
    first_frame += sequence * sequence_frames;
    last_frame += sequence;
    mass += head * mass_pages + origin;
    where += head * capacity;
    held += head * slots;
    stamp += head * slots;
    selected += head * budget;
    table += head * table_pages + table_offset;
    fetch_pages += head * budget;
    fetch_frames += head * budget;
    missing += head * budget;

    const int now = *step, beyond = last_tokens ? *last_tokens : 0;
    const int n = max(0, min(*sealed - recent, capacity) - origin);
    // Largest: empty, then oldest. Of a slot that was chosen in this step: stamped(now).
    auto stamped = [](int step) { return ~0u - 1 - static_cast<unsigned>(step); };
    for (int slot = threadIdx.x; slot < slots; slot += THREADS)
        slot_keys[slot] = held[slot] < 0 ? ~0u : stamped(stamp[slot]);
    if (threadIdx.x == 0) again = 0;

    auto positive = [](float value) { return value > 0.f ? __float_as_uint(value) : 0u; };
    auto is_candidate = [&](int i) { return i >= first - origin && i < n; };
    unsigned largest = 0, seen = 0;  // of the keys this thread loads, and the sum of their mass
    for (int base = threadIdx.x * 4; base < n; base += THREADS * 4 * QUADS) {
        float4 loaded[QUADS];
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            const int i = base + j * THREADS * 4;
            if (i < n) loaded[j] = *reinterpret_cast<const float4*>(mass + i);
        }
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            const int i = base + j * THREADS * 4;
            if (i >= n) break;
            uint4 four = {positive(loaded[j].x), positive(loaded[j].y), positive(loaded[j].z),
                          positive(loaded[j].w)};
            if (i < first - origin || i + 4 > n) {
                if (!is_candidate(i)) four.x = 0;
                if (!is_candidate(i + 1)) four.y = 0;
                if (!is_candidate(i + 2)) four.z = 0;
                if (!is_candidate(i + 3)) four.w = 0;
            }
            if (i < cached) *reinterpret_cast<uint4*>(keys + i) = four;
            largest = max(largest, max(max(four.x, four.y), max(four.z, four.w)));
            if (share) seen += fixed(four.x) + fixed(four.y) + fixed(four.z) + fixed(four.w);
        }
    }
    unsigned target = NEVER;
    if (share) {
        Sum total;
        scan_warps({0, add_over_warp(seen)}, total, scratch);
        target = static_cast<unsigned>((share * total.mass + 0xffffffffu) >> 32);
        if (target == 0) target = 1;  // of no mass at all nothing can be a share
    }
    __syncthreads();

    auto mass_key = [&](int i) {
        return i < cached ? keys[i] : is_candidate(i) ? positive(mass[i]) : 0u;
    };
    int found = listed + 1;
    if (n > listed && budget <= THREADS) {
        const int words = (n + LANES - 1) / LANES;
        unsigned* const above = marks;  // [words], bit i % 32 of word i / 32 for key i
        unsigned* const equal = marks + words;
        for (int word = threadIdx.x; word < 2 * words; word += THREADS) marks[word] = 0;
        const unsigned bound = find_cut(THREADS, budget, NEVER, SLACK, scratch,
                                        [&](int) { return largest; }).threshold;
        for (int base = threadIdx.x * 4; base < n && largest >= bound; base += THREADS * 4)
            for (int i = base; i < base + 4; ++i) {
                const unsigned key = i < n ? mass_key(i) : 0;
                if (key && key >= bound)  // nobody else sets this bit
                    atomicAdd((key > bound ? above : equal) + i / LANES, 1u << i % LANES);
            }
        __syncthreads();
        found = list_marked(above, equal, words, budget, scratch, [&](int rank, int i) {
            if (rank >= listed) return;
            list[rank] = mass_key(i);
            list_pages[rank] = origin + i;
        });
    }
    int chosen;
    if (found <= listed) {
        auto list_key = [&](int i) { return list[i]; };
        const Cut best = find_cut(found, budget, target, 1, scratch, list_key);
        chosen = take_in_order(found, best, scratch, list_key,
                               [&](int rank, int i) { pages[rank] = list_pages[i]; });
    } else {  // few keys, or many that can be among the largest
        const Cut best = find_cut(n, budget, target, 1, scratch, mass_key);
        chosen = take_in_order(n, best, scratch, mass_key,
                               [&](int rank, int i) { pages[rank] = origin + i; });
    }

    for (int i = threadIdx.x; i < budget; i += THREADS) {
        selected[i] = i < chosen ? pages[i] : -1;
        if (i >= chosen) continue;
        const int frame = where[pages[i]], slot = frame - first_frame;
        const bool present = addresses[pages[i]] != 0;
        frames[i] = frame >= 0 ? frame : present ? MISS : MISSING;
        if (frame < 0 || slot < 0 || slot >= slots) continue;
        if (slot_keys[slot] == stamped(now)) atomicAdd(&again, 1u);
        slot_keys[slot] = 0;
        stamp[slot] = now;
    }
    __syncthreads();

    int absent = 0;
    if (waits)
        absent = walk(chosen, scratch, [&](int i) { return frames[i] == MISSING ? 1 : 0; },
                      [&](int i, int, Sum before) { missing[before.count] = base_page + pages[i]; }).count;
    const Sum others = walk(
        chosen, scratch,
        [&](int i) {
            if (frames[i] == MISSING) return waits ? 1 : 2;
            return frames[i] == MISS ? 1 : 3;
        },
        [&](int i, int kind, Sum before) {
            const int place = i - static_cast<int>(before.mass);  // the table has none missing
            if (kind == 3) table[place] = frames[i];
            if (kind == 2) missing[before.mass] = base_page + pages[i];
            if (kind == 1) {
                misses[before.count] = i;
                frames[i] = place;
            }
        });
    const int missed = others.count, present = chosen - static_cast<int>(others.mass);
    if (!waits) absent = others.mass;
    if (missed > 0) {
        auto slot_key = [&](int slot) { return slot_keys[slot]; };
        const Cut oldest = find_cut(slots, missed, NEVER, 1, scratch, slot_key);
        take_in_order(slots, oldest, scratch, slot_key, [&](int rank, int slot) {
            const int page = pages[misses[rank]], frame = first_frame + slot;
            if (held[slot] >= 0) where[held[slot]] = -1;
            held[slot] = page;
            stamp[slot] = now;
            where[page] = frame;
            table[frames[misses[rank]]] = frame;
            fetch_pages[rank] = base_page + page;
            fetch_frames[rank] = frame;
        });
    }
    if (threadIdx.x != 0) return;
    chosen_count[head] = chosen;
    count[head] = present;
    if (last_tokens) table[present] = last_frame;
    tokens[head] = (table_offset + present) * page_tokens + beyond;
    fetch_count[head] = missed;
    missing_count[head] = absent;
    const unsigned counted[] = {static_cast<unsigned>(present - missed),
                                static_cast<unsigned>(missed - (waits ? absent : 0)),
                                static_cast<unsigned>(absent), again};
    for (int i = 0; i < 4; ++i)  // nobody else adds; an atomic is not waited for
        atomicAdd(stats + 4 * head + i, static_cast<unsigned long long>(counted[i]));
}
