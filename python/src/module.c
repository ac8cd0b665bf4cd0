/* SPDX-License-Identifier: MIT */
/* What the module vjp._core contains. */
#include "core.h"

static PyMethodDef methods[] = {
    {"devices", device_list, METH_NOARGS, "[(kind, index, one line)] of the devices that this machine has."},
    {"set_threads", device_set_threads, METH_O, "How many threads the CPU uses from now on; 0: the default."},
    {"table", describe_table, METH_NOARGS,
     "{function: (op, pass, inputs, outputs, attributes)}: the op table. An input is (name, kind, optional), an output "
     "(name, kind), an attribute (name, type, default, choices or None)."},
    {"call_many", (PyCFunction)(void (*)(void))call_many, METH_FASTCALL,
     "Several calls of a function, by its name and a list of dicts of arguments, with the same attributes; returns a "
     "list of their results. They are one launch where the device can do that."},
    {"synchronize", device_synchronize, METH_O, "Waits for the devices of that name and raises what they found."},
    {"summary", device_summary, METH_O, "One line on what a device is."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                        .m_name = "vjp._core",
                                        .m_doc = "The C part of the package vjp.",
                                        .m_size = -1,
                                        .m_methods = methods};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && error_init(module) && array_init() && memory_init() && call_init(module) &&
        PyModule_AddFunctions(module, graph_methods) == 0 && PyModule_AddFunctions(module, program_methods) == 0 &&
        PyModule_AddFunctions(module, torch_methods) == 0 && PyModule_AddFunctions(module, jax_methods) == 0 &&
        PyModule_AddStringConstant(module, "__version__", vjp_version()) == 0)
        return module;
    Py_XDECREF(module);
    return NULL;
}
