/*
 * Reading the safetensors format; safetensors_write.c writes it. The header is parsed in place: a decoded string is
 * never longer than its JSON source, so names and metadata live in the header's own buffer. Only the JSON that the
 * format needs is taken (objects of strings, lists of integers); everything else is refused with the byte where it
 * stands.
 */
#include "train/safetensors.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* The longest header that the format's own implementation takes. */
static const uint64_t LONGEST_HEADER = 100000000;

enum { LENGTH_BYTES = 8, DATA_ALIGNMENT = 64 };

/* Every type of the format, in bits; those that vjp computes with have a dtype. */
static const struct {
    const char *name;
    unsigned bits;
    int dtype;
} types[] = {
    {"F64", 64, VJP_F64}, {"F32", 32, VJP_F32}, {"F16", 16, VJP_F16}, {"BF16", 16, VJP_BF16}, {"I64", 64, VJP_I64},
    {"I32", 32, VJP_I32}, {"I16", 16, -1},      {"I8", 8, -1},        {"U64", 64, -1},        {"U32", 32, -1},
    {"U16", 16, -1},      {"U8", 8, -1},        {"BOOL", 8, -1},      {"C64", 64, -1},        {"F8_E5M2", 8, -1},
    {"F8_E4M3", 8, -1},   {"F8_E8M0", 8, -1},   {"F6_E2M3", 6, -1},   {"F6_E3M2", 6, -1},     {"F4", 4, -1},
};

enum { TYPE_COUNT = sizeof types / sizeof types[0] };

static bool fail(char error[SAFETENSORS_ERROR], const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool fail(char error[SAFETENSORS_ERROR], const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(error, SAFETENSORS_ERROR, format, list);
    va_end(list);
    /* Names come from the file; none of their control characters may reach a terminal. */
    for (char *c = error; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return false;
}

/* ---- JSON, as far as the format needs it ------------------------------------------------------------- */

typedef struct reader {
    char *text;
    size_t at, length;
    char *error;
} reader;

static bool expected(const reader *r, const char *what) {
    if (r->at >= r->length) return fail(r->error, "its header ends where %s should stand", what);
    return fail(r->error, "its header has no %s at byte %zu", what, r->at);
}

static void skip_blanks(reader *r) {
    while (r->at < r->length &&
           (r->text[r->at] == ' ' || r->text[r->at] == '\n' || r->text[r->at] == '\t' || r->text[r->at] == '\r'))
        r->at++;
}

/* True if the next sign is `sign`, which is then behind us. */
static bool take(reader *r, char sign) {
    skip_blanks(r);
    if (r->at >= r->length || r->text[r->at] != sign) return false;
    r->at++;
    return true;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static bool read_hex4(reader *r, unsigned *value) {
    *value = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        int digit = r->at < r->length ? hex_digit(r->text[r->at]) : -1;
        if (digit < 0) return expected(r, "four hexadecimal digits");
        *value = *value << 4 | (unsigned)digit;
    }
    return true;
}

/* Behind "\u": one character, or a pair of surrogates that make one. */
static bool read_code_point(reader *r, char **to) {
    unsigned code, low;
    if (!read_hex4(r, &code)) return false;
    if (code >= 0xd800 && code < 0xe000) {
        bool pair = code < 0xdc00 && r->at + 2 <= r->length && memcmp(r->text + r->at, "\\u", 2) == 0;
        if (!pair) return fail(r->error, "its header has half a surrogate pair at byte %zu", r->at);
        r->at += 2;
        if (!read_hex4(r, &low)) return false;
        if (low < 0xdc00 || low >= 0xe000)
            return fail(r->error, "its header has half a surrogate pair at byte %zu", r->at);
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (code == 0) return fail(r->error, "its header has a name with a zero character at byte %zu", r->at);
    char *out = *to;
    if (code < 0x80) {
        *out++ = (char)code;
    } else if (code < 0x800) {
        *out++ = (char)(0xc0 | code >> 6);
        *out++ = (char)(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
        *out++ = (char)(0xe0 | code >> 12);
        *out++ = (char)(0x80 | (code >> 6 & 0x3f));
        *out++ = (char)(0x80 | (code & 0x3f));
    } else {
        *out++ = (char)(0xf0 | code >> 18);
        *out++ = (char)(0x80 | (code >> 12 & 0x3f));
        *out++ = (char)(0x80 | (code >> 6 & 0x3f));
        *out++ = (char)(0x80 | (code & 0x3f));
    }
    *to = out;
    return true;
}

/* Decodes the string in place and ends it with a zero: the closing quote leaves room for one. */
static bool read_string(reader *r, const char *what, char **string) {
    static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    if (!take(r, '"')) return expected(r, what);
    char *to = *string = r->text + r->at;
    while (r->at < r->length && r->text[r->at] != '"') {
        char c = r->text[r->at++];
        if ((unsigned char)c < 0x20) return fail(r->error, "its header has a control character at byte %zu", r->at - 1);
        if (c != '\\') {
            *to++ = c;
            continue;
        }
        char escape = r->at < r->length ? r->text[r->at++] : 0;
        const char *known = escape ? strchr(escapes, escape) : NULL;
        if (known)
            *to++ = meanings[known - escapes];
        else if (escape != 'u')
            return fail(r->error, "its header has an unknown escape at byte %zu", r->at - 1);
        else if (!read_code_point(r, &to))
            return false;
    }
    if (r->at >= r->length) return expected(r, "the end of a string");
    r->at++;
    *to = 0;
    return true;
}

/* A size or an offset: digits without sign or leading zeros, at most 2^63 - 1. */
static bool read_size(reader *r, int64_t *value) {
    skip_blanks(r);
    size_t begin = r->at;
    *value = 0;
    for (; r->at < r->length && r->text[r->at] >= '0' && r->text[r->at] <= '9'; r->at++) {
        int digit = r->text[r->at] - '0';
        if (*value > (INT64_MAX - digit) / 10)
            return fail(r->error, "its header has a number past 2^63 at byte %zu", begin);
        *value = *value * 10 + digit;
    }
    if (r->at == begin) return expected(r, "size of 0 or more");
    if (r->text[begin] == '0' && r->at > begin + 1)
        return fail(r->error, "its header has a number with a leading zero at byte %zu", begin);
    return true;
}

/* Between the elements of a list or an object: true while there is another; *ok is false after a failure. */
static bool next_element(reader *r, char end, bool *first, bool *ok) {
    *ok = true;
    if (take(r, end)) return false;
    if (!*first && !take(r, ',')) {
        *ok = expected(r, end == '}' ? "comma or }" : "comma or ]");
        return false;
    }
    *first = false;
    return true;
}

/* JSON is UTF-8; a header that is not would give names that no other program can be asked for. */
static bool check_utf8(const char *text, size_t length, char *error) {
    for (size_t i = 0; i < length;) {
        unsigned char c = (unsigned char)text[i];
        size_t more = c < 0x80                ? 0
                      : c >= 0xc2 && c < 0xe0 ? 1
                      : c >= 0xe0 && c < 0xf0 ? 2
                      : c >= 0xf0 && c < 0xf5 ? 3
                                              : 4;
        bool good = more < 4 && more < length - i;
        for (size_t j = 1; good && j <= more; j++)
            good = ((unsigned char)text[i + j] & 0xc0) == 0x80;
        if (good && more >= 2) { /* no longer than needed, no surrogates, nothing past U+10FFFF */
            unsigned char second = (unsigned char)text[i + 1];
            good = !(c == 0xe0 && second < 0xa0) && !(c == 0xed && second >= 0xa0) && !(c == 0xf0 && second < 0x90) &&
                   !(c == 0xf4 && second >= 0x90);
        }
        if (!good) return fail(error, "its header is not UTF-8 at byte %zu", i);
        i += more + 1;
    }
    return true;
}

/* ---- The header -------------------------------------------------------------------------------------- */

/* Offsets of the tensor being read, kept beside it until the data is there. */
typedef struct byte_range {
    int64_t begin, end;
    size_t tensor;
} byte_range;

typedef struct parser {
    reader r;
    safetensors_file *file;
    byte_range *ranges; /* one a tensor */
    size_t tensor_room, pair_room;
} parser;

/* Makes room for one element more; doubling keeps a long header linear. */
static bool grow(void **list, size_t count, size_t *room, size_t size, char *error) {
    if (count < *room) return true;
    size_t larger = *room ? *room * 2 : 16;
    void *moved = realloc(*list, larger * size);
    if (!moved) return fail(error, "there is no memory for its %zu names", larger);
    *list = moved;
    *room = larger;
    return true;
}

static bool parse_metadata(parser *p) {
    reader *r = &p->r;
    if (!take(r, '{')) return expected(r, "{ of __metadata__");
    bool first = true, ok;
    while (next_element(r, '}', &first, &ok)) {
        char *key, *value;
        if (!read_string(r, "key of __metadata__", &key)) return false;
        if (!take(r, ':')) return expected(r, "colon");
        if (!read_string(r, "text of __metadata__", &value)) return false;
        void *list = p->file->metadata;
        if (!grow(&list, p->file->pairs, &p->pair_room, sizeof *p->file->metadata, r->error)) return false;
        p->file->metadata = list;
        p->file->metadata[p->file->pairs++] = (safetensors_pair){key, value};
    }
    return ok;
}

static bool parse_type(reader *r, safetensors_tensor *tensor, unsigned *bits) {
    char *type;
    if (!read_string(r, "dtype", &type)) return false;
    for (int i = 0; i < TYPE_COUNT; i++)
        if (strcmp(types[i].name, type) == 0) {
            tensor->type = types[i].name;
            tensor->dtype = types[i].dtype;
            *bits = types[i].bits;
            return true;
        }
    return fail(r->error, "tensor \"%.64s\" has dtype \"%.32s\", which the format does not know", tensor->name, type);
}

static bool parse_shape(reader *r, safetensors_tensor *tensor, uint64_t *elements, bool *overflow) {
    if (!take(r, '[')) return expected(r, "[ of a shape");
    bool first = true, ok;
    bool empty = false;
    *elements = 1;
    while (next_element(r, ']', &first, &ok)) {
        int64_t size;
        if (!read_size(r, &size)) return false;
        if (tensor->ndim < VJP_MAX_DIMS) tensor->shape[tensor->ndim] = size;
        tensor->ndim++;
        empty = empty || size == 0;
        /* Leaves room for the multiplication by an element's bits. */
        if (size && *elements > (uint64_t)INT64_MAX / 64 / (uint64_t)size) *overflow = true;
        if (size && !*overflow) *elements *= (uint64_t)size;
    }
    if (empty) *elements = 0, *overflow = false;
    return ok;
}

static bool parse_offsets(reader *r, const safetensors_tensor *tensor, byte_range *range) {
    if (!take(r, '[')) return expected(r, "[ of data_offsets");
    if (!read_size(r, &range->begin)) return false;
    if (!take(r, ',')) return expected(r, "comma");
    if (!read_size(r, &range->end)) return false;
    if (!take(r, ']')) return expected(r, "] of data_offsets");
    if (range->begin > range->end)
        return fail(r->error, "tensor \"%.64s\" has data_offsets [%lld, %lld], which end before they begin",
                    tensor->name, (long long)range->begin, (long long)range->end);
    return true;
}

static bool parse_tensor(parser *p, char *name) {
    reader *r = &p->r;
    safetensors_tensor tensor = {.name = name};
    byte_range range = {.tensor = p->file->count};
    uint64_t elements = 0;
    unsigned bits = 0;
    bool overflow = false, first = true, ok;
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    unsigned seen = 0;
    if (!take(r, '{')) return expected(r, "{ of a tensor");
    while (next_element(r, '}', &first, &ok)) {
        char *key;
        if (!read_string(r, "key", &key)) return false;
        if (!take(r, ':')) return expected(r, "colon");
        unsigned which = strcmp(key, "dtype") == 0          ? DTYPE
                         : strcmp(key, "shape") == 0        ? SHAPE
                         : strcmp(key, "data_offsets") == 0 ? OFFSETS
                                                            : 0;
        if (!which) return fail(r->error, "tensor \"%.64s\" has an unknown entry \"%.32s\"", name, key);
        if (seen & which) return fail(r->error, "tensor \"%.64s\" has two entries \"%s\"", name, key);
        seen |= which;
        if (which == DTYPE && !parse_type(r, &tensor, &bits)) return false;
        if (which == SHAPE && !parse_shape(r, &tensor, &elements, &overflow)) return false;
        if (which == OFFSETS && !parse_offsets(r, &tensor, &range)) return false;
    }
    if (!ok) return false;
    if (seen != (DTYPE | SHAPE | OFFSETS))
        return fail(r->error, "tensor \"%.64s\" has no %s", name,
                    !(seen & DTYPE)   ? "dtype"
                    : !(seen & SHAPE) ? "shape"
                                      : "data_offsets");
    if (overflow) return fail(r->error, "tensor \"%.64s\" is too large: the product of its sizes overflows", name);
    if (elements * bits % 8)
        return fail(r->error, "tensor \"%.64s\" has %llu elements of %u bits, which fill no whole bytes", name,
                    (unsigned long long)elements, bits);
    tensor.bytes = (size_t)(elements * bits / 8);
    if ((uint64_t)(range.end - range.begin) != tensor.bytes)
        return fail(r->error, "tensor \"%.64s\" has %llu bytes by its shape and dtype, but %lld by its data_offsets",
                    name, (unsigned long long)tensor.bytes, (long long)(range.end - range.begin));

    void *tensors = p->file->tensors, *ranges = p->ranges;
    size_t room = p->tensor_room, same = p->tensor_room;
    bool grown = grow(&tensors, p->file->count, &room, sizeof tensor, r->error);
    p->file->tensors = tensors;
    grown = grown && grow(&ranges, p->file->count, &same, sizeof range, r->error);
    p->ranges = ranges;
    if (!grown) return false;
    p->tensor_room = room;
    p->ranges[p->file->count] = range;
    p->file->tensors[p->file->count++] = tensor;
    return true;
}

static bool parse_header(parser *p) {
    reader *r = &p->r;
    if (!check_utf8(r->text, r->length, r->error)) return false;
    if (!r->length || r->text[0] != '{') return fail(r->error, "its header does not begin with {");
    r->at = 1;
    bool first = true, ok, metadata_seen = false;
    while (next_element(r, '}', &first, &ok)) {
        char *name;
        if (!read_string(r, "name of a tensor", &name)) return false;
        if (!take(r, ':')) return expected(r, "colon");
        if (strcmp(name, "__metadata__") != 0) {
            if (!parse_tensor(p, name)) return false;
        } else {
            if (metadata_seen) return fail(r->error, "its header has two entries __metadata__");
            metadata_seen = true;
            if (!parse_metadata(p)) return false;
        }
    }
    if (!ok) return false;
    skip_blanks(r);
    if (r->at < r->length) return fail(r->error, "its header goes on behind its end at byte %zu", r->at);
    return true;
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* `stride` bytes lie between one text pointer and the next. */
static bool check_unique(const void *first, size_t count, size_t stride, const char *what, char *error) {
    if (count < 2) return true;
    const char **sorted = malloc(count * sizeof *sorted);
    if (!sorted) return fail(error, "there is no memory to sort its %zu names", count);
    for (size_t i = 0; i < count; i++)
        memcpy(&sorted[i], (const char *)first + i * stride, sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, by_text);
    bool unique = true;
    for (size_t i = 1; unique && i < count; i++)
        if (strcmp(sorted[i - 1], sorted[i]) == 0) unique = fail(error, "it has two %s \"%.64s\"", what, sorted[i]);
    free(sorted);
    return unique;
}

static int by_offset(const void *a, const void *b) {
    const byte_range *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

/* Sorts the ranges and holds each against the one before: the format wants all of the data named exactly once. */
static bool check_ranges(parser *p, uint64_t *data_bytes) {
    if (p->file->count) qsort(p->ranges, p->file->count, sizeof *p->ranges, by_offset);
    int64_t end = 0;
    for (size_t i = 0; i < p->file->count; i++) {
        const char *name = p->file->tensors[p->ranges[i].tensor].name;
        if (p->ranges[i].begin < end)
            return fail(p->r.error,
                        "tensor \"%.64s\" begins at byte %lld of the data, inside \"%.64s\", which ends at %lld", name,
                        (long long)p->ranges[i].begin, p->file->tensors[p->ranges[i - 1].tensor].name, (long long)end);
        if (p->ranges[i].begin > end)
            return fail(p->r.error, "bytes %lld to %lld of the data belong to no tensor", (long long)end,
                        (long long)p->ranges[i].begin);
        end = p->ranges[i].end;
    }
    *data_bytes = (uint64_t)end;
    return true;
}

static uint64_t read_length(const unsigned char bytes[LENGTH_BYTES]) {
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        length = length << 8 | bytes[i];
    return length;
}

static bool check_length(uint64_t length, char *error) {
    if (length > LONGEST_HEADER)
        return fail(error, "it says that its header has %llu bytes; the most is %llu (is it a safetensors file?)",
                    (unsigned long long)length, (unsigned long long)LONGEST_HEADER);
    return true;
}

static bool check_size(uint64_t have, uint64_t want, char *error) {
    if (have < want)
        return fail(error, "it is cut off: its data has %llu of %llu bytes", (unsigned long long)have,
                    (unsigned long long)want);
    if (have > want)
        return fail(error, "it has more data than its tensors: %llu instead of %llu bytes", (unsigned long long)have,
                    (unsigned long long)want);
    return true;
}

/* Takes over p->file->header, which holds `length` bytes and room for one more. */
static bool parse_all(parser *p, size_t length, uint64_t *data_bytes) {
    p->r.text = p->file->header;
    p->r.length = length;
    const safetensors_file *file = p->file;
    return parse_header(p) &&
           (!file->count ||
            check_unique(&file->tensors[0].name, file->count, sizeof file->tensors[0], "tensors", p->r.error)) &&
           (!file->pairs ||
            check_unique(&file->metadata[0].key, file->pairs, sizeof file->metadata[0], "metadata keys", p->r.error)) &&
           check_ranges(p, data_bytes);
}

static void point_at_data(parser *p, const char *data) {
    for (size_t i = 0; i < p->file->count; i++)
        p->file->tensors[p->ranges[i].tensor].data = data + p->ranges[i].begin;
}

/* ---- Reading ----------------------------------------------------------------------------------------- */

static bool parse_bytes(parser *p, const unsigned char *bytes, size_t count) {
    char *error = p->r.error;
    if (count < LENGTH_BYTES) return fail(error, "it is cut off: %zu bytes are no safetensors file", count);
    uint64_t length = read_length(bytes), data_bytes;
    if (!check_length(length, error)) return false;
    if (length > count - LENGTH_BYTES)
        return fail(error, "it is cut off: its header has %zu of %llu bytes", count - LENGTH_BYTES,
                    (unsigned long long)length);
    p->file->header = malloc((size_t)length + 1);
    if (!p->file->header) return fail(error, "there is no memory for its header");
    memcpy(p->file->header, bytes + LENGTH_BYTES, (size_t)length);
    if (!parse_all(p, (size_t)length, &data_bytes)) return false;
    if (!check_size(count - LENGTH_BYTES - length, data_bytes, error)) return false;
    point_at_data(p, (const char *)bytes + LENGTH_BYTES + length);
    return true;
}

bool safetensors_parse(const void *bytes, size_t count, safetensors_file *file, char error[SAFETENSORS_ERROR]) {
    *file = (safetensors_file){0};
    parser p = {.file = file, .r.error = error};
    bool ok = parse_bytes(&p, bytes, count);
    free(p.ranges);
    if (!ok) safetensors_free(file);
    return ok;
}

static bool read_stream(parser *p, FILE *stream) {
    char *error = p->r.error;
    unsigned char prefix[LENGTH_BYTES];
    size_t got = fread(prefix, 1, LENGTH_BYTES, stream);
    if (ferror(stream)) return fail(error, "it cannot be read: %s", strerror(errno));
    if (got < LENGTH_BYTES) return fail(error, "it is cut off: %zu bytes are no safetensors file", got);
    uint64_t length = read_length(prefix), data_bytes;
    if (!check_length(length, error)) return false;
    p->file->header = malloc((size_t)length + 1);
    if (!p->file->header) return fail(error, "there is no memory for its header");
    got = fread(p->file->header, 1, (size_t)length, stream);
    if (ferror(stream)) return fail(error, "it cannot be read: %s", strerror(errno));
    if (got < length)
        return fail(error, "it is cut off: its header has %zu of %llu bytes", got, (unsigned long long)length);
    if (!parse_all(p, (size_t)length, &data_bytes)) return false;

    /* A regular file tells its size: no memory is taken for bytes that are not there. */
    struct stat status;
    if (fstat(fileno(stream), &status) == 0 && S_ISREG(status.st_mode)) {
        uint64_t behind = (uint64_t)status.st_size - LENGTH_BYTES - length;
        if (!check_size(behind, data_bytes, error)) return false;
    }
    size_t room = ((size_t)data_bytes / DATA_ALIGNMENT + 1) * DATA_ALIGNMENT;
    p->file->data = aligned_alloc(DATA_ALIGNMENT, room);
    if (!p->file->data) return fail(error, "there is no memory for its %llu bytes", (unsigned long long)data_bytes);
    got = fread(p->file->data, 1, (size_t)data_bytes, stream);
    if (ferror(stream)) return fail(error, "it cannot be read: %s", strerror(errno));
    bool more = got == data_bytes && fgetc(stream) != EOF;
    if (!check_size(got + more, data_bytes, error)) return false;
    point_at_data(p, p->file->data);
    return true;
}

bool safetensors_read(const char *path, safetensors_file *file, char error[SAFETENSORS_ERROR]) {
    *file = (safetensors_file){0};
    FILE *stream = fopen(path, "rb");
    if (!stream) return fail(error, "%s: it cannot be opened: %s", path, strerror(errno));
    char reason[SAFETENSORS_ERROR] = "";
    parser p = {.file = file, .r.error = reason};
    bool ok = read_stream(&p, stream);
    free(p.ranges);
    fclose(stream);
    if (ok) return true;
    safetensors_free(file);
    return fail(error, "%.200s: %.300s", path, reason);
}

void safetensors_free(safetensors_file *file) {
    free(file->tensors);
    free(file->metadata);
    free(file->header);
    free(file->data);
    *file = (safetensors_file){0};
}

const safetensors_tensor *safetensors_find(const safetensors_file *file, const char *name) {
    for (size_t i = 0; i < file->count; i++)
        if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i];
    return NULL;
}

const char *safetensors_metadata(const safetensors_file *file, const char *key) {
    for (size_t i = 0; i < file->pairs; i++)
        if (strcmp(file->metadata[i].key, key) == 0) return file->metadata[i].value;
    return NULL;
}
