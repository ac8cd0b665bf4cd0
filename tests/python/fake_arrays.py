# SPDX-License-Identifier: MIT
"""Arrays that say they are in a GPU's memory, which is the host's here: one kind exports DLPack's table of C functions, as
torch's tensors do, the other capsules, as cupy's and jax's. For test_gpu_arrays.py."""
import ctypes as c

import numpy as np

CUDA = 2
TABLE, CAPSULE = b"dlpack_exchange_api", b"dltensor_versioned"  # a capsule does not copy its name


class Device(c.Structure):
    _fields_ = [("type", c.c_int32), ("id", c.c_int32)]


class Type(c.Structure):
    _fields_ = [("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16)]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device", Device), ("ndim", c.c_int32), ("dtype", Type), ("shape", c.POINTER(c.c_int64)),
                ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]


class Managed(c.Structure):
    _fields_ = [("major", c.c_uint32), ("minor", c.c_uint32), ("context", c.c_void_p), ("deleter", c.c_void_p), ("flags", c.c_uint64),
                ("tensor", Tensor)]


ALLOCATE = c.PYFUNCTYPE(c.c_int, c.POINTER(Tensor), c.POINTER(c.c_void_p), c.c_void_p, c.c_void_p)
TO_OBJECT = c.PYFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(c.c_void_p))
BORROW = c.PYFUNCTYPE(c.c_int, c.py_object, c.POINTER(Tensor))
STREAM = c.PYFUNCTYPE(c.c_int, c.c_int32, c.c_int32, c.POINTER(c.c_void_p))
DELETER = c.PYFUNCTYPE(None, c.c_void_p)


class Exchange(c.Structure):
    _fields_ = [("major", c.c_uint32), ("minor", c.c_uint32), ("previous", c.c_void_p), ("allocate", ALLOCATE), ("from_object", c.c_void_p),
                ("to_object", TO_OBJECT), ("borrow", BORROW), ("current_stream", STREAM)]


def fill(view, array, gpu):
    """Describes a NumPy array of f32 in a tensor; returns what must stay alive."""
    shape = (c.c_int64 * max(array.ndim, 1))(*array.shape)
    strides = (c.c_int64 * max(array.ndim, 1))(*(s // array.itemsize for s in array.strides))
    view.data, view.device, view.ndim, view.dtype = array.ctypes.data, Device(CUDA, gpu), array.ndim, Type(2, 32, 1)
    view.shape, view.strides, view.byte_offset = shape, strides, 0
    return shape, strides


class Fake:
    """What both kinds share: a NumPy array that is in the memory of a GPU, as far as vjp knows."""
    packed_copies = 0

    def __init__(self, array, gpu=0):
        self.array, self.gpu = np.asarray(array, dtype=np.float32), gpu

    def contiguous(self):
        type(self).packed_copies += 1
        return type(self)(np.ascontiguousarray(self.array), self.gpu)

    def __setitem__(self, key, value):
        self.array[key] = value.array


class WithTable(Fake):
    stream = 0  # the current one
    alive = {}  # what was allocated and not freed, by the address of its tensor


def allocate(prototype, made, context, set_error):
    p = prototype.contents
    # The allocator of a GPU aligns; so does this, for the workspace.
    shape = tuple(p.shape[i] for i in range(p.ndim))
    room = np.zeros(int(np.prod(shape)) + 16, np.float32)
    first = -(room.ctypes.data % 64) % 64 // 4
    array = room[first:first + int(np.prod(shape))].reshape(shape)
    assert p.device.type == CUDA
    managed = Managed(1, 0, None, c.cast(delete, c.c_void_p).value, 0)
    keep = fill(managed.tensor, array, p.device.id)
    WithTable.alive[c.addressof(managed)] = (managed, array, keep)
    made[0] = c.addressof(managed)
    return 0


@DELETER
def delete(managed):
    del WithTable.alive[managed]


def to_object(managed, made):
    held, array, _ = WithTable.alive.pop(managed)
    result = WithTable(array, held.tensor.device.id)
    c.pythonapi.Py_IncRef(c.py_object(result))
    made[0] = id(result)
    return 0


def borrow(found, view):
    found.views = fill(view.contents, found.array, found.gpu)
    return 0


def current_stream(kind, number, stream):
    assert kind == CUDA
    stream[0] = WithTable.stream
    return 0


c.pythonapi.PyCapsule_New.restype = c.py_object
c.pythonapi.PyCapsule_New.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p]
table = Exchange(1, 3, None, ALLOCATE(allocate), None, TO_OBJECT(to_object), BORROW(borrow), STREAM(current_stream))
WithTable.__dlpack_c_exchange_api__ = c.pythonapi.PyCapsule_New(c.addressof(table), TABLE, None)


class WithCapsule(Fake):
    asked = []  # the streams that capsules were asked for

    def __dlpack_device__(self):
        return CUDA, self.gpu

    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append(stream)
        managed = Managed(1, 0, None, None, 0)
        self.views = managed, fill(managed.tensor, self.array, self.gpu)
        return c.pythonapi.PyCapsule_New(c.addressof(managed), CAPSULE, None)

    def __array_namespace__(self):
        return Library


class Library:
    """The module of WithCapsule."""

    @staticmethod
    def from_dlpack(memory):
        kind, gpu = memory.__dlpack_device__()
        assert kind == CUDA
        capsule = memory.__dlpack__(stream=1, max_version=(1, 0))
        pointer = c.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = c.c_void_p, [c.py_object, c.c_char_p]
        t = Managed.from_address(pointer(capsule, CAPSULE)).tensor
        assert t.device.type == CUDA and t.device.id == gpu
        shape = tuple(t.shape[i] for i in range(t.ndim))
        values = np.ctypeslib.as_array((c.c_float * int(np.prod(shape))).from_address(t.data)).reshape(shape).copy()
        return WithCapsule(values, gpu)
