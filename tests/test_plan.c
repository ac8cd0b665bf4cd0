/* SPDX-License-Identifier: MIT */
/* The plan of an arena: as its definition by plain loops makes it, and a checker that sees every overlap. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>

#include "graph/program.h"
#include "numbers.h"

static void the_checker_sees_overlaps(void **unused) {
    (void)unused;
    plan_range range[] = {{100, 0, 0, 3}, {50, 90, 2, 5}, {50, 90, 6, 7}};
    int32_t pair[2];
    assert_true(plan_find_overlap(range, 3, pair));
    assert_int_equal(pair[0], 0);
    assert_int_equal(pair[1], 1);
    range[1].first = 4;
    assert_true(plan_find_overlap(range, 3, pair));
    assert_int_equal(pair[0], -1);
    size_t arena, live;
    range[1].first = 2;
    assert_true(plan_arena(range, 3, &arena));
    assert_true(plan_find_overlap(range, 3, pair));
    assert_int_equal(pair[0], -1);
    assert_true(plan_live_bytes(range, 3, &live));
    assert_int_equal(live, 2 * PLAN_ALIGNMENT);
    assert_int_equal(arena, 2 * PLAN_ALIGNMENT);
}

static bool alive_together(const plan_range *a, const plan_range *b) {
    return a->first <= b->last && b->first <= a->last;
}

/*
 * The plan by its definition: in the order of weights, of equal ones in that of their first calls, each range at the
 * lowest offset that is free.
 */
static size_t plan_by_definition(plan_range *range, int count, bool by_life) {
    size_t arena = 0;
    bool placed[600] = {false};
    for (int round = 0; round < count; round++) {
        int own = -1;
        double heaviest = -1;
        for (int i = 0; i < count; i++) {
            double weight = (double)range[i].bytes * (by_life ? range[i].last - range[i].first + 1 : 1);
            if (placed[i] || weight < heaviest) continue;
            if (weight == heaviest && range[i].first >= range[own].first) continue;
            own = i;
            heaviest = weight;
        }
        size_t bytes = (range[own].bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT, at = 0;
        for (bool moved = true; moved;) {
            moved = false;
            for (int i = 0; i < count && bytes; i++) {
                size_t end = (range[i].offset + range[i].bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
                if (!placed[i] || !range[i].bytes || !alive_together(&range[i], &range[own])) continue;
                if (range[i].offset >= at + bytes || end <= at) continue;
                at = end;
                moved = true;
            }
        }
        range[own].offset = at;
        placed[own] = true;
        if (at + bytes > arena) arena = at + bytes;
    }
    return arena;
}

/* Blocks of ranges and their summaries are there for speed alone; long and short lives, equal sizes and empty ones. */
static void plans_are_as_defined(void **unused) {
    (void)unused;
    enum { COUNT = 600 };
    for (uint64_t seed = 0; seed < 24; seed++) {
        static plan_range range[COUNT], wanted[2][COUNT];
        for (int i = 0; i < COUNT; i++) {
            double size = random_of(7, seed, 3 * (uint64_t)i), from = random_of(7, seed, 3 * (uint64_t)i + 1),
                   life = random_of(7, seed, 3 * (uint64_t)i + 2);
            int first = seed % 3 ? (int)(fabs(from) * 1000) : i;
            int last = first + (int)(pow(fabs(life), seed % 4 ? 6 : 1) * 500);
            if (seed % 3 == 0) last = 2 * COUNT - i;
            size_t bytes = seed % 5 ? (size_t)(fabs(size) * 5000) : 512;
            range[i] = (plan_range){.bytes = i % 50 ? bytes : 0, .first = first, .last = last};
            if (seed ==
                23) { /* the gap below the second group was another range's, which is dead when the last begin */
                static const plan_range group[] = {{.bytes = 512, .first = 5, .last = 30},
                                                   {.bytes = 512, .first = 20, .last = 30},
                                                   {.bytes = 256, .first = 15, .last = 40}};
                range[i] = i ? group[i * 3 / COUNT] : (plan_range){.bytes = 256000, .first = 0, .last = 10};
            }
            wanted[0][i] = wanted[1][i] = range[i];
        }
        size_t arena, by_size = plan_by_definition(wanted[0], COUNT, false),
                      by_life = plan_by_definition(wanted[1], COUNT, true);
        assert_true(plan_arena(range, COUNT, &arena));
        assert_int_equal(arena, by_life < by_size ? by_life : by_size);
        for (int i = 0; i < COUNT; i++)
            if (range[i].bytes) assert_int_equal(range[i].offset, wanted[by_life < by_size][i].offset);
        size_t live = 0, found;
        for (int i = 0; i < COUNT; i++) {
            size_t own = 0;
            for (int j = 0; j < COUNT; j++)
                if (range[j].first <= range[i].first && range[i].first <= range[j].last)
                    own += (range[j].bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
            if (own > live) live = own;
        }
        assert_true(plan_live_bytes(range, COUNT, &found));
        assert_int_equal(found, live);
        /* Any range moved onto one that is alive with it is seen. */
        int32_t pair[2];
        assert_true(plan_find_overlap(range, COUNT, pair));
        assert_int_equal(pair[0], -1);
        for (int i = 0; i < COUNT; i += 37) {
            int other = (i * 7 + 1) % COUNT;
            if (!alive_together(&range[i], &range[other]) || !range[i].bytes || !range[other].bytes) continue;
            size_t kept = range[i].offset;
            range[i].offset = range[other].offset + range[other].bytes - 1;
            assert_true(plan_find_overlap(range, COUNT, pair));
            assert_true(pair[0] >= 0 && pair[1] >= 0);
            range[i].offset = kept;
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_checker_sees_overlaps),
        cmocka_unit_test(plans_are_as_defined),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
