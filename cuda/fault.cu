// Page faults: chosen pages that are in no host frame are asked for, and waited for, by the kernel.
//
// A mailbox in pinned host memory holds one question and one answer, each with its number. The
// question is a layer and the pages that it misses; a thread of the host brings them into host
// frames and answers with their addresses. While it works it beats; if it has not for `patience`
// nanoseconds, the kernel gives up, so that nothing hangs when the host is dead. After a refusal or
// that, nothing more is asked in this step: what it computes is not to be used.
#include "host.cuh"
#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr int PARTS = 8;      // blocks that look through the candidates of a KV head
constexpr int FORESEEN = 15;  // pages that one of them reports at most
constexpr int EVERY = 4;      // steps from one look to the next, another one for every layer

// Words of the mailbox: the host writes the first ones, the kernel those from ASKED on.
constexpr int BEAT = 0, ANSWERED = 1, REFUSED = 2, REST = 3;
constexpr int ASKED = 32, LAYER = 33, ROUND = 34, COUNT = 35, GAVE_UP = 36;
// Words of the state in device memory.
constexpr int NUMBER = 0, FAILED = 1, LEFT = 2;

// Bring the pages that a choice misses into host frames.
DEVICE void ask(int layer, int round, const int* missing, const int* missing_counts, int kv_heads,
                int budget, long long* addresses, int* state, unsigned* mailbox, int* pages,
                const long long* answers, unsigned long long patience) {
    __shared__ int answered;
    int count = 0;
    for (int head = 0; head < kv_heads; ++head) count += missing_counts[head];
    if (count == 0 || state[FAILED] || (round > 0 && state[LEFT] == 0)) return;
    for (int head = 0, first = 0; head < kv_heads; first += missing_counts[head++])
        for (int i = threadIdx.x; i < missing_counts[head]; i += THREADS)
            pages[first + i] = missing[static_cast<long long>(head) * budget + i];
    show_to_host();
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned number = static_cast<unsigned>(++state[NUMBER]);
        mailbox[LAYER] = layer;
        mailbox[ROUND] = round;
        mailbox[COUNT] = count;
        unsigned beat = load_from_host(mailbox + BEAT);
        unsigned long long heard = nanoseconds();
        store_to_host(mailbox + ASKED, number);
        bool waits = true;
        while (waits && load_from_host(mailbox + ANSWERED) != number) {
            nap();
            const unsigned now = load_from_host(mailbox + BEAT);
            if (now != beat) heard = nanoseconds();
            beat = now;
            waits = nanoseconds() - heard < patience;
        }
        answered = waits && !load_from_host(mailbox + REFUSED);
        if (!waits) store_to_host(mailbox + GAVE_UP, number);
        state[LEFT] = answered ? load_from_host(mailbox + REST) : 0;
        state[FAILED] = !answered;
    }
    __syncthreads();
    if (!answered) return;
    const volatile long long* const told = answers;
    for (int i = threadIdx.x; i < count; i += THREADS) addresses[pages[i]] = told[i];
}

// Part `part` of what the host should know of the choice of one KV head, of a sequence whose pages
// count from `base_page`.
DEVICE void note(int part, const float* mass, int stop, int first, const int* selected, int chosen,
                 const long long* addresses, const int* where, int now, float share,
                 int* last_chosen, int base_page, int* foreseen) {
    __shared__ float least_of[WARPS];
    __shared__ int found;
    if (threadIdx.x == 0) found = 0;
    float least = -minus_infinity();
    for (int i = threadIdx.x; i < chosen; i += THREADS) {
        least = fminf(least, mass[selected[i]]);
        if (part == 0) last_chosen[selected[i]] = now;
    }
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        least = fminf(least, __shfl_xor_sync(ALL_LANES, least, distance));
    if (threadIdx.x % LANES == 0) least_of[threadIdx.x / LANES] = least;
    __syncthreads();
    for (int warp = 0; warp < WARPS; ++warp) least = fminf(least, least_of[warp]);
#pragma unroll 4
    for (int page = first + part * THREADS + threadIdx.x; page < stop; page += PARTS * THREADS) {
        if (addresses[page] != 0 || where[page] >= 0 || !(mass[page] >= share * least)) continue;
        const int at = atomicAdd(&found, 1);
        if (at < FORESEEN) foreseen[1 + at] = base_page + page;
    }
    __syncthreads();
    if (threadIdx.x == 0) foreseen[0] = min(found, FORESEEN);
}

// KV heads, addresses and pages of several sequences follow each other as in `choose_pages`.
//
// Block 0 asks, the others note at every fourth step. Runs after `choose_pages` and before the fetch.
//
// Round 0 of a layer asks for all its missing pages; the host may bring a part of them only. A later
// round (block 0 alone), after the fetch of that part, asks for the same pages while the host says
// that some are left, and is answered with the addresses of the next part, and 0 for pages that were
// fetched and whose frames are taken again.
// -> addresses[page] of the pages asked for; and if it is noted
//    last_chosen[page] = *step of the chosen pages;
//    foreseen [kv_heads * PARTS, 1 + FORESEEN] in host memory: how many, then pages in no host frame
//    and no device frame that were not chosen, but have at least `share` of the mass of the least
//    that was; some of them if there are more.
extern "C" __global__ void __launch_bounds__(THREADS)
report_choice(int layer, int round, const int* missing, const int* missing_counts, int kv_heads,
              int budget, long long* addresses, int* state, unsigned* mailbox, int* pages,
              const long long* answers, unsigned long long patience, const float* mass,
              int mass_pages, int capacity, const int* sealed, int first, int recent,
              const int* selected, const int* chosen, const int* where, const int* step,
              float share, int* last_chosen, int* foreseen, int sequence_heads) {
    if (blockIdx.x == 0) {
        ask(layer, round, missing, missing_counts, kv_heads, budget, addresses, state, mailbox,
            pages, answers, patience);
        return;
    }
    if ((*step + layer) % EVERY != 0) return;
    const int index = blockIdx.x - 1, part = index % PARTS;
    const long long head = index / PARTS;
    const int base_page = index / PARTS / sequence_heads * capacity;
    note(part, mass + head * mass_pages, min(*sealed - recent, capacity), first,
         selected + head * budget, chosen[head], addresses + base_page, where + head * capacity,
         *step, share, last_chosen + base_page, base_page, foreseen + index * (1 + FORESEEN));
}
