/* SPDX-License-Identifier: MIT */
/*
 * JPEG by libjpeg-turbo: grey or RGB, baseline or progressive. The library reports errors by a callback that must not
 * return, so it jumps back to setjmp(). A warning means that pixels were lost, and refuses the file too, except for
 * stray bytes between two markers, which cameras write and which change nothing.
 */
#include <stdio.h>

#include "train/data/picture.h"

#ifdef VJP_HAVE_JPEG
#include <setjmp.h>
#include <string.h>

#include <jpeglib.h>

#include <jerror.h>

/* A progressive file can visit each pixel in thousands of scans; encoders write about ten. */
enum { MAX_SCANS = 256 };

typedef struct decoder {
    struct jpeg_decompress_struct jpeg; /* first: the library's pointer to it is a pointer to the decoder */
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf on_error;
    const char *path;
    picture *picture;
    char *error;
} decoder;

static void stop(j_common_ptr jpeg) {
    decoder *d = (decoder *)jpeg;
    char reason[JMSG_LENGTH_MAX];
    d->errors.format_message(jpeg, reason);
    train_fail(d->error, "%.300s: it cannot be decoded: %s", d->path, reason);
    longjmp(d->on_error, 1);
}

static void take_message(j_common_ptr jpeg, int level) {
    bool warning = level < 0;
    if (warning && jpeg->err->msg_code != JWRN_EXTRANEOUS_DATA) stop(jpeg);
}

static void count_scans(j_common_ptr jpeg) {
    decoder *d = (decoder *)jpeg;
    if (d->jpeg.input_scan_number <= MAX_SCANS) return;
    train_fail(d->error, "%.300s: it has more than %d scans", d->path, MAX_SCANS);
    longjmp(d->on_error, 1);
}

static bool decode(decoder *d, const unsigned char *bytes, size_t count) {
    if (setjmp(d->on_error)) return false;
    jpeg_create_decompress(&d->jpeg);
    d->jpeg.progress = &d->progress;
    jpeg_mem_src(&d->jpeg, bytes, (unsigned long)count);
    jpeg_read_header(&d->jpeg, TRUE);
    if (d->jpeg.num_components != 1 && d->jpeg.num_components != 3)
        return train_fail(d->error, "%.300s: it has %d channels; grey (1) and RGB (3) are read, CMYK is not", d->path,
                          d->jpeg.num_components);
    d->jpeg.out_color_space = d->jpeg.num_components == 1 ? JCS_GRAYSCALE : JCS_RGB;
    picture *p = d->picture;
    if (!picture_allocate(d->path, d->jpeg.image_height, d->jpeg.image_width, d->jpeg.num_components, p, d->error))
        return false;
    jpeg_start_decompress(&d->jpeg);
    while (d->jpeg.output_scanline < d->jpeg.output_height) {
        JSAMPROW row = p->pixels + d->jpeg.output_scanline * p->width * p->channels;
        jpeg_read_scanlines(&d->jpeg, &row, 1);
    }
    jpeg_finish_decompress(&d->jpeg);
    return true;
}

bool picture_parse_jpeg(const char *path, const unsigned char *bytes, size_t count, picture *p,
                        char error[TRAIN_ERROR]) {
    decoder d = {.path = path, .picture = p, .error = error, .progress.progress_monitor = count_scans};
    d.jpeg.err = jpeg_std_error(&d.errors);
    d.errors.error_exit = stop;
    d.errors.emit_message = take_message;
    bool ok = decode(&d, bytes, count);
    jpeg_destroy_decompress(&d.jpeg);
    return ok;
}
#else
bool picture_parse_jpeg(const char *path, const unsigned char *bytes, size_t count, picture *p,
                        char error[TRAIN_ERROR]) {
    (void)bytes, (void)count, (void)p;
    return train_fail(error, "%.300s: it is a JPEG, which this vjp was built without (libjpeg-turbo)", path);
}
#endif
