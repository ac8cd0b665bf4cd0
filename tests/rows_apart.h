/* SPDX-License-Identifier: MIT */
/*
 * A test of any device, for test files that include device_tests.h: rope and attention on queries, keys and values that
 * are slices of one tensor, and on gradients that are, give the bits that packed tensors give, and nothing between the
 * slices is written.
 */
#ifndef VJP_TESTS_ROWS_APART_H
#define VJP_TESTS_ROWS_APART_H

enum { SLICED_BATCH = 2, SLICED_TIME = 37, SLICED_ROWS = SLICED_BATCH * SLICED_TIME };

/* What is sliced; the names of what a layer writes. */
enum { OF_Q, OF_K, OF_V, OF_DQ, OF_DK, OF_DV, SLICES, OF_Y = SLICES, OF_LSE, OF_LAYER };
static const char *const layer_names[OF_LAYER] = {"q", "k", "v", "dq", "dk", "dv", "y", "lse"};

/* How slices lie: `before` elements come before all, and `after` after those of each time. */
typedef struct slicing {
    int64_t heads, kv_heads, dim, before, after;
} slicing;

static const slicing slicings[] = {
    {4, 2, 8, 0, 0},  /* every row on 16 bytes, also in 16 bits */
    {2, 1, 6, 1, 0},  /* from an odd element on */
    {2, 2, 6, 0, 1},  /* at an odd distance, though each row has an even length */
    {3, 1, 5, 0, 0},  /* neighbouring slices share words in 16 bits */
    {2, 1, 72, 0, 4}, /* more columns than one product of a GPU has */
};

static int64_t sliced_step(const slicing *s) {
    return (s->heads + 2 * s->kv_heads) * s->dim + s->after;
}

/* Elements of q, k, v or of their gradients, with those around them. */
static int64_t sliced_elements(const slicing *s) {
    return s->before + SLICED_ROWS * sliced_step(s) + 3;
}

static int64_t heads_of(const slicing *s, int part) {
    return part % 3 == OF_Q ? s->heads : s->kv_heads;
}

/* Where a slice begins in a buffer that has q, k and v, then their gradients. */
static int64_t slice_at(const slicing *s, int part) {
    int64_t heads = part % 3 == OF_Q ? 0 : part % 3 == OF_K ? s->heads : s->heads + s->kv_heads;
    return (part < OF_DQ ? 0 : sliced_elements(s)) + s->before + heads * s->dim;
}

static void write_number(vjp_dtype dtype, void *to, float value) {
    uint16_t half = dtype == VJP_BF16 ? vjp_f32_to_bf16(value) : vjp_f32_to_f16(value);
    if (dtype == VJP_F32)
        memcpy(to, &value, sizeof value);
    else
        memcpy(to, &half, sizeof half);
}

/* Packed values of a part. */
static char *numbers_of(vjp_dtype dtype, int part, int64_t count) {
    size_t size = vjp_dtype_size(dtype);
    char *numbers = malloc((size_t)count * size);
    for (int64_t i = 0; i < count; i++)
        write_number(dtype, numbers + (size_t)i * size, sinf((float)(i % 1009) * 1.7f + (float)part));
    return numbers;
}

static void must(vjp_status status) {
    if (status != VJP_OK) fail_msg("%s", vjp_error(device));
}

/*
 * A layer's calls: q and k are rotated in place, rotated k is added to v, attention forward, attention backward, the
 * same without y and lse and added, then dq and dk are rotated back in place.
 */
static void run_layer(const vjp_tensor t[OF_LAYER], const vjp_tensor *dy, const vjp_tensor *cosine,
                      const vjp_tensor *sine, int64_t n_rot) {
    const vjp_rope_attributes *rope = WITH(rope, .n_rot = n_rot, .pairing = VJP_PAIRING_HALF);
    const vjp_rope_attributes *neighbours = WITH(rope, .n_rot = n_rot, .pairing = VJP_PAIRING_INTERLEAVED);
    const vjp_attention_attributes *causal = WITH(attention, .causal = 1);
    vjp_tensor more[OF_LAYER];
    memcpy(more, t, sizeof more);
    for (int i = 0; i < OF_LAYER; i++)
        more[i].flags = VJP_ACCUMULATE;
    must(vjp_rope_forward(device, &t[OF_Q], &t[OF_Q], cosine, sine, NULL, rope));
    must(vjp_rope_forward(device, &t[OF_K], &t[OF_K], cosine, sine, NULL, rope));
    must(vjp_rope_forward(device, &more[OF_V], &t[OF_K], cosine, sine, NULL, neighbours));
    must(vjp_attention_forward(device, &t[OF_Y], &t[OF_LSE], &t[OF_Q], &t[OF_K], &t[OF_V], NULL, causal));
    must(vjp_attention_backward(device, &t[OF_DQ], &t[OF_DK], &t[OF_DV], dy, &t[OF_Q], &t[OF_K], &t[OF_V], &t[OF_Y],
                                &t[OF_LSE], NULL, causal));
    must(vjp_attention_backward(device, &more[OF_DQ], &more[OF_DK], &more[OF_DV], dy, &t[OF_Q], &t[OF_K], &t[OF_V],
                                NULL, NULL, NULL, causal));
    must(vjp_rope_backward(device, &t[OF_DQ], &t[OF_DQ], cosine, sine, NULL, rope));
    must(vjp_rope_backward(device, &t[OF_DK], &t[OF_DK], cosine, sine, NULL, rope));
    must(vjp_synchronize(device));
}

/* All that a layer writes, packed, one after another; freed by the caller. */
static char *layer_results(const slicing *s, vjp_dtype dtype, bool sliced, size_t bytes[OF_LAYER]) {
    const int64_t y_shape[] = {SLICED_BATCH, SLICED_TIME, s->heads, s->dim};
    const int64_t lse_shape[] = {SLICED_BATCH, s->heads, SLICED_TIME};
    const int64_t n_rot = s->dim / 4 * 4, table_shape[] = {SLICED_TIME, n_rot / 2};
    int64_t y_count = SLICED_ROWS * s->heads * s->dim, table_count = SLICED_TIME * n_rot / 2;
    size_t size = vjp_dtype_size(dtype), all = 0;
    size_t block_bytes = 2 * (size_t)sliced_elements(s) * size, step = (size_t)sliced_step(s) * size;
    char *dy_numbers = numbers_of(dtype, 7, y_count), *angles = numbers_of(VJP_F32, 8, table_count);
    char *block = malloc(block_bytes);
    memset(block, 0xff, block_bytes); /* NaN in every dtype */
    vjp_tensor t[OF_LAYER];
    vjp_tensor dy = on_device(dtype, 4, y_shape, dy_numbers, (size_t)y_count * size);
    vjp_tensor table = on_device(VJP_F32, 2, table_shape, angles, (size_t)table_count * sizeof(float));
    t[OF_Y] = on_device(dtype, 4, y_shape, dy_numbers, bytes[OF_Y] = (size_t)y_count * size);
    t[OF_LSE] = on_device(VJP_F32, 3, lse_shape, block, bytes[OF_LSE] = SLICED_ROWS * (size_t)s->heads * sizeof(float));
    void *data = NULL;
    if (sliced) must(vjp_alloc(device, block_bytes, &data));
    for (int i = 0; i < SLICES; i++) {
        const int64_t shape[] = {SLICED_BATCH, SLICED_TIME, heads_of(s, i), s->dim};
        size_t row = (size_t)(shape[2] * shape[3]) * size, at = (size_t)slice_at(s, i) * size;
        char *numbers = numbers_of(dtype, i, SLICED_ROWS * shape[2] * shape[3]);
        bytes[i] = SLICED_ROWS * row;
        for (size_t r = 0; sliced && r < SLICED_ROWS; r++)
            memcpy(block + at + r * step, numbers + r * row, row);
        t[i] = sliced ? vjp_tensor_of(data, dtype, 4, shape) : on_device(dtype, 4, shape, numbers, bytes[i]);
        free(numbers);
        if (!sliced) continue;
        t[i].offset = at;
        t[i].stride[1] = sliced_step(s);
        t[i].stride[0] = SLICED_TIME * sliced_step(s);
    }
    if (sliced) must(vjp_upload(device, data, 0, block, block_bytes));
    run_layer(t, &dy, &table, &table, n_rot);

    for (int i = 0; i < OF_LAYER; i++)
        all += bytes[i];
    char *results = malloc(all), *to = results;
    if (sliced) must(vjp_download(device, block, data, 0, block_bytes));
    for (int i = 0; i < OF_LAYER; to += bytes[i++]) {
        size_t row = bytes[i] / SLICED_ROWS;
        for (size_t r = 0; sliced && i < SLICES && r < SLICED_ROWS; r++) {
            char *from = block + (size_t)slice_at(s, i) * size + r * step;
            memcpy(to + r * row, from, row);
            memset(from, 0xff, row);
        }
        if (!sliced || i >= SLICES) must(vjp_download(device, to, t[i].data, 0, bytes[i]));
        if (!sliced || i >= SLICES) vjp_free(device, t[i].data);
    }
    for (size_t i = 0; i < block_bytes; i++)
        if (block[i] != (char)0xff) fail_msg("byte %zu, between the slices, was written", i);
    vjp_free(device, data), vjp_free(device, dy.data), vjp_free(device, table.data);
    free(block), free(dy_numbers), free(angles);
    return results;
}

static void slices_of_one_tensor_give_the_bits_of_packed_ones(void **state) {
    (void)state;
    need_device();
    must(vjp_reserve(device, 1 << 20));
    for (size_t i = 0; i < 3 * sizeof slicings / sizeof slicings[0]; i++) {
        static const vjp_dtype storage[] = {VJP_F32, VJP_BF16, VJP_F16};
        const slicing *s = &slicings[i / 3];
        if (!in_part(i / 3 + i % 3, 3)) continue;
        size_t bytes[OF_LAYER], same[OF_LAYER], at = 0;
        char *packed = layer_results(s, storage[i % 3], false, bytes);
        char *sliced = layer_results(s, storage[i % 3], true, same);
        assert_memory_equal(bytes, same, sizeof bytes);
        for (int k = 0; k < OF_LAYER; at += bytes[k++])
            if (memcmp(packed + at, sliced + at, bytes[k]) != 0)
                fail_msg("%s of slicing %zu differs in %s", layer_names[k], i / 3, vjp_dtype_name(storage[i % 3]));
        free(packed);
        free(sliced);
    }
}

#endif
