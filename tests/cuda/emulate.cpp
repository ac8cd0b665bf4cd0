/* SPDX-License-Identifier: MIT */
// See emulate.h.
#include "state.h"

#include "emulate/accesses.h"
#include "emulate/fiber.h"
#include "emulate/lines.h"

#include <algorithm>
#include <cstdarg>
#include <cstdlib>
#include <map>
#include <mutex>

#include <sys/mman.h>

// Where static variables begin that have no value: the shared ones are among them, up to `_end`.
extern "C" char __bss_start[] __attribute__((visibility("hidden")));

namespace emulated {

Thread threads[MAX_RESIDENT];
State states[MAX_RESIDENT];
unsigned now;
const launch *current;
uint32_t moment;
bool seen;
Arrival arrival;

namespace {

constexpr size_t STACK = 512 << 10;
constexpr int NAMED_BARRIERS = 16;

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
alignas(ALIGNMENT) char dynamic[MAX_CLUSTER][MAX_SHARED];
char *stacks;
Cell *cells;
std::vector<size_t> touched; // cells, in this launch
void *scheduler;
unsigned own_index;                                             // of the thread that runs, in its block
unsigned first_block;                                           // of the cluster that runs
uint32_t cluster_begin, cluster_time, block_times[MAX_CLUSTER]; // of the last barrier of the cluster, and of each block
unsigned arrivals[MAX_CLUSTER][NAMED_BARRIERS]; // at barriers with a number, of threads that do not wait there
bool running;
char *message;
uint32_t launches, numbers;
std::map<const char *, size_t> memories;
const char *last_memory; // that was touched
size_t last_bytes;

size_t shared_bytes() {
    return static_cast<size_t>(_end - __bss_start);
}

// ---- Reporting ----------------------------------------------------------------------------------------------

unsigned block_of(unsigned thread) {
    return first_block + rank_of(thread);
}

} // namespace

void report_error(const char *format, ...) {
    if (seen) return;
    seen = true;
    int used = snprintf(message, MESSAGE, "block %u of %u: ", block_of(now), current->grid);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + used, MESSAGE - static_cast<size_t>(used), format, arguments);
    va_end(arguments);
}

uint32_t place_in_code(const void *address) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) - emulate_first_byte());
}

line_text line_of(uint32_t place) {
    line_text line;
    emulate_line_of(place, "tests/cuda/include", line.text, sizeof line.text);
    return line;
}

void stop(State state, const char *file, int line) {
    states[now] = state;
    threads[now].file = file;
    threads[now].line = line;
    fiber_switch(&threads[now].sp, scheduler);
}

// ---- Accesses -----------------------------------------------------------------------------------------------

static unsigned warp_of(unsigned thread) {
    return thread / WARP;
}

bool is_before(unsigned other, uint32_t time, bool was_write, unsigned thread) {
    if (other == thread) return true;
    const Thread &t = threads[thread];
    if (t.clock && time < (was_write ? t.clock->writes : t.clock->others)[other]) return true;
    if (rank_of(other) != rank_of(thread)) return time < cluster_time;
    if (time < block_times[rank_of(thread)]) return true;
    if (warp_of(other) == warp_of(thread) && (t.warp_mask >> other % WARP & 1) && time < t.warp_time) return true;
    return t.team && threads[other].team == t.team && time < t.team_time;
}

namespace {

// Where barriers that count arrivals are known to be between, several readers are not compared: each may have arrived
// after it read, and their times are not kept.
bool all_before(const Cell &c, unsigned thread) {
    if (c.reader != MANY) return is_before(c.reader, c.read_time, false, thread);
    unsigned rank = rank_of(thread);
    if (c.read_time < block_times[rank] || threads[thread].clock) return true;
    for (unsigned warp = 0; warp < MAX_THREADS / WARP; warp++)
        if (c.reading_warps >> warp & 1)
            for (unsigned i = warp * WARP; i < (warp + 1) * WARP && i < current->threads; i++)
                if (!is_before(rank * current->threads + i, c.read_time, false, thread)) return false;
    return true;
}

void tell_race(bool write, unsigned thread, bool other_wrote, uint16_t other, uint32_t place, uint32_t other_place) {
    char name[32] = "other threads read";
    if (other != MANY) snprintf(name, sizeof name, "thread %u %s", other, other_wrote ? "writes" : "reads");
    report_error("a race: thread %u %s at %s what %s at %s, with no barrier between", thread,
                 write ? "writes" : "reads", line_of(place).text, name, line_of(other_place).text);
}

void touch_shared(char *a, size_t bytes, bool write, bool atomic, unsigned thread, uint32_t place) {
    size_t first = static_cast<size_t>(a - __bss_start) / GRAIN;
    size_t last = (static_cast<size_t>(a - __bss_start) + bytes - 1) / GRAIN;
    if (!compare_with_engine(a, bytes, write, thread, place)) return;
    uint32_t block_time = block_times[rank_of(thread)];
    unsigned warp = warp_of(thread % current->threads);
    for (size_t i = first; i <= last && !seen; i++) {
        Cell &c = cells[i];
        if (!write && c.read_time == moment && c.write_time < block_time &&
            (c.reader == thread || (c.reader == MANY && (c.reading_warps >> warp & 1))))
            continue; // nothing new
        if (c.listed != launches) {
            c.listed = launches;
            touched.push_back(i);
        }
        bool written = c.write_time >= cluster_begin, read = c.read_time >= cluster_begin;
        if (written && !(atomic && c.atomic) && !is_before(c.writer, c.write_time, true, thread))
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
            c.reading_warps |= 1u << warp;
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
    if (lies_in(a, bytes, stacks, MAX_RESIDENT * STACK)) return true;
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
                 write ? "writes" : "reads", bytes, line_of(place).text);
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
    end_thread();
    stop(State::ENDED, "", 0);
    abort(); // an ended thread is never resumed
}

// Lets the lanes that wait for those of `mask` continue, if all are there.
bool release_lanes(unsigned first, uint32_t mask, together run) {
    void *brought[WARP] = {};
    uint32_t there = 0;
    unsigned end = (first / current->threads + 1) * current->threads;
    for (unsigned lane = 0; lane < WARP; lane++) {
        unsigned i = first + lane;
        if (!(mask >> lane & 1) || i >= end || states[i] == State::ENDED) continue;
        if (states[i] != State::MEETING || threads[i].mask != mask || threads[i].run != run) return false;
        brought[lane] = threads[i].brought;
        there |= 1u << lane;
    }
    running = false; // what it touches is the threads', not the kernel's
    now = first;
    if (run) run(brought, there);
    running = true;
    if (!run) moment++;
    std::vector<unsigned> met;
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (!(there >> lane & 1)) continue;
        Thread &t = threads[first + lane];
        if (!run) {
            t.warp_time = moment;
            t.warp_mask = there;
            met.push_back(first + lane);
        }
        states[first + lane] = State::READY;
    }
    meet_clocks(met);
    return true;
}

bool release_barrier(unsigned rank, int id) {
    std::vector<unsigned> waiting;
    unsigned alive = 0, wanted = 0, first = rank * current->threads, end = first + current->threads;
    bool says = false;
    for (unsigned i = first; i < end; i++) {
        alive += states[i] != State::ENDED;
        if (states[i] != State::AT_BARRIER || threads[i].barrier != id) continue;
        waiting.push_back(i);
        says |= threads[i].says;
        wanted = static_cast<unsigned>(threads[i].barrier_threads);
    }
    unsigned there = static_cast<unsigned>(waiting.size()), &passing = arrivals[rank][id];
    if (!there || there + passing < (id ? wanted : alive)) return false;
    moment++;
    if (id)
        passing -= wanted - there;
    else
        block_times[rank] = moment;
    for (unsigned i : waiting) {
        Thread &t = threads[i];
        t.said = says;
        if (id) {
            t.team = id;
            t.team_time = moment;
        }
        states[i] = State::READY;
    }
    meet_clocks(waiting);
    return true;
}

bool release_cluster() {
    std::vector<unsigned> all;
    for (unsigned i = 0; i < resident_threads(); i++) {
        if (states[i] == State::ENDED) continue;
        if (states[i] != State::AT_CLUSTER) return false;
        all.push_back(i);
    }
    cluster_time = ++moment;
    for (uint32_t &time : block_times)
        time = moment;
    for (unsigned i : all)
        states[i] = State::READY;
    meet_clocks(all);
    return true;
}

void tell_divergence() {
    int first = -1, other = -1;
    for (unsigned i = 0; i < resident_threads(); i++) {
        if (states[i] == State::ENDED) continue;
        if (first < 0) first = static_cast<int>(i);
        const Thread &a = threads[first], &b = threads[i];
        if (a.line != b.line || strcmp(a.file, b.file) != 0) other = static_cast<int>(i);
    }
    const Thread &a = threads[first], &b = threads[other < 0 ? first : other];
    report_error("threads diverge: thread %d waits at %s:%d, thread %d at %s:%d", first, emulate_file_name(a.file),
                 a.line, other, emulate_file_name(b.file), b.line);
}

// Lets threads continue that wait for what has happened.
bool release_threads() {
    bool any = false;
    for (unsigned i = 0; i < resident_threads() && !seen; i++) {
        Thread &t = threads[i];
        unsigned block = i / current->threads * current->threads;
        bool now_ready = false;
        switch (states[i]) {
        case State::MEETING: any |= release_lanes(block + (i - block) / WARP * WARP, t.mask, t.run); break;
        case State::AT_BARRIER: any |= release_barrier(rank_of(i), t.barrier); break;
        case State::AT_CLUSTER: any |= release_cluster(); break;
        case State::SPINNING: now_ready = *t.number == t.value; break;
        case State::WAITING:
        case State::MULTIPLYING: now_ready = may_continue(i); break;
        default: break;
        }
        if (now_ready) states[i] = State::READY;
        any |= now_ready;
    }
    return any;
}

// False: all threads have ended, or something is wrong. What is late happens when nothing else can.
bool release() {
    bool any = arrival == Arrival::ANY && deliver_loads(false);
    any |= release_threads();
    if (any || seen) return true;
    if (multiply_if_all_wait() || deliver_loads(true)) return true;
    for (unsigned i = 0; i < resident_threads() && !seen; i++)
        if (states[i] != State::ENDED) tell_divergence();
    return false;
}

void run_cluster(const unsigned *order) {
    unsigned count = resident_threads();
    cluster_begin = cluster_time = ++moment;
    for (unsigned rank = 0; rank < current->cluster; rank++) {
        block_times[rank] = moment;
        memset(dynamic[rank], 0xff, current->shared);
        memset(arrivals[rank], 0, sizeof arrivals[rank]);
    }
    for (size_t i : touched)
        memset(__bss_start + i * GRAIN, 0xff, GRAIN);
    for (unsigned i = 0; i < count; i++) {
        Thread &t = threads[i];
        states[i] = State::READY;
        t.warp_time = t.warp_mask = t.team_time = 0;
        t.team = t.group = 0;
        t.copies.clear();
        t.clock.reset();
        // Stacks that all ended at the same offset of a page would compete for the same cache lines.
        t.sp = fiber_stack(stacks + (i + 1) * STACK - 64 - i % 64 * 448, start);
    }
    begin_cluster();
    do
        for (unsigned i = 0; i < count && !seen; i++) {
            now = order[i];
            own_index = now - rank_of(now) * current->threads;
            if (states[now] == State::READY) fiber_switch(&scheduler, threads[now].sp);
        }
    while (!seen && release());
    end_cluster();
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
        size_t bytes[] = {MAX_RESIDENT * STACK, (shared_bytes() / GRAIN + 1) * sizeof(Cell)};
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
    arrival = static_cast<Arrival>(launches / 3 % 3);
    std::vector<unsigned> clusters = order_of(l.grid / l.cluster), lanes = order_of(resident_threads());
    running = true;
    for (unsigned i = 0; i < clusters.size() && !seen; i++) {
        first_block = clusters[i] * l.cluster;
        run_cluster(lanes.data());
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
    return {own_index, 0, 0};
}
indices block_index() {
    return {block_of(now), 0, 0};
}
tensor_cores cores_of_card() {
    return current->cores;
}

int block_of_cluster() {
    return static_cast<int>(rank_of(now));
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

void arrive_at_barrier(int id) {
    arrivals[rank_of(now)][id]++;
}

void wait_for_cluster(const char *file, int line) {
    stop(State::AT_CLUSTER, file, line);
}

void wait_for_value(const int *number, int value, const char *file, int line) {
    if (!touch(number, sizeof *number, false)) return;
    threads[now].number = number;
    threads[now].value = value;
    stop(State::SPINNING, file, line);
}

void meet(uint32_t mask, void *brought, together run, const char *file, int line) {
    Thread &t = threads[now];
    t.mask = mask;
    t.brought = brought;
    t.run = run;
    if (!(mask >> now % current->threads % WARP & 1)) {
        report_error("thread %u is not in the mask %08x at %s:%d", now, mask, emulate_file_name(file), line);
    }
    stop(State::MEETING, file, line);
}

void meet_and_see(uint32_t mask, const char *file, int line) {
    meet(mask, nullptr, nullptr, file, line);
}

char *dynamic_memory() {
    return dynamic[rank_of(now)];
}

char *memory_of(unsigned rank) {
    return dynamic[rank];
}

bool find_offset(const void *shared, size_t bytes, unsigned *rank, size_t *offset) {
    size_t at = static_cast<size_t>(static_cast<const char *>(shared) - dynamic[0]);
    if (at >= sizeof dynamic) return false;
    *rank = static_cast<unsigned>(at / MAX_SHARED);
    *offset = at % MAX_SHARED;
    return *offset + bytes <= current->shared;
}

// Dynamic memory begins at 0 in each block. Addresses are as aligned as the memory is: kernels calculate with their
// bits.
constexpr uint32_t STATIC = 1 << 20;
static char *static_memory() {
    return __bss_start - reinterpret_cast<uintptr_t>(__bss_start) % ALIGNMENT;
}

uint32_t address_of(const void *shared) {
    unsigned rank;
    size_t offset;
    if (find_offset(shared, 0, &rank, &offset)) return static_cast<uint32_t>(offset);
    return STATIC + static_cast<uint32_t>(static_cast<const char *>(shared) - static_memory());
}

char *at_address(uint32_t address) {
    return address < STATIC ? dynamic[rank_of(now)] + address : static_memory() + (address - STATIC);
}

last_access last_access_of(const void *shared) {
    const Cell &c = cells[static_cast<size_t>(static_cast<const char *>(shared) - __bss_start) / GRAIN];
    return {c.write_time >= cluster_begin,
            c.read_time >= cluster_begin,
            c.writer,
            c.reader == MANY ? MAX_RESIDENT : c.reader,
            c.write_time,
            c.read_time,
            c.write_place,
            c.read_place};
}

uint32_t any_number() {
    return static_cast<uint32_t>(mixed(static_cast<uint64_t>(launches) << 32 | ++numbers));
}

bool happens_now() {
    return arrival == Arrival::EARLY || (arrival == Arrival::ANY && any_number() % 2);
}

bool touch(const void *address, size_t bytes, bool write, bool atomic, int lane) {
    unsigned block = now / current->threads * current->threads;
    unsigned thread = lane < 0 ? now : block + (now - block) / WARP * WARP + static_cast<unsigned>(lane);
    return access(address, bytes, write, atomic, thread, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}

void copy_async(void *to, const void *from, size_t bytes, size_t from_memory) {
    Thread &t = threads[now];
    Copy c{static_cast<char *>(to), static_cast<const char *>(from), bytes, from_memory, t.group};
    if (happens_now())
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
    if (running && !access(address, bytes, write, false, now, place)) stop(State::READY, "", 0); // it could fault
}
