/* SPDX-License-Identifier: MIT */
/*
 * Python's arrays as tensors, without a copy where they are packed, and new arrays of the same kind.
 *
 *   the array has                       it is read by          a result is made by
 *   a DLPack table of C functions       that table, borrowed   that table's allocator (torch 2.10 and later)
 *   the buffer protocol                 Py_buffer              numpy.empty()
 *   a dtype named bfloat16 (ml_dtypes)  a view as uint16       numpy.empty(), since buffers have no such dtype
 *   __dlpack__                          a capsule              memory of our own, and the library's from_dlpack()
 *
 * Arrays that come by DLPack may be in the memory of a GPU (gpu.c).
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

static PyObject *text_exchange, *text_dlpack, *text_device, *text_view, *text_dtype, *text_name, *text_from_dlpack;
static PyObject *dlpack_keywords, *empty_tuple;
static int64_t
    sizes[VJP_DTYPE_COUNT]; /* vjp_dtype_size() without a call of another library: it adds up in small calls */

/* NumPy, imported when an array of it is first needed. */
static PyObject *numpy_empty, *numpy_dtypes[VJP_DTYPE_COUNT], *numpy_uint16;

static const struct {
    const char *numpy, *torch;
    char format; /* of the buffer protocol; integers are distinguished by their size */
} dtypes[VJP_DTYPE_COUNT] = {
    [VJP_F32] = {"float32", "float", 'f'}, [VJP_BF16] = {"bfloat16", "bfloat16", 0},
    [VJP_F16] = {"float16", "half", 'e'},  [VJP_F64] = {"float64", "double", 'd'},
    [VJP_I32] = {"int32", "int", 'i'},     [VJP_I64] = {"int64", "long", 'q'},
};

bool array_init(void) {
    for (int d = 0; d < VJP_DTYPE_COUNT; d++)
        sizes[d] = (int64_t)vjp_dtype_size((vjp_dtype)d);
    text_exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    text_dlpack = PyUnicode_InternFromString("__dlpack__");
    text_device = PyUnicode_InternFromString("__dlpack_device__");
    text_view = PyUnicode_InternFromString("view");
    text_dtype = PyUnicode_InternFromString("dtype");
    text_name = PyUnicode_InternFromString("name");
    text_from_dlpack = PyUnicode_InternFromString("from_dlpack");
    dlpack_keywords = Py_BuildValue("{s:(ii)}", "max_version", DL_MAJOR, DL_MINOR);
    empty_tuple = PyTuple_New(0);
    return text_exchange && text_dlpack && text_device && text_view && text_dtype && text_name && text_from_dlpack &&
           dlpack_keywords && empty_tuple;
}

bool array_bytes(const vjp_tensor *tensor, size_t *bytes) {
    size_t total = vjp_dtype_size((vjp_dtype)tensor->dtype);
    bool fits = true;
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0) {
            *bytes = 0;
            return true;
        }
        if (total > (size_t)PTRDIFF_MAX / (size_t)tensor->shape[i])
            fits = false;
        else
            total *= (size_t)tensor->shape[i];
    }
    *bytes = total;
    return fits;
}

/* ---- dtypes ------------------------------------------------------------------------------------------ */

const char *array_dtype_name(int dtype) {
    return dtypes[dtype].numpy;
}

static int find_dtype(const char *text) {
    const char *dot = strrchr(text, '.'); /* torch.float32 */
    if (dot) text = dot + 1;
    for (int d = 0; d < VJP_DTYPE_COUNT; d++)
        if (strcmp(text, dtypes[d].numpy) == 0 || strcmp(text, dtypes[d].torch) == 0) return d;
    return vjp_dtype_find(text);
}

int array_dtype(PyObject *name) {
    PyObject *text = NULL;
    if (PyUnicode_Check(name))
        text = Py_NewRef(name);
    else if (!(text = PyObject_GetAttr(name, text_name))) {
        PyErr_Clear();
        text = PyType_Check(name) ? PyObject_GetAttrString(name, "__name__") : PyObject_Str(name);
    }
    const char *characters = text && PyUnicode_Check(text) ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    int dtype = characters ? find_dtype(characters) : -1;
    if (dtype < 0 && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "unknown dtype %R; there are f32, bf16, f16, f64, i32 and i64", name);
    Py_XDECREF(text);
    return dtype;
}

static int dtype_of_format(const char *format, Py_ssize_t size) {
    if (!format) return -1;
    const uint16_t one = 1;
    char native = *(const char *)&one ? '<' : '>';
    if (*format == native || *format == '=' || *format == '@') format++;
    if (!*format || format[1]) return -1;
    if (strchr("ilq", *format)) return size == 4 ? VJP_I32 : size == 8 ? VJP_I64 : -1;
    for (int d = 0; d < VJP_DTYPE_COUNT; d++)
        if (*format == dtypes[d].format) return d;
    return -1;
}

static int dtype_of_dlpack(dl_type type) {
    if (type.lanes != 1) return -1;
    switch (type.code << 8 | type.bits) {
    case DL_FLOAT << 8 | 32: return VJP_F32;
    case DL_BFLOAT << 8 | 16: return VJP_BF16;
    case DL_FLOAT << 8 | 16: return VJP_F16;
    case DL_FLOAT << 8 | 64: return VJP_F64;
    case DL_INT << 8 | 32: return VJP_I32;
    case DL_INT << 8 | 64: return VJP_I64;
    default: return -1;
    }
}

static bool refuse_dtype(PyObject *object, const char *function, const char *name) {
    PyObject *dtype = PyObject_GetAttr(object, text_dtype);
    PyErr_Clear();
    if (dtype)
        PyErr_Format(PyExc_TypeError,
                     "%s: %s has the dtype %S; it must be f32, bf16, f16, f64, i32 or i64 in native byte order",
                     function, name, dtype);
    else
        PyErr_Format(PyExc_TypeError, "%s: %s must be an array of f32, bf16, f16, f64, i32 or i64, not %R", function,
                     name, (PyObject *)Py_TYPE(object));
    Py_XDECREF(dtype);
    return false;
}

static bool refuse_rank(const char *function, const char *name, int ndim) {
    PyErr_Format(PyExc_ValueError, "%s: %s has rank %d; ranks go from 0 to %d", function, name, ndim, VJP_MAX_DIMS);
    return false;
}

/* ---- Reading ----------------------------------------------------------------------------------------- */

/* The table of a type; the attribute is looked up once for each type. */
static const dl_exchange *exchange_of(PyObject *object) {
    enum { SLOTS = 64, SHIFT = 5 };
    static struct {
        PyTypeObject *type;
        const dl_exchange *table;
    } known[SLOTS];
    PyTypeObject *type = Py_TYPE(object);
    size_t slot = ((uintptr_t)type >> SHIFT ^ (uintptr_t)type >> 12) % SLOTS;
    if (known[slot].type == type) return known[slot].table;
    const dl_exchange *table = NULL;
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, text_exchange);
    if (capsule) table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyErr_Clear();
    Py_XDECREF(capsule);
    while (table && table->header.version.major != DL_MAJOR)
        table = (const dl_exchange *)(const void *)table->header.previous;
    if (table && !table->borrow) table = NULL;
    Py_XDECREF((PyObject *)known[slot].type);
    Py_INCREF((PyObject *)type); /* so that no other type gets its address */
    known[slot].type = type;
    known[slot].table = table;
    return table;
}

bool array_has_table(PyObject *object) {
    return exchange_of(object) != NULL;
}

/* A packed tensor of this shape, without memory. */
static void set_form(array *a, int dtype, int ndim, const int64_t *shape) {
    a->tensor.data = NULL; /* member by member: to clear all the axes takes longer than all of this */
    a->tensor.offset = 0;
    a->tensor.dtype = dtype;
    a->tensor.ndim = ndim;
    a->tensor.flags = a->tensor.reserved = 0;
    int64_t packed = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        a->tensor.shape[i] = shape[i];
        a->tensor.stride[i] = packed;
        packed = (int64_t)((uint64_t)packed * (uint64_t)shape[i]); /* wraps only where the size is refused later */
    }
}

void array_view(array *a, int dtype, int ndim, const int64_t *shape, const int64_t *strides, void *data) {
    int64_t size = sizes[dtype];
    set_form(a, dtype, ndim, shape);
    a->gpu = -1;
    a->data = data;
    for (int i = 0; i < ndim; i++)
        a->byte_stride[i] = (strides ? strides[i] : a->tensor.stride[i]) * size;
}

static bool read_dlpack(const dl_tensor *d, PyObject *object, const char *function, const char *name, array *a) {
    int dtype = dtype_of_dlpack(d->dtype);
    if (dtype < 0) return refuse_dtype(object, function, name);
    if (d->ndim < 0 || d->ndim > VJP_MAX_DIMS) return refuse_rank(function, name, d->ndim);
    bool gpu = d->device.type == DL_CUDA || d->device.type == DL_CUDA_MANAGED;
    if (!gpu && d->device.type != DL_CPU && d->device.type != DL_CUDA_HOST) {
        PyErr_Format(PyExc_ValueError,
                     "%s: %s is neither in host memory nor in a CUDA device's (DLPack device type %d)", function, name,
                     (int)d->device.type);
        return false;
    }
    array_view(a, dtype, d->ndim, d->shape, d->strides, d->data ? (char *)d->data + d->byte_offset : NULL);
    if (gpu) a->gpu = d->device.id;
    return true;
}

/* Whether an object with __dlpack__ is on a GPU. An object that does not say is on the host. */
static bool is_on_gpu(PyObject *object) {
    PyObject *pair = PyObject_CallMethodObjArgs(object, text_device, NULL);
    PyObject *type = pair ? PySequence_GetItem(pair, 0) : NULL;
    long number = type ? PyLong_AsLong(type) : DL_CPU;
    PyErr_Clear();
    Py_XDECREF(type);
    Py_XDECREF(pair);
    return number == DL_CUDA || number == DL_CUDA_MANAGED;
}

/* The capsule of an object, ready for a->stream where it is on a GPU. */
static PyObject *get_capsule(PyObject *object, PyObject *method, array *a) {
    PyObject *stream = NULL, *keywords = dlpack_keywords, *bare = NULL, *capsule = NULL;
    if (is_on_gpu(object)) {
        if (!gpu_capsule_stream(object, &a->stream)) return NULL;
        stream = PyLong_FromVoidPtr(a->stream);
        keywords = PyDict_Copy(dlpack_keywords);
        bare = PyDict_New();
        bool ok = stream && keywords && bare && PyDict_SetItemString(keywords, "stream", stream) == 0 &&
                  PyDict_SetItemString(bare, "stream", stream) == 0;
        if (!ok) goto done;
    }
    capsule = PyObject_Call(method, empty_tuple, keywords);
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) { /* from before max_version */
        PyErr_Clear();
        capsule = PyObject_Call(method, empty_tuple, bare);
    }
done:
    if (keywords != dlpack_keywords) Py_XDECREF(keywords);
    Py_XDECREF(bare);
    Py_XDECREF(stream);
    return capsule;
}

static bool read_capsule(PyObject *object, const char *function, const char *name, bool output, array *a) {
    PyObject *method = PyObject_GetAttr(object, text_dlpack);
    if (!method) return refuse_dtype(object, function, name);
    PyObject *capsule = get_capsule(object, method, a);
    Py_DECREF(method);
    if (!capsule) return false;
    a->kind = ARRAY_CAPSULE;
    a->owned = capsule; /* not consumed: the capsule's destructor frees the tensor */
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_managed_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (output && managed->flags & DL_READ_ONLY) {
            PyErr_Format(PyExc_ValueError, "%s: %s is read-only", function, name);
            return false;
        }
        return read_dlpack(&managed->tensor, object, function, name, a);
    }
    dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    return managed && read_dlpack(&managed->tensor, object, function, name, a);
}

static bool read_buffer(const char *function, const char *name, int dtype, array *a) {
    const Py_buffer *b = &a->buffer;
    if (b->ndim > VJP_MAX_DIMS) return refuse_rank(function, name, b->ndim);
    int64_t shape[VJP_MAX_DIMS];
    for (int i = 0; i < b->ndim; i++) {
        shape[i] = b->shape[i];
        a->byte_stride[i] = b->strides[i];
    }
    set_form(a, dtype, b->ndim, shape);
    a->data = b->buf;
    return true;
}

/* ml_dtypes' bfloat16, which the buffer protocol refuses: its bits as a buffer. */
static bool get_bfloat16(PyObject *object, int flags, Py_buffer *buffer) {
    PyObject *dtype = PyObject_GetAttr(object, text_dtype);
    PyObject *name = dtype ? PyObject_GetAttr(dtype, text_name) : NULL;
    bool is_bfloat16 = name && PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
    PyErr_Clear();
    if (is_bfloat16 && !numpy_dtypes[VJP_BF16]) numpy_dtypes[VJP_BF16] = Py_NewRef(dtype);
    Py_XDECREF(name);
    Py_XDECREF(dtype);
    if (!is_bfloat16) return false;
    if (!numpy_uint16) numpy_uint16 = PyUnicode_FromString("uint16");
    PyObject *bits = PyObject_CallMethodObjArgs(object, text_view, numpy_uint16, NULL);
    bool ok = bits && PyObject_GetBuffer(bits, buffer, flags) == 0;
    Py_XDECREF(bits);
    return ok;
}

bool array_read(PyObject *object, const char *function, const char *name, bool output, array *a) {
    a->kind = ARRAY_NONE;
    a->has_buffer = false;
    a->gpu = -1;
    a->stream = NULL;
    a->packed = NULL;
    a->exchange = NULL;
    a->managed = NULL;
    a->object = object;
    a->owned = NULL;
    a->copy = NULL;
    const dl_exchange *exchange = exchange_of(object);
    if (exchange) {
        dl_tensor view;
        if (exchange->borrow(object, &view)) return false;
        a->kind = ARRAY_EXCHANGE;
        a->exchange = exchange;
        return read_dlpack(&view, object, function, name, a);
    }
    if (!PyObject_CheckBuffer(object)) return read_capsule(object, function, name, output, a);
    int flags = PyBUF_STRIDES | PyBUF_FORMAT | (output ? PyBUF_WRITABLE : 0), dtype;
    if (PyObject_GetBuffer(object, &a->buffer, flags) == 0) {
        a->has_buffer = true;
        dtype = dtype_of_format(a->buffer.format, a->buffer.itemsize);
        if (dtype < 0) return refuse_dtype(object, function, name);
    } else {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        a->has_buffer = get_bfloat16(object, flags, &a->buffer);
        if (!a->has_buffer && !PyErr_Occurred()) {
            if (is_on_gpu(object)) { /* cupy's have a buffer for memory that the host can read, too */
                Py_XDECREF(type);
                Py_XDECREF(value);
                Py_XDECREF(trace);
                return read_capsule(object, function, name, output, a);
            }
            PyErr_Restore(type, value, trace);
            return false;
        }
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        if (!a->has_buffer) return false;
        dtype = VJP_BF16;
    }
    a->kind = ARRAY_BUFFER;
    return read_buffer(function, name, dtype, a);
}

void array_release(array *a) {
    if (a->has_buffer) PyBuffer_Release(&a->buffer);
    if (a->managed && a->managed->deleter) { /* which may run Python code: without a pending exception */
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        a->managed->deleter(a->managed);
        PyErr_Restore(type, value, trace);
    }
    Py_XDECREF(a->owned);
    Py_XDECREF(a->packed);
    free(a->copy);
    a->has_buffer = false;
    a->managed = NULL;
    a->owned = a->packed = NULL;
    a->copy = NULL;
}

/* ---- Packing ----------------------------------------------------------------------------------------- */

bool array_is_packed(const array *a) {
    int64_t size = sizes[a->tensor.dtype], expected = size;
    bool packed = true;
    if ((uintptr_t)a->data & (size_t)(size - 1)) return false; /* a size is a power of two */
    for (int i = a->tensor.ndim - 1; i >= 0; i--) {
        if (a->tensor.shape[i] == 0) return true;
        if (a->tensor.shape[i] != 1 && a->byte_stride[i] != expected) packed = false;
        expected =
            (int64_t)((uint64_t)expected * (uint64_t)a->tensor.shape[i]); /* wraps only where the size is refused */
    }
    return packed;
}

/* Whether axes [from, to) follow each other when `expected` is the distance on the last of them, in bytes. */
static bool follow(const array *a, int from, int to, int64_t expected) {
    for (int i = to - 1; i >= from; i--) {
        if (a->tensor.shape[i] != 1 && a->byte_stride[i] != expected) return false;
        expected = (int64_t)((uint64_t)expected * (uint64_t)a->tensor.shape[i]); /* as in array_is_packed() */
    }
    return true;
}

/* Whether the rows, the last two axes, are packed and lie apart at one distance; the tensor then gets its strides. */
static bool use_rows(array *a) {
    vjp_tensor *tensor = &a->tensor;
    int64_t size = (int64_t)vjp_dtype_size((vjp_dtype)tensor->dtype), step = 0;
    int axes = tensor->ndim - 2;
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] == 0) return false;
    for (int i = 0; i < axes; i++)
        if (tensor->shape[i] != 1) step = a->byte_stride[i];
    if (axes < 1 || (uintptr_t)a->data % (size_t)size != 0 || step % size != 0) return false;
    if (!follow(a, axes, tensor->ndim, size) || !follow(a, 0, axes, step)) return false;
    if (step / size / tensor->shape[axes] / tensor->shape[axes + 1] < 1) return false; /* rows that meet */
    for (int i = 0; i < axes; i++)
        tensor->stride[i] = a->byte_stride[i] / size;
    tensor->data = a->data;
    return true;
}

/*
 * Whether two indices can name the same memory: the axes, from the smallest stride up, must each step over all that the
 * ones before them span. Refuses a few arrays whose elements interleave without meeting.
 */
bool array_repeats_elements(const array *a) {
    int64_t size = (int64_t)vjp_dtype_size((vjp_dtype)a->tensor.dtype);
    int64_t span = size, passed = 0;
    int count = 0;
    bool used[VJP_MAX_DIMS] = {false};
    for (int i = 0; i < a->tensor.ndim; i++)
        count += a->tensor.shape[i] > 1;
    for (; count > 0; count--) {
        int smallest = -1;
        for (int i = 0; i < a->tensor.ndim; i++)
            if (!used[i] && a->tensor.shape[i] > 1 &&
                (smallest < 0 || llabs(a->byte_stride[i]) < llabs(a->byte_stride[smallest])))
                smallest = i;
        used[smallest] = true;
        int64_t stride = llabs(a->byte_stride[smallest]);
        if (stride < span) return true;
        passed += stride * (a->tensor.shape[smallest] - 1);
        span = passed + size;
    }
    return false;
}

vjp_status array_place(array *a, bool output, bool rows, const char **problem) {
    size_t bytes;
    if (array_is_packed(a)) {
        a->tensor.data = a->data;
        return VJP_OK;
    }
    if (rows && use_rows(a)) return VJP_OK;
    *problem = "is too large: the product of its sizes overflows";
    if (!array_bytes(&a->tensor, &bytes)) return VJP_INVALID;
    *problem = "cannot be written: several of its elements share memory";
    if (output && array_repeats_elements(a)) return VJP_INVALID;
    *problem = "needs a packed copy, and memory ran out";
    a->copy = malloc(bytes ? bytes : 1);
    if (!a->copy) return VJP_OUT_OF_MEMORY;
    a->tensor.data = a->copy;
    return VJP_OK;
}

bool array_pack(array *a, const char *function, const char *name, bool output, bool rows) {
    const char *problem = NULL;
    if (a->gpu >= 0) return gpu_pack(a, function, name, output);
    vjp_status status = array_place(a, output, rows, &problem);
    if (status == VJP_OUT_OF_MEMORY)
        PyErr_NoMemory();
    else if (status != VJP_OK)
        PyErr_Format(PyExc_ValueError, "%s: %s %s", function, name, problem);
    return status == VJP_OK;
}

static void copy_axes(char *to, const int64_t *to_stride, const char *from, const int64_t *from_stride, int ndim,
                      const int64_t *shape, size_t size) {
    if (ndim == 0) {
        memcpy(to, from, size);
        return;
    }
    if (ndim > 1) {
        for (int64_t i = 0; i < shape[0]; i++)
            copy_axes(to + i * to_stride[0], to_stride + 1, from + i * from_stride[0], from_stride + 1, ndim - 1,
                      shape + 1, size);
        return;
    }
    for (int64_t i = 0; i < shape[0]; i++)
        switch (size) { /* a constant size makes memcpy one load and one store */
        case 2: memcpy(to + i * to_stride[0], from + i * from_stride[0], 2); break;
        case 4: memcpy(to + i * to_stride[0], from + i * from_stride[0], 4); break;
        default: memcpy(to + i * to_stride[0], from + i * from_stride[0], 8); break;
        }
}

static void copy_elements(const array *a, bool in) {
    size_t size = vjp_dtype_size((vjp_dtype)a->tensor.dtype);
    int64_t packed[VJP_MAX_DIMS];
    for (int i = 0; i < a->tensor.ndim; i++)
        packed[i] = a->tensor.stride[i] * (int64_t)size;
    if (in)
        copy_axes(a->copy, packed, a->data, a->byte_stride, a->tensor.ndim, a->tensor.shape, size);
    else
        copy_axes(a->data, a->byte_stride, a->copy, packed, a->tensor.ndim, a->tensor.shape, size);
}

void array_copy_in(const array *a) {
    copy_elements(a, true);
}

void array_copy_out(const array *a) {
    copy_elements(a, false);
}

/* ---- New arrays -------------------------------------------------------------------------------------- */

static PyObject *numpy_dtype(int dtype) {
    if (numpy_dtypes[dtype]) return numpy_dtypes[dtype];
    PyObject *numpy = PyImport_ImportModule("numpy"), *scalar = NULL;
    PyObject *make = numpy ? PyObject_GetAttrString(numpy, "dtype") : NULL;
    if (make && dtype == VJP_BF16) {
        PyObject *ml_dtypes = PyImport_ImportModule("ml_dtypes");
        scalar = ml_dtypes ? PyObject_GetAttrString(ml_dtypes, "bfloat16") : NULL;
        Py_XDECREF(ml_dtypes);
    } else if (make)
        scalar = PyUnicode_FromString(dtypes[dtype].numpy);
    numpy_dtypes[dtype] = scalar ? PyObject_CallFunctionObjArgs(make, scalar, NULL) : NULL;
    Py_XDECREF(scalar);
    Py_XDECREF(make);
    Py_XDECREF(numpy);
    return numpy_dtypes[dtype];
}

static PyObject *numpy_new(const vjp_tensor *described) {
    if (!numpy_empty) {
        PyObject *numpy = PyImport_ImportModule("numpy");
        numpy_empty = numpy ? PyObject_GetAttrString(numpy, "empty") : NULL;
        Py_XDECREF(numpy);
        if (!numpy_empty) return NULL;
    }
    PyObject *dtype = numpy_dtype(described->dtype);
    PyObject *shape = dtype ? PyTuple_New(described->ndim) : NULL;
    for (int i = 0; shape && i < described->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(described->shape[i]);
        if (!size || PyTuple_SetItem(shape, i, size)) Py_CLEAR(shape);
    }
    PyObject *made = shape ? PyObject_CallFunctionObjArgs(numpy_empty, shape, dtype, NULL) : NULL;
    Py_XDECREF(shape);
    return made;
}

static void set_exchange_error(void *context, const char *kind, const char *message) {
    (void)context, (void)kind;
    PyErr_SetString(PyExc_RuntimeError, message);
}

/* Whether an array that has a buffer is of a library with arrays of its own, such as jax: not NumPy's, with __dlpack__.
 */
static bool has_own_arrays(PyObject *object) {
    static PyTypeObject *last;
    static bool answer;
    PyTypeObject *type = Py_TYPE(object);
    if (type == last) return answer;
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *ndarray = numpy ? PyObject_GetAttrString(numpy, "ndarray") : NULL;
    PyObject *method = PyObject_GetAttr((PyObject *)type, text_dlpack);
    answer = ndarray && method && PyObject_IsInstance(object, ndarray) == 0;
    PyErr_Clear();
    Py_XDECREF(method);
    Py_XDECREF(ndarray);
    Py_XDECREF(numpy);
    Py_XDECREF((PyObject *)last);
    Py_INCREF((PyObject *)type);
    last = type;
    return answer;
}

bool array_needs_host(const array *a, const char *function, const char *name) {
    if (a->gpu < 0) return true;
    PyErr_Format(PyExc_ValueError, "%s: %s is in the memory of cuda:%d; it must be in host memory", function, name,
                 a->gpu);
    return false;
}

bool array_create(const array *like, const vjp_tensor *described, vjp_device *device, array *a) {
    bool own = like->kind == ARRAY_BUFFER && like->object && has_own_arrays(like->object);
    a->kind = own ? ARRAY_CAPSULE : like->kind;
    a->has_buffer = false;
    a->gpu = like->gpu;
    a->stream = NULL;
    a->exchange = like->exchange;
    a->managed = NULL;
    a->object = a->owned = a->packed = NULL;
    a->copy = NULL;
    a->tensor = *described;
    if (a->kind == ARRAY_EXCHANGE) {
        dl_tensor prototype = {.device = {a->gpu < 0 ? DL_CPU : DL_CUDA, a->gpu < 0 ? 0 : a->gpu},
                               .ndim = described->ndim,
                               .dtype = memory_dl_type((vjp_dtype)described->dtype),
                               .shape = a->tensor.shape};
        if (like->exchange->allocate(&prototype, &a->managed, NULL, set_exchange_error)) {
            if (!PyErr_Occurred()) PyErr_NoMemory();
            a->managed = NULL;
            return false;
        }
        a->tensor.data = (char *)a->managed->tensor.data + a->managed->tensor.byte_offset;
        return true;
    }
    if (a->kind == ARRAY_CAPSULE) {
        a->owned = memory_create(described, a->gpu, device, &a->tensor.data);
        return a->owned != NULL;
    }
    a->owned = numpy_new(described);
    if (!a->owned) return false;
    int flags = PyBUF_STRIDES | PyBUF_WRITABLE;
    a->has_buffer = described->dtype == VJP_BF16 ? get_bfloat16(a->owned, flags, &a->buffer)
                                                 : PyObject_GetBuffer(a->owned, &a->buffer, flags) == 0;
    if (!a->has_buffer) return false;
    a->tensor.data = a->buffer.buf;
    return true;
}

PyObject *array_namespace(PyObject *object) {
    PyObject *namespace = PyObject_CallMethod(object, "__array_namespace__", NULL);
    if (!namespace) { /* torch: the package that the type is from */
        PyErr_Clear();
        PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
        const char *name = module && PyUnicode_Check(module) ? PyUnicode_AsUTF8AndSize(module, NULL) : NULL;
        char package[128];
        snprintf(package, sizeof package, "%.*s", name ? (int)strcspn(name, ".") : 0, name ? name : "");
        namespace = name ? PyImport_ImportModule(package) : NULL;
        Py_XDECREF(module);
    }
    return namespace;
}

/* The function that makes an array of the library of `object` from one that has __dlpack__. */
static PyObject *find_from_dlpack(PyObject *object) {
    PyObject *namespace = array_namespace(object);
    PyObject *found = namespace ? PyObject_GetAttr(namespace, text_from_dlpack) : NULL;
    Py_XDECREF(namespace);
    if (!found)
        PyErr_Format(PyExc_TypeError, "no from_dlpack() was found for %R: give out=, or NumPy arrays",
                     (PyObject *)Py_TYPE(object));
    return found;
}

PyObject *array_take(const array *like, array *a) {
    if (a->kind == ARRAY_EXCHANGE) {
        void *object = NULL;
        dl_managed_versioned *managed = a->managed;
        a->managed = NULL;
        return like->exchange->to_object(managed, &object) == 0 ? object : NULL;
    }
    if (a->kind != ARRAY_CAPSULE) return Py_NewRef(a->owned);
    PyObject *from_dlpack = find_from_dlpack(like->object);
    PyObject *made = from_dlpack ? PyObject_CallFunctionObjArgs(from_dlpack, a->owned, NULL) : NULL;
    Py_XDECREF(from_dlpack);
    return made;
}
