// Choose the pages of largest mass per KV head, and plan which frames they are read from.
//
// One block per KV head does everything, so nothing has to wait for another block, and every
// result is the same at every run: equal keys are taken in order of their index.
//
// -D: THREADS.
#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr int BITS = 11;  // of a key that one pass looks at
constexpr int BINS = 1 << BITS;
constexpr int BINS_EACH = BINS / THREADS;
constexpr int AT_ONCE = 4;  // keys a thread loads before it looks at one
constexpr unsigned NEVER = 0xffffffffu;  // a target of mass that is not reached
static_assert(THREADS % LANES == 0 && WARPS <= LANES && BINS % THREADS == 0, "see scan");

struct Sum {
    unsigned count, mass;
};
DEVICE Sum operator+(Sum a, Sum b) { return {a.count + b.count, a.mass + b.mass}; }

struct Scratch {
    unsigned counts[BINS], masses[BINS];
    Sum warps[WARPS];
    Sum above, bin;  // of the keys above the bin where the cut lies, and of that bin
    int digit;
};

// Sum over the lanes before this one and itself.
DEVICE Sum scan_warp(Sum value) {
    for (int distance = 1; distance < LANES; distance *= 2) {
        const Sum other = {__shfl_up_sync(ALL_LANES, value.count, distance),
                           __shfl_up_sync(ALL_LANES, value.mass, distance)};
        if (threadIdx.x % LANES >= distance) value = value + other;
    }
    return value;
}

// Sum over the threads before this one; `total` receives the sum over all.
DEVICE Sum scan(Sum own, Sum& total, Scratch& scratch) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const Sum within = scan_warp(own);
    __syncthreads();  // an earlier use of `warps` is over
    if (lane == LANES - 1) scratch.warps[warp] = within;
    __syncthreads();
    Sum none = {0, 0};
    const Sum warps = scan_warp(lane < WARPS ? scratch.warps[lane] : none);
    const int before = warp == 0 ? 0 : warp - 1;
    const Sum others = {__shfl_sync(ALL_LANES, warps.count, before),
                        __shfl_sync(ALL_LANES, warps.mass, before)};
    total = {__shfl_sync(ALL_LANES, warps.count, WARPS - 1),
             __shfl_sync(ALL_LANES, warps.mass, WARPS - 1)};
    return {(warp == 0 ? 0 : others.count) + within.count - own.count,
            (warp == 0 ? 0 : others.mass) + within.mass - own.mass};
}

// Mass in units of 2^-31, rounded down; sums of integers do not depend on their order.
DEVICE unsigned fixed(unsigned key) {
    return static_cast<unsigned>(fminf(__uint_as_float(key), 1.f) * 2147483648.f);
}

// Which keys to take: those above `threshold`, and the first `ties` of those equal to it.
struct Cut {
    unsigned threshold, ties;
};

// Where to cut to take the `want` largest of n keys, or as few as hold `share` * 2^-32 of all mass
// if that is not 0. Keys of 0 are never taken. Every thread receives the cut.
template <typename Key>
DEVICE Cut find_cut(int n, unsigned want, unsigned long long share, Scratch& scratch, Key key_of) {
    const int lane = threadIdx.x % LANES;
    unsigned prefix = 0, target = NEVER;
    Sum above = {0, 0}, total;
    for (int shift = 32 - BITS, pass = 0; pass < 3; ++pass) {
        const unsigned digits = pass < 2 ? BINS - 1 : (1u << (32 - 2 * BITS)) - 1;
        const unsigned known = pass == 0 ? 0 : ~0u << (pass == 1 ? 32 - BITS : 32 - 2 * BITS);
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
            scratch.counts[bin] = scratch.masses[bin] = 0;
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
                const bool counts = keys[j] != 0 && (keys[j] & known) == prefix;
                const unsigned who = __ballot_sync(ALL_LANES, counts);
                if (who == 0) continue;
                const int leader = __ffs(who) - 1;
                const unsigned bin = keys[j] >> shift & digits;
                const unsigned common = __shfl_sync(ALL_LANES, bin, leader);
                const bool same = counts && bin == common;
                const unsigned together = __popc(__ballot_sync(ALL_LANES, same));
                if (lane == leader) atomicAdd(&scratch.counts[common], together);
                if (counts && !same) atomicAdd(&scratch.counts[bin], 1u);
                if (share == 0) continue;
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
        if (pass == 0 && share != 0) {  // of no mass at all nothing can be a share
            target = static_cast<unsigned>((share * total.mass + 0xffffffffu) >> 32);
            if (target == 0) target = 1;
        }
        if (pass == 0 && total.count < want && total.mass < target) return {0, 0};  // take all
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
        shift = pass == 0 ? 32 - 2 * BITS : 0;
    }
    unsigned ties = min(want - above.count, scratch.bin.count);
    const unsigned mass = share ? fixed(prefix) : 0;
    if (mass) ties = min(ties, (target - above.mass + mass - 1) / mass);
    __syncthreads();  // the scratch may be used again
    return {prefix, ties};
}

// Call take(rank, i) for the i < n that the cut takes, in ascending order; return their number.
// What `take` writes is visible to all threads afterwards.
template <typename Key, typename Take>
DEVICE int take_in_order(int n, Cut cut, Scratch& scratch, Key key_of, Take take) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int each = (n + THREADS - 1) / THREADS * LANES;  // a run of indices per warp
    const int begin = warp * each, end = min(n, begin + each);
    unsigned larger = 0, equal = 0;
    for (int base = begin; base < end; base += LANES) {
        const unsigned key = base + lane < end ? key_of(base + lane) : 0;
        larger += __popc(__ballot_sync(ALL_LANES, key > cut.threshold));
        equal += __popc(__ballot_sync(ALL_LANES, key != 0 && key == cut.threshold));
    }
    Sum total;  // count: keys above the threshold; mass: keys equal to it
    const Sum own = {lane == 0 ? larger : 0, lane == 0 ? equal : 0};
    const Sum offset = scan(own, total, scratch);
    larger = __shfl_sync(ALL_LANES, offset.count, 0);
    equal = __shfl_sync(ALL_LANES, offset.mass, 0);
    const unsigned lower_lanes = (1u << lane) - 1;
    for (int base = begin; base < end; base += LANES) {
        const unsigned key = base + lane < end ? key_of(base + lane) : 0;
        const bool is_larger = key > cut.threshold;
        const bool is_equal = key != 0 && key == cut.threshold;
        const unsigned all_larger = __ballot_sync(ALL_LANES, is_larger);
        const unsigned all_equal = __ballot_sync(ALL_LANES, is_equal);
        const unsigned tie = equal + __popc(all_equal & lower_lanes);
        const unsigned rank = larger + __popc(all_larger & lower_lanes) + min(tie, cut.ties);
        if (is_larger || (is_equal && tie < cut.ties))
            take(static_cast<int>(rank), base + lane);
        larger += __popc(all_larger);
        equal += __popc(all_equal);
    }
    __syncthreads();
    return static_cast<int>(total.count + min(total.mass, cut.ties));
}

constexpr int MISS = -1, MISSING = -2, AWAITED = -3;  // instead of a frame

// The rules, per KV head; the rows of KV heads follow each other. The first `cached` keys are kept
// in shared memory.
//
// Choose: of candidates [first, last), last = min(*sealed - recent, capacity), those of largest
// mass, `budget` at most, or as few as hold share * 2^-32 of the candidates' mass if `share` is not
// 0; of equal ones those of lower index. Mass 0 or NaN is never chosen.
// -> selected [budget], ascending, -1 past chosen_count.
//
// Plan: a chosen page that has a frame (where[page] >= 0) is a hit and keeps it. Else, if
// addresses[page] is 0, it is missing: it is reported and, unless `waits`, not attended to. Else, or
// if `waits`, it is a miss and gets a slot of those that hold no chosen page: empty ones first, then those of the oldest stamp;
// of equal ones those of lower index. The i-th miss gets the i-th such slot, both in ascending
// order; the page that was there loses its frame. Slot s is frame first_frame + s, held[s] its
// page or -1, stamp[s] the step (read from *step) at which that page was last chosen. Frames that
// are no slots are the caller's: never evicted.
// -> table [table_offset ..]: the frames of hits and misses, ascending by page; count: how many;
//    tokens: (table_offset + count) * page_tokens; fetch_pages, fetch_frames, fetch_count: the
//    misses; missing, missing_count; stats [4] += hits, misses that are not missing, missing, and
//    hits in slots stamped *step already.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
choose_pages(const float* mass, int mass_pages, int capacity, const int* sealed, int first,
             int recent, int cached, int budget, unsigned long long share,
             const long long* addresses, int* where, int* held, int* stamp, int slots,
             int first_frame, const int* step, int* selected, int* chosen_count, int* table,
             int table_pages, int table_offset, int page_tokens, int* count, int* tokens,
             int* fetch_pages, int* fetch_frames, int* fetch_count, int* missing,
             int* missing_count, long long* stats, int waits) {
    SHARED_MEMORY(shared);
    __shared__ Scratch scratch;
    __shared__ unsigned again;  // hits that were chosen in this step before
    unsigned* const slot_keys = reinterpret_cast<unsigned*>(shared);  // [slots]
    int* const pages = reinterpret_cast<int*>(slot_keys + slots);     // [budget] chosen
    int* const frames = pages + budget;                               // [budget] theirs
    int* const misses = frames + budget;                              // [budget] indices of both
    unsigned* const keys = reinterpret_cast<unsigned*>(misses + budget);  // [cached] first keys
    const long long head = blockIdx.x;
    mass += head * mass_pages + first;
    where += head * capacity;
    held += head * slots;
    stamp += head * slots;
    selected += head * budget;
    table += head * table_pages + table_offset;
    fetch_pages += head * budget;
    fetch_frames += head * budget;
    missing += head * budget;

    const int n = max(0, min(*sealed - recent, capacity) - first);
    auto read_key = [&](int i) { return mass[i] > 0.f ? __float_as_uint(mass[i]) : 0u; };
#pragma unroll 4
    for (int i = threadIdx.x; i < min(n, cached); i += THREADS) keys[i] = read_key(i);
    __syncthreads();
    auto mass_key = [&](int i) { return i < cached ? keys[i] : read_key(i); };
    const Cut best = find_cut(n, budget, share, scratch, mass_key);
    const int chosen = take_in_order(n, best, scratch, mass_key,
                                     [&](int rank, int i) { pages[rank] = first + i; });

    const int now = *step;
    if (threadIdx.x == 0) again = 0;
    for (int slot = threadIdx.x; slot < slots; slot += THREADS)  // largest: empty, then oldest
        slot_keys[slot] = held[slot] < 0 ? ~0u : ~0u - 1 - static_cast<unsigned>(stamp[slot]);
    __syncthreads();
    for (int i = threadIdx.x; i < budget; i += THREADS) {
        selected[i] = i < chosen ? pages[i] : -1;
        if (i >= chosen) continue;
        frames[i] = where[pages[i]];
        if (frames[i] < 0) {
            frames[i] = addresses[pages[i]] ? MISS : waits ? AWAITED : MISSING;
        } else if (frames[i] >= first_frame && frames[i] < first_frame + slots) {
            slot_keys[frames[i] - first_frame] = 0;
            if (stamp[frames[i] - first_frame] == now) atomicAdd(&again, 1u);
            stamp[frames[i] - first_frame] = now;
        }
    }
    __syncthreads();

    const Cut all = {0, 0};
    const int missed = take_in_order(
        chosen, all, scratch,
        [&](int i) { return frames[i] == MISS || frames[i] == AWAITED ? 1u : 0u; },
        [&](int rank, int i) { misses[rank] = i; });
    const int absent = take_in_order(
        chosen, all, scratch, [&](int i) { return frames[i] <= MISSING ? 1u : 0u; },
        [&](int rank, int i) { missing[rank] = pages[i]; });
    if (missed > 0) {
        auto slot_key = [&](int slot) { return slot_keys[slot]; };
        const Cut oldest = find_cut(slots, missed, 0, scratch, slot_key);
        take_in_order(slots, oldest, scratch, slot_key, [&](int rank, int slot) {
            const int page = pages[misses[rank]], frame = first_frame + slot;
            if (held[slot] >= 0) where[held[slot]] = -1;
            held[slot] = page;
            stamp[slot] = now;
            where[page] = frame;
            frames[misses[rank]] = frame;
            fetch_pages[rank] = page;
            fetch_frames[rank] = frame;
        });
    }
    const int present = take_in_order(
        chosen, all, scratch, [&](int i) { return frames[i] >= 0 ? 1u : 0u; },
        [&](int rank, int i) { table[rank] = frames[i]; });
    if (threadIdx.x != 0) return;
    chosen_count[head] = chosen;
    count[head] = present;
    tokens[head] = (table_offset + present) * page_tokens;
    fetch_count[head] = missed;
    missing_count[head] = absent;
    stats[4 * head] += present - missed;
    stats[4 * head + 1] += missed - (waits ? absent : 0);
    stats[4 * head + 2] += absent;
    stats[4 * head + 3] += again;
}
