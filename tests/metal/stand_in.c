/* SPDX-License-Identifier: MIT */
/* See stand_in.h. */
#include "stand_in.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulate.h"
#include "gpu/metal/device.h"

stand_in_state stand_in;

void stand_in_reset(void) {
    stand_in = (stand_in_state){.max_threads = 1024, .max_bytes = 1ul << 32};
}

__attribute__((format(printf, 1, 2))) static void misuse(const char *format, ...) {
    va_list arguments;
    if (stand_in.misuse[0]) return;
    va_start(arguments, format);
    vsnprintf(stand_in.misuse, sizeof stand_in.misuse, format, arguments);
    va_end(arguments);
}

/* ---- Objects ----------------------------------------------------------------------------------------- */

typedef enum kind {
    GONE,
    CLASS_STRING,
    CLASS_OPTIONS,
    CLASS_VALUES,
    STRING,
    FAILURE,
    OPTIONS,
    VALUES,
    DEVICE,
    QUEUE,
    BUFFER,
    LIBRARY,
    FUNCTION,
    PIPELINE,
    COMMANDS,
    ENCODER
} kind;

enum { MAX_CONSTANTS = 64, MAX_AUTORELEASED = 4096, UNIFORM_BYTES = 4096 };

typedef struct object object;

typedef struct recorded {
    object *pipeline, *buffer[EMULATE_MAX_BUFFERS];
    char *bytes; /* of the last buffer */
    emulate_launch launch;
} recorded;

struct object {
    kind kind;
    int references;
    char *text;                       /* string, failure */
    bool fast_math, precise;          /* options */
    unsigned constant[MAX_CONSTANTS]; /* values, function, pipeline */
    bool given[MAX_CONSTANTS];
    char *memory; /* buffer */
    size_t bytes;
    const emulate_shader *shader; /* library and what comes of it */
    const emulate_kernel *kernel;
    unsigned constants[MAX_CONSTANTS]; /* in the shader's order */
    recorded *record;                  /* commands */
    int records;
    bool ended, committed, done;
    object *failure, *of; /* of: the commands of an encoder */
    recorded next;        /* encoder: what is set */
    object *older;        /* commands: committed before */
};

static object classes[] = {{.kind = CLASS_STRING}, {.kind = CLASS_OPTIONS}, {.kind = CLASS_VALUES}};
static object *autoreleased[MAX_AUTORELEASED];
static int autoreleased_count;
static object *newest; /* commands that were committed last */

static object *make(kind k) {
    object *o = calloc(1, sizeof *o);
    o->kind = k;
    o->references = 1;
    stand_in.objects++;
    return o;
}

static object *autorelease(object *o) {
    if (!stand_in.pools) misuse("an object is autoreleased with no pool in place");
    if (autoreleased_count == MAX_AUTORELEASED) abort();
    autoreleased[autoreleased_count++] = o;
    return o;
}

static object *text_object(kind k, const char *text) {
    object *o = make(k);
    o->text = strdup(text);
    return o;
}

static objc_id m_retain(objc_id self, void *selector) {
    (void)selector;
    ((object *)self)->references++;
    return self;
}

/* The last objects that were released stay in memory, so that a message to one is seen. */
enum { GRAVES = 1024 };
static object *graves[GRAVES];
static unsigned grave;

static void let_go(object *o) {
    if (--o->references > 0) return;
    if (o->kind == ENCODER && !o->ended) misuse("an encoder is released before endEncoding");
    free(o->text);
    free(o->memory);
    for (int i = 0; i < o->records; i++) {
        let_go(o->record[i].pipeline);
        for (int b = 0; b < EMULATE_MAX_BUFFERS; b++)
            if (o->record[i].buffer[b]) let_go(o->record[i].buffer[b]);
        free(o->record[i].bytes);
    }
    free(o->record);
    free(o->next.bytes);
    if (o->failure) let_go(o->failure);
    if (o == newest) newest = NULL;
    o->kind = GONE;
    o->text = o->memory = NULL;
    stand_in.objects--;
    free(graves[grave % GRAVES]);
    graves[grave++ % GRAVES] = o;
}

static void m_release(objc_id self, void *selector) {
    (void)selector;
    let_go(self);
}

static void *push_pool(void) {
    stand_in.pools++;
    return &autoreleased[autoreleased_count];
}

static void pop_pool(void *pool) {
    while (&autoreleased[autoreleased_count] > (object **)pool)
        let_go(autoreleased[--autoreleased_count]);
    stand_in.pools--;
}

static objc_id fail_with(const char *words, objc_id *error) {
    *error = autorelease(text_object(FAILURE, words));
    return NULL;
}

/* ---- Strings, options, values ------------------------------------------------------------------------ */

static objc_id class_named(const char *name) {
    return strcmp(name, "NSString") == 0                    ? &classes[0]
           : strcmp(name, "MTLCompileOptions") == 0         ? &classes[1]
           : strcmp(name, "MTLFunctionConstantValues") == 0 ? &classes[2]
                                                            : NULL;
}

static objc_id m_new(objc_id self, void *selector) {
    (void)selector;
    object *o = make(((object *)self)->kind == CLASS_OPTIONS ? OPTIONS : VALUES);
    o->fast_math = true;
    return o;
}

static objc_id m_string(objc_id self, void *selector, const char *text) {
    (void)self;
    (void)selector;
    return autorelease(text_object(STRING, text));
}

static const char *m_text(objc_id self, void *selector) {
    (void)selector;
    return ((object *)self)->text;
}

static objc_id m_description(objc_id self, void *selector) {
    (void)selector;
    return autorelease(text_object(STRING, ((object *)self)->text));
}

static signed char m_responds(objc_id self, void *selector, void *asked) {
    (void)self;
    (void)selector;
    const char *name = asked;
    return !(stand_in.old_system && (strstr(name, "setMath") || strstr(name, "supportsFamily")));
}

static void m_fast_math(objc_id self, void *selector, signed char value) {
    (void)selector;
    ((object *)self)->fast_math = value;
    ((object *)self)->precise = !value;
}

static void m_math_mode(objc_id self, void *selector, long value) {
    (void)selector;
    ((object *)self)->fast_math = value != 0;
}

static void m_math_functions(objc_id self, void *selector, long value) {
    (void)selector;
    ((object *)self)->precise = value == 1;
}

static void m_set_constant(objc_id self, void *selector, const void *value, unsigned long type, unsigned long index) {
    object *o = self;
    (void)selector;
    if (type != 33 || index >= MAX_CONSTANTS) {
        misuse("function constant %lu of type %lu", index, type);
        return;
    }
    memcpy(&o->constant[index], value, sizeof o->constant[index]);
    o->given[index] = true;
}

/* ---- The device -------------------------------------------------------------------------------------- */

static objc_id create_device(void) {
    return stand_in.no_device ? NULL : make(DEVICE);
}

static objc_id m_name(objc_id self, void *selector) {
    (void)self;
    (void)selector;
    return autorelease(text_object(STRING, "a processor that plays a GPU"));
}

static unsigned long m_max_bytes(objc_id self, void *selector) {
    (void)self;
    (void)selector;
    return stand_in.max_bytes;
}

static signed char m_supports(objc_id self, void *selector, long family) {
    (void)self;
    (void)selector;
    return family == 1007 && !stand_in.no_matrices;
}

static unsigned long m_width(objc_id self, void *selector) {
    (void)self;
    (void)selector;
    return emulate_with.width;
}

static objc_id m_new_queue(objc_id self, void *selector) {
    (void)self;
    (void)selector;
    return stand_in.fail_queue ? NULL : make(QUEUE);
}

static objc_id m_new_buffer(objc_id self, void *selector, unsigned long bytes, unsigned long options) {
    (void)self;
    (void)selector;
    if (options != 0) misuse("a buffer that is not shared");
    if (!bytes) misuse("a buffer of no bytes");
    if (stand_in.fail_buffer || bytes > stand_in.max_bytes) return NULL;
    object *o = make(BUFFER);
    if (posix_memalign((void **)&o->memory, 4096, bytes) != 0) abort();
    memset(o->memory, 0xee, bytes);
    o->bytes = bytes;
    return o;
}

static objc_id m_contents(objc_id self, void *selector) {
    (void)selector;
    return ((object *)self)->memory;
}

/* The compiler: a source is recognised by its text. */
static const emulate_shader *shader_of(const char *source) {
    for (const emulate_shader *s = emulate_shaders; s; s = s->next)
        if (metal_shader(s->name) && strcmp(metal_shader(s->name), source) == 0) return s;
    return NULL;
}

static objc_id m_new_library(objc_id self, void *selector, objc_id source, objc_id options, objc_id *error) {
    (void)self;
    (void)selector;
    const object *with = options;
    if (stand_in.fail_library) return fail_with(stand_in.fail_library, error);
    if (!with || with->fast_math || !with->precise) misuse("a library is compiled with fast mathematics");
    const emulate_shader *shader = shader_of(((object *)source)->text);
    if (!shader) return fail_with("this source is not one of the shaders that were compiled for the test", error);
    object *o = make(LIBRARY);
    o->shader = shader;
    stand_in.libraries++;
    return o;
}

static objc_id m_new_function(objc_id self, void *selector, objc_id name, objc_id values, objc_id *error) {
    const object *library = self, *given = values;
    const char *wanted = ((object *)name)->text;
    const emulate_shader *shader = library->shader;
    (void)selector;
    if (stand_in.fail_function) return fail_with(stand_in.fail_function, error);
    for (size_t k = 0; k < shader->kernels; k++) {
        if (strncmp(wanted, "run_", 4) != 0 || strcmp(wanted + 4, shader->kernel[k].name) != 0) continue;
        object *o = make(FUNCTION);
        o->shader = shader;
        o->kernel = &shader->kernel[k];
        for (size_t i = 0; i < shader->constants; i++) {
            unsigned index = shader->constant[i].index;
            if (!given->given[index]) misuse("function constant %u (%s) is not given", index, shader->constant[i].name);
            o->constants[i] = given->constant[index];
        }
        return o;
    }
    char words[128];
    snprintf(words, sizeof words, "there is no function %.80s", wanted);
    return fail_with(words, error);
}

static objc_id m_new_pipeline(objc_id self, void *selector, objc_id function, objc_id *error) {
    (void)self;
    (void)selector;
    const object *from = function;
    if (stand_in.fail_pipeline) return fail_with(stand_in.fail_pipeline, error);
    object *o = make(PIPELINE);
    o->shader = from->shader;
    o->kernel = from->kernel;
    memcpy(o->constants, from->constants, sizeof o->constants);
    stand_in.pipelines++;
    return o;
}

static unsigned long m_max_threads(objc_id self, void *selector) {
    (void)self;
    (void)selector;
    return stand_in.max_threads;
}

/* ---- Encoding ---------------------------------------------------------------------------------------- */

static objc_id m_commands(objc_id self, void *selector) {
    (void)self;
    (void)selector;
    return stand_in.fail_commands ? NULL : autorelease(make(COMMANDS));
}

static objc_id m_encoder(objc_id self, void *selector) {
    (void)selector;
    if (stand_in.fail_encoder) return NULL;
    object *o = make(ENCODER);
    o->of = self;
    return autorelease(o);
}

static void m_set_pipeline(objc_id self, void *selector, objc_id pipeline) {
    (void)selector;
    ((object *)self)->next.pipeline = pipeline;
}

static void m_set_buffer(objc_id self, void *selector, objc_id buffer, unsigned long offset, unsigned long index) {
    object *o = self, *b = buffer;
    (void)selector;
    if (index >= EMULATE_MAX_BUFFERS || (b && offset >= b->bytes)) {
        misuse("buffer %lu at offset %lu", index, offset);
        return;
    }
    o->next.buffer[index] = b;
    o->next.launch.buffer[index] = (emulate_buffer){b->memory, b->bytes, offset};
}

static void m_set_bytes(objc_id self, void *selector, const void *bytes, unsigned long length, unsigned long index) {
    object *o = self;
    (void)selector;
    if (index != EMULATE_MAX_BUFFERS - 1 || length > UNIFORM_BYTES) {
        misuse("%lu bytes set as buffer %lu", length, index);
        return;
    }
    free(o->next.bytes);
    o->next.bytes = malloc(length);
    memcpy(o->next.bytes, bytes, length);
    o->next.launch.buffer[index] = (emulate_buffer){o->next.bytes, length, 0};
}

static void m_dispatch(objc_id self, void *selector, objc_size groups, objc_size threads) {
    object *o = self, *commands = o->of;
    recorded *r = &o->next;
    (void)selector;
    if (o->ended) misuse("a dispatch after endEncoding");
    if (!r->pipeline || !r->bytes || groups.depth != 1 || threads.height != 1 || threads.depth != 1 || !groups.width ||
        !groups.height || !threads.width || threads.width > stand_in.max_threads ||
        groups.width * threads.width > UINT32_MAX) {
        misuse("a dispatch of %lu x %lu groups of %lu threads", groups.width, groups.height, threads.width);
        return;
    }
    for (size_t i = 0; i < r->pipeline->shader->operands; i++)
        if (!r->buffer[i]) misuse("%s.metal: buffer %zu is not set", r->pipeline->shader->name, i);
    commands->record = realloc(commands->record, (size_t)(commands->records + 1) * sizeof *commands->record);
    recorded *kept = &commands->record[commands->records++];
    *kept = *r;
    kept->bytes = malloc(r->launch.buffer[EMULATE_MAX_BUFFERS - 1].bytes);
    memcpy(kept->bytes, r->bytes, r->launch.buffer[EMULATE_MAX_BUFFERS - 1].bytes);
    kept->launch.buffer[EMULATE_MAX_BUFFERS - 1].memory = kept->bytes;
    kept->launch.grid[0] = (unsigned)groups.width;
    kept->launch.grid[1] = (unsigned)groups.height;
    kept->launch.grid[2] = 1;
    kept->launch.threads = (unsigned)threads.width;
    kept->launch.shader = r->pipeline->shader;
    kept->launch.kernel = r->pipeline->kernel;
    kept->launch.constant = r->pipeline->constants;
    r->pipeline->references++;
    for (int b = 0; b < EMULATE_MAX_BUFFERS; b++)
        if (kept->buffer[b]) kept->buffer[b]->references++;
    stand_in.grid[0] = groups.width;
    stand_in.grid[1] = groups.height;
}

static void m_end(objc_id self, void *selector) {
    (void)selector;
    ((object *)self)->ended = ((object *)self)->of->ended = true;
}

static void m_commit(objc_id self, void *selector) {
    object *o = self;
    (void)selector;
    if (!o->ended || o->committed) misuse("a commit before endEncoding, or a second one");
    o->committed = true;
    o->older = newest;
    newest = o;
    stand_in.committed++;
}

/* In the order of the queue. */
static void run(object *o) {
    if (!o || o->done || o->kind == GONE) return;
    run(o->older);
    o->older = NULL;
    o->done = true;
    if (stand_in.fail_run) o->failure = text_object(FAILURE, stand_in.fail_run);
    for (int i = 0; i < o->records && !o->failure; i++) {
        char message[EMULATE_MESSAGE];
        stand_in.launches++;
        if (!emulate_run(&o->record[i].launch, message)) o->failure = text_object(FAILURE, message);
    }
}

static void m_wait(objc_id self, void *selector) {
    (void)selector;
    if (!((object *)self)->committed) misuse("waiting for what was not committed");
    stand_in.waits++;
    run(self);
}

static unsigned long m_status(objc_id self, void *selector) {
    (void)selector;
    const object *o = self;
    return o->failure ? 5 : o->done ? 4 : o->committed ? 2 : 0;
}

static objc_id m_error(objc_id self, void *selector) {
    (void)selector;
    return ((object *)self)->failure;
}

/* ---- Messages ---------------------------------------------------------------------------------------- */

#define ANY GONE
static const struct {
    kind kind; /* that understands it; ANY: all */
    objc_method method;
} messages[OBJC_MESSAGES] = {
    [OBJC_NEW] = {ANY, (objc_method)m_new},
    [OBJC_RETAIN] = {ANY, (objc_method)m_retain},
    [OBJC_RELEASE] = {ANY, (objc_method)m_release},
    [OBJC_RESPONDS] = {ANY, (objc_method)m_responds},
    [OBJC_STRING] = {CLASS_STRING, (objc_method)m_string},
    [OBJC_TEXT] = {STRING, (objc_method)m_text},
    [OBJC_DESCRIPTION] = {FAILURE, (objc_method)m_description},
    [OBJC_NAME] = {DEVICE, (objc_method)m_name},
    [OBJC_MAX_BYTES] = {DEVICE, (objc_method)m_max_bytes},
    [OBJC_SUPPORTS] = {DEVICE, (objc_method)m_supports},
    [OBJC_WIDTH] = {PIPELINE, (objc_method)m_width},
    [OBJC_NEW_QUEUE] = {DEVICE, (objc_method)m_new_queue},
    [OBJC_NEW_BUFFER] = {DEVICE, (objc_method)m_new_buffer},
    [OBJC_NEW_LIBRARY] = {DEVICE, (objc_method)m_new_library},
    [OBJC_NEW_PIPELINE] = {DEVICE, (objc_method)m_new_pipeline},
    [OBJC_SET_FAST_MATH] = {OPTIONS, (objc_method)m_fast_math},
    [OBJC_SET_MATH_MODE] = {OPTIONS, (objc_method)m_math_mode},
    [OBJC_SET_MATH_FUNCTIONS] = {OPTIONS, (objc_method)m_math_functions},
    [OBJC_SET_CONSTANT] = {VALUES, (objc_method)m_set_constant},
    [OBJC_NEW_FUNCTION] = {LIBRARY, (objc_method)m_new_function},
    [OBJC_MAX_THREADS] = {PIPELINE, (objc_method)m_max_threads},
    [OBJC_CONTENTS] = {BUFFER, (objc_method)m_contents},
    [OBJC_COMMANDS] = {QUEUE, (objc_method)m_commands},
    [OBJC_ENCODER] = {COMMANDS, (objc_method)m_encoder},
    [OBJC_SET_PIPELINE] = {ENCODER, (objc_method)m_set_pipeline},
    [OBJC_SET_BUFFER] = {ENCODER, (objc_method)m_set_buffer},
    [OBJC_SET_BYTES] = {ENCODER, (objc_method)m_set_bytes},
    [OBJC_DISPATCH] = {ENCODER, (objc_method)m_dispatch},
    [OBJC_END] = {ENCODER, (objc_method)m_end},
    [OBJC_COMMIT] = {COMMANDS, (objc_method)m_commit},
    [OBJC_WAIT] = {COMMANDS, (objc_method)m_wait},
    [OBJC_STATUS] = {COMMANDS, (objc_method)m_status},
    [OBJC_ERROR] = {COMMANDS, (objc_method)m_error},
};

/* A selector is its name. */
static void *selector_of(const char *name) {
    return (void *)(uintptr_t)name;
}

/* A message to NULL does nothing; one that an object does not understand ends the program on macOS, and here. */
static objc_id to_nothing(objc_id self, void *selector) {
    (void)self;
    (void)selector;
    return NULL;
}

static objc_method method_of(objc_id self, void *selector) {
    const object *o = self;
    for (int m = 0; m < OBJC_MESSAGES && o; m++) {
        if (strcmp(objc_selectors[m], selector) != 0) continue;
        if (o->kind != GONE && (messages[m].kind == ANY || messages[m].kind == o->kind)) return messages[m].method;
        misuse("%s sent to %s", (const char *)selector, o->kind == GONE ? "an object that is gone" : "another kind");
        fprintf(stderr, "stand_in: %s\n", stand_in.misuse);
        abort();
    }
    return (objc_method)to_nothing;
}

const objc_system stand_in_system = {class_named, selector_of, method_of, push_pool, pop_pool, create_device};
