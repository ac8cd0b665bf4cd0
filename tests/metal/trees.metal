/* SPDX-License-Identifier: MIT */
// The sums of common.metal on their own, for every size of team and threadgroup.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, x) operand(Float, 1, sum) operand(Float, 2, largest) operand(Float, 3, column)
#define NUMBERS(number)
#define KERNELS(kernel_of) kernel_of(sums) kernel_of(twice)

struct Params {
    uint lanes;
};

struct Shared {
    uint none;
};

#include "common.metal"

inline void sums(thread const Call &c) {
    uint i = c.group * c.threads + c.lane;
    float2 two = team_sum(c, float2(c.x.at(i), 1.0f), c.p.lanes);
    float most = team_max(c, abs(c.x.at(i)), c.p.lanes);
    float4 across = across_teams(c, float4(c.x.at(i)), c.p.lanes);
    if ((c.lane / c.p.lanes + 1) * c.p.lanes <= c.threads) {
        c.sum.set(i, two.y == float(c.p.lanes) ? two.x : -1.0f);
        c.largest.set(i, most);
    }
    if (c.lane < c.p.lanes) {
        c.column.set(i, across.w);
    }
}

// Two sums one after another: the second must not overwrite what is still being read of the first.
inline void twice(thread const Call &c) {
    uint i = c.group * c.threads + c.lane;
    float first = team_sum(c, c.x.at(i), c.p.lanes);
    float second = team_sum(c, 2.0f * c.x.at(i), c.p.lanes);
    if ((c.lane / c.p.lanes + 1) * c.p.lanes <= c.threads) {
        c.sum.set(i, first);
        c.largest.set(i, second);
    }
}

KERNELS(ENTRY)
