/* SPDX-License-Identifier: MIT */
/*
 * Placing ranges of memory with lifetimes in one arena. Finding the smallest arena is as hard as bin packing; in
 * practice the largest range first, each at the lowest offset that is free during its whole life, comes within a few
 * per cent of the bytes alive at the worst moment, which no plan can beat. Both orders, by size and by size times
 * lifetime, are tried.
 *
 * The placed ranges are kept in the order of their offsets, in blocks that summarise their lifetimes and gaps. In the
 * graphs of networks nearly every block is either alive with a new range as a whole, without a gap that is large
 * enough, or not at all, and is skipped: n ranges take about n^2 / BLOCK steps instead of n^2.
 */
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "graph/graph.h"

static bool together(const plan_range *a, const plan_range *b) {
    return a->first <= b->last && b->first <= a->last;
}

/* plan_arena() has checked that the sum of all of them fits. */
static size_t aligned(size_t bytes) {
    return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

static size_t end_of(const plan_range *range) {
    return range->offset + aligned(range->bytes);
}

/* ---- Placed ranges, by offset ------------------------------------------------------------------------ */

enum { BLOCK = 128 };

typedef struct block {
    int32_t range[BLOCK], count;
    int32_t first_min, first_max, last_min, last_max;
    size_t end;     /* of the range that ends last */
    size_t max_gap; /* the largest one between two of its ranges, if all of them are alive */
} block;

typedef struct placed_ranges {
    plan_range *range; /* of the caller */
    block *block;
    int32_t *order; /* of the blocks, by offset */
    int32_t blocks;
} placed_ranges;

static void summarise(const plan_range *range, block *b) {
    b->first_min = b->last_min = INT32_MAX;
    b->first_max = b->last_max = INT32_MIN;
    b->end = b->max_gap = 0;
    for (int32_t i = 0; i < b->count; i++) {
        const plan_range *own = &range[b->range[i]];
        if (own->first < b->first_min) b->first_min = own->first;
        if (own->first > b->first_max) b->first_max = own->first;
        if (own->last < b->last_min) b->last_min = own->last;
        if (own->last > b->last_max) b->last_max = own->last;
        if (i && own->offset > b->end && own->offset - b->end > b->max_gap) b->max_gap = own->offset - b->end;
        if (end_of(own) > b->end) b->end = end_of(own);
    }
}

/* Moves the upper half of a full block to a new one after it. */
static void split(placed_ranges *p, int32_t at) {
    block *from = &p->block[p->order[at]], *to = &p->block[p->blocks];
    to->count = BLOCK / 2;
    from->count -= to->count;
    memcpy(to->range, from->range + from->count, (size_t)to->count * sizeof to->range[0]);
    memmove(p->order + at + 2, p->order + at + 1, (size_t)(p->blocks - at - 1) * sizeof *p->order);
    p->order[at + 1] = p->blocks++;
    summarise(p->range, from);
    summarise(p->range, to);
}

static void insert(placed_ranges *p, int32_t index) {
    const plan_range *range = p->range;
    size_t offset = range[index].offset;
    int32_t low = 0, high = p->blocks - 1;
    while (low < high) { /* the last block that begins at or below the offset */
        int32_t middle = low + (high - low + 1) / 2;
        if (range[p->block[p->order[middle]].range[0]].offset <= offset)
            low = middle;
        else
            high = middle - 1;
    }
    if (p->block[p->order[low]].count == BLOCK) {
        split(p, low);
        if (range[p->block[p->order[low + 1]].range[0]].offset <= offset) low++;
    }
    block *b = &p->block[p->order[low]];
    int32_t at = b->count++;
    for (; at > 0 && range[b->range[at - 1]].offset > offset; at--)
        b->range[at] = b->range[at - 1];
    b->range[at] = index;
    summarise(range, b);
}

/* The lowest offset where `own` overlaps no range that is alive together with it. */
static size_t lowest_offset(const placed_ranges *p, const plan_range *own) {
    size_t at = 0, wanted = aligned(own->bytes);
    for (int32_t k = 0; k < p->blocks; k++) {
        const block *b = &p->block[p->order[k]];
        if (!b->count || b->first_min > own->last || b->last_max < own->first) continue; /* none is alive with it */
        size_t begin = p->range[b->range[0]].offset;
        bool all = b->first_max <= own->last && b->last_min >= own->first;
        if (all && begin < at + wanted && b->max_gap < wanted) {
            if (b->end > at) at = b->end;
            continue;
        }
        for (int32_t i = 0; i < b->count; i++) {
            const plan_range *other = &p->range[b->range[i]];
            if (!together(own, other)) continue;
            if (other->offset >= at + wanted) return at;
            if (end_of(other) > at) at = end_of(other);
        }
    }
    return at;
}

/* ---- Both orders ------------------------------------------------------------------------------------- */

typedef struct ranked {
    double weight;
    int32_t first, index;
} ranked;

/* Of equal ones the one that begins first: if all are equal, no plan is better. */
static int heavier_first(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->weight != y->weight) return x->weight > y->weight ? -1 : 1;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

static size_t place_all(placed_ranges *p, const ranked *order, int32_t count) {
    size_t arena = 0;
    p->blocks = 1;
    p->order[0] = 0;
    p->block[0].count = 0;
    for (int32_t i = 0; i < count; i++) {
        plan_range *own = &p->range[order[i].index];
        own->offset = lowest_offset(p, own);
        insert(p, order[i].index);
        if (end_of(own) > arena) arena = end_of(own);
    }
    return arena;
}

bool plan_sizes_fit(const plan_range *range, int32_t count) {
    size_t total = 0, own;
    for (int32_t i = 0; i < count; i++)
        if (!vjp_align_size(range[i].bytes, PLAN_ALIGNMENT, &own) || !vjp_add_size(total, own, &total)) return false;
    return true;
}

bool plan_arena(plan_range *range, int32_t count, size_t *arena_bytes) {
    *arena_bytes = 0;
    if (count == 0) return true;
    /* A block is split when it is full, so each but the first holds at least half. */
    size_t blocks = (size_t)count / (BLOCK / 2) + 1;
    placed_ranges placed = {.range = range};
    placed.block = malloc(blocks * sizeof *placed.block);
    placed.order = malloc(blocks * sizeof *placed.order);
    ranked *order = malloc((size_t)count * sizeof *order);
    size_t *best_offset = malloc((size_t)count * sizeof *best_offset);
    bool ok = placed.block && placed.order && order && best_offset;
    size_t best = SIZE_MAX;
    for (int by_life = 0; by_life < 2 && ok; by_life++) {
        for (int32_t i = 0; i < count; i++) {
            double life = by_life ? range[i].last - range[i].first + 1 : 1;
            order[i] = (ranked){(double)range[i].bytes * life, range[i].first, i};
        }
        qsort(order, (size_t)count, sizeof *order, heavier_first);
        size_t arena = place_all(&placed, order, count);
        if (arena >= best) continue;
        best = arena;
        for (int32_t i = 0; i < count; i++)
            best_offset[i] = range[i].offset;
    }
    for (int32_t i = 0; i < count && ok; i++)
        range[i].offset = best_offset[i];
    *arena_bytes = ok ? best : 0;
    free(placed.block);
    free(placed.order);
    free(order);
    free(best_offset);
    return ok;
}

/* ---- What holds for a plan --------------------------------------------------------------------------- */

/* One more than the last call of any range. */
static size_t times_of(const plan_range *range, int32_t count) {
    int32_t last = 0;
    for (int32_t i = 0; i < count; i++)
        if (range[i].last > last) last = range[i].last;
    return (size_t)last + 1;
}

bool plan_live_bytes(const plan_range *range, int32_t count, size_t *live_bytes) {
    size_t times = times_of(range, count), live = 0;
    size_t *change = calloc(times + 1, sizeof *change); /* of the live bytes, modulo 2^64, at each call */
    if (!change) return false;
    for (int32_t i = 0; i < count; i++) {
        change[range[i].first] += aligned(range[i].bytes);
        change[range[i].last + 1] -= aligned(range[i].bytes);
    }
    *live_bytes = 0;
    for (size_t t = 0; t < times; t++) {
        live += change[t];
        if (live > *live_bytes) *live_bytes = live;
    }
    free(change);
    return true;
}

/*
 * A tree over the calls. `all` of a node is the highest end of a range that is alive during all of the node's calls,
 * `any` of one that is alive during some of them.
 */
typedef struct end_tree {
    size_t *all, *any;
} end_tree;

static size_t highest_end(const end_tree *tree, size_t node, size_t from, size_t to, size_t first, size_t last) {
    if (first <= from && to <= last) return tree->any[node];
    size_t middle = from + (to - from) / 2, end = tree->all[node], below;
    if (first <= middle && (below = highest_end(tree, 2 * node, from, middle, first, last)) > end) end = below;
    if (last > middle && (below = highest_end(tree, 2 * node + 1, middle + 1, to, first, last)) > end) end = below;
    return end;
}

static void raise_end(end_tree *tree, size_t node, size_t from, size_t to, size_t first, size_t last, size_t end) {
    if (end > tree->any[node]) tree->any[node] = end;
    if (first <= from && to <= last) {
        if (end > tree->all[node]) tree->all[node] = end;
        return;
    }
    size_t middle = from + (to - from) / 2;
    if (first <= middle) raise_end(tree, 2 * node, from, middle, first, last, end);
    if (last > middle) raise_end(tree, 2 * node + 1, middle + 1, to, first, last, end);
}

typedef struct sorted {
    size_t offset;
    int32_t index;
} sorted;

static int by_offset(const void *a, const void *b) {
    const sorted *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

/* By offset, each range must begin where those before it that are alive with it have ended. */
bool plan_find_overlap(const plan_range *range, int32_t count, int32_t pair[2]) {
    size_t times = times_of(range, count);
    sorted *order = malloc(((size_t)count + 1) * sizeof *order);
    size_t *ends = calloc(8 * times, sizeof *ends);
    bool ok = order && ends;
    end_tree tree = {ends, ok ? ends + 4 * times : NULL};
    pair[0] = pair[1] = -1;
    for (int32_t i = 0; i < count && ok; i++)
        order[i] = (sorted){range[i].offset, i};
    if (ok) qsort(order, (size_t)count, sizeof *order, by_offset);
    for (int32_t k = 0; k < count && ok && pair[0] < 0; k++) {
        const plan_range *own = &range[order[k].index];
        if (!own->bytes) continue;
        size_t first = (size_t)own->first, last = (size_t)own->last;
        if (highest_end(&tree, 1, 0, times - 1, first, last) > own->offset) {
            pair[1] = order[k].index;
            for (int32_t j = 0; j < k && pair[0] < 0; j++) {
                const plan_range *other = &range[order[j].index];
                if (other->bytes && together(own, other) && other->offset + other->bytes > own->offset)
                    pair[0] = order[j].index;
            }
        }
        raise_end(&tree, 1, 0, times - 1, first, last, own->offset + own->bytes);
    }
    free(order);
    free(ends);
    return ok;
}
