/* SPDX-License-Identifier: MIT */
// See emulate.h.
#include "emulate.h"

#include "emulate/accesses.h"
#include "emulate/fiber.h"
#include "emulate/lines.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

emulate_settings emulate_with = {EMULATE_FORWARD, 32};
emulate_shader *emulate_shaders;

namespace {

enum { STACK = 64 << 10, SLOT = 16 };

enum class State : unsigned char { READY, AT_BARRIER, IN_SIMD, ENDED };

struct Thread {
    void *sp;
    unsigned simd_begin; // the first thread of its simdgroup
    const char *file;    // where it waits
    int line;
    unsigned turn;                  // how many exchanges it has been in
    unsigned shown[2];              // the turn of each slot: a thread that has ended has no more
    alignas(16) char slot[2][SLOT]; // what it shows to its simdgroup, alternating: a thread that is ahead must not
                                    // overwrite it
};

struct Grid3 { // as uint3 lies in memory
    unsigned x, y, z, padding;
};

// A word of threadgroup memory; no shader has smaller elements there. Small, because they are most of what the emulator
// itself reads: places are relative to the program.
struct Cell {
    unsigned write_epoch, read_epoch;
    short writer, reader; // MANY: several threads; MATRIX: a simdgroup's matrix, so that no thread has done it alone
    unsigned write_place : 31, atomic : 1, read_place;
};

enum { WORD = 4 };

enum { MANY = -1, MATRIX = -2, MATRIX_THREADS = 32 };

struct Region {
    char *memory;
    size_t bytes;
    Cell *cell;
};

enum { REGIONS = 256 };

char *stacks; // [EMULATE_MAX_THREADS][STACK]
Thread threads[EMULATE_MAX_THREADS];
State states[EMULATE_MAX_THREADS]; // of the threads: by themselves, because all are read after every exchange
void *scheduler;
unsigned now; // the thread that runs
const emulate_launch *launch;
Grid3 place;
Region regions[REGIONS]; // of every kernel that ran: two each
int region_count;
Region active[4]; // copies, because every access looks here first
int active_count;
unsigned epoch = 1, group_epoch; // the one in which the group began
bool running, seen;
unsigned early; // see report_early()
unsigned early_place;
char *message;
unsigned long launches;

// ---- Reporting ----------------------------------------------------------------------------------------------

void line_of(unsigned place, char *text, size_t room) {
    emulate_line_of(place, "metal_stdlib", text, room);
}

__attribute__((format(printf, 1, 2))) void report_error(const char *format, ...) {
    if (seen) return;
    seen = true;
    int used = snprintf(message, EMULATE_MESSAGE, "%s.metal, %s(): group %u: ", launch->shader->name,
                        launch->kernel->name, place.y * launch->grid[0] + place.x);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + used, static_cast<size_t>(EMULATE_MESSAGE - used), format, arguments);
    va_end(arguments);
}

// ---- Memory accesses ----------------------------------------------------------------------------------------

// "thread 7"
struct Name {
    char text[32];
    explicit Name(int who) {
        if (who == MATRIX)
            snprintf(text, sizeof text, "the matrix of a simdgroup");
        else
            snprintf(text, sizeof text, "thread %d", who != MANY ? who : now ? 0 : 1);
    }
};

void tell_race(const Cell &cell, bool write, short who, bool other_wrote, unsigned at) {
    char here[160], there[160];
    line_of(at, here, sizeof here);
    line_of(other_wrote ? cell.write_place : cell.read_place, there, sizeof there);
    report_error("a race: %s %s at %s what %s %s at %s, with no barrier between", Name(who).text,
                 write ? "writes" : "reads", here, Name(other_wrote ? cell.writer : cell.reader).text,
                 other_wrote ? "writes" : "reads", there);
}

bool by_matrix; // the access at hand

void touch(const Region &region, size_t from, size_t bytes, bool write, bool atomic, unsigned at) {
    short who = by_matrix ? static_cast<short>(MATRIX) : static_cast<short>(now);
    for (size_t i = from / WORD; i <= (from + bytes - 1) / WORD && !seen; i++) {
        Cell &cell = region.cell[i];
        bool written = cell.write_epoch == epoch, read = cell.read_epoch == epoch;
        if (!write && read && !written && (cell.reader == MANY || cell.reader == who)) continue; // nothing new
        bool both_atomic = atomic && cell.atomic;
        if (written && (cell.writer != who || by_matrix) && !both_atomic)
            tell_race(cell, write, who, true, at);
        else if (write && read && (cell.reader != who || by_matrix))
            tell_race(cell, true, who, false, at);
        else if (!write && cell.write_epoch < group_epoch && !early_place) {
            early_place = at; // a race if a thread writes it before the next barrier
            early = now;
        }
        if (write) {
            cell.atomic = atomic && (!written || cell.atomic);
            cell.write_epoch = epoch;
            cell.writer = who;
            cell.write_place = at & INT32_MAX;
        } else {
            cell.reader = read && cell.reader != who ? static_cast<short>(MANY) : who;
            cell.read_epoch = epoch;
            cell.read_place = at;
        }
    }
}

// Reports the first read since the last barrier of memory that no thread has written yet.
void report_early() {
    char here[160];
    if (!early_place || seen) return;
    line_of(early_place, here, sizeof here);
    report_error("thread %u reads at %s threadgroup memory that no thread has written", early, here);
}

// The buffer that the last access to such a page was in.
enum { PAGE = 12, PAGES = 256 };
const emulate_buffer *hit[PAGES];

bool lies_in(const emulate_buffer &b, const char *a, size_t bytes) {
    return static_cast<size_t>(a - b.memory) < b.bytes && static_cast<size_t>(a - b.memory) + bytes <= b.bytes;
}

__attribute__((noinline)) void find(const char *a, size_t bytes, bool write, unsigned at, bool atomic) {
    for (int i = 0; i < active_count; i++)
        if (static_cast<size_t>(a - active[i].memory) < active[i].bytes)
            return touch(active[i], static_cast<size_t>(a - active[i].memory), bytes, write, atomic, at);
    if (a >= __ehdr_start && a < _end) return; // constants
    for (const emulate_buffer &b : launch->buffer)
        if (b.memory && lies_in(b, a, bytes)) {
            hit[reinterpret_cast<uintptr_t>(a) >> PAGE & (PAGES - 1)] = &b;
            return;
        }
    if (seen) return;
    char here[160];
    line_of(at, here, sizeof here);
    report_error("thread %u %s at %s outside of every buffer", now, write ? "writes" : "reads", here);
    fiber_switch(&threads[now].sp, scheduler); // the access itself could fault
}

inline void access(const void *address, size_t bytes, bool write, uintptr_t at, bool atomic = false) {
    const char *a = static_cast<const char *>(address);
    if (static_cast<size_t>(a - stacks) < static_cast<size_t>(EMULATE_MAX_THREADS) * STACK || !running) return;
    const emulate_buffer *b = hit[reinterpret_cast<uintptr_t>(a) >> PAGE & (PAGES - 1)];
    if (b && lies_in(*b, a, bytes)) return;
    find(a, bytes, write, static_cast<unsigned>(at - emulate_first_byte()), atomic);
}

} // namespace

static void emulate_access(const void *address, size_t bytes, bool write, uintptr_t place) {
    access(address, bytes, write, place);
}

namespace {

// ---- Stopping -----------------------------------------------------------------------------------------------

void stop(State state, const char *file, int line) {
    Thread &t = threads[now];
    states[now] = state;
    t.file = file;
    t.line = line;
    fiber_switch(&t.sp, scheduler);
}

unsigned width() {
    return emulate_with.width < EMULATE_MAX_THREADS ? emulate_with.width : static_cast<unsigned>(EMULATE_MAX_THREADS);
}

void run_thread() {
    Grid3 grid = {launch->grid[0], launch->grid[1], launch->grid[2], 0}, size = {launch->threads, 1, 1, 0}, at = place;
    unsigned lane = now, simd = emulate_with.width;
    void *pointer[EMULATE_MAX_BUFFERS], *arguments[EMULATE_MAX_BUFFERS + 6];
    size_t count = launch->shader->operands;
    for (size_t i = 0; i < count; i++) {
        pointer[i] = launch->buffer[i].memory + launch->buffer[i].offset;
        arguments[i] = &pointer[i];
    }
    const emulate_buffer &uniforms = launch->buffer[EMULATE_MAX_BUFFERS - 1];
    void *table = uniforms.memory + uniforms.offset;
    arguments[count] = &table;
    arguments[count + 1] = &at;
    arguments[count + 2] = &grid;
    arguments[count + 3] = &size;
    arguments[count + 4] = &lane;
    arguments[count + 5] = &simd;
    launch->kernel->run(arguments);
}

void start() {
    run_thread();
    states[now] = State::ENDED;
    fiber_switch(&threads[now].sp, scheduler);
    abort(); // an ended thread is never resumed
}

// ---- A threadgroup ------------------------------------------------------------------------------------------

bool same_place(const Thread &a, const Thread &b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

void tell_divergence(unsigned a, unsigned b) {
    const Thread &s = threads[a], &t = threads[b];
    if (states[b] == State::ENDED)
        report_error("threads diverge: thread %u waits at %s:%d, thread %u has ended", a, emulate_file_name(s.file),
                     s.line, b);
    else
        report_error("threads diverge: thread %u waits at %s:%d, thread %u at %s:%d", a, emulate_file_name(s.file),
                     s.line, b, emulate_file_name(t.file), t.line);
}

// Resumes a simdgroup whose threads have all come to one exchange. Threads that have ended take no part.
bool release_simdgroup(unsigned begin, unsigned end) {
    int first = -1;
    for (unsigned i = begin; i < end; i++) {
        if (states[i] == State::ENDED) continue;
        if (states[i] != State::IN_SIMD) return false;
        if (first < 0) first = static_cast<int>(i);
        if (!same_place(threads[first], threads[i])) return false;
    }
    for (unsigned i = begin; first >= 0 && i < end; i++)
        if (states[i] == State::IN_SIMD) states[i] = State::READY;
    return first >= 0;
}

// Resumes all threads, or reports what keeps them waiting. False: the group has ended, or must.
bool release(unsigned count) {
    bool any = false;
    for (unsigned begin = 0; begin < count; begin += width()) {
        unsigned end = begin + width() < count ? begin + width() : count;
        any = release_simdgroup(begin, end) || any;
    }
    if (any) return true;
    int first = -1;
    for (unsigned i = 0; i < count; i++)
        if (states[i] != State::ENDED && first < 0) first = static_cast<int>(i);
    if (first < 0) return false;
    for (unsigned i = 0; i < count; i++)
        if (states[i] != states[first] || !same_place(threads[first], threads[i])) {
            tell_divergence(static_cast<unsigned>(first), i);
            return false;
        }
    for (unsigned i = 0; i < count; i++)
        states[i] = State::READY;
    epoch++;
    report_early();
    return true;
}

void run_group(const unsigned *order) {
    unsigned count = launch->threads;
    group_epoch = ++epoch;
    early_place = 0;
    active_count = 0;
    for (unsigned i = 0; i < count; i++) {
        states[i] = State::READY;
        threads[i].simd_begin = i / width() * width();
        threads[i].turn = threads[i].shown[0] = threads[i].shown[1] = 0;
        // Stacks that all ended at the same offset of a page would compete for the same cache lines.
        threads[i].sp = fiber_stack(stacks + static_cast<size_t>(i + 1) * STACK - 64 - i % 64 * 448, start);
    }
    do
        for (unsigned i = 0; i < count && !seen; i++) {
            now = order[i];
            if (states[now] == State::READY) fiber_switch(&scheduler, threads[now].sp);
        }
    while (!seen && release(count));
    report_early();
}

// ---- A launch -----------------------------------------------------------------------------------------------

// To be freed.
unsigned *order_of(unsigned count, emulate_order order) {
    unsigned *at = static_cast<unsigned *>(malloc(count * sizeof *at));
    if (!at) abort();
    uint64_t random = 88172645463325252u + launches;
    for (unsigned i = 0; i < count; i++)
        at[i] = order == EMULATE_REVERSE ? count - 1 - i : i;
    for (unsigned i = count; order == EMULATE_SHUFFLED && i > 1; i--) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        unsigned j = static_cast<unsigned>(random % i), kept = at[i - 1];
        at[i - 1] = at[j];
        at[j] = kept;
    }
    return at;
}

} // namespace

bool emulate_run(const emulate_launch *l, char text[EMULATE_MESSAGE]) {
    if (!stacks) {
        void *memory = mmap(nullptr, static_cast<size_t>(EMULATE_MAX_THREADS) * STACK, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) abort();
        stacks = static_cast<char *>(memory);
    }
    launch = l;
    message = text;
    seen = false;
    memset(hit, 0, sizeof hit);
    for (size_t i = 0; i < l->shader->constants; i++)
        *l->shader->constant[i].value = l->constant[i];
    emulate_order order = emulate_with.order;
    if (order == EMULATE_IN_TURN) order = static_cast<emulate_order>(launches % 3);
    unsigned count = l->grid[0] * l->grid[1], *groups = order_of(count, order), *lanes = order_of(l->threads, order);
    running = true;
    for (unsigned i = 0; i < count && !seen; i++) {
        place = {groups[i] % l->grid[0], groups[i] / l->grid[0], 0, 0};
        run_group(lanes);
    }
    running = false;
    free(groups);
    free(lanes);
    launches++;
    return !seen;
}

// ---- What shaders call --------------------------------------------------------------------------------------

// The first thread of a group to come here resets the group's memory: full of NaN, and untouched.
void emulate_shared(void *memory, size_t bytes) {
    for (int i = 0; i < active_count; i++)
        if (active[i].memory == memory) return;
    Region *region = regions;
    while (region < regions + region_count && region->memory != memory)
        region++;
    if (region == regions + region_count) {
        if (region_count++ == REGIONS) abort();
        *region = {static_cast<char *>(memory), bytes,
                   static_cast<Cell *>(calloc((bytes + WORD - 1) / WORD, sizeof(Cell)))};
        if (!region->cell) abort();
    }
    memset(memory, 0xff, bytes);
    active[active_count++] = *region;
}

extern "C" {

void emulate_barrier(const char *file, int line) {
    stop(State::AT_BARRIER, file, line);
}

unsigned emulate_simd_lane(void) {
    return now - threads[now].simd_begin;
}

unsigned emulate_simd_width(void) {
    return width();
}

// Shows a value to the simdgroup, waits for the others', and returns the turn.
static unsigned show(const void *value, size_t bytes, const char *file, int line) {
    Thread &t = threads[now];
    unsigned turn = ++t.turn;
    if (bytes > SLOT) abort();
    if (bytes) memcpy(t.slot[turn % 2], value, bytes);
    t.shown[turn % 2] = turn;
    stop(State::IN_SIMD, file, line);
    return turn;
}

// A lane that does not exist, or has ended, gives NaN.
const void *emulate_exchange(const void *value, size_t bytes, unsigned lane, const char *file, int line) {
    static const uint64_t nothing[2] = {UINT64_MAX, UINT64_MAX};
    unsigned turn = show(value, bytes, file, line), first = threads[now].simd_begin;
    if (lane >= width() || first + lane >= launch->threads || threads[first + lane].shown[turn % 2] != turn)
        return nothing;
    return threads[first + lane].slot[turn % 2];
}

unsigned emulate_atomic(unsigned *at, int what, unsigned value) {
    access(at, sizeof *at, true, reinterpret_cast<uintptr_t>(__builtin_return_address(0)), true);
    unsigned before = *at;
    switch (what) {
    case '+': *at = before + value; break;
    case '<': *at = value < before ? value : before; break;
    case '>': *at = value > before ? value : before; break;
    case '|': *at = before | value; break;
    case '&': *at = before & value; break;
    case '=': *at = value; break;
    }
    return before;
}
}

// ---- Matrices of a simdgroup --------------------------------------------------------------------------------

namespace {

// Which elements of a matrix a thread has is not defined, so they are scattered: the e-th of a thread is this one,
// counted by rows; and where element `at` is. 53 times 29 is 1 modulo 64.
unsigned element_of(unsigned lane, unsigned e) {
    return (2 * lane + e) * 53 % 64;
}
unsigned holder_of(unsigned at) {
    return at * 29 % 64;
}

struct Factors {
    float a[2], b[2];
};

// Waits for all 32 threads of the simdgroup, which a matrix needs; what they show, by thread, is in slot `turn` % 2.
unsigned all_show(const Factors &own, const char *file, int line) {
    unsigned turn = show(&own, sizeof own, file, line), first = threads[now].simd_begin;
    unsigned next = first + (now - first + 1) % MATRIX_THREADS; // each looks at one, so one sees who is missing
    bool whole = width() == MATRIX_THREADS && first + MATRIX_THREADS <= launch->threads;
    if (whole && threads[next].shown[turn % 2] == turn) return turn;
    report_error("the simdgroup of thread %u has fewer than 32 threads for the matrix at %s:%d", now,
                 emulate_file_name(file), line);
    fiber_switch(&threads[now].sp, scheduler);
    abort();
}

const Factors &shown_by(unsigned lane, unsigned turn) {
    return *reinterpret_cast<const Factors *>(threads[threads[now].simd_begin + lane].slot[turn % 2]);
}

// Where the e-th element of this thread lies; the access is the whole simdgroup's.
size_t touch_element(const float *matrix, unsigned e, size_t apart, bool transposed, bool write, uintptr_t place) {
    unsigned at = element_of(emulate_simd_lane(), e), row = at / 8, column = at % 8;
    size_t offset = transposed ? column * apart + row : row * apart + column;
    by_matrix = true;
    access(matrix + offset, sizeof *matrix, write, place);
    by_matrix = false;
    return offset;
}

} // namespace

extern "C" {

void emulate_matrix_load(float own[2], const float *from, size_t apart, bool transposed, const char *file, int line) {
    uintptr_t place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    all_show(Factors(), file, line);
    for (unsigned e = 0; e < 2; e++)
        own[e] = from[touch_element(from, e, apart, transposed, false, place)];
}

void emulate_matrix_store(const float own[2], float *to, size_t apart, bool transposed, const char *file, int line) {
    uintptr_t place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    all_show(Factors(), file, line);
    for (unsigned e = 0; e < 2; e++)
        to[touch_element(to, e, apart, transposed, true, place)] = own[e];
}

// d = a b + c, each element a chain of fused multiply-adds, the last product first: an order that no register has, as
// a device may add in another one, and what must have the same bits may not mix both.
void emulate_matrix_multiply(float d[2], const float a[2], const float b[2], const float c[2], const char *file,
                             int line) {
    unsigned turn = all_show({{a[0], a[1]}, {b[0], b[1]}}, file, line);
    for (unsigned e = 0; e < 2; e++) {
        unsigned at = element_of(emulate_simd_lane(), e);
        float sum = c[e];
        for (unsigned k = 8; k-- > 0;) {
            unsigned left = holder_of(at / 8 * 8 + k), right = holder_of(8 * k + at % 8);
            sum = __builtin_fmaf(shown_by(left / 2, turn).a[left % 2], shown_by(right / 2, turn).b[right % 2], sum);
        }
        d[e] = sum;
    }
}
}
