/* SPDX-License-Identifier: MIT */
/*
 * PNG by libpng: any bit depth, palette, interlaced or not; the result is 8 bits per channel, grey or RGB. The library
 * reports errors by a callback that must not return, so it jumps back to setjmp(). The file's checksums are verified.
 */
#include "train/data/picture.h"

#ifdef VJP_HAVE_PNG
#include <setjmp.h>
#include <string.h>

#include <png.h>

typedef struct decoder {
    png_structp png;
    png_infop info;
    const unsigned char *bytes;
    size_t count, at;
    const char *path;
    picture *picture;
    char *error;
} decoder;

static void stop(png_structp png, png_const_charp reason) {
    decoder *d = png_get_error_ptr(png);
    train_fail(d->error, "%.300s: it cannot be decoded: %s", d->path, reason);
    png_longjmp(png, 1);
}

static void ignore(png_structp png, png_const_charp warning) {
    (void)png, (void)warning;
}

static void take_bytes(png_structp png, png_bytep to, size_t count) {
    decoder *d = png_get_io_ptr(png);
    if (count > d->count - d->at) png_error(png, "it ends too early");
    memcpy(to, d->bytes + d->at, count);
    d->at += count;
}

static bool decode(decoder *d) {
    if (setjmp(png_jmpbuf(d->png))) return false;
    png_set_read_fn(d->png, d, take_bytes);
    png_read_info(d->png, d->info);
    bool grey = !(png_get_color_type(d->png, d->info) & PNG_COLOR_MASK_COLOR);
    picture *p = d->picture;
    if (!picture_allocate(d->path, png_get_image_height(d->png, d->info), png_get_image_width(d->png, d->info),
                          grey ? 1 : 3, p, d->error))
        return false;
    png_set_expand(d->png);
    png_set_scale_16(d->png);
    png_set_strip_alpha(d->png);
    int passes = png_set_interlace_handling(d->png);
    png_read_update_info(d->png, d->info);
    if (png_get_rowbytes(d->png, d->info) != (size_t)(p->width * p->channels)) png_error(d->png, "unknown layout");
    for (int pass = 0; pass < passes; pass++)
        for (int64_t y = 0; y < p->height; y++)
            png_read_row(d->png, p->pixels + y * p->width * p->channels, NULL);
    png_read_end(d->png, NULL);
    return true;
}

bool picture_parse_png(const char *path, const unsigned char *bytes, size_t count, picture *p,
                       char error[TRAIN_ERROR]) {
    decoder d = {.bytes = bytes, .count = count, .path = path, .picture = p, .error = error};
    d.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &d, stop, ignore);
    d.info = d.png ? png_create_info_struct(d.png) : NULL;
    bool ok = d.info ? decode(&d) : train_fail(error, "%.300s: there is no memory to decode it", path);
    png_destroy_read_struct(&d.png, &d.info, NULL);
    return ok;
}
#else
bool picture_parse_png(const char *path, const unsigned char *bytes, size_t count, picture *p,
                       char error[TRAIN_ERROR]) {
    (void)bytes, (void)count, (void)p;
    return train_fail(error, "%.300s: it is a PNG, which this vjp was built without (libpng)", path);
}
#endif
