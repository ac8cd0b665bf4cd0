/*
 * Placing ranges of memory with lifetimes in one arena. Finding the smallest arena is as hard as packing; in practice
 * the largest range first, each at the lowest place that is free for its whole life, comes within a few per cent of
 * what is alive at the worst moment, which no plan can beat. Orders by size and by size times lifetime are both tried.
 */
#include <stdlib.h>
#include <string.h>

#include "graph/graph.h"

static bool together(const plan_range *a, const plan_range *b) {
    return a->first <= b->last && b->first <= a->last;
}

static size_t aligned(size_t bytes) {
    return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

typedef struct ranked {
    double weight;
    int32_t index;
} ranked;

static int heavier_first(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->weight != y->weight) return x->weight > y->weight ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

/* Ranges already placed, in the order of their offsets. */
static size_t lowest_place(const plan_range *range, const int32_t *placed, int32_t count, const plan_range *own) {
    size_t at = 0, wanted = aligned(own->bytes);
    for (int32_t i = 0; i < count; i++) {
        const plan_range *other = &range[placed[i]];
        if (!together(own, other)) continue;
        if (other->offset >= at + wanted) break;
        size_t end = other->offset + aligned(other->bytes);
        if (end > at) at = end;
    }
    return at;
}

static size_t place_all(plan_range *range, const ranked *order, int32_t count, int32_t *placed) {
    size_t arena = 0;
    for (int32_t i = 0; i < count; i++) {
        plan_range *own = &range[order[i].index];
        own->offset = lowest_place(range, placed, i, own);
        int32_t at = i;
        for (; at > 0 && range[placed[at - 1]].offset > own->offset; at--)
            placed[at] = placed[at - 1];
        placed[at] = order[i].index;
        if (own->offset + aligned(own->bytes) > arena) arena = own->offset + aligned(own->bytes);
    }
    return arena;
}

bool plan_arena(plan_range *range, int32_t count, size_t *arena_bytes) {
    *arena_bytes = 0;
    if (count == 0) return true;
    ranked *order = malloc((size_t)count * sizeof *order);
    int32_t *placed = malloc((size_t)count * sizeof *placed);
    size_t *best_offset = malloc((size_t)count * sizeof *best_offset);
    bool ok = order && placed && best_offset;
    size_t best = SIZE_MAX;
    for (int way = 0; way < 2 && ok; way++) {
        for (int32_t i = 0; i < count; i++) {
            double life = way ? range[i].last - range[i].first + 1 : 1;
            order[i] = (ranked){(double)range[i].bytes * life, i};
        }
        qsort(order, (size_t)count, sizeof *order, heavier_first);
        size_t arena = place_all(range, order, count, placed);
        if (arena >= best) continue;
        best = arena;
        for (int32_t i = 0; i < count; i++)
            best_offset[i] = range[i].offset;
    }
    for (int32_t i = 0; i < count && ok; i++)
        range[i].offset = best_offset[i];
    *arena_bytes = ok ? best : 0;
    free(order);
    free(placed);
    free(best_offset);
    return ok;
}

size_t plan_live_bytes(const plan_range *range, int32_t count) {
    size_t most = 0;
    /* The most is alive when some range begins. */
    for (int32_t i = 0; i < count; i++) {
        size_t live = 0;
        for (int32_t j = 0; j < count; j++)
            if (range[j].first <= range[i].first && range[i].first <= range[j].last) live += aligned(range[j].bytes);
        if (live > most) most = live;
    }
    return most;
}

bool plan_find_overlap(const plan_range *range, int32_t count, int32_t *one, int32_t *other) {
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = i + 1; j < count; j++)
            if (range[i].bytes && range[j].bytes && together(&range[i], &range[j]) &&
                range[i].offset < range[j].offset + range[j].bytes &&
                range[j].offset < range[i].offset + range[i].bytes) {
                *one = i;
                *other = j;
                return true;
            }
    return false;
}
