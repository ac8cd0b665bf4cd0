/* SPDX-License-Identifier: MIT */
/* What the parts of the emulator (emulate.h) know of the cluster that runs: its threads, and what each has seen. */
#ifndef VJP_TESTS_CUDA_STATE_H
#define VJP_TESTS_CUDA_STATE_H

#include "emulate.h"

#include <memory>
#include <vector>

namespace emulated {

constexpr unsigned MAX_RESIDENT = MAX_CLUSTER * MAX_THREADS, MAX_GROUPS = MAX_RESIDENT / WARPGROUP;

enum class State : unsigned char { READY, AT_BARRIER, AT_CLUSTER, MEETING, WAITING, SPINNING, MULTIPLYING, ENDED };
enum class Arrival : unsigned char { LATE, EARLY, ANY }; // of what is asynchronous

/*
 * What one has seen: all that an actor did at times below its number. Actors are the threads, whose times are moments
 * of the launch, and behind them, in `others` alone, those of hopper.cpp, which count what they do. `others` of a
 * thread: what it read.
 */
struct Clock {
    std::vector<uint32_t> writes, others;
};
using clock_pointer = std::shared_ptr<const Clock>;

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
    uint32_t warp_time, warp_mask; // of its last barrier in the warp
    int team;                      // the last barrier with a number, and when
    uint32_t team_time;
    std::vector<Copy> copies; // that have not arrived
    int group;
    const int *number; // that shall become `value`
    int value;
    clock_pointer clock; // of Hopper's kernels alone
};

extern Thread threads[MAX_RESIDENT];
extern State states[MAX_RESIDENT];
extern unsigned now; // the thread that runs
extern const launch *current;
extern uint32_t moment;
extern bool seen; // an error
extern Arrival arrival;

__attribute__((format(printf, 1, 2))) void report_error(const char *format, ...);
struct line_text {
    char text[160];
};
line_text line_of(uint32_t place);
uint32_t place_in_code(const void *address);
void stop(State state, const char *file, int line);

inline unsigned resident_threads() {
    return current->cluster * current->threads;
}
// Of a thread, its block's number in the cluster.
inline unsigned rank_of(unsigned thread) {
    return current->cluster == 1 ? 0 : thread / current->threads;
}
// Whether what is asynchronous happens now.
bool happens_now();
uint32_t any_number();

// The dynamic memory of a block, and where a place is in it. False: not there, or not all of it.
char *memory_of(unsigned rank);
bool find_offset(const void *shared, size_t bytes, unsigned *rank, size_t *offset);

// Whether what a thread did at `time` is before what `thread` does now.
bool is_before(unsigned other, uint32_t time, bool was_write, unsigned thread);

// Who wrote two bytes of shared memory last, and who reads them since, if anyone in this cluster.
struct last_access {
    bool written, read;
    unsigned writer, reader; // reader: MAX_RESIDENT: several
    uint32_t write_time, read_time, write_place, read_place;
};
last_access last_access_of(const void *shared);

// ---- Between hopper.cpp and engine.cpp ----------------------------------------------------------------------

// A row of what the copy engine moves: `bytes` of it are in memory, what is behind them is zero, or is not stored.
struct piece {
    char *global;
    int bytes;
};
// Rows of `row_bytes`, of a tile swizzled; `place`: in the code.
struct moved {
    std::vector<piece> rows;
    int row_bytes;
    bool tile;
    uint32_t place;
};
void load(uint32_t blocks, void *shared, const moved &m, const void *barrier);
void store(const void *shared, const moved &m, bool adds);

// ---- hopper.cpp, for emulate.cpp ----------------------------------------------------------------------------

void begin_cluster();
void end_cluster();
void end_thread();
// What is known after threads have met at a barrier of memory.
void meet_clocks(const std::vector<unsigned> &met);
// Compares a thread's access with what the copy engine and products do. False: a race, which is reported.
bool compare_with_engine(const void *shared, size_t bytes, bool write, unsigned thread, uint32_t place);
bool may_continue(unsigned thread); // which is WAITING or MULTIPLYING
bool multiply_if_all_wait();        // whether anything was multiplied
bool deliver_loads(bool one);       // some that are on their way, or exactly one. Whether any

} // namespace emulated

#endif
