/* SPDX-License-Identifier: MIT */
/*
 * Kernels that torch's dispatcher calls, and torch's threads as a pool for them, by torch's stable C ABI. No header of
 * torch is used and nothing of it is linked: vjp.torch looks its functions up in the loaded library and passes their
 * addresses, so one build serves every torch that has them (2.10 and later; before, vjp.torch registers kernels in
 * Python).
 *
 * The arguments of a kernel are a stack of 64-bit values in the order of the schema that vjp.torch defines: the tensors
 * of the pass, the attributes, then `dtype` (cast), `outputs` (where there are several) and `wide` (where a gradient
 * may be f32 although T is not). The results replace them. The kernel owns the tensors, optional values and strings on
 * it.
 *
 * The GIL is not held and must not be needed. An error is thrown as torch's exception, after everything was released.
 */
#include "core.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct torch_tensor torch_tensor; /* torch's handles */
typedef struct torch_string torch_string;
typedef struct torch_library torch_library;
typedef void (*torch_kernel)(uint64_t *stack, uint64_t inputs, uint64_t outputs);
typedef void (*torch_range)(int64_t begin, int64_t end, void *context);

/* Functions of torch; they return 0, or an error that torch has logged. */
static struct {
    int32_t (*library_init_impl)(const char *space, const char *key, const char *file, uint32_t line,
                                 torch_library **library);
    int32_t (*library_impl)(torch_library *library, const char *name, torch_kernel kernel, uint64_t version);
    int32_t (*get_data_ptr)(torch_tensor *tensor, void **data);
    int32_t (*get_dim)(torch_tensor *tensor, int64_t *ndim);
    int32_t (*get_sizes)(torch_tensor *tensor, int64_t **sizes);
    int32_t (*get_strides)(torch_tensor *tensor, int64_t **strides);
    int32_t (*get_dtype)(torch_tensor *tensor, int32_t *dtype);
    int32_t (*get_device_type)(torch_tensor *tensor, int32_t *type);
    int32_t (*empty_strided)(int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t type,
                             int32_t index, torch_tensor **tensor);
    int32_t (*delete_tensor)(torch_tensor *tensor);
    int32_t (*delete_value)(uint64_t *value); /* or NULL: then */
    void (*operator_delete)(void *value);     /* C++'s, which torch's headers called before 2.13 */
    int32_t (*string_length)(torch_string *string, size_t *length);
    int32_t (*string_text)(torch_string *string, const char **text);
    int32_t (*delete_string)(torch_string *string);
    int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, torch_range run, void *context);
    int32_t (*get_num_threads)(uint32_t *count);
    void (*check)(bool condition, const char *function, const char *file, uint32_t line, const char *message);
    int32_t (*device_cpu)(void);
    int32_t (*dtype[VJP_DTYPE_COUNT])(void);
} torch;

#define ENTRY(member, name)                                                                                            \
    { name, offsetof(struct_of_torch, member) }
typedef __typeof__(torch) struct_of_torch;

static const struct {
    const char *name;
    size_t offset;
} entries[] = {
    ENTRY(library_init_impl, "aoti_torch_library_init_impl"),
    ENTRY(library_impl, "torch_library_impl"),
    ENTRY(get_data_ptr, "aoti_torch_get_data_ptr"),
    ENTRY(get_dim, "aoti_torch_get_dim"),
    ENTRY(get_sizes, "aoti_torch_get_sizes"),
    ENTRY(get_strides, "aoti_torch_get_strides"),
    ENTRY(get_dtype, "aoti_torch_get_dtype"),
    ENTRY(get_device_type, "aoti_torch_get_device_type"),
    ENTRY(empty_strided, "aoti_torch_empty_strided"),
    ENTRY(delete_tensor, "aoti_torch_delete_tensor_object"),
    ENTRY(delete_value, "torch_delete_stable_ivalue"),
    ENTRY(operator_delete, "_ZdlPv"),
    ENTRY(string_length, "torch_string_length"),
    ENTRY(string_text, "torch_string_c_str"),
    ENTRY(delete_string, "torch_delete_string"),
    ENTRY(parallel_for, "torch_parallel_for"),
    ENTRY(get_num_threads, "torch_get_num_threads"),
    ENTRY(check, "aoti_torch_check"),
    ENTRY(device_cpu, "aoti_torch_device_type_cpu"),
    ENTRY(dtype[VJP_F32], "aoti_torch_dtype_float32"),
    ENTRY(dtype[VJP_BF16], "aoti_torch_dtype_bfloat16"),
    ENTRY(dtype[VJP_F16], "aoti_torch_dtype_float16"),
    ENTRY(dtype[VJP_F64], "aoti_torch_dtype_float64"),
    ENTRY(dtype[VJP_I32], "aoti_torch_dtype_int32"),
    ENTRY(dtype[VJP_I64], "aoti_torch_dtype_int64"),
};
enum { ENTRIES = sizeof entries / sizeof entries[0] };

/* The versions of the C ABI that this file is written for: 2.13, and before that 2.10. */
static uint64_t abi_version(void) {
    return (uint64_t)2 << 56 | (uint64_t)(torch.delete_value ? 13 : 10) << 48;
}

static int32_t dtype_codes[VJP_DTYPE_COUNT], cpu_code;

/* ---- Torch's threads --------------------------------------------------------------------------------- */

typedef struct parallel_job {
    vjp_task task;
    void *argument;
} parallel_job;

static void run_range(int64_t begin, int64_t end, void *context) {
    const parallel_job *job = context;
    for (int64_t i = begin; i < end; i++)
        job->task(job->argument, (size_t)i);
}

static void run_on_torch(void *context, size_t count, vjp_task task, void *argument) {
    (void)context;
    parallel_job job = {task, argument};
    torch.parallel_for(0, (int64_t)count, 1, run_range, &job);
}

static int torch_threads(void) {
    uint32_t count = 1;
    return torch.get_num_threads(&count) == 0 && count > 0 ? (int)count : 1;
}

static const device_pool torch_pool = {run_on_torch, torch_threads};

/* ---- A call ------------------------------------------------------------------------------------------ */

typedef struct kernel {
    const op_function *f;
    bool f64_on_cpu; /* f64 has a kernel on the CPU; without one `ref` computes it */
} kernel;

typedef struct torch_call {
    const kernel *k;
    torch_tensor *inputs[VJP_MAX_SLOTS], *outputs[VJP_MAX_SLOTS];
    array arrays[VJP_MAX_SLOTS];
    const vjp_tensor *tensors[VJP_MAX_SLOTS];
    int64_t attributes[MAX_ATTRIBUTES];
    int32_t dtype; /* torch's code; of an output whose dtype the op leaves open */
    int64_t wanted, wide;
    char sentence[1024]; /* "" as long as nothing went wrong */
} torch_call;

static void fail(torch_call *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void fail(torch_call *c, const char *format, ...) {
    va_list list;
    va_start(list, format);
    if (!c->sentence[0]) vsnprintf(c->sentence, sizeof c->sentence, format, list);
    va_end(list);
}

static int find_dtype(int32_t code) {
    for (int d = 0; d < VJP_DTYPE_COUNT; d++)
        if (dtype_codes[d] == code) return d;
    return -1;
}

static void read_tensor(torch_call *c, size_t slot, torch_tensor *handle) {
    const op_function *f = c->k->f;
    const char *name = f->pass->slots[slot].name;
    int64_t ndim, *shape, *strides;
    int32_t code, device;
    void *data;
    if (torch.get_dim(handle, &ndim) || torch.get_sizes(handle, &shape) || torch.get_strides(handle, &strides) ||
        torch.get_dtype(handle, &code) || torch.get_device_type(handle, &device) || torch.get_data_ptr(handle, &data)) {
        fail(c, "%s: %s could not be read", f->name, name);
        return;
    }
    int dtype = find_dtype(code);
    if (device != cpu_code)
        fail(c, "%s: %s is not in host memory", f->name, name);
    else if (dtype < 0)
        fail(c, "%s: %s has a dtype that vjp does not take; it must be f32, bf16, f16, f64, i32 or i64", f->name, name);
    else if (ndim > VJP_MAX_DIMS)
        fail(c, "%s: %s has rank %d; ranks go from 0 to %d", f->name, name, (int)ndim, VJP_MAX_DIMS);
    if (c->sentence[0]) return;
    array *a = &c->arrays[slot];
    const char *problem = NULL;
    array_view(a, dtype, (int)ndim, shape, strides, data);
    bool rows = f->pass->slots[slot].flags & VJP_SLOT_ROWS;
    if (array_place(a, false, rows, &problem) != VJP_OK) fail(c, "%s: %s %s", f->name, name, problem);
    c->tensors[slot] = &a->tensor;
}

/* Frees a value that stands for an optional one; NULL where that is absent. */
static torch_tensor *take_optional(uint64_t value) {
    uint64_t *present = (uint64_t *)(uintptr_t)value; // NOLINT(performance-no-int-to-ptr)
    if (!present) return NULL;
    torch_tensor *handle = (torch_tensor *)(uintptr_t)*present; // NOLINT(performance-no-int-to-ptr)
    if (torch.delete_value)
        torch.delete_value(present);
    else
        torch.operator_delete(present);
    return handle;
}

static void read_choice(torch_call *c, const vjp_attribute *a, uint64_t value) {
    torch_string *string = (torch_string *)(uintptr_t)value; // NOLINT(performance-no-int-to-ptr)
    const char *text = "";
    size_t length = 0;
    int64_t choice = 0;
    torch.string_text(string, &text);
    torch.string_length(string, &length);
    while (a->choices[choice] &&
           (strlen(a->choices[choice]) != length || memcmp(a->choices[choice], text, length) != 0))
        choice++;
    if (a->choices[choice])
        memcpy((char *)c->attributes + a->offset, &choice, sizeof choice);
    else
        fail(c, "%s: %s is '%.*s', which is not one of its choices", c->k->f->name, a->name,
             (int)(length < 64 ? length : 64), text);
    torch.delete_string(string);
}

static void read_attribute(torch_call *c, const vjp_attribute *a, uint64_t value) {
    if (a->type == VJP_CHOICE) {
        read_choice(c, a, value);
        return;
    }
    if (a->type == VJP_BOOLEAN) value = (value & 0xff) != 0;
    memcpy((char *)c->attributes + a->offset, &value, sizeof value);
}

static bool has_wide_outputs(const op_function *f) {
    for (size_t i = 0; f->number == VJP_BACKWARD && i < f->pass->outputs; i++)
        if (f->pass->slots[i].kind == VJP_KIND_PARAMETER) return true;
    return false;
}

/* Takes everything from the stack first, so that what it owns is freed whatever is wrong. */
static void read_stack(torch_call *c, const uint64_t *stack) {
    const op_function *f = c->k->f;
    const vjp_pass_info *pass = f->pass;
    for (size_t i = pass->outputs; i < pass->count; i++) {
        uint64_t value = *stack++;
        c->inputs[i] = pass->slots[i].flags & VJP_SLOT_OPTIONAL
                           ? take_optional(value)
                           : (torch_tensor *)(uintptr_t)value; // NOLINT(performance-no-int-to-ptr)
    }
    if (f->attributes) vjp_op_defaults(f->op, c->attributes);
    for (int i = 0; i < f->attributes; i++)
        read_attribute(c, &f->info->attributes[i], *stack++);
    if (function_leaves_dtype_open(f)) memcpy(&c->dtype, stack++, sizeof c->dtype);
    c->wanted = pass->outputs > 1 ? (int64_t)*stack++ : -1;
    int gate = function_gate(f);
    for (size_t i = 0; c->wanted == -1 && gate >= 0 && i < pass->outputs; i++)
        if (function_leaves_out(f, i, c->inputs[gate])) {
            c->wanted &= ~(INT64_C(1) << i);
            break;
        }
    c->wide = has_wide_outputs(f) ? (int64_t)*stack++ : 0;
    for (size_t i = pass->outputs; i < pass->count && !c->sentence[0]; i++)
        if (c->inputs[i]) read_tensor(c, i, c->inputs[i]);
}

/* An output that is not wanted is an empty tensor. */
static void create_output(torch_call *c, size_t slot, vjp_dtype storage, const vjp_tensor *described) {
    const op_function *f = c->k->f;
    vjp_tensor form = *described;
    bool wanted = c->wanted >> slot & 1;
    if (c->wide >> slot & 1 && f->pass->slots[slot].kind == VJP_KIND_PARAMETER && storage != VJP_F64)
        form.dtype = VJP_F32;
    if (f->pass->slots[slot].kind == VJP_KIND_FLOAT) form.dtype = find_dtype(c->dtype);
    if (form.dtype < 0) {
        fail(c, "%s: the dtype must be f32, bf16, f16 or f64", f->name);
        return;
    }
    if (!wanted) form = vjp_tensor_of(NULL, (vjp_dtype)form.dtype, 1, (const int64_t[1]){0});
    torch_tensor *made = NULL;
    if (torch.empty_strided(form.ndim, form.shape, form.stride, dtype_codes[form.dtype], cpu_code, -1, &made) ||
        torch.get_data_ptr(made, &form.data)) {
        fail(c, "%s: memory ran out for %s", f->name, f->pass->slots[slot].name);
        return;
    }
    c->outputs[slot] = made;
    c->arrays[slot].tensor = form;
    c->tensors[slot] = wanted ? &c->arrays[slot].tensor : NULL;
}

static void compute(torch_call *c) {
    const op_function *f = c->k->f;
    const void *attributes = f->attributes ? c->attributes : NULL;
    vjp_dtype storage = call_storage(f, c->tensors);
    vjp_tensor described[VJP_MAX_SLOTS];
    vjp_status status = VJP_OK;
    bool f64 = storage == VJP_F64 || (function_leaves_dtype_open(f) && c->dtype == dtype_codes[VJP_F64]);
    const char *name = f64 && !c->k->f64_on_cpu ? "ref" : "cpu";
    device_entry *entry = device_acquire(name, true, &status, c->sentence, sizeof c->sentence);
    if (!entry) return;
    c->sentence[0] = 0;
    status = vjp_infer(entry->device, f->op, f->number, c->tensors, f->pass->count, attributes, described);
    for (size_t i = 0; status == VJP_OK && i < f->pass->outputs && !c->sentence[0]; i++)
        create_output(c, i, storage, &described[i]);
    for (size_t i = f->pass->outputs; status == VJP_OK && i < f->pass->count; i++)
        if (c->arrays[i].copy) array_copy_in(&c->arrays[i]);
    if (status == VJP_OK && !c->sentence[0]) status = call_op(f, entry->device, c->tensors, attributes);
    if (status != VJP_OK) fail(c, "%s", vjp_error(entry->device));
    device_give_back(entry);
}

static void run(const kernel *k, uint64_t *stack) {
    torch_call c;
    size_t count = k->f->pass->count;
    c.k = k;
    c.sentence[0] = 0;
    memset(c.inputs, 0, sizeof c.inputs[0] * count);
    memset(c.outputs, 0, sizeof c.outputs[0] * count);
    memset(c.tensors, 0, sizeof c.tensors[0] * count);
    for (size_t i = 0; i < count; i++)
        c.arrays[i].copy = NULL;
    read_stack(&c, stack);
    if (!c.sentence[0]) compute(&c);
    for (size_t i = 0; i < count; i++) {
        free(c.arrays[i].copy);
        if (c.inputs[i]) torch.delete_tensor(c.inputs[i]);
        if (c.outputs[i] && c.sentence[0]) torch.delete_tensor(c.outputs[i]);
    }
    if (c.sentence[0]) torch.check(false, k->f->name, "vjp", 0, c.sentence); /* throws */
    for (size_t i = 0; i < k->f->pass->outputs; i++)
        stack[i] = (uint64_t)(uintptr_t)c.outputs[i];
}

/* ---- Registering ------------------------------------------------------------------------------------- */

/* A kernel gets no context from torch, so each is a function of its own. */
#define EIGHT(X, tens) X(tens##0) X(tens##1) X(tens##2) X(tens##3) X(tens##4) X(tens##5) X(tens##6) X(tens##7)
#define ALL(X)         EIGHT(X, 0) EIGHT(X, 1) EIGHT(X, 2) EIGHT(X, 3) EIGHT(X, 4) EIGHT(X, 5) EIGHT(X, 6) EIGHT(X, 7)
enum { MAX_KERNELS = 64 };

static kernel kernels[MAX_KERNELS];

#define DEFINE(octal)                                                                                                  \
    static void kernel_##octal(uint64_t *stack, uint64_t inputs, uint64_t outputs) {                                   \
        (void)inputs, (void)outputs;                                                                                   \
        run(&kernels[0##octal], stack);                                                                                \
    }
#define NAME(octal) kernel_##octal,
ALL(DEFINE)
static const torch_kernel kernel_functions[MAX_KERNELS] = {ALL(NAME)};

/* False: torch lacks one. Of the two that delete a value either is enough. */
static bool read_addresses(PyObject *addresses) {
    bool all = true;
    for (size_t i = 0; i < ENTRIES; i++) {
        PyObject *number = PyDict_GetItemString(addresses, entries[i].name); /* borrowed */
        void *address = number ? PyLong_AsVoidPtr(number) : NULL;
        memcpy((char *)&torch + entries[i].offset, &address, sizeof address);
        bool deletes = entries[i].offset == offsetof(struct_of_torch, delete_value) ||
                       entries[i].offset == offsetof(struct_of_torch, operator_delete);
        all = all && (address || deletes);
    }
    return all && (torch.delete_value || torch.operator_delete) && !PyErr_Occurred();
}

static PyObject *torch_symbols(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    PyObject *names = PyTuple_New(ENTRIES);
    for (size_t i = 0; names && i < ENTRIES; i++) {
        PyObject *name = PyUnicode_FromString(entries[i].name);
        if (!name || PyTuple_SetItem(names, (Py_ssize_t)i, name)) Py_CLEAR(names);
    }
    return names;
}

static PyObject *torch_register(PyObject *module, PyObject *addresses) {
    (void)module;
    static torch_library *library; /* as long as the process: deleting it would remove the kernels */
    if (library) Py_RETURN_TRUE;
    if (!read_addresses(addresses)) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_FALSE;
    }
    cpu_code = torch.device_cpu();
    for (int d = 0; d < VJP_DTYPE_COUNT; d++)
        dtype_codes[d] = torch.dtype[d]();
    device_set_pool(&torch_pool);
    device_entry *entry = device_take(NULL, true);
    if (!entry) return NULL;
    bool ok = torch.library_init_impl("vjp", "CPU", __FILE__, __LINE__, &library) == 0;
    const op_function *f;
    for (size_t i = 0; ok && (f = call_function_at(i)); i++) {
        if (i < MAX_KERNELS) kernels[i] = (kernel){f, vjp_supports(entry->device, f->op, f->number, VJP_F64) == VJP_OK};
        ok = i < MAX_KERNELS && torch.library_impl(library, f->name, kernel_functions[i], abi_version()) == 0;
    }
    device_give_back(entry);
    if (ok) Py_RETURN_TRUE;
    PyErr_SetString(PyExc_ImportError, "vjp.torch: torch refused a kernel");
    return NULL;
}

static PyObject *torch_forget_pool(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    device_set_pool(NULL);
    Py_RETURN_NONE;
}

PyMethodDef torch_methods[] = {
    {"torch_symbols", torch_symbols, METH_NOARGS, "The names of torch's functions that torch_register() looks for."},
    {"torch_register", torch_register, METH_O,
     "Registers a kernel for each op, by {name: address} of torch's functions, and runs them on torch's threads. "
     "False: a function is missing."},
    {"torch_forget_pool", torch_forget_pool, METH_NOARGS, "From now on vjp's own threads are used, not torch's."},
    {NULL, NULL, 0, NULL},
};
