// The softmax over pages, or over a page's keys, in parts that can be added.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f;

// Largest logit and the sum of e^(logit - largest).
struct Softmax {
    float maximum, sum;

    DEVICE void add(Softmax other) {
        const float top = fmaxf(maximum, other.maximum);
        const float base = top == minus_infinity() ? 0.f : top;
        sum = sum * exp2_fast(LOG2_E * (maximum - base)) +
              other.sum * exp2_fast(LOG2_E * (other.maximum - base));
        maximum = top;
    }
    DEVICE void add_lane(int distance) {
        add({__shfl_xor_sync(ALL_LANES, maximum, distance),
             __shfl_xor_sync(ALL_LANES, sum, distance)});
    }
};
