/* SPDX-License-Identifier: MIT */
/*
 * Matrix products by cuBLASLt; products.cuh has the contract.
 *
 * cuBLASLt is column-major: a row-major [m, k] by [k, n] is, read as column-major, [n, k] by [k, m], so the factors
 * change places. A call queries the heuristics once for each shape; the answer is kept in a table of fixed size, so
 * that a call allocates nothing and the same shape gets the same algorithm as long as it is in use.
 */
#include "cuda/gemm/products.cuh"

#include <cstdlib>
#include <cstring>

#include <cublasLt.h>

namespace vjp {

/* Scratch memory for an algorithm, for example to add parts of a long sum: as much as NVIDIA recommends for Hopper. */
static constexpr size_t SCRATCH_BYTES = 32 << 20;

/* Shapes whose algorithm is remembered, and candidates tried for each. */
static constexpr int CHOICES = 256, CANDIDATES = 8;

/*
 * The largest number of rows and items of a call; more are split, since kernels put them in grid dimensions of 65,535.
 */
static constexpr int64_t MAX_ROWS = 1 << 20, MAX_ITEMS = 1 << 15;

/* Everything that an algorithm depends on. Compared by its bytes, so every member is of one size. */
struct shape_key {
    int64_t items, m, n, k, a_row, a_item, b_row, b_item, item;
    int64_t storage, a_transposed, b_transposed, f32, bias, factors, addend;
};

struct choice {
    shape_key key;
    cublasLtMatmulAlgo_t algorithm;
    size_t scratch_bytes;
};

struct products {
    cublasLtHandle_t handle;
    void *scratch;
    int count, oldest;        /* choices in use; the next to be replaced once all are */
    uint64_t hashes[CHOICES]; /* of the keys, adjacent: a search reads little */
    choice choices[CHOICES];
};

vjp_status products_open(vjp_device *device) {
    products *p = static_cast<products *>(calloc(1, sizeof *p));
    if (!p) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for matrix products", device->name);
    state_of(device)->matrix_products = p;
    cublasStatus_t status = cublasLtCreate(&p->handle);
    if (status != CUBLAS_STATUS_SUCCESS)
        return vjp_fail(device, VJP_DEVICE_FAILED, "%s: opening cuBLASLt: %s", device->name,
                        cublasLtGetStatusString(status));
    return device_result(device, "allocating memory for matrix products", cudaMalloc(&p->scratch, SCRATCH_BYTES));
}

void products_close(products *p) {
    if (p->handle) cublasLtDestroy(p->handle);
    if (p->scratch) cudaFree(p->scratch);
    free(p);
}

static uint64_t hash_of(const shape_key &key) {
    uint64_t words[sizeof key / 8], hash = 0;
    memcpy(words, &key, sizeof key);
    for (uint64_t word : words) {
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash;
}

/* ---- Descriptions ------------------------------------------------------------------------------------ */

/* cuBLASLt's description of a product, on the stack. */
struct description {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a, b, result; /* a, b: ours; cuBLASLt gets them swapped */
};

static cudaDataType type_of(vjp_dtype dtype) {
    return dtype == VJP_BF16 ? CUDA_R_16BF : dtype == VJP_F16 ? CUDA_R_16F : CUDA_R_32F;
}

static vjp_dtype result_type(const product &p) {
    return p.f32 ? VJP_F32 : p.storage;
}

/* Keeps the first failure of several. */
struct outcome {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    void operator=(cublasStatus_t next) {
        if (status == CUBLAS_STATUS_SUCCESS) status = next;
    }
};

template <class V>
static void set(outcome &result, cublasLtMatmulDescOpaque_t *d, cublasLtMatmulDescAttributes_t which, V value) {
    result = cublasLtMatmulDescSetAttribute(d, which, &value, sizeof value);
}

template <class V>
static void set(outcome &result, cublasLtMatmulPreferenceOpaque_t *d, cublasLtMatmulPreferenceAttributes_t which,
                V value) {
    result = cublasLtMatmulPreferenceSetAttribute(d, which, &value, sizeof value);
}

/* Rows in memory are cuBLASLt's columns. */
static void lay_out(outcome &result, cublasLtMatrixLayoutOpaque_t *layout, vjp_dtype dtype, int64_t rows,
                    int64_t columns, int64_t row, int64_t item, int64_t items) {
    int32_t count = (int32_t)items;
    result = cublasLtMatrixLayoutInit(layout, type_of(dtype), (uint64_t)columns, (uint64_t)rows, row);
    if (count == 1) return;
    result = cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
    result = cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &item, sizeof item);
}

static cublasStatus_t describe(const vjp_work *work, const product &p, const void *bias, description *d) {
    outcome result;
    bool tf32 = p.storage == VJP_F32 && state_of(work->device)->tf32;
    result =
        cublasLtMatmulDescInit(&d->operation, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F);
    set(result, &d->operation, CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(result, &d->operation, CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p.factors) set(result, &d->operation, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    if (bias) {
        set(result, &d->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(result, &d->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    lay_out(result, &d->a, p.storage, p.a.transposed ? p.k : p.m, p.a.transposed ? p.m : p.k, p.a.row, p.a.item,
            p.items);
    lay_out(result, &d->b, p.storage, p.b.transposed ? p.n : p.k, p.b.transposed ? p.k : p.n, p.b.row, p.b.item,
            p.items);
    lay_out(result, &d->result, result_type(p), p.m, p.n, p.n, p.item, p.items);
    return result.status;
}

/* ---- Algorithms -------------------------------------------------------------------------------------- */

/* The alignment that every item has if the first is fully aligned. */
static uint32_t alignment_of(const product &p, vjp_dtype dtype, int64_t item) {
    uint64_t distance = p.items > 1 ? (uint64_t)item * vjp_dtype_size(dtype) : 0;
    uint64_t bits = distance | PRODUCT_ALIGNMENT;
    return (uint32_t)(bits & (~bits + 1));
}

/*
 * Parts of a sum may be added in the scratch memory in their order, but not in place in the order of arrival, nor
 * rounded to the result's type.
 */
static constexpr uint32_t REDUCTIONS = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

/* Whether an algorithm can add a matrix that is not the result's old value. */
static bool takes_addend(const cublasLtMatmulAlgo_t *algorithm) {
    int32_t can = 0;
    size_t written;
    return cublasLtMatmulAlgoCapGetAttribute(algorithm, CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT, &can, sizeof can,
                                             &written) == CUBLAS_STATUS_SUCCESS &&
           can;
}

static bool is_reproducible(const cublasLtMatmulAlgo_t *algorithm) {
    uint32_t scheme = 0;
    size_t written;
    return cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme,
                                                sizeof scheme, &written) == CUBLAS_STATUS_SUCCESS &&
           !(scheme & ~REDUCTIONS);
}

template <class V> static V config(const cublasLtMatmulAlgo_t *algorithm, cublasLtMatmulAlgoConfigAttributes_t which) {
    V value = 0;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(algorithm, which, &value, sizeof value, &written);
    return value;
}

/*
 * How much a candidate is preferred to those before it; 0: not at all. On Hopper cuBLASLt ranks large tiles first, of
 * which a multiprocessor holds one. With tiles of which it holds two, one writes its result while the other multiplies.
 * That pays where a sum is short, since with more terms writing is little beside multiplying, and where there are three
 * waves of such tiles, since fewer leave too many multiprocessors idle at the end. An f32 result has twice the bytes to
 * write: there such tiles are faster for any sum.
 *
 * A small result with a long sum, the gradient of a weight, is fastest where its tiles are just less than one wave and
 * the sum is not split: in short tests 5 to 25 % faster than the first candidates for the layers of models of 76, 124
 * and 360 million parameters, which split the sum or begin a second wave.
 *
 * What counts is the card at work: an H200 that multiplies all the time draws its 700 watts and lowers its clock,
 * to 1.3 to 1.8 of 2 GHz, and then large tiles, which read less for each multiplication, do better than in a short
 * test. Measured so with the products of models of 124 million to 1.1 billion parameters, each for a quarter of a
 * second: from 2048 terms on the first candidate, a large tile, is up to 6 % faster and once 2 % slower; with fewer it
 * is 1 to 8 % slower. 128 x 128 is 2 to 3 % faster for f32 results of 5632 x 2048 over 8192 terms.
 *
 * In f32, without tensor cores, tiles of 128 x 256 are the fastest from two waves on, if blocks go through the result
 * in squares and not in rows (compact_order()): 1 to 2 % faster than the first candidate for 16384 x 4096 x 1024 and
 * 8192 x 4096 x 4096, with a bias.
 */
static int rank_of(const vjp_work *work, const product &p, const cublasLtMatmulHeuristicResult_t &candidate) {
    static constexpr uint32_t tiles[] = {CUBLASLT_MATMUL_TILE_144x128, CUBLASLT_MATMUL_TILE_176x128,
                                         CUBLASLT_MATMUL_TILE_128x160, CUBLASLT_MATMUL_TILE_128x128};
    const cublasLtMatmulAlgo_t *algorithm = &candidate.algo;
    if (state_of(work->device)->capability != 90) return 0;
    bool split = config<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1;
    if (p.storage == VJP_F32)
        return !state_of(work->device)->tf32 && !split && candidate.wavesCount >= 2 &&
               config<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID) == CUBLASLT_MATMUL_TILE_128x256;
    if (candidate.wavesCount >= 0.9f && candidate.wavesCount < 0.99f) return !split;
    if (candidate.wavesCount < 2.9f || split) return 0;
    uint32_t tile = config<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID);
    uint16_t cluster = config<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);
    if (p.f32 && tile == CUBLASLT_MATMUL_TILE_128x128) return 4;
    if (p.k >= 2048 || (cluster != CUBLASLT_CLUSTER_SHAPE_2x1x1 && cluster != CUBLASLT_CLUSTER_SHAPE_1x2x1)) return 0;
    for (int i = 0; i < 4; i++)
        if (tile == tiles[i]) return i + 1;
    return 0;
}

/* Blocks at work lie in squares of the result, which need fewer rows and columns than a line of them. */
static void compact_order(cublasLtMatmulAlgo_t *algorithm) {
    uint32_t on = 1;
    cublasLtMatmulAlgoConfigSetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, &on, sizeof on);
}

static cublasStatus_t choose(const vjp_work *work, const product &p, choice *c) {
    outcome result;
    description d;
    cublasLtMatmulPreferenceOpaque_t preference;
    /* The heuristics use the bias's alignment: give them one that does not depend on its address. */
    result = describe(work, p, p.bias ? reinterpret_cast<const void *>(PRODUCT_ALIGNMENT) : nullptr, &d);
    result = cublasLtMatmulPreferenceInit(&preference);
    set(result, &preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)SCRATCH_BYTES);
    set(result, &preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, REDUCTIONS);
    set(result, &preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p, p.storage, p.b.item));
    set(result, &preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p, p.storage, p.a.item));
    set(result, &preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p, result_type(p), p.item));
    set(result, &preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p, result_type(p), p.item));
    if (result.status != CUBLAS_STATUS_SUCCESS) return result.status;

    cublasLtHandle_t handle = state_of(work->device)->matrix_products->handle;
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES], checked;
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &d.operation, &d.b, &d.a, &d.result, &d.result,
                                                           &preference, CANDIDATES, candidates, &count);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    int best = -1;
    for (int i = 0; i < count; i++) {
        cublasLtMatmulAlgo_t *algorithm = &candidates[i].algo;
        int rank = rank_of(work, p, candidates[i]);
        if (rank <= best) continue;
        if (p.storage == VJP_F32 && rank > 0) compact_order(algorithm);
        if (candidates[i].state != CUBLAS_STATUS_SUCCESS || !is_reproducible(algorithm)) continue;
        if (p.addend && !takes_addend(algorithm)) continue;
        if (cublasLtMatmulAlgoCheck(handle, &d.operation, &d.b, &d.a, &d.result, &d.result, algorithm, &checked) !=
                CUBLAS_STATUS_SUCCESS ||
            checked.workspaceSize > SCRATCH_BYTES)
            continue;
        c->algorithm = *algorithm;
        c->scratch_bytes = checked.workspaceSize;
        best = rank;
    }
    return best >= 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* The algorithm for a shape, from the table or new in it. NULL after a failure. */
static const choice *find_choice(const vjp_work *work, const product &p, cublasStatus_t *status) {
    products *table = state_of(work->device)->matrix_products;
    shape_key key = {p.items,
                     p.m,
                     p.n,
                     p.k,
                     p.a.row,
                     p.a.item,
                     p.b.row,
                     p.b.item,
                     p.item,
                     p.storage,
                     p.a.transposed,
                     p.b.transposed,
                     p.f32,
                     p.bias != nullptr,
                     p.factors != nullptr,
                     p.addend != nullptr};
    uint64_t hash = hash_of(key);
    for (int i = 0; i < table->count; i++)
        if (table->hashes[i] == hash && memcmp(&table->choices[i].key, &key, sizeof key) == 0)
            return &table->choices[i];
    choice fresh{};
    fresh.key = key;
    *status = choose(work, p, &fresh);
    if (*status != CUBLAS_STATUS_SUCCESS) return nullptr;
    int place = table->count;
    if (place < CHOICES) {
        table->count++;
    } else {
        place = table->oldest;
        table->oldest = (place + 1) % CHOICES;
    }
    table->hashes[place] = hash;
    table->choices[place] = fresh;
    return &table->choices[place];
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

static cublasStatus_t enqueue(const vjp_work *work, const product &p) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const choice *c = find_choice(work, p, &status);
    description d;
    if (c) status = describe(work, p, p.bias, &d);
    if (!c || status != CUBLAS_STATUS_SUCCESS) return status;
    const products *table = state_of(work->device)->matrix_products;
    float here[] = {p.scale, 0, 1};
    const float *factors = p.factors ? p.factors : here;
    return cublasLtMatmul(table->handle, &d.operation, factors, p.b.data, &d.b, p.a.data, &d.a, factors + 1 + p.add,
                          p.addend ? p.addend : p.result, &d.result, p.result, &d.result, &c->algorithm, table->scratch,
                          c->scratch_bytes, stream_of(work));
}

static const void *moved(const void *data, vjp_dtype dtype, int64_t elements) {
    return static_cast<const char *>(data) + elements * (int64_t)vjp_dtype_size(dtype);
}

/* The product's items from `item` on and rows from `row` on. */
static product part_of(const product &p, int64_t item, int64_t row) {
    product part = p;
    part.items = vjp_min(MAX_ITEMS, p.items - item);
    part.m = vjp_min(MAX_ROWS, p.m - row);
    part.a.data = moved(p.a.data, p.storage, item * p.a.item + row * (p.a.transposed ? 1 : p.a.row));
    part.b.data = moved(p.b.data, p.storage, item * p.b.item);
    part.result = const_cast<void *>(moved(p.result, result_type(p), item * p.item + row * p.n));
    if (p.addend) part.addend = moved(p.addend, result_type(p), item * p.item + row * p.n);
    return part;
}

vjp_status multiply(const vjp_work *work, const product &p) {
    if (p.n == 0) return VJP_OK;
    for (int64_t item = 0; item < p.items; item += MAX_ITEMS)
        for (int64_t row = 0; row < p.m; row += MAX_ROWS) {
            cublasStatus_t status = enqueue(work, part_of(p, item, row));
            if (status != CUBLAS_STATUS_SUCCESS)
                return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: cuBLASLt: %s (a product of %lld x %lld x %lld)",
                                  work->device->name, cublasLtGetStatusString(status), (long long)p.m, (long long)p.n,
                                  (long long)p.k);
        }
    return VJP_OK;
}

} // namespace vjp
