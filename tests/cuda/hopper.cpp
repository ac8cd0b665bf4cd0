/* SPDX-License-Identifier: MIT */
// Hopper's barriers, copy engine and products of warpgroups, for the emulator (emulate.h). Shared memory that they use
// is compared in steps of 16 bytes.
#include "state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <deque>
#include <map>

extern "C" {
#include "core/half.h"
}

namespace emulated {
namespace {

constexpr unsigned MAX_BARRIERS = 128, STORING = 32;
constexpr size_t STEP = 16, ROW = 128; // of what is compared, and of a tile

// Actors behind the threads: the copy engine as it stores for a thread, warpgroups that multiply, and the copy engine
// as it loads for a barrier. Their times are numbers of stores, of groups of products and of phases.
constexpr unsigned STORES = MAX_RESIDENT, PRODUCTS = STORES + STORING, LOADS = PRODUCTS + MAX_GROUPS;
constexpr unsigned ACTORS = LOADS + MAX_BARRIERS;

struct Barrier {
    unsigned actor;
    int arrivals, missing, bytes; // of the phase; bytes are negative if they are there before they are expected
    uint32_t phase;
    Clock clock;
    clock_pointer seen; // when the last phase ended
};

struct Load {
    char *to;
    moved what;
    const void *barrier;
};

struct Store {
    const char *from;
    moved what;
    bool adds, committed, read;
    std::vector<char> data;
};

struct Stores {
    unsigned actor = 0;
    uint32_t count = 1;
    std::vector<Store> list;
};

using products = std::vector<product_of_group>;
struct Batch {
    std::array<products, WARPGROUP> of;
    std::array<uint32_t, WARPGROUP> times; // of the commits
    int commits = 0;
};
struct Group {
    std::deque<Batch> batches;
    uint32_t done = 0;
    std::map<uint32_t, clock_pointer> seen; // by who waits for so many; the last ones
};

// What the copy engine and products did to 16 bytes of dynamic memory, and when; 0: nothing.
constexpr unsigned GROUPS = MAX_THREADS / WARPGROUP;
struct Place {
    uint32_t load_time, load_place, store_time, product_time[GROUPS];
    uint16_t load_actor, store_actor;
};

bool clocked; // a kernel of Hopper's runs
std::map<const void *, Barrier> barriers;
std::vector<Load> loads; // on their way
std::map<unsigned, Stores> stores;
std::vector<Place> places[MAX_CLUSTER];
products open[MAX_RESIDENT];
uint32_t committed[MAX_RESIDENT], wanted[MAX_RESIDENT], published[MAX_RESIDENT], parity_of[MAX_RESIDENT];
const void *awaited[MAX_RESIDENT];
Group groups[MAX_GROUPS];

// ---- What has been seen -------------------------------------------------------------------------------------

Clock no_clock() {
    return {std::vector<uint32_t>(resident_threads()), std::vector<uint32_t>(ACTORS)};
}

void need_clocks() {
    if (clocked) return;
    clocked = true;
    auto first = std::make_shared<const Clock>(no_clock());
    for (unsigned i = 0; i < resident_threads(); i++)
        threads[i].clock = first;
    for (unsigned rank = 0; rank < current->cluster; rank++)
        places[rank].assign(MAX_SHARED / STEP, Place{});
}

void see(std::vector<uint32_t> &mine, const std::vector<uint32_t> &theirs) {
    for (size_t i = 0; i < mine.size(); i++)
        mine[i] = std::max(mine[i], theirs[i]);
}
void see(Clock &mine, const Clock &theirs) {
    see(mine.writes, theirs.writes);
    see(mine.others, theirs.others);
}

// Many threads see the same at about the same time: the last answers are kept.
clock_pointer both(const clock_pointer &a, const clock_pointer &b) {
    static struct { clock_pointer a, b, both; } kept[16];
    static unsigned oldest;
    if (a == b || !b) return a;
    for (const auto &k : kept)
        if (k.a == a && k.b == b) return k.both;
    auto all = std::make_shared<Clock>(*a);
    see(*all, *b);
    kept[oldest++ % 16] = {a, b, all};
    return all;
}

void see_actor(unsigned thread, unsigned actor, uint32_t time) {
    const Clock &old = *threads[thread].clock;
    if (old.others[actor] >= time) return;
    static struct {
        clock_pointer from, to;
        unsigned actor;
        uint32_t time;
    } last;
    if (last.from != threads[thread].clock || last.actor != actor || last.time != time) {
        auto changed = std::make_shared<Clock>(old);
        changed->others[actor] = time;
        last = {threads[thread].clock, changed, actor, time};
    }
    threads[thread].clock = last.to;
}

bool actor_is_before(unsigned actor, uint32_t time, unsigned thread) {
    return !time || time < threads[thread].clock->others[actor];
}

// ---- Races --------------------------------------------------------------------------------------------------

void tell_engine_race(const char *who, unsigned thread, const char *does, uint32_t place, const char *what,
                      uint32_t other_place) {
    report_error("a race: %s %u %s at %s what %s%s%s, with no barrier between", who, thread, does, line_of(place).text,
                 what, other_place ? " at " : "", other_place ? line_of(other_place).text : "");
}

Place *place_of(const void *shared) {
    unsigned rank;
    size_t offset;
    if (!clocked || !find_offset(shared, 1, &rank, &offset)) return nullptr;
    return &places[rank][offset / STEP];
}

// Whether all that products and stores read there is before what the thread does.
bool is_read(const Place &p, unsigned thread, const char *who, const char *does, uint32_t at) {
    if (!actor_is_before(p.store_actor, p.store_time, thread)) {
        tell_engine_race(who, thread, does, at, "the copy engine stores", 0);
        return false;
    }
    return true;
}
bool is_multiplied(const Place &p, unsigned rank, unsigned thread, const char *who, const char *does, uint32_t at) {
    for (unsigned g = 0; g < current->threads / WARPGROUP; g++) {
        unsigned actor = PRODUCTS + rank * (current->threads / WARPGROUP) + g;
        if (actor_is_before(actor, p.product_time[g], thread)) continue;
        char what[64];
        snprintf(what, sizeof what, "warpgroup %u multiplies", g);
        tell_engine_race(who, thread, does, at, what, 0);
        return false;
    }
    return true;
}

} // namespace

bool compare_with_engine(const void *shared, size_t bytes, bool write, unsigned thread, uint32_t at) {
    if (!clocked) return true;
    const char *first = static_cast<const char *>(shared);
    unsigned rank;
    size_t offset;
    if (!find_offset(first, bytes, &rank, &offset)) return true;
    const char *does = write ? "writes" : "reads";
    for (size_t i = offset / STEP; i <= (offset + bytes - 1) / STEP; i++) {
        const Place &p = places[rank][i];
        if (!actor_is_before(p.load_actor, p.load_time, thread)) {
            tell_engine_race("thread", thread, does, at, "the copy engine loads", p.load_place);
            return false;
        }
        if (write && (!is_read(p, thread, "thread", does, at) || !is_multiplied(p, rank, thread, "thread", does, at)))
            return false;
    }
    return true;
}

namespace {

// What threads wrote there, and the copy engine loaded, as what is asynchronous sees it that `thread` begins.
enum class Content { THERE, NONE, LOADING, WRITTEN, UNPUBLISHED };
Content content_of(const char *shared, unsigned thread) {
    const Place *p = place_of(shared);
    last_access last = last_access_of(shared);
    if (p && !actor_is_before(p->load_actor, p->load_time, thread)) return Content::LOADING;
    if (!last.written) return p && p->load_time ? Content::THERE : Content::NONE;
    if (!is_before(last.writer, last.write_time, true, thread)) return Content::WRITTEN;
    return published[last.writer] > last.write_time || published[thread] > last.write_time ? Content::THERE
                                                                                           : Content::UNPUBLISHED;
}

// Whether that can be used: all of it is before, and visible.
bool can_be_used(const char *shared, unsigned thread, const char *does, uint32_t at) {
    uint32_t write_place = last_access_of(shared).write_place;
    switch (content_of(shared, thread)) {
    case Content::LOADING:
        tell_engine_race("for thread", thread, does, at, "the copy engine loads", place_of(shared)->load_place);
        return false;
    case Content::WRITTEN:
        tell_engine_race("for thread", thread, does, at, "a thread writes", write_place);
        return false;
    case Content::UNPUBLISHED:
        report_error("for thread %u %s at %s what is written at %s, with no publish_shared() between", thread, does,
                     line_of(at).text, line_of(write_place).text);
        return false;
    default: return true;
    }
}

// Whether the copy engine may write there.
bool can_be_loaded(const char *shared, unsigned rank, unsigned thread, uint32_t at) {
    const char *who = "for thread", *does = "the copy engine loads";
    const Place *p = place_of(shared);
    if (p) {
        if (!actor_is_before(p->load_actor, p->load_time, thread)) {
            tell_engine_race(who, thread, does, at, "it loads", p->load_place);
            return false;
        }
        if (!is_read(*p, thread, who, does, at) || !is_multiplied(*p, rank, thread, who, does, at)) return false;
    }
    for (size_t i = 0; i < STEP; i += 2) {
        last_access last = last_access_of(shared + i);
        if (last.written && !is_before(last.writer, last.write_time, true, thread)) {
            tell_engine_race(who, thread, does, at, "a thread writes", last.write_place);
            return false;
        }
        if (last.read && last.reader != MAX_RESIDENT && !is_before(last.reader, last.read_time, false, thread)) {
            tell_engine_race(who, thread, does, at, "a thread reads", last.read_place);
            return false;
        }
    }
    return true;
}

#define HERE place_in_code(__builtin_return_address(0))

bool has_ended(unsigned rank) {
    const State *first = states + rank * current->threads;
    return std::all_of(first, first + current->threads, [](State s) { return s == State::ENDED; });
}

// The same place in another block of the cluster.
char *in_block(unsigned rank, const void *shared) {
    unsigned own;
    size_t offset;
    if (!find_offset(shared, 1, &own, &offset)) {
        report_error("thread %u uses memory that is not in the block's dynamic shared memory", now);
        return nullptr;
    }
    if (has_ended(rank)) {
        report_error("thread %u uses shared memory of block %u of its cluster, which has ended", now, rank);
        return nullptr;
    }
    return memory_of(rank) + offset;
}

// ---- Barriers -----------------------------------------------------------------------------------------------

Barrier *barrier_at(const void *at) {
    auto found = barriers.find(at);
    if (found != barriers.end()) return &found->second;
    report_error("thread %u uses a barrier that is not initialised", now);
    return nullptr;
}

void end_phase(Barrier &b) {
    if (b.missing > 0 || b.bytes != 0) return;
    b.missing = b.arrivals;
    b.phase++;
    b.clock.others[b.actor] = b.phase + 1;
    b.seen = std::make_shared<const Clock>(b.clock);
}

void arrive(Barrier &b, int bytes, bool relaxed) {
    const Clock &mine = *threads[now].clock;
    moment++;
    see(b.clock.others, mine.others);
    b.clock.others[now] = moment;
    if (!relaxed) {
        see(b.clock.writes, mine.writes);
        b.clock.writes[now] = moment;
    }
    b.bytes += bytes;
    if (b.missing == 0) report_error("thread %u arrives at a barrier at which all have arrived", now);
    b.missing--;
    end_phase(b);
}

} // namespace

void barrier_init(const void *barrier, int count) {
    need_clocks();
    if (barriers.size() >= MAX_BARRIERS) return report_error("more than %u barriers", MAX_BARRIERS);
    if (!touch(barrier, sizeof(uint64_t), true)) return;
    unsigned actor = LOADS + static_cast<unsigned>(barriers.size());
    barriers[barrier] = {actor, count, count, 0, 0, no_clock(), nullptr};
}

void barrier_arrive(const void *barrier, int expected_bytes) {
    if (Barrier *b = barrier_at(barrier)) arrive(*b, expected_bytes, false);
}

void barrier_arrive_in(int block, const void *barrier) {
    const void *there = in_block(static_cast<unsigned>(block), barrier);
    if (!there) return;
    if (Barrier *b = barrier_at(there)) arrive(*b, 0, true);
}

void barrier_wait(const void *barrier, uint32_t parity, const char *file, int line) {
    Barrier *b = barrier_at(barrier);
    if (!b) return;
    if (b->phase % 2 == parity) {
        awaited[now] = barrier;
        parity_of[now] = parity;
        stop(State::WAITING, file, line);
    }
    threads[now].clock = both(threads[now].clock, b->seen);
}

void publish() {
    need_clocks();
    published[now] = ++moment;
}

void meet_clocks(const std::vector<unsigned> &met) {
    if (!clocked || met.empty()) return;
    auto all = std::make_shared<Clock>(*threads[met[0]].clock);
    const Clock *last = nullptr;
    for (unsigned i : met) {
        if (threads[i].clock.get() != last) see(*all, *threads[i].clock);
        last = threads[i].clock.get();
    }
    for (unsigned i : met)
        all->writes[i] = all->others[i] = moment;
    for (unsigned i : met)
        threads[i].clock = all;
}

// ---- The copy engine ----------------------------------------------------------------------------------------

// Where a byte of a tile is: the 16-byte chunks of its rows are exchanged by the address.
static size_t swizzled(size_t address) {
    return address ^ (address / ROW % 8 * STEP);
}

static size_t bytes_of(const moved &m) {
    return m.rows.size() * static_cast<size_t>(m.row_bytes);
}

// Calls f(where in shared memory, where in the bytes, how many) for 16 bytes at a time.
template <class F> static void for_steps(const void *shared, const moved &m, F f) {
    size_t first = address_of(shared), bytes = bytes_of(m);
    char *memory = static_cast<char *>(const_cast<void *>(shared)) - first;
    for (size_t i = 0; i < bytes; i += STEP)
        f(memory + (m.tile ? swizzled(first + i) : first + i), i, std::min(STEP, bytes - i));
}

static void arrive_now(const Load &l) {
    std::vector<char> data(bytes_of(l.what));
    for (size_t r = 0; r < l.what.rows.size(); r++) {
        const piece &row = l.what.rows[r];
        if (row.bytes <= 0) continue;
        if (!touch(row.global, static_cast<size_t>(row.bytes), false)) return;
        memcpy(&data[r * static_cast<size_t>(l.what.row_bytes)], row.global, static_cast<size_t>(row.bytes));
    }
    for_steps(l.to, l.what, [&](char *to, size_t i, size_t bytes) { memcpy(to, &data[i], bytes); });
    Barrier &b = barriers.at(l.barrier);
    b.bytes -= static_cast<int>(data.size());
    end_phase(b);
}

void load(uint32_t blocks, void *shared, const moved &m, const void *barrier) {
    for (unsigned rank = 0; rank < current->cluster && !seen; rank++) {
        if (!(blocks >> rank & 1)) continue;
        char *to = in_block(rank, shared);
        const void *there = in_block(rank, barrier);
        Barrier *b = there ? barrier_at(there) : nullptr;
        if (!to || !b) return;
        size_t bytes = bytes_of(m), offset;
        unsigned found;
        if (!find_offset(to, bytes, &found, &offset) || found != rank)
            return report_error("thread %u loads behind the block's shared memory at %s", now, line_of(m.place).text);
        for (size_t i = offset / STEP; i < (offset + bytes + STEP - 1) / STEP && !seen; i++) {
            if (!can_be_loaded(memory_of(rank) + i * STEP, rank, now, m.place)) return;
            Place &p = places[rank][i];
            p.load_time = b->phase + 1;
            p.load_place = m.place;
            p.load_actor = static_cast<uint16_t>(b->actor);
        }
        Load l{to, m, there};
        if (happens_now())
            arrive_now(l);
        else
            loads.push_back(std::move(l));
    }
}

bool deliver_loads(bool one) {
    bool any = false;
    for (size_t i = loads.size(); i-- > 0 && !seen;) {
        if (!one && any_number() % 4) continue;
        size_t at = one ? any_number() % loads.size() : i;
        Load l = std::move(loads[at]);
        loads.erase(loads.begin() + static_cast<ptrdiff_t>(at));
        arrive_now(l);
        any = true;
        if (one) break;
    }
    return any;
}

static void read_now(Store &s) {
    if (s.read) return;
    s.read = true;
    s.data.resize(bytes_of(s.what));
    for_steps(s.from, s.what, [&](const char *from, size_t i, size_t bytes) { memcpy(&s.data[i], from, bytes); });
}

static void store_now(const Store &s) {
    for (size_t r = 0; r < s.what.rows.size(); r++) {
        const piece &row = s.what.rows[r];
        size_t bytes = static_cast<size_t>(std::max(row.bytes, 0));
        if (!bytes) continue;
        if (!touch(row.global, bytes, true)) return;
        const char *data = &s.data[r * static_cast<size_t>(s.what.row_bytes)];
        if (!s.adds) {
            memcpy(row.global, data, bytes);
            continue;
        }
        for (size_t i = 0; i < bytes; i += sizeof(float)) {
            float sum, more;
            memcpy(&sum, row.global + i, sizeof sum);
            memcpy(&more, data + i, sizeof more);
            sum += more;
            memcpy(row.global + i, &sum, sizeof sum);
        }
    }
}

void store(const void *shared, const moved &m, bool adds) {
    need_clocks();
    Stores &mine = stores[now];
    if (!mine.actor) mine.actor = STORES + static_cast<unsigned>(stores.size()) - 1;
    if (mine.actor >= PRODUCTS) return report_error("more than %u threads store by the copy engine", STORING);
    Store s{static_cast<const char *>(shared), m, adds, false, false, {}};
    for (size_t i = 0; i < bytes_of(m); i += STEP) {
        const char *at = s.from + i;
        if (!can_be_used(at, now, "is stored by the copy engine", m.place)) return;
        if (Place *p = place_of(at)) {
            p->store_time = mine.count;
            p->store_actor = static_cast<uint16_t>(mine.actor);
        }
    }
    if (happens_now()) read_now(s);
    mine.list.push_back(std::move(s));
}

void engine_commit() {
    auto found = stores.find(now);
    if (found == stores.end()) return;
    for (Store &s : found->second.list)
        s.committed = true;
}

// What is only read may be stored at any time until the thread waits for that, or ends.
static void finish_stores(Stores &mine, bool only_read) {
    std::vector<Store> left;
    for (Store &s : mine.list) {
        if (s.committed) read_now(s);
        if (s.committed && !(only_read && !happens_now()))
            store_now(s);
        else
            left.push_back(std::move(s));
    }
    mine.list = std::move(left);
}

void engine_wait(bool only_read) {
    auto found = stores.find(now);
    if (found == stores.end()) return;
    Stores &mine = found->second;
    finish_stores(mine, only_read);
    see_actor(now, mine.actor, ++mine.count);
}

void end_thread() {
    auto found = stores.find(now);
    if (found == stores.end() || seen) return;
    for (const Store &s : found->second.list)
        if (!s.committed || actor_is_before(found->second.actor, found->second.count, now))
            return report_error("thread %u ends before the copy engine has read what it stores", now);
    finish_stores(found->second, false);
}

// ---- Products -----------------------------------------------------------------------------------------------

namespace {

unsigned group_of(unsigned thread) {
    return rank_of(thread) * (current->threads / WARPGROUP) + thread % current->threads / WARPGROUP;
}
unsigned first_of(unsigned group) {
    unsigned each = current->threads / WARPGROUP;
    return group / each * current->threads + group % each * WARPGROUP;
}

float number_of(product_of_group::number_type type, const char *at) {
    static const auto halves = [] {
        std::vector<float> all(1 << 16);
        for (unsigned i = 0; i < all.size(); i++)
            all[i] = vjp_f16_to_f32(static_cast<uint16_t>(i));
        return all;
    }();
    uint32_t word = 0;
    memcpy(&word, at, type == product_of_group::TF32 ? 4 : 2);
    if (type == product_of_group::F16) return halves[word];
    word = type == product_of_group::BF16 ? word << 16 : word & 0xffffe000u;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

constexpr int ROWS = 64, MOST_TERMS = 16, MOST_COLUMNS = 256;

// Reads [terms][count] numbers, with the term along the rows of a tile or along its columns. What no barrier makes
// visible is NaN.
bool read_operand(float (*to)[MOST_COLUMNS], const product_of_group &p, uint64_t described, bool over_rows, int count,
                  unsigned first, uint32_t seq) {
    size_t start = (described & 0x3fff) << 4, leading = (described >> 16 & 0x3fff) << 4,
           stride = (described >> 32 & 0x3fff) << 4;
    if (described >> 49 != 1u << 13) {
        report_error("a product's operand at %zu is not of rows of 128 swizzled bytes", start);
        return false;
    }
    size_t bytes = p.type == product_of_group::TF32 ? 4 : 2, terms = 32 / bytes, wide = ROW / bytes;
    unsigned rank = rank_of(first), group = first % current->threads / WARPGROUP;
    char *memory = memory_of(rank);
    size_t known = SIZE_MAX;
    bool there = false;
    for (size_t outer = 0; outer < (over_rows ? terms : static_cast<size_t>(count)); outer++)
        for (size_t inner = 0; inner < (over_rows ? static_cast<size_t>(count) : terms); inner++) {
            size_t at = start + outer / 8 * stride + outer % 8 * ROW + inner % wide * bytes;
            if (over_rows) at += inner / wide * leading;
            at = swizzled(at);
            if (at / STEP != known) {
                known = at / STEP;
                if (at + bytes > current->shared) {
                    report_error("a product reads at %zu of %zu bytes of shared memory", at, current->shared);
                    return false;
                }
                // A kernel may multiply what is not there, and not use the result.
                Content content = content_of(memory + at, first);
                there = content == Content::THERE || content == Content::UNPUBLISHED;
                if (content == Content::UNPUBLISHED && !can_be_used(memory + at, first, "is multiplied", p.place))
                    return false;
                if (there) places[rank][known].product_time[group] = seq;
            }
            (over_rows ? to[outer][inner] : to[inner][outer]) = there ? number_of(p.type, memory + at) : NAN;
        }
    return true;
}

// The terms of a thread's left operand in registers.
void read_registers(float (*to)[MOST_COLUMNS], const product_of_group &p, int thread) {
    int row = thread / WARP * 16 + thread % WARP / 4;
    for (int i = 0; i < 4; i++) {
        const char *at = reinterpret_cast<const char *>(p.registers + i);
        int r = row + i % 2 * 8;
        if (p.type == product_of_group::TF32) {
            to[thread % 4 + i / 2 * 4][r] = number_of(p.type, at);
        } else {
            for (int half = 0; half < 2; half++)
                to[thread % 4 * 2 + half + i / 2 * 8][r] = number_of(p.type, at + 2 * half);
        }
    }
}

// Calls f(number of the thread's, of the sums) for what a thread holds of 64 x 2 `count` sums.
template <class F> void for_held(int thread, int count, F f) {
    int row = thread / WARP * 16 + thread % WARP / 4;
    for (int i = 0; i < count; i++)
        f(i, (row + i / 2 % 2 * 8) * 2 * count + i / 4 * 8 + thread % 4 * 2 + i % 2);
}

bool describe_the_same(const product_of_group &p, const product_of_group &q) {
    return p.type == q.type && p.count == q.count && p.keep == q.keep && p.over_rows == q.over_rows &&
           p.left_over_rows == q.left_over_rows && p.a == q.a && p.b == q.b && !p.registers == !q.registers;
}

void multiply_batch(unsigned group) {
    Group &g = groups[group];
    unsigned first = first_of(group);
    uint32_t seq = ++g.done;
    Batch batch = std::move(g.batches.front());
    g.batches.pop_front();
    // The warps multiply together: what each had read before, to registers that are a factor, is read.
    Clock clock = no_clock();
    clock.others[PRODUCTS + group] = seq + 1;
    for (unsigned i = 0; i < WARPGROUP; i++)
        clock.others[first + i] = batch.times[i];
    g.seen[seq] = std::make_shared<const Clock>(std::move(clock));
    while (g.seen.size() > 8)
        g.seen.erase(g.seen.begin());
    static float left[MOST_TERMS][MOST_COLUMNS], right[MOST_TERMS][MOST_COLUMNS], sums[ROWS * MOST_COLUMNS];
    now = first;
    for (const products &each : batch.of)
        if (each.size() != batch.of[0].size())
            return report_error("threads of a warpgroup commit groups of %zu and %zu products", batch.of[0].size(),
                                each.size());
    for (size_t i = 0; i < batch.of[0].size() && !seen; i++) {
        const product_of_group &p = batch.of[0][i];
        int terms = p.type == product_of_group::TF32 ? 8 : 16, size = 2 * p.count;
        for (const products &each : batch.of)
            if (!describe_the_same(each[i], p))
                return report_error("threads of a warpgroup describe different products");
        if (p.registers)
            for (int t = 0; t < WARPGROUP; t++)
                read_registers(left, batch.of[static_cast<size_t>(t)][i], t);
        else if (!read_operand(left, p, p.a, p.left_over_rows, ROWS, first, seq))
            return;
        if (!read_operand(right, p, p.b, p.over_rows, size, first, seq)) return;
        for (int t = 0; t < WARPGROUP; t++) {
            const product_of_group &own = batch.of[static_cast<size_t>(t)][i];
            for_held(t, p.count, [&](int mine, int sum) { sums[sum] = own.keep ? own.d[mine] : 0; });
        }
        for (int r = 0; r < ROWS; r++) {
            float row[MOST_TERMS];
            for (int k = 0; k < terms; k++)
                row[k] = left[k][r];
            add_products(current->cores, p.type == product_of_group::TF32, sums + r * size, size, row, right[0],
                         MOST_COLUMNS, terms);
        }
        for (int t = 0; t < WARPGROUP; t++) {
            const product_of_group &own = batch.of[static_cast<size_t>(t)][i];
            for_held(t, p.count, [&](int mine, int sum) { own.d[mine] = sums[sum]; });
        }
    }
}

} // namespace

void add_product(const product_of_group &p) {
    need_clocks();
    open[now].push_back(p);
    open[now].back().place = HERE;
}

void commit_products() {
    unsigned thread = now, group = group_of(thread);
    Group &g = groups[group];
    size_t at = committed[thread]++ - g.done;
    if (g.batches.size() <= at) g.batches.resize(at + 1);
    g.batches[at].of[thread % current->threads % WARPGROUP] = std::move(open[thread]);
    g.batches[at].times[thread % current->threads % WARPGROUP] = ++moment;
    open[thread].clear();
    if (++g.batches[at].commits == WARPGROUP && at == 0 && happens_now()) multiply_batch(group);
    now = thread;
}

void wait_products(int pending, const char *file, int line) {
    uint32_t all = committed[now], left = static_cast<uint32_t>(pending);
    unsigned group = group_of(now);
    wanted[now] = all > left ? all - left : 0;
    if (groups[group].done < wanted[now]) stop(State::MULTIPLYING, file, line);
    auto found = groups[group].seen.find(wanted[now]);
    if (found != groups[group].seen.end()) threads[now].clock = both(threads[now].clock, found->second);
}

bool multiply_if_all_wait() {
    bool any = false;
    if (!clocked) return false;
    for (unsigned group = 0; group < resident_threads() / WARPGROUP && !seen; group++) {
        unsigned first = first_of(group);
        uint32_t least = UINT32_MAX;
        for (unsigned i = first; i < first + WARPGROUP; i++)
            least = std::min(least, states[i] == State::MULTIPLYING ? wanted[i] : 0);
        while (groups[group].done < least && !seen) {
            multiply_batch(group);
            any = true;
        }
    }
    return any;
}

bool may_continue(unsigned thread) {
    if (states[thread] == State::MULTIPLYING) return groups[group_of(thread)].done >= wanted[thread];
    return barriers.at(awaited[thread]).phase % 2 != parity_of[thread];
}

// ---- A cluster of blocks ------------------------------------------------------------------------------------

void begin_cluster() {
    clocked = false;
    barriers.clear();
    loads.clear();
    stores.clear();
    for (Group &g : groups)
        g = {};
    for (unsigned i = 0; i < resident_threads(); i++) {
        open[i].clear();
        committed[i] = published[i] = 0;
    }
}

void end_cluster() {
    if (seen) return;
    if (!loads.empty()) report_error("the block ends before %zu loads by the copy engine have arrived", loads.size());
    for (const auto &[at, b] : barriers)
        if (b.bytes != 0) report_error("the block ends with %d bytes that a barrier expects", b.bytes);
    for (const Group &g : groups)
        if (!g.batches.empty()) report_error("the block ends before its products are done");
}

} // namespace emulated
