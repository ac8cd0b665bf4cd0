/* SPDX-License-Identifier: MIT */
/*
 * The safetensors reader and writer: what is written reads back the same, each violation of the format is refused with
 * its own sentence, thousands of randomly damaged files crash nothing, and a failed write leaves the old file alone.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files/safetensors.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

/* ---- A temporary folder ----------------------------------------------------------------------------- */

static char folder[] = "/tmp/test_safetensors.XXXXXX";

static int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    DIR *entries = opendir(folder);
    char path[512];
    for (struct dirent *e; entries && (e = readdir(entries));) {
        snprintf(path, sizeof path, "%s/%.255s", folder, e->d_name);
        if (e->d_name[0] != '.') unlink(path);
    }
    if (entries) closedir(entries);
    return rmdir(folder);
}

static const char *path_of(const char *name, char path[256]) {
    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

static int files_in_folder(void) {
    int count = 0;
    DIR *entries = opendir(folder);
    for (struct dirent *e; (e = readdir(entries));)
        count += e->d_name[0] != '.';
    closedir(entries);
    return count;
}

/* ---- Files in memory --------------------------------------------------------------------------------- */

/* A file of this header and `data_bytes` bytes of data 0, 1, 2, ... */
static unsigned char *make_file(const char *header, size_t header_bytes, size_t data_bytes, size_t *size) {
    *size = 8 + header_bytes + data_bytes;
    unsigned char *bytes = calloc(1, *size + 1);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)((uint64_t)header_bytes >> (8 * i));
    memcpy(bytes + 8, header, header_bytes);
    for (size_t i = 0; i < data_bytes; i++)
        bytes[8 + header_bytes + i] = (unsigned char)i;
    return bytes;
}

/* ---- What is refused --------------------------------------------------------------------------------- */

#define A(shape, offsets) "\"a\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define B(shape, offsets) "\"b\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct {
    const char *header;
    size_t data_bytes;
    const char *says; /* part of the sentence; NULL: the file is good */
} headers[] = {
    /* good */
    {"{}", 0, NULL},
    {"{} \n\t ", 0, NULL},
    {"{" A("[2]", "[0,8]") "}", 8, NULL},
    {"{ \"a\" : { \"shape\" : [ 2 , 1 ] , \"data_offsets\" : [ 0 , 8 ] , \"dtype\" : \"F32\" } }", 8, NULL},
    {"{" A("[]", "[0,4]") "}", 4, NULL},
    {"{" A("[0,9223372036854775807]", "[0,0]") "}", 0, NULL},
    {"{" B("[1]", "[4,8]") "," A("[1]", "[0,4]") "}", 8, NULL},
    {"{" A("[0]", "[4,4]") "," B("[1]", "[0,4]") "}", 4, NULL},
    {"{\"__metadata__\":{\"k\":\"v\",\"l\":\"\"}," A("[1]", "[0,4]") "}", 4, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3, NULL},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,2]}}", 2, NULL},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, NULL},
    {"{\"\\u00e9\\n\\ud83d\\ude00\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, NULL},
    /* JSON */
    {"", 0, "does not begin with {"},
    {" {}", 0, "does not begin with {"},
    {"[]", 0, "does not begin with {"},
    {"{", 0, "its header cannot be read: it ends at byte 1, where key"},
    {"{}x", 0, "has more text after its end at byte 2"},
    {"{\"a\"}", 0, "no colon at byte 4"},
    {"{\"a\":1}", 0, "tensor \"a\" is 1 instead of an object"},
    {"{\"a\":[]}", 0, "tensor \"a\" is [] instead of an object"},
    {"{\"a\":null}", 0, "tensor \"a\" is null instead of an object"},
    {"{\"a", 0, "the end of a text"},
    {"{\"a\\", 0, "unknown escape"},
    {"{\"a\\q\":{}}", 0, "unknown escape"},
    {"{\"\\u12\":{}}", 0, "hexadecimal"},
    {"{\"\\ud800\":{}}", 0, "surrogate"},
    {"{\"\\ud800\\u0041\":{}}", 0, "surrogate"},
    {"{\"\\udc00\":{}}", 0, "surrogate"},
    {"{\"\\u0000\":{}}", 0, "zero character"},
    {"{\"\x01\":{}}", 0, "control character"},
    {"{\"\xff\":{}}", 0, "UTF-8"},
    {"{\"\xc0\x80\":{}}", 0, "UTF-8"},
    {"{\"\xed\xa0\x80\":{}}", 0, "UTF-8"},
    {"{\"\xe2\x82", 0, "UTF-8"},
    {"{" A("[2]", "[0,8]") ","
                           "}",
     8, "no key at byte"},
    {"{" A("[2]", "[0,8]") B("[0]", "[8,8]") "}", 8, "comma or }"},
    {"{" A("[2,]", "[0,8]") "}", 8, "no value at byte"},
    {"{" A("[2 1]", "[0,8]") "}", 8, "comma or ]"},
    {"{" A("[-2]", "[0,8]") "}", 8, "\"a\" has -2 in its shape, which is not an integer from 0 to 2^63 - 1"},
    {"{" A("[2.0]", "[0,8]") "}", 8, "\"a\" has 2.0 in its shape, which is not an integer"},
    {"{" A("[2e0]", "[0,8]") "}", 8, "\"a\" has 2.0 in its shape, which is not an integer"},
    {"{" A("[-0]", "[0,0]") "}", 0, "\"a\" has -0.0 in its shape, which is not an integer"},
    {"{" A("[\"2\"]", "[0,8]") "}", 8, "\"a\" has \"2\" in its shape, which is not an integer"},
    {"{" A("[[2]]", "[0,8]") "}", 8, "\"a\" has [...] in its shape, which is not an integer"},
    {"{" A("2", "[0,8]") "}", 8, "\"a\" has 2 as its shape instead of a list"},
    {"{" A("{}", "[0,8]") "}", 8, "\"a\" has {} as its shape instead of a list"},
    {"{" A("[02]", "[0,8]") "}", 8, "leading zero"},
    {"{" A("[2]", "[0,8,9]") "}", 8, "\"a\" has 3 data_offsets instead of 2"},
    {"{" A("[2]", "[0]") "}", 8, "\"a\" has 1 data_offsets instead of 2"},
    {"{" A("[2]", "[]") "}", 8, "\"a\" has 0 data_offsets instead of 2"},
    {"{" A("[2]", "8") "}", 8, "\"a\" has 8 as its data_offsets instead of a list"},
    {"{" A("[2]", "[0,8.5]") "}", 8, "\"a\" has 8.5 in its data_offsets, which is not an integer"},
    {"{" A("[2]", "[null,8]") "}", 8, "\"a\" has null in its data_offsets, which is not an integer"},
    {"{" A("[99999999999999999999]", "[0,8]") "}", 8, "\"a\" has 1e20 in its shape, which is not an integer"},
    {"{" A("[9223372036854775808]", "[0,8]") "}", 8, "in its shape, which is not an integer from 0 to 2^63 - 1"},
    {"{" A("[2]", "[0,9223372036854775807]") "}", 8, "but 9223372036854775807 by its data_offsets"},
    {"{" A("[2]", "[9223372036854775799,9223372036854775807]") "}", 8,
     "bytes 0 to 9223372036854775799 of the data belong to no tensor"},
    {"{" A("[2]", "[0,9223372036854775808]") "}", 8, "in its data_offsets, which is not an integer"},
    {"{" A("[1e999]", "[0,8]") "}", 8, "no double can hold"},
    {"{\"__metadata__\":[]}", 0, "its __metadata__ is [] instead of an object"},
    {"{\"__metadata__\":{\"k\":1}}", 0, "its __metadata__ has 1 as \"k\" instead of a text"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "object at byte 0 has two members \"__metadata__\""},
    {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "object at byte 16 has two members \"k\""},
    /* tensors */
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "\"a\" has no dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "\"a\" has no shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "\"a\" has no data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "object at byte 5 has two members \"dtype\""},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4, "unknown entry \"x\""},
    {"{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "\"a\" has dtype \"F33\", which the format does not know"},
    {"{\"a\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "\"a\" has dtype 32, which the format does not know"},
    {"{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "does not know"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "no whole bytes"},
    {"{" A("[4294967296,4294967296]", "[0,8]") "}", 8, "overflows"},
    {"{" A("[4611686018427387904]", "[0,0]") "}", 0, "overflows"},
    {"{" A("[3]", "[0,8]") "}", 8, "12 bytes by its shape and dtype, but 8"},
    {"{" A("[2]", "[8,0]") "}", 8, "end before they begin"},
    {"{" A("[1]", "[0,4]") "," A("[1]", "[4,8]") "}", 8, "object at byte 0 has two members \"a\""},
    {"{" A("[1]", "[0,4]") ",\"\\u0061\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8,
     "object at byte 0 has two members \"a\""},
    /* data */
    {"{" A("[2]", "[0,8]") "," B("[2]", "[4,12]") "}", 12, "inside \"a\""},
    {"{" A("[2]", "[0,8]") "," B("[2]", "[0,8]") "}", 8, "inside \"a\""},
    {"{" A("[2]", "[0,8]") "," B("[1]", "[12,16]") "}", 16, "bytes 8 to 12 of the data belong to no tensor"},
    {"{" A("[2]", "[4,12]") "}", 12, "bytes 0 to 4 of the data belong to no tensor"},
    {"{" A("[2]", "[0,8]") "}", 7, "7 of 8 bytes"},
    {"{" A("[2]", "[0,8]") "}", 9, "9 instead of 8 bytes"},
    {"{}", 1, "1 instead of 0 bytes"},
};

static void test_headers(void **state) {
    (void)state;
    char path[256], error[SAFETENSORS_ERROR], from_memory[SAFETENSORS_ERROR];
    path_of("header", path);
    for (size_t i = 0; i < COUNT(headers); i++) {
        size_t size;
        unsigned char *bytes = make_file(headers[i].header, strlen(headers[i].header), headers[i].data_bytes, &size);
        FILE *out = fopen(path, "wb");
        assert_int_equal(fwrite(bytes, 1, size, out), size);
        fclose(out);
        safetensors_file file;
        error[0] = from_memory[0] = 0;
        bool ok = safetensors_parse(bytes, size, &file, from_memory);
        if (ok) safetensors_free(&file);
        bool read_ok = safetensors_read(path, &file, error);
        if (read_ok) safetensors_free(&file);
        bool expected = !headers[i].says;
        if (ok != expected || read_ok != expected) fail_msg("%s: %s", headers[i].header, error);
        if (!expected && (!strstr(from_memory, headers[i].says) || !strstr(error, headers[i].says)))
            fail_msg("%s: \"%s\" does not say \"%s\"", headers[i].header, error, headers[i].says);
        if (!expected) assert_ptr_equal(strstr(error, path), error);
        free(bytes);
    }
    unlink(path);
}

/* Every shorter prefix of a good file, and wrong header lengths. */
static void test_truncated(void **state) {
    (void)state;
    const char *header = "{" A("[2]", "[0,8]") "," B("[1]", "[8,12]") "}";
    size_t size;
    unsigned char *bytes = make_file(header, strlen(header), 12, &size);
    safetensors_file file;
    char error[SAFETENSORS_ERROR];
    for (size_t cut = 0; cut < size; cut++) {
        unsigned char *copy = malloc(cut + 1); /* a copy, so that a sanitizer detects a read past the end */
        memcpy(copy, bytes, cut);
        assert_false(safetensors_parse(copy, cut, &file, error));
        assert_non_null(strstr(error, "cut off"));
        free(copy);
    }
    static const uint64_t lengths[] = {UINT64_MAX, INT64_MAX, 100000001, 1u << 20, UINT64_MAX - 7};
    for (size_t i = 0; i < COUNT(lengths); i++) {
        memcpy(bytes, &lengths[i], 8);
        assert_false(safetensors_parse(bytes, size, &file, error));
        assert_true(strstr(error, "header has") != NULL);
    }
    free(bytes);
}

/* Longer than other JSON may be, and with many names: all are there, in the header's order, and a repeated one is
 * refused.
 */
static void test_long_header(void **state) {
    (void)state;
    enum { TENSORS = 20000, LINE = 80, LENGTH = 17 * 1024 * 1024 };
    char *header = malloc(LENGTH), name[32], error[SAFETENSORS_ERROR];
    assert_non_null(header);
    for (size_t twice = 0; twice < 2; twice++) {
        size_t length = 0, size;
        for (size_t i = 0; i < TENSORS; i++) {
            size_t number = twice && i == TENSORS - 1 ? 7 : i, at = TENSORS - 1 - i; /* the data in reverse order */
            length += (size_t)snprintf(header + length, LINE,
                                       "%c\"t%zu\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}",
                                       i ? ',' : '{', number, at, at + 1);
        }
        header[length++] = '}';
        memset(header + length, ' ', LENGTH - length);
        unsigned char *bytes = make_file(header, LENGTH, TENSORS, &size);
        safetensors_file file;
        bool ok = safetensors_parse(bytes, size, &file, error);
        if (ok == (twice == 1)) fail_msg("%s", ok ? "taken" : error);
        if (twice) assert_non_null(strstr(error, "object at byte 0 has two members \"t7\""));
        if (ok) assert_int_equal(file.count, TENSORS);
        for (size_t i = 0; i < file.count; i++) {
            snprintf(name, sizeof name, "t%zu", i);
            assert_string_equal(file.tensors[i].name, name);
            assert_ptr_equal(file.tensors[i].data, bytes + 8 + LENGTH + TENSORS - 1 - i);
        }
        safetensors_free(&file);
        free(bytes);
    }
    free(header);
}

/* A name from a file must not control the terminal. */
static void test_control_characters(void **state) {
    (void)state;
    const char *header = "{\"\\u001b[31m\":{\"dtype\":\"X\",\"shape\":[],\"data_offsets\":[0,0]}}";
    size_t size;
    unsigned char *bytes = make_file(header, strlen(header), 0, &size);
    safetensors_file file;
    char error[SAFETENSORS_ERROR];
    assert_false(safetensors_parse(bytes, size, &file, error));
    assert_null(strchr(error, 27));
    free(bytes);
}

static uint32_t next_random(uint64_t *seed) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

/* Damages a good file at random; whatever is still accepted must hold its promises about the data. */
static void test_random_damage(void **state) {
    (void)state;
    enum { TRIALS = 50000 };
    static const char signs[] = "{}[]\",:\\u019 \x80";
    const char *header = "{\"__metadata__\":{\"k\":\"v\\u00e9\"}," A("[2]", "[0,8]") "," B("[3,1]", "[8,20]") "}";
    size_t size, accepted = 0;
    unsigned char *good = make_file(header, strlen(header), 20, &size);
    uint64_t seed = 1;
    for (int trial = 0; trial < TRIALS; trial++) {
        unsigned char *bytes = malloc(size);
        memcpy(bytes, good, size);
        for (uint32_t n = 1 + next_random(&seed) % 3; n; n--) {
            size_t at = next_random(&seed) % size;
            bytes[at] = next_random(&seed) % 2 ? (unsigned char)signs[next_random(&seed) % (sizeof signs - 1)]
                                               : (unsigned char)next_random(&seed);
        }
        safetensors_file file;
        char error[SAFETENSORS_ERROR] = "";
        if (safetensors_parse(bytes, size, &file, error)) {
            accepted++;
            for (size_t i = 0; i < file.count; i++) {
                const unsigned char *data = file.tensors[i].data;
                assert_true(data >= bytes && data + file.tensors[i].bytes <= bytes + size);
            }
            safetensors_free(&file);
        } else {
            assert_true(error[0] != 0);
            assert_true(file.tensors == NULL && file.header == NULL);
        }
        free(bytes);
    }
    free(good);
    assert_true(accepted > 0 && accepted < TRIALS); /* both outcomes occurred */
}

/* ---- Writing ----------------------------------------------------------------------------------------- */

static const uint16_t halves[3] = {1, 2, 3};
static const float singles[4] = {1, 2, 3, 4};
static const double doubles[1] = {5};
static const int64_t longs[2] = {-6, 7};

/* Narrow elements first: written in this order, the wider ones would not be aligned. */
static const safetensors_tensor written[] = {
    {.name = "half \"quoted\"\n", .dtype = VJP_BF16, .ndim = 1, .shape = {3}, .data = halves},
    {.name = "single", .dtype = VJP_F32, .ndim = 2, .shape = {2, 2}, .data = singles},
    {.name = "empty", .dtype = VJP_F16, .ndim = 2, .shape = {0, 5}, .data = NULL},
    {.name = "d\xc3\xa9j\xc3\xa0", .dtype = VJP_F64, .ndim = 0, .data = doubles},
    {.name = "long", .dtype = VJP_I64, .ndim = 1, .shape = {2}, .data = longs},
};
static const size_t written_bytes[] = {6, 16, 0, 8, 16};
static const safetensors_pair pairs[] = {{"attributes", "axes=1 eps=1e-5"}, {"tab\t", "\\"}};

static void test_round_trip(void **state) {
    (void)state;
    char path[256], error[SAFETENSORS_ERROR];
    path_of("round", path);
    assert_true(safetensors_write(path, written, COUNT(written), pairs, COUNT(pairs), error));
    safetensors_file file;
    if (!safetensors_read(path, &file, error)) fail_msg("%s", error);
    assert_int_equal(file.count, COUNT(written));
    for (size_t i = 0; i < file.count; i++) {
        const safetensors_tensor *t = &file.tensors[i], *w = &written[i];
        assert_string_equal(t->name, w->name);
        assert_int_equal(t->dtype, w->dtype);
        assert_int_equal(t->ndim, w->ndim);
        assert_memory_equal(t->shape, w->shape, sizeof t->shape);
        assert_int_equal(t->bytes, written_bytes[i]);
        if (t->bytes) assert_memory_equal(t->data, w->data, t->bytes);
        assert_int_equal((uintptr_t)t->data % vjp_dtype_size((vjp_dtype)t->dtype), 0);
    }
    assert_int_equal(file.pairs, COUNT(pairs));
    assert_string_equal(safetensors_metadata(&file, "attributes"), "axes=1 eps=1e-5");
    assert_string_equal(safetensors_metadata(&file, "tab\t"), "\\");
    assert_null(safetensors_metadata(&file, "none"));
    assert_ptr_equal(safetensors_find(&file, "long"), &file.tensors[4]);
    assert_null(safetensors_find(&file, "lon"));
    safetensors_free(&file);

    unsigned char prefix[8];
    FILE *in = fopen(path, "rb");
    assert_int_equal(fread(prefix, 1, 8, in), 8);
    fclose(in);
    assert_int_equal(prefix[0] % 8, 0); /* the data begins at a multiple of 8 */
    unlink(path);
}

static void test_write_refusals(void **state) {
    (void)state;
    static const struct {
        safetensors_tensor tensor;
        const char *says;
    } rows[] = {
        {{.name = "__metadata__", .dtype = VJP_F32}, "cannot be called"},
        {{.name = "x", .dtype = 77}, "dtype 77"},
        {{.name = "x", .dtype = VJP_F32, .ndim = 9}, "rank 9"},
        {{.name = "x", .dtype = VJP_F32, .ndim = 1, .shape = {-1}}, "sizes that no file can hold"},
        {{.name = "x", .dtype = VJP_F32, .ndim = 2, .shape = {INT64_MAX, INT64_MAX}}, "sizes that no file can hold"},
    };
    char path[256], error[SAFETENSORS_ERROR];
    path_of("refused", path);
    for (size_t i = 0; i < COUNT(rows); i++) {
        assert_false(safetensors_write(path, &rows[i].tensor, 1, NULL, 0, error));
        if (!strstr(error, rows[i].says)) fail_msg("\"%s\" does not say \"%s\"", error, rows[i].says);
    }
    const safetensors_tensor twice[] = {written[1], written[1]};
    assert_false(safetensors_write(path, twice, 2, NULL, 0, error));
    assert_non_null(strstr(error, "two tensors"));
    assert_int_equal(files_in_folder(), 0);
}

/* Over a limit on a file's size, as on a full disk: the old file stays, and nothing else is left behind. */
static void test_failed_write_keeps_the_old_file(void **state) {
    (void)state;
    enum { LIMIT = 4096 };
    char path[256], error[SAFETENSORS_ERROR];
    path_of("kept", path);
    assert_true(safetensors_write(path, written, COUNT(written), NULL, 0, error));
    static float large[LIMIT];
    safetensors_tensor tensor = {.name = "large", .dtype = VJP_F32, .ndim = 1, .shape = {LIMIT}, .data = large};
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    limit.rlim_cur = LIMIT;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    bool ok = safetensors_write(path, &tensor, 1, NULL, 0, error);
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    assert_false(ok);
    assert_non_null(strstr(error, "cannot be written"));
    assert_int_equal(files_in_folder(), 1);
    safetensors_file file;
    assert_true(safetensors_read(path, &file, error));
    assert_int_equal(file.count, COUNT(written));
    safetensors_free(&file);
    unlink(path);
}

static void test_odd_paths(void **state) {
    (void)state;
    char path[256], link_path[256], error[SAFETENSORS_ERROR];
    safetensors_file file;
    /* A pipe is written to, not replaced. Tested on our own pipe: a broken writer must not touch the system's devices.
     */
    path_of("pipe", path);
    assert_int_equal(mkfifo(path, 0600), 0);
    int reader = open(path, O_RDONLY | O_NONBLOCK);
    assert_true(reader >= 0);
    assert_true(safetensors_write(path, written, COUNT(written), NULL, 0, error));
    struct stat status;
    assert_int_equal(lstat(path, &status), 0);
    assert_true(S_ISFIFO(status.st_mode));
    unsigned char bytes[4096];
    ssize_t got = read(reader, bytes, sizeof bytes);
    close(reader);
    assert_true(got > 0);
    assert_true(safetensors_parse(bytes, (size_t)got, &file, error));
    assert_int_equal(file.count, COUNT(written));
    safetensors_free(&file);
    unlink(path);

    assert_false(safetensors_write(folder, written, COUNT(written), NULL, 0, error));
    assert_non_null(strstr(error, "folder"));
    assert_false(safetensors_write(path_of("none/x", path), written, COUNT(written), NULL, 0, error));
    assert_false(safetensors_read(path_of("none", path), &file, error));
    assert_false(safetensors_read(folder, &file, error));

    /* Through a link, the file behind it is replaced. */
    path_of("behind", path);
    assert_true(safetensors_write(path, written, 1, NULL, 0, error));
    assert_int_equal(symlink(path, path_of("link", link_path)), 0);
    assert_true(safetensors_write(link_path, written, 2, NULL, 0, error));
    assert_true(safetensors_read(path, &file, error));
    assert_int_equal(file.count, 2);
    safetensors_free(&file);
    unlink(link_path);
    unlink(path);
    assert_int_equal(files_in_folder(), 0);
}

/* A file that another process truncates while its tensors are read: a sentence, and no signal. */
static void test_cut_off_while_open(void **state) {
    (void)state;
    enum { COUNT = 100000 };
    static float numbers[2][COUNT], got[COUNT];
    for (int i = 0; i < COUNT; i++)
        numbers[0][i] = (float)i, numbers[1][i] = (float)-i;
    const safetensors_tensor tensors[] = {
        {.name = "a", .dtype = VJP_F32, .ndim = 1, .shape = {COUNT}, .data = numbers[0]},
        {.name = "b", .dtype = VJP_F32, .ndim = 1, .shape = {COUNT}, .data = numbers[1]}};
    char path[256], error[SAFETENSORS_ERROR] = "", part[128];
    safetensors_file file;
    path_of("cut", path);
    assert_true(safetensors_write(path, tensors, 2, NULL, 0, error));
    if (!safetensors_open(path, &file, error)) fail_msg("%s", error);
    assert_int_equal(file.count, 2);
    for (int i = 0; i < 2; i++) {
        assert_null(file.tensors[i].data);
        assert_true(safetensors_fetch(&file.tensors[i], 0, sizeof got, got, error));
        assert_memory_equal(got, numbers[i], sizeof got);
    }
    const size_t left = sizeof got / 2;
    assert_int_equal(truncate(path, (off_t)(file.tensors[1].at + (int64_t)left)), 0);
    assert_true(safetensors_fetch(&file.tensors[0], 0, sizeof got, got, error));
    assert_false(safetensors_fetch(&file.tensors[1], 0, sizeof got, got, error));
    snprintf(part, sizeof part, "cut off while tensor \"b\" was read: %zu of %zu bytes", left, sizeof got);
    assert_non_null(strstr(error, part));
    safetensors_free(&file);
    /* Truncated before that, it cannot be opened; nor can what is not a file. */
    assert_false(safetensors_open(path, &file, error));
    assert_non_null(strstr(error, "it is cut off"));
    unlink(path);
    assert_false(safetensors_open(path, &file, error));
    assert_non_null(strstr(error, "cannot be opened"));
    assert_false(safetensors_open("/dev/null", &file, error));
    assert_non_null(strstr(error, "it is not a regular file"));
}

/* Tensors may share their data, so that their sizes can add up to more than memory holds. */
static void test_sum_of_sizes(void **state) {
    (void)state;
    enum { COUNT = 3 };
    safetensors_tensor tensors[COUNT];
    static const char *const names[COUNT] = {"a", "b", "c"};
    for (int i = 0; i < COUNT; i++)
        tensors[i] = (safetensors_tensor){.name = names[i], .dtype = VJP_F64, .ndim = 1, .shape = {INT64_MAX / 16}};
    char path[256], error[SAFETENSORS_ERROR] = "";
    assert_false(safetensors_write(path_of("sum", path), tensors, COUNT, NULL, 0, error));
    assert_non_null(strstr(error, "all tensors together are larger than a file can be"));
    assert_int_equal(files_in_folder(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_headers),        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_long_header),    cmocka_unit_test(test_control_characters),
        cmocka_unit_test(test_random_damage),  cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_write_refusals), cmocka_unit_test(test_failed_write_keeps_the_old_file),
        cmocka_unit_test(test_odd_paths),      cmocka_unit_test(test_cut_off_while_open),
        cmocka_unit_test(test_sum_of_sizes),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
