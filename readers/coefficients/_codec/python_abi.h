/* Python's stable ABI of 3.11: by Python's own headers, or where they are not installed (Debian has them in a package of
   their own) by the few declarations that the codec needs, after docs.python.org/3.11/c-api/stable.html. */
#pragma once
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#if __has_include(<Python.h>) && !defined(WITHOUT_PYTHON_H)
#include <Python.h>
#else
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

typedef ssize_t Py_ssize_t;
typedef struct {
    Py_ssize_t references;
    void *type;
} PyObject;
typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef struct {
    const char *name;
    PyCFunction function;
    int flags;
    const char *docs;
} PyMethodDef;
typedef struct PyModuleDef {
    struct {
        PyObject head;
        PyObject *(*init)(void);
        Py_ssize_t index;
        PyObject *copy;
    } base;
    const char *name, *docs;
    Py_ssize_t size;
    PyMethodDef *methods;
    void *slots, *traverse, *clear, *release;
} PyModuleDef;
typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len, itemsize;
    int readonly, ndim;
    char *format;
    Py_ssize_t *shape, *strides, *suboffsets;
    void *internal;
} Py_buffer;

#define PyModuleDef_HEAD_INIT {{1, NULL}, NULL, 0, NULL}
#define METH_VARARGS 1
#define PyBUF_SIMPLE 0
#define PyBUF_WRITABLE 1
#define PyBUF_STRIDES 0x18
#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *
#define PyModule_Create(definition) PyModule_Create2(definition, 3)
#define Py_None (&_Py_NoneStruct)
#define Py_XDECREF(object) Py_DecRef(object)
#define Py_BEGIN_ALLOW_THREADS { void *thread_ = PyEval_SaveThread();
#define Py_END_ALLOW_THREADS PyEval_RestoreThread(thread_); }

extern PyObject _Py_NoneStruct, *PyExc_ValueError;
extern int PyArg_ParseTuple(PyObject *, const char *, ...), PyArg_Parse(PyObject *, const char *, ...), PyObject_GetBuffer(PyObject *, Py_buffer *, int);
extern void PyBuffer_Release(Py_buffer *), Py_DecRef(PyObject *), *PyEval_SaveThread(void), PyEval_RestoreThread(void *);
extern PyObject *PyBytes_FromStringAndSize(const char *, Py_ssize_t), *PyByteArray_FromStringAndSize(const char *, Py_ssize_t);
extern char *PyBytes_AsString(PyObject *), *PyByteArray_AsString(PyObject *);
extern int PyByteArray_Resize(PyObject *, Py_ssize_t);
extern PyObject *PyErr_Format(PyObject *, const char *, ...), *PyErr_NoMemory(void), *Py_NewRef(PyObject *);
extern PyObject *PyLong_FromLong(long), *PyLong_FromLongLong(long long), *PyUnicode_FromString(const char *);
extern PyObject *Py_BuildValue(const char *, ...);
extern int PyUnicode_FSConverter(PyObject *, void *);
extern PyObject *PyModule_Create2(PyModuleDef *, int), *PySequence_GetItem(PyObject *, Py_ssize_t);
extern int PyModule_AddIntConstant(PyObject *, const char *, long), PyModule_AddStringConstant(PyObject *, const char *, const char *);
extern Py_ssize_t PySequence_Size(PyObject *);
#endif
