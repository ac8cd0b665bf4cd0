/* SPDX-License-Identifier: MIT */
/*
 * Reading pictures and splitting them into batches. IDX files are found by their usual names; a folder of classes
 * holds JPEG, PNG, PGM or PPM files.
 */
#include "train/data/images.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/philox.h"
#include "core/system.h"
#include "train/data/picture.h"
#include "train/files/input.h"

enum { PATH = 4096, MAX_CLASSES = 4096, VALIDATION = 10 /* every tenth picture */ };

/* All pictures are held in memory. */
static const int64_t MAX_IDX_BYTES = (int64_t)1 << 34;

void images_free(image_data *images) {
    free(images->pixels);
    free(images->label);
    free(images->class_name);
    *images = (image_data){0};
}

static int64_t picture_bytes(const image_data *images) {
    return images->height * images->width * images->channels;
}

/* Makes room for `more` pictures after those already there. */
static bool make_room(image_data *images, int64_t more, const char *path, char error[TRAIN_ERROR]) {
    int64_t count = images->count + more, each = picture_bytes(images), bytes;
    if (__builtin_mul_overflow(count, each, &bytes)) return train_fail(error, "%s: too many pictures", path);
    unsigned char *pixels = realloc(images->pixels, (size_t)bytes + 1);
    if (pixels) images->pixels = pixels;
    int32_t *label = realloc(images->label, (size_t)count * sizeof *label + 1);
    if (label) images->label = label;
    if (!pixels || !label) return train_fail(error, "%s: there is no memory for %lld pictures", path, (long long)count);
    return true;
}

/* ---- IDX --------------------------------------------------------------------------------------------- */

/* The two parts of a set, each as pictures and labels; a name may have a dot instead of its middle dash. */
static const char *const parts[2][2][2] = {
    {{"train-images-idx3-ubyte", "train-images.idx3-ubyte"}, {"train-labels-idx1-ubyte", "train-labels.idx1-ubyte"}},
    {{"t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"}, {"t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"}}};

/* NULL with *ok: there is no file of either name. */
static FILE *open_part(const char *dir, const char *const names[2], char path[PATH], bool *ok,
                       char error[TRAIN_ERROR]) {
    FILE *file = NULL;
    int64_t bytes;
    *ok = true;
    for (int i = 0; i < 2 && !file && *ok; i++) {
        if (snprintf(path, PATH, "%s/%s", dir, names[i]) >= PATH)
            *ok = train_fail(error, "%.300s: the path is too long", dir);
        else if (!(file = input_stream(path, MAX_IDX_BYTES, &bytes, error)))
            *ok = errno == ENOENT;
    }
    return file;
}

static bool read_sizes(FILE *file, const char *path, int dims, int64_t *size, char error[TRAIN_ERROR]) {
    unsigned char head[4 + 4 * 3];
    if (fread(head, 1, (size_t)(4 + 4 * dims), file) != (size_t)(4 + 4 * dims))
        return train_fail(error, "%s: it ends within its header", path);
    if (head[0] || head[1] || head[2] != 8 || head[3] != dims)
        return train_fail(error, "%s: it is not an IDX file of bytes with %d dimensions", path, dims);
    for (int i = 0; i < dims; i++) {
        const unsigned char *at = head + 4 + 4 * i;
        size[i] = (int64_t)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3];
    }
    return true;
}

static bool read_labels(FILE *file, const char *path, image_data *images, int64_t count, char error[TRAIN_ERROR]) {
    for (int64_t i = 0; i < count; i++) {
        int byte = fgetc(file);
        if (byte == EOF) return train_fail(error, "%s: it ends after %lld labels", path, (long long)i);
        images->label[images->count + i] = byte;
        if (byte >= images->classes) images->classes = byte + 1;
    }
    return true;
}

static bool add_part(image_data *images, FILE *pictures, const char *pictures_path, FILE *labels,
                     const char *labels_path, char error[TRAIN_ERROR]) {
    int64_t size[3] = {0}, label_count = 0;
    if (!read_sizes(pictures, pictures_path, 3, size, error) ||
        !read_sizes(labels, labels_path, 1, &label_count, error))
        return false;
    if (size[0] != label_count)
        return train_fail(error, "%s: it has %lld labels for %lld pictures", labels_path, (long long)label_count,
                          (long long)size[0]);
    if (size[1] < 1 || size[2] < 1 || size[1] > 65535 || size[2] > 65535)
        return train_fail(error, "%s: its pictures have %lld x %lld pixels; each side must be 1 to 65535",
                          pictures_path, (long long)size[2], (long long)size[1]);
    if (images->count && (images->height != size[1] || images->width != size[2]))
        return train_fail(error, "%s: its pictures differ in size from those of the training part", pictures_path);
    images->height = size[1];
    images->width = size[2];
    images->channels = 1;
    system_status about;
    int64_t each = picture_bytes(images);
    if (!system_status_of_open(system_number_of(pictures), &about) || (about.bytes - 16) / each < size[0])
        return train_fail(error, "%s: it ends before the last of its %lld pictures", pictures_path, (long long)size[0]);
    if (!make_room(images, size[0], pictures_path, error)) return false;
    if (fread(images->pixels + images->count * each, (size_t)each, (size_t)size[0], pictures) != (size_t)size[0])
        return train_fail(error, "%s: it ends before the last of its %lld pictures", pictures_path, (long long)size[0]);
    if (!read_labels(labels, labels_path, images, size[0], error)) return false;
    images->count += size[0];
    return true;
}

/* Reads the folder as a set of IDX files; *found says whether it is one. */
static bool read_idx(const char *dir, image_data *images, bool *found, char error[TRAIN_ERROR]) {
    bool ok = true;
    *found = false;
    for (int part = 0; part < 2 && ok; part++) {
        char pictures_path[PATH], labels_path[PATH];
        FILE *pictures = open_part(dir, parts[part][0], pictures_path, &ok, error);
        FILE *labels = pictures ? open_part(dir, parts[part][1], labels_path, &ok, error) : NULL;
        if (pictures && !labels && ok)
            ok = train_fail(error, "%s: this file, with the labels of the pictures beside it, is missing", labels_path);
        if (pictures) *found = true;
        if (labels) ok = add_part(images, pictures, pictures_path, labels, labels_path, error);
        if (pictures) fclose(pictures);
        if (labels) fclose(labels);
        if (part == 0) images->trained = images->count;
    }
    if (!ok || !*found) return ok;
    if (!images->trained) return train_fail(error, "%s: it has only the test files; there is nothing to train on", dir);
    images->class_name = calloc((size_t)images->classes + 1, sizeof *images->class_name);
    if (!images->class_name) return train_fail(error, "%s: there is no memory for the names of the classes", dir);
    for (int64_t i = 0; i < images->classes; i++)
        snprintf(images->class_name[i], sizeof images->class_name[i], "%lld", (long long)i);
    return true;
}

/* ---- A folder of classes ----------------------------------------------------------------------------- */

static bool add_picture(image_data *images, const char *path, int32_t label, char error[TRAIN_ERROR]) {
    picture p;
    if (!picture_read(path, &p, error)) return false;
    if (images->count && (p.height != images->height || p.width != images->width || p.channels != images->channels)) {
        train_fail(error, "%s: it has %lld x %lld pixels and %lld channels; the first picture has %lld x %lld and %lld",
                   path, (long long)p.width, (long long)p.height, (long long)p.channels, (long long)images->width,
                   (long long)images->height, (long long)images->channels);
        picture_free(&p);
        return false;
    }
    images->height = p.height;
    images->width = p.width;
    images->channels = p.channels;
    bool ok = make_room(images, 1, path, error);
    if (ok) {
        memcpy(images->pixels + images->count * picture_bytes(images), p.pixels, (size_t)picture_bytes(images));
        images->label[images->count++] = label;
    }
    picture_free(&p);
    return ok;
}

static bool add_class(image_data *images, const char *dir, int32_t label, char error[TRAIN_ERROR]) {
    size_t count;
    char **names = input_names(dir, &count, error);
    if (!names) return false;
    bool ok = true;
    for (size_t i = 0; i < count; i++) {
        char path[PATH];
        if (ok && snprintf(path, sizeof path, "%s/%s", dir, names[i]) >= (int)sizeof path)
            ok = train_fail(error, "%s/%s: the path is too long", dir, names[i]);
        ok = ok && add_picture(images, path, label, error);
        free(names[i]);
    }
    free(names);
    return ok;
}

/* Moves every tenth picture to the end, where the validation part is. */
static bool split_validation(image_data *images, char error[TRAIN_ERROR]) {
    int64_t each = picture_bytes(images), front = 0, back = 0;
    image_data sorted = *images;
    sorted.pixels = malloc((size_t)(images->count * each) + 1);
    sorted.label = malloc((size_t)images->count * sizeof *sorted.label + 1);
    if (!sorted.pixels || !sorted.label) {
        free(sorted.pixels);
        free(sorted.label);
        return train_fail(error, "there is no memory for %lld pictures", (long long)images->count);
    }
    sorted.trained = images->count - images->count / VALIDATION;
    for (int64_t i = 0; i < images->count; i++) {
        int64_t to = i % VALIDATION == VALIDATION - 1 ? sorted.trained + back++ : front++;
        memcpy(sorted.pixels + to * each, images->pixels + i * each, (size_t)each);
        sorted.label[to] = images->label[i];
    }
    free(images->pixels);
    free(images->label);
    *images = sorted;
    return true;
}

static bool read_classes(const char *dir, image_data *images, char error[TRAIN_ERROR]) {
    size_t count;
    char **names = input_names(dir, &count, error);
    if (!names) return false;
    bool ok = true;
    images->class_name = calloc(count + 1, sizeof *images->class_name);
    if (!images->class_name) ok = train_fail(error, "%s: there is no memory for the names of the classes", dir);
    for (size_t i = 0; i < count; i++) {
        char path[PATH];
        system_status about;
        if (ok && snprintf(path, sizeof path, "%s/%s", dir, names[i]) >= (int)sizeof path)
            ok = train_fail(error, "%.300s/%.100s: the path is too long", dir, names[i]);
        bool known = ok && system_status_of(path, &about);
        if (ok && !known && errno != ENOENT && errno != ELOOP) /* not a link to nothing or to itself */
            ok = train_fail(error, "%.300s: it cannot be read: %s", path, strerror(errno));
        if (known && about.kind == SYSTEM_FOLDER) {
            if (images->classes == MAX_CLASSES) ok = train_fail(error, "%s: more than %d classes", dir, MAX_CLASSES);
            if (ok) snprintf(images->class_name[images->classes], sizeof *images->class_name, "%.63s", names[i]);
            ok = ok && add_class(images, path, (int32_t)images->classes++, error);
        }
        free(names[i]);
    }
    free(names);
    if (ok && !images->count)
        return train_fail(error, "%s: it has neither IDX files (train-images-idx3-ubyte, ...) nor folders of pictures",
                          dir);
    return ok && split_validation(images, error);
}

bool images_read(const char *path, image_data *images, char error[TRAIN_ERROR]) {
    *images = (image_data){0};
    system_status about;
    bool found, ok = system_status_of(path, &about) ||
                     train_fail(error, "%.300s: it cannot be opened: %s", path, strerror(errno));
    if (ok && about.kind != SYSTEM_FOLDER)
        ok = train_fail(error, "%s: it is not a folder; pictures are read from a folder", path);
    ok = ok && read_idx(path, images, &found, error) && (found || read_classes(path, images, error));
    if (!ok) images_free(images);
    return ok;
}

/* ---- Batches ----------------------------------------------------------------------------------------- */

static void fill(void *context, bool validation, uint64_t part, void *input, int32_t *target) {
    const image_data *images = context;
    int64_t each = picture_bytes(images);
    float *to = input;
    uint64_t batch = part / (uint64_t)images->shards, first = part % (uint64_t)images->shards * (uint64_t)images->rows;
    for (int64_t row = 0; row < images->rows; row++) {
        int64_t which;
        if (validation) {
            which = images->trained + (int64_t)part * images->rows + row;
        } else {
            vjp_philox words = {
                {(uint32_t)batch, (uint32_t)(batch >> 32), (uint32_t)first + (uint32_t)row, 0x70696374u /* "pict" */}};
            words = vjp_philox4x32_10(words, (uint32_t)images->seed, (uint32_t)(images->seed >> 32));
            which = (int64_t)(((uint64_t)words.word[0] << 32 | words.word[1]) % (uint64_t)images->trained);
        }
        target[row] = images->label[which];
        const unsigned char *from = images->pixels + which * each;
        for (int64_t i = 0; i < each; i++)
            *to++ = ((float)from[i] / 255 - 0.5f) * 2;
    }
}

bool images_source(image_data *images, int64_t batch, int64_t shards, uint64_t seed, train_source *source,
                   char error[TRAIN_ERROR]) {
    if (!images->trained) return train_fail(error, "there are no pictures to train on");
    images->rows = batch / shards;
    images->shards = shards;
    images->seed = seed;
    *source = (train_source){
        .context = images, .fill = fill, .validation_parts = (images->count - images->trained) / batch * shards};
    return true;
}
