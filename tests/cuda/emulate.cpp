/* SPDX-License-Identifier: MIT */
// See emulate.h.
#include "emulate.h"

#include "emulate/accesses.h"
#include "emulate/fiber.h"
#include "emulate/lines.h"

#include <algorithm>
#include <cstdarg>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include <sys/mman.h>

// Where static variables begin that have no value: the shared ones are among them, up to `_end`.
extern "C" char __bss_start[] __attribute__((visibility("hidden")));

namespace emulated {
namespace {

constexpr size_t STACK = 512 << 10;

enum class State : unsigned char { READY, AT_BARRIER, MEETING, ENDED };

struct Copy {
    char *to;
    const char *from;
    size_t bytes, from_memory;
    int group;
};

struct Thread {
    void *sp;
    const char *file; // where it waits
    int line;
    int barrier, barrier_threads;
    bool says, said;
    uint32_t mask;
    void *brought;
    together run;
    bool sees;
    uint32_t warp_time, warp_mask; // of its last barrier in the warp
    int team;                      // the last barrier with a number, and when
    uint32_t team_time;
    std::vector<Copy> copies; // that have not arrived
    int group;
};

// Two bytes of shared memory.
constexpr size_t GRAIN = 2;
struct Cell {
    uint32_t write_time, read_time;
    uint32_t write_place, read_place;
    uint32_t reading_warps;
    uint16_t writer, reader; // reader: MANY where several have read
    uint32_t listed;         // the launch whose list has it
    bool atomic;
};
constexpr uint16_t MANY = UINT16_MAX;

constexpr size_t ALIGNMENT = 1024;
alignas(ALIGNMENT) char dynamic[MAX_SHARED];
char *stacks;
Cell *cells;
std::vector<size_t> touched; // cells, in this launch
Thread threads[MAX_THREADS];
State states[MAX_THREADS];
void *scheduler;
unsigned now; // the thread that runs
const launch *current;
unsigned block;
uint32_t moment, block_begin, block_time; // of the last barrier of the block
bool running, seen, early;
char *message;
uint32_t launches;
std::map<const char *, size_t> memories;
const char *last_memory; // that was touched
size_t last_bytes;

size_t shared_bytes() {
    return static_cast<size_t>(_end - __bss_start);
}

// ---- Reporting ----------------------------------------------------------------------------------------------

__attribute__((format(printf, 1, 2))) void report_error(const char *format, ...) {
    if (seen) return;
    seen = true;
    int used = snprintf(message, MESSAGE, "block %u of %u: ", block, current->grid);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + used, MESSAGE - static_cast<size_t>(used), format, arguments);
    va_end(arguments);
}

struct Line {
    char text[160];
    explicit Line(uint32_t place) {
        emulate_line_of(place, "tests/cuda/include", text, sizeof text);
    }
};

void stop_thread() {
    fiber_switch(&threads[now].sp, scheduler);
}

// ---- Accesses -----------------------------------------------------------------------------------------------

unsigned warp_of(unsigned thread) {
    return thread / WARP;
}

// Whether what thread `other` did at `time` is before what `thread` does now.
bool is_before(unsigned other, uint32_t time, unsigned thread) {
    if (other == thread || time < block_time) return true;
    const Thread &t = threads[thread];
    if (warp_of(other) == warp_of(thread) && (t.warp_mask >> other % WARP & 1) && time < t.warp_time) return true;
    return t.team && threads[other].team == t.team && time < t.team_time;
}

bool all_before(const Cell &c, unsigned thread) {
    if (c.reader != MANY) return is_before(c.reader, c.read_time, thread);
    if (c.read_time < block_time) return true;
    for (unsigned warp = 0; warp < warp_of(MAX_THREADS); warp++)
        if (c.reading_warps >> warp & 1)
            for (unsigned i = warp * WARP; i < (warp + 1) * WARP && i < current->threads; i++)
                if (!is_before(i, c.read_time, thread)) return false;
    return true;
}

void tell_race(bool write, unsigned thread, bool other_wrote, uint16_t other, uint32_t place, uint32_t other_place) {
    char name[32] = "other threads read";
    if (other != MANY) snprintf(name, sizeof name, "thread %u %s", other, other_wrote ? "writes" : "reads");
    report_error("a race: thread %u %s at %s what %s at %s, with no barrier between", thread,
                 write ? "writes" : "reads", Line(place).text, name, Line(other_place).text);
}

void touch_shared(char *a, size_t bytes, bool write, bool atomic, unsigned thread, uint32_t place) {
    size_t first = static_cast<size_t>(a - __bss_start) / GRAIN;
    size_t last = (static_cast<size_t>(a - __bss_start) + bytes - 1) / GRAIN;
    for (size_t i = first; i <= last && !seen; i++) {
        Cell &c = cells[i];
        if (!write && c.read_time == moment && c.write_time < block_time &&
            (c.reader == thread || (c.reader == MANY && (c.reading_warps >> warp_of(thread) & 1))))
            continue; // nothing new
        if (c.listed != launches) {
            c.listed = launches;
            touched.push_back(i);
        }
        bool written = c.write_time >= block_begin, read = c.read_time >= block_begin;
        if (written && !(atomic && c.atomic) && !is_before(c.writer, c.write_time, thread))
            return tell_race(write, thread, true, c.writer, place, c.write_place);
        if (write) {
            if (read && !(atomic && c.atomic) && !all_before(c, thread))
                return tell_race(true, thread, false, c.reader, place, c.read_place);
            c.atomic = atomic && (c.atomic || !(written || read));
            c.write_time = moment;
            c.writer = static_cast<uint16_t>(thread);
            c.write_place = place;
            c.read_time = 0;
            c.reading_warps = 0;
        } else {
            bool again = read && c.read_time >= block_time;
            if (!again) c.reading_warps = 0;
            c.reader = again && c.reader != thread ? MANY : static_cast<uint16_t>(thread);
            c.reading_warps |= 1u << warp_of(thread);
            c.read_time = moment;
            c.read_place = place;
        }
    }
}

bool is_memory(const char *a, size_t bytes) {
    auto next = memories.upper_bound(a);
    if (next == memories.begin()) return false;
    --next;
    if (static_cast<size_t>(a - next->first) + bytes > next->second) return false;
    last_memory = next->first;
    last_bytes = next->second;
    return true;
}

bool lies_in(const char *a, size_t bytes, const char *memory, size_t room) {
    return static_cast<size_t>(a - memory) < room && static_cast<size_t>(a - memory) + bytes <= room;
}

// False: outside of every memory, and reported.
bool access(const void *address, size_t bytes, bool write, bool atomic, unsigned thread, uintptr_t at) {
    const char *a = static_cast<const char *>(address);
    if (lies_in(a, bytes, stacks, MAX_THREADS * STACK)) return true;
    uint32_t place = static_cast<uint32_t>(at - emulate_first_byte());
    if (lies_in(a, bytes, __bss_start, shared_bytes())) {
        touch_shared(const_cast<char *>(a), bytes, write, atomic, thread, place);
        return true;
    }
    if (lies_in(a, bytes, last_memory, last_bytes) || is_memory(a, bytes)) return true;
    if (!write && (lies_in(a, bytes, static_cast<const char *>(current->arguments), current->argument_bytes) ||
                   (a >= __ehdr_start && a < _end)))
        return true;
    report_error("thread %u %s %zu bytes at %s outside of every memory of the device", thread,
                 write ? "writes" : "reads", bytes, Line(place).text);
    return false;
}

// ---- A block ------------------------------------------------------------------------------------------------

void arrive(const Copy &c) {
    if (!touch(c.to, c.bytes, true) || (c.from_memory && !touch(c.from, c.from_memory, false))) return;
    memcpy(c.to, c.from, c.from_memory);
    memset(c.to + c.from_memory, 0, c.bytes - c.from_memory);
}

void start() {
    current->thread();
    states[now] = State::ENDED;
    stop_thread();
    abort(); // an ended thread is never resumed
}

void stop(State state, const char *file, int line) {
    states[now] = state;
    threads[now].file = file;
    threads[now].line = line;
    stop_thread();
}

// Lets the lanes that wait for those of `mask` continue, if all are there.
bool release_lanes(unsigned first, uint32_t mask, together run) {
    void *brought[WARP] = {};
    uint32_t there = 0;
    for (unsigned lane = 0; lane < WARP; lane++) {
        unsigned i = first + lane;
        if (!(mask >> lane & 1) || i >= current->threads || states[i] == State::ENDED) continue;
        if (states[i] != State::MEETING || threads[i].mask != mask || threads[i].run != run) return false;
        brought[lane] = threads[i].brought;
        there |= 1u << lane;
    }
    running = false; // what it touches is the threads', not the kernel's
    if (run) run(brought, there);
    running = true;
    bool sees = !run;
    if (sees) moment++;
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (!(there >> lane & 1)) continue;
        Thread &t = threads[first + lane];
        if (sees) {
            t.warp_time = moment;
            t.warp_mask = there;
        }
        states[first + lane] = State::READY;
    }
    return true;
}

bool release_warps() {
    bool any = false;
    for (unsigned i = 0; i < current->threads && !seen; i++)
        if (states[i] == State::MEETING) any |= release_lanes(i / WARP * WARP, threads[i].mask, threads[i].run);
    return any;
}

bool release_barrier(int id) {
    unsigned waiting = 0, alive = 0, wanted = 0;
    bool says = false;
    for (unsigned i = 0; i < current->threads; i++) {
        alive += states[i] != State::ENDED;
        if (states[i] != State::AT_BARRIER || threads[i].barrier != id) continue;
        waiting++;
        says |= threads[i].says;
        wanted = static_cast<unsigned>(threads[i].barrier_threads);
    }
    if (!waiting || waiting < (id ? wanted : alive)) return false;
    moment++;
    if (!id) block_time = moment;
    for (unsigned i = 0; i < current->threads; i++) {
        Thread &t = threads[i];
        if (states[i] != State::AT_BARRIER || t.barrier != id) continue;
        t.said = says;
        if (id) {
            t.team = id;
            t.team_time = moment;
        }
        states[i] = State::READY;
    }
    return true;
}

void tell_divergence() {
    int first = -1, other = -1;
    for (unsigned i = 0; i < current->threads; i++) {
        if (states[i] == State::ENDED) continue;
        if (first < 0) first = static_cast<int>(i);
        const Thread &a = threads[first], &b = threads[i];
        if (a.line != b.line || strcmp(a.file, b.file) != 0) other = static_cast<int>(i);
    }
    const Thread &a = threads[first], &b = threads[other < 0 ? first : other];
    report_error("threads diverge: thread %d waits at %s:%d, thread %d at %s:%d", first, emulate_file_name(a.file),
                 a.line, other, emulate_file_name(b.file), b.line);
}

// False: all threads have ended, or something is wrong.
bool release() {
    bool any = release_warps(), waiting = false;
    for (unsigned i = 0; i < current->threads; i++) {
        waiting |= states[i] != State::ENDED;
        if (states[i] == State::AT_BARRIER) any |= release_barrier(threads[i].barrier);
    }
    if (!any && waiting && !seen) tell_divergence();
    return any;
}

void run_block(const unsigned *order) {
    unsigned count = current->threads;
    block_begin = block_time = ++moment;
    memset(dynamic, 0xff, current->shared);
    for (size_t i : touched)
        memset(__bss_start + i * GRAIN, 0xff, GRAIN);
    for (unsigned i = 0; i < count; i++) {
        Thread &t = threads[i];
        states[i] = State::READY;
        t.warp_time = t.warp_mask = t.team_time = 0;
        t.team = t.group = 0;
        t.copies.clear();
        // Stacks that all ended at the same offset of a page would compete for the same cache lines.
        t.sp = fiber_stack(stacks + (i + 1) * STACK - 64 - i % 64 * 448, start);
    }
    do
        for (unsigned i = 0; i < count && !seen; i++) {
            now = order[i];
            if (states[now] == State::READY) fiber_switch(&scheduler, threads[now].sp);
        }
    while (!seen && release());
}

// ---- A launch -----------------------------------------------------------------------------------------------

uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
}

// As they are, reversed, or shuffled, in turn.
std::vector<unsigned> order_of(unsigned count) {
    std::vector<unsigned> at(count);
    for (unsigned i = 0; i < count; i++)
        at[i] = launches % 3 == 1 ? count - 1 - i : i;
    if (launches % 3 == 2)
        for (unsigned i = count; i > 1; i--)
            std::swap(at[i - 1], at[mixed((uint64_t)launches << 32 | i) % i]);
    return at;
}

std::mutex lock;

} // namespace

bool run(const launch &l, char text[MESSAGE]) {
    std::lock_guard<std::mutex> held(lock);
    if (!stacks) {
        size_t bytes[] = {MAX_THREADS * STACK, (shared_bytes() / GRAIN + 1) * sizeof(Cell)};
        void *memory[2];
        for (int i = 0; i < 2; i++) {
            memory[i] =
                mmap(nullptr, bytes[i], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory[i] == MAP_FAILED) abort();
        }
        stacks = static_cast<char *>(memory[0]);
        cells = static_cast<Cell *>(memory[1]);
    }
    current = &l;
    message = text;
    seen = false;
    launches++;
    touched.clear();
    early = launches % 2;
    std::vector<unsigned> blocks = order_of(l.grid), lanes = order_of(l.threads);
    running = true;
    for (unsigned i = 0; i < l.grid && !seen; i++) {
        block = blocks[i];
        run_block(lanes.data());
    }
    running = false;
    return !seen;
}

void add_memory(const void *memory, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    memories[static_cast<const char *>(memory)] = bytes;
}

void remove_memory(const void *memory) {
    std::lock_guard<std::mutex> held(lock);
    memories.erase(static_cast<const char *>(memory));
    last_bytes = 0;
}

// ---- For kernels --------------------------------------------------------------------------------------------

indices thread_index() {
    return {now, 0, 0};
}
indices block_index() {
    return {block, 0, 0};
}
indices block_size() {
    return {current->threads, 1, 1};
}
indices grid_size() {
    return {current->grid, 1, 1};
}

bool wait_at_barrier(int id, int count, bool says, const char *file, int line) {
    Thread &t = threads[now];
    t.barrier = id;
    t.barrier_threads = count;
    t.says = says;
    stop(State::AT_BARRIER, file, line);
    return t.said;
}

void meet(uint32_t mask, void *brought, together run, const char *file, int line) {
    Thread &t = threads[now];
    t.mask = mask;
    t.brought = brought;
    t.run = run;
    if (!(mask >> now % WARP & 1)) {
        report_error("thread %u is not in the mask %08x at %s:%d", now, mask, emulate_file_name(file), line);
        stop_thread();
    }
    stop(State::MEETING, file, line);
}

void meet_and_see(uint32_t mask, const char *file, int line) {
    meet(mask, nullptr, nullptr, file, line);
}

char *dynamic_memory() {
    return dynamic;
}

// Addresses are as aligned as the memory is: kernels calculate with their bits.
static char *first_address() {
    return __bss_start - reinterpret_cast<uintptr_t>(__bss_start) % ALIGNMENT;
}

uint32_t address_of(const void *shared) {
    return static_cast<uint32_t>(static_cast<const char *>(shared) - first_address());
}

char *at_address(uint32_t address) {
    return first_address() + address;
}

bool touch(const void *address, size_t bytes, bool write, bool atomic, int lane) {
    unsigned thread = lane < 0 ? now : now / WARP * WARP + static_cast<unsigned>(lane);
    return access(address, bytes, write, atomic, thread, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}

void copy_async(void *to, const void *from, size_t bytes, size_t from_memory) {
    Thread &t = threads[now];
    Copy c{static_cast<char *>(to), static_cast<const char *>(from), bytes, from_memory, t.group};
    if (early)
        arrive(c);
    else
        t.copies.push_back(c);
}

void commit_copies() {
    threads[now].group++;
}

void wait_copies(int pending) {
    Thread &t = threads[now];
    size_t there = 0;
    while (there < t.copies.size() && t.copies[there].group < t.group - pending)
        arrive(t.copies[there++]);
    t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<ptrdiff_t>(there));
}

} // namespace emulated

static void emulate_access(const void *address, size_t bytes, bool write, uintptr_t place) {
    using namespace emulated;
    if (running && !access(address, bytes, write, false, now, place)) stop_thread(); // the access itself could fault
}
