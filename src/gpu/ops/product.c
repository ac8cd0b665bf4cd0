/* SPDX-License-Identifier: MIT */
/*
 * See product.h. The kernels are `product` and `join` of linear.wgsl and linear.metal.
 *
 *     enough tiles to fill a GPU   `product` alone, compiled for which axis of an operand is contiguous
 *     fewer tiles, or a long depth the depth is split into parts, by the sizes alone (tiles.c), and `join` adds them
 */
#include "gpu/ops/product.h"

static gpu_tiles split_of(const vjp_work *work, const gpu_product *p) {
    return gpu_tiles_of(work, p->batches, p->rows, p->columns, p->depth);
}

/* All parts of a product, in the workspace. */
static gpu_matrix parts_of(const gpu_product *p, const gpu_tiles *c) {
    return gpu_matrix_scratch(p->parts_at, c->parts * p->batches * p->rows * p->columns);
}

int64_t gpu_product_parts(const vjp_work *work, const gpu_product *p) {
    gpu_tiles c = split_of(work, p);
    return c.parts > 1 ? parts_of(p, &c).count : 0;
}

gpu_launch gpu_product_begin(const vjp_work *work, const gpu_product *p, const gpu_tiles *c, const char *kernel,
                             vjp_activation activation) {
    gpu_launch l = gpu_begin(work, kernel);
    l.shader = "linear";
    l.threads = gpu_threads(work->device);
    gpu_constant(&l, "LEFT_ALONG", p->left_along);
    gpu_constant(&l, "RIGHT_ALONG", p->right_along);
    gpu_constant(&l, "ACTIVATION", activation);
    gpu_u32(&l, p->rows);
    gpu_u32(&l, p->columns);
    gpu_u32(&l, p->depth);
    gpu_u32(&l, p->batches);
    gpu_u32(&l, c->row_tiles);
    gpu_u32(&l, c->column_tiles);
    gpu_u32(&l, c->parts);
    gpu_u32(&l, c->span);
    gpu_u32(&l, c->chain);
    gpu_u32(&l, p->zero_nan);
    return l;
}

static void bind_results(gpu_launch *l, const gpu_product *p) {
    gpu_matrix_bind(l, "bias", &p->bias, 1, false); /* short: not worth more pipelines, one per alignment */
    gpu_matrix_bind(l, "residual", &p->residual, p->columns, false);
    gpu_matrix_bind(l, "gate", &p->gate, p->columns, false);
    gpu_matrix_bind(l, "dy", &p->dy, p->columns, false);
    gpu_matrix_bind(l, "pre", &p->pre, p->columns, true);
    gpu_matrix_bind(l, "y", &p->y, p->columns, true);
}

vjp_status gpu_product_join(const vjp_work *work, const gpu_product *p, const gpu_tiles *c) {
    int64_t lanes = gpu_joining_lanes(work, c->parts), teams = gpu_threads(work->device) / lanes;
    gpu_launch l = gpu_product_begin(work, p, c, "join", p->activation);
    gpu_matrix parts = parts_of(p, c);
    gpu_constant(&l, "LANES", lanes);
    gpu_constant(&l, "TEAMS", teams);
    gpu_matrix_bind(&l, "parts", &parts, p->columns, false);
    bind_results(&l, p);
    return gpu_enqueue(&l, vjp_divide_up(p->batches * p->rows * vjp_divide_up(p->columns, 4), teams));
}

vjp_status gpu_multiply(const vjp_work *work, const gpu_product *p) {
    gpu_tiles c = split_of(work, p);
    int64_t tiles = p->batches * c.row_tiles * c.column_tiles;
    if (tiles == 0) return VJP_OK;
    gpu_product parts = *p;
    if (c.parts > 1) {
        parts.bias = parts.residual = parts.gate = parts.dy = parts.pre = (gpu_matrix){.place = GPU_NOWHERE};
        parts.y = parts_of(p, &c);
        parts.activation = VJP_ACTIVATION_NONE;
    }
    gpu_launch l = gpu_product_begin(work, p, &c, "product", parts.activation);
    gpu_tiles_choose(&l, &c);
    gpu_matrix_bind(&l, "left", &p->left, p->left_along ? p->depth : p->rows, false);
    gpu_matrix_bind(&l, "right", &p->right, p->right_along ? p->depth : p->columns, false);
    bind_results(&l, &parts);
    vjp_status status = gpu_enqueue(&l, tiles * c.parts);
    return status == VJP_OK && c.parts > 1 ? gpu_product_join(work, p, &c) : status;
}
