/* Affine transforms of images: nearest pixel or bilinear, black outside.
 *
 * The arithmetic equals torch's grid_sample (align_corners=False) in float32, rounded to bytes: bit-exact if both use
 * fused multiply-add, as CPUs with FMA do. Otherwise one value in 100,000 differs by 1. Coordinates are in halves of a side
 * from the centre; the map takes pixels of a result of rows x columns, of which a part is computed, to the image. */
#include "python_abi.h"
#include "codec.h"
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { CHUNK = 128, MOST_GRID = 1 << 20 };
#define ROUNDER 12582912.0f /* 1.5 * 2^23: floats of this size are whole numbers */
#define LARGEST 1e6f
typedef float f32x4 __attribute__((vector_size(16)));
typedef u8 u8x4 __attribute__((vector_size(4)));

/* source: [height, width, 3], steps of either sign; last: the last place from which four bytes can be read. by: the map
 * from (x, y, 1) of the result to x, then to y. */
typedef struct {
    const u8 *source, *last;
    i64 height, width, row_step, column_step, rows, columns, top, left, out_height, out_width;
    float by[6];
    int is_nearest;
} Affine;

/* Clamps coordinates outside of the image, so that they stay outside and fit into an int. */
static inline float bounded(float value, float side) { return value > -2.0f ? (value < side ? value : side) : -2.0f; }
static inline i32 whole(float value) {
    i32 near = (i32)value;
    return near - ((float)near > value);
}

#define JOINED(a, b) a##_##b
#if defined(__x86_64__)
#define NAME(what) JOINED(what, fma)
#define FUSED(a, b, c) ((f32x4)_mm_fmadd_ps((__m128)(a), _mm_set1_ps(b), (__m128)(c)))
#define FUSED_1(a, b, c) __builtin_fmaf(a, b, c)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include "affine.inc"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef NAME
#undef FUSED
#undef FUSED_1
#endif

#define NAME(what) JOINED(what, base)
#if defined(__aarch64__)
#define FUSED(a, b, c) ((f32x4)vfmaq_n_f32((float32x4_t)(c), (float32x4_t)(a), b))
#define FUSED_1(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#define FUSED_1(a, b, c) ((a) * (b) + (c))
#endif
#include "affine.inc"

static void (*move)(const Affine *, const float *across, u8 *out, i64 out_step) = move_base;

/* Choose the function that belongs to a variant of the codec. */
void choose_affine(const char *variant) {
    move = move_base;
#if defined(__x86_64__)
    if (!strncmp(variant, "avx2", 4)) move = move_fma; /* CPUs with this variant also have FMA */
#else
    (void)variant;
#endif
}

static int describe(Affine *m, const Py_buffer *source, const Py_buffer *out) {
    if (source->ndim != 3 || out->ndim != 3 || source->itemsize != 1 || out->itemsize != 1 || source->shape[2] != 3 ||
        out->shape[2] != 3)
        return 0;
    m->height = source->shape[0], m->width = source->shape[1];
    m->row_step = source->strides[0], m->column_step = source->strides[1];
    m->out_height = out->shape[0], m->out_width = out->shape[1];
    i64 row = m->row_step < 0 ? -m->row_step : m->row_step;
    if (m->height < 1 || m->width < 1 || m->out_height < 1 || m->out_width < 1 || m->height > MOST_SIDE ||
        m->width > MOST_SIDE || m->rows < 1 || m->columns < 1 || m->rows > MOST_GRID || m->columns > MOST_GRID ||
        m->top < 0 || m->left < 0 || m->out_height > m->rows - m->top || m->out_width > m->columns - m->left)
        return 0;
    if (source->strides[2] != 1 || (m->width > 1 && m->column_step != 3 && m->column_step != -3) ||
        (m->height > 1 && row < 3 * m->width) || out->strides[2] != 1 || (m->out_width > 1 && out->strides[1] != 3))
        return 0;
    for (int k = 0; k < 6; k++)
        if (!(m->by[k] >= -LARGEST && m->by[k] <= LARGEST)) return 0;
    m->source = source->buf;
    m->last = m->source - 1;
    if (m->row_step > 0) m->last += (m->height - 1) * m->row_step;
    if (m->column_step > 0) m->last += (m->width - 1) * m->column_step;
    return 1;
}

/* affine(source, out, by, grid, is_nearest): source, out: uint8 [height, width, 3], with contiguous pixels;
 * grid: (rows, columns, top, left): the size of the whole result, and the corner of `out` in it. */
PyObject *py_affine(PyObject *self, PyObject *args) {
    Py_buffer source, out;
    PyObject *objects[2];
    Affine m;
    float *by = m.by;
    int done = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO(ffffff)(LLLL)p", &objects[0], &objects[1], by, by + 1, by + 2, by + 3, by + 4, by + 5,
                          &m.rows, &m.columns, &m.top, &m.left, &m.is_nearest) ||
        PyObject_GetBuffer(objects[0], &source, PyBUF_STRIDES))
        return NULL;
    if (!PyObject_GetBuffer(objects[1], &out, PyBUF_STRIDES | PyBUF_WRITABLE)) {
        float *across = NULL;
        if (!describe(&m, &source, &out)) PyErr_Format(PyExc_ValueError, "native: affine");
        else if (!(across = malloc((size_t)m.out_width * sizeof(float)))) PyErr_NoMemory();
        else {
            done = 1;
            Py_BEGIN_ALLOW_THREADS;
            for (i64 k = 0; k < m.out_width; k++)
                across[k] = (float)(2 * (m.left + k) + 1 - m.columns) / (float)m.columns;
            move(&m, across, out.buf, out.strides[0]);
            Py_END_ALLOW_THREADS;
        }
        free(across);
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&source);
    if (!done) return NULL;
    return Py_NewRef(Py_None);
}
