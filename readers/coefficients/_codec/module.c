/* readers.coefficients.native: the functions of Python, in the limited API of 3.11.
 *
 * Each function checks that its arguments are consistent, so that no Python caller can make it leave its buffers, and
 * raises ValueError otherwise; values in images are checked when they are read. The interpreter's lock is released.
 *
 *   shape   height, width, components, across, down of the image as stored
 *   region  size, is_fancy, top, left, height, width: a box at size / 8 of its sides
 *   resize  rows, columns, top, left, flips: the size of the whole resized box, and the corner of the computed part */
#include "python_abi.h"
#include "codec.h"
#include <stdlib.h>
#include <string.h>

static const Codec *codec;
PyObject *py_affine(PyObject *self, PyObject *args); /* affine.c */
PyObject *py_read_file(PyObject *self, PyObject *args), *py_examine(PyObject *self, PyObject *args); /* files.c */
PyObject *py_read_jpeg_facts(PyObject *self, PyObject *args);
void choose_affine(const char *variant);

static int refuse(const char *what) {
    PyErr_Format(PyExc_ValueError, "native: %s", what);
    return 1;
}

static int check_shape(const Shape *s) {
    int is_sampled = (s->across == 1 || s->across == 2) && (s->down == 1 || s->down == 2);
    if (s->height < 1 || s->width < 1 || s->height > MOST_SIDE || s->width > MOST_SIDE || !is_sampled ||
        !(s->components == 3 || (s->components == 1 && s->across == 1 && s->down == 1)))
        return refuse("shape");
    return 0;
}
static int check_region(const Shape *s, const Region *r) {
    if (r->size != 8 && r->size != 4 && r->size != 2 && r->size != 1) return refuse("size");
    i64 height = (s->height * r->size + 7) / 8, width = (s->width * r->size + 7) / 8;
    if (r->top < 0 || r->left < 0 || r->height < 1 || r->width < 1 || r->height > height - r->top ||
        r->width > width - r->left)
        return refuse("region");
    return 0;
}

/* The output of a function: [height, width, 3] of uint8 or float32, or several of them. */
typedef struct {
    Py_buffer view;
    Target target;
    i64 images, image_stride, height, width, pixel, colour; /* pixel, colour: bytes to the next one */
} Output;

static int open_output(PyObject *object, Output *out, int axes) {
    if (PyObject_GetBuffer(object, &out->view, PyBUF_STRIDES | PyBUF_WRITABLE)) return 1;
    const Py_buffer *v = &out->view;
    if (v->ndim != axes || v->shape[axes - 1] != 3 || (v->itemsize != 1 && v->itemsize != 4)) {
        PyBuffer_Release(&out->view);
        return refuse("out: [height, width, 3]");
    }
    const Py_ssize_t *sides = v->shape + axes - 3, *steps = v->strides + axes - 3;
    out->target = (Target){v->buf, steps[0], steps[2]};
    out->images = axes > 3 ? v->shape[0] : 1, out->image_stride = axes > 3 ? v->strides[0] : 0;
    out->height = sides[0], out->width = sides[1], out->pixel = steps[1], out->colour = steps[2];
    return 0;
}
/* Strides of dimensions of length 1 are arbitrary. */
static int has_step(const Output *out, i64 bytes) { return out->width == 1 || out->pixel == bytes; }
static int is_interleaved(const Output *out) {
    return out->colour == out->view.itemsize && has_step(out, 3 * out->view.itemsize);
}

static int check_pixels(const Region *r, const Output *out) {
    if (out->view.itemsize != 1 || !is_interleaved(out) || out->height != r->height || out->width != r->width)
        return refuse("out: uint8 of the size of the region");
    return 0;
}
/* scaling: float32 [2, 3], a factor and a summand for each colour, or None for uint8. */
static int read_resize(const Region *r, const Output *out, PyObject *scaling, int is_fused, Resize *to) {
    const Py_buffer *v = &out->view;
    to->height = out->height, to->width = out->width;
    if (to->rows < 1 || to->columns < 1 || to->rows > MOST_RESIZED || to->columns > MOST_RESIZED ||
        r->height > MOST_SHRINK * to->rows || r->width > MOST_SHRINK * to->columns || to->top < 0 || to->left < 0 ||
        to->height < 1 || to->width < 1 || to->height > to->rows - to->top || to->width > to->columns - to->left)
        return refuse("resize");
    if (scaling == Py_None) {
        to->kind = is_interleaved(out) ? BYTES : BYTE_PLANES;
        return v->itemsize == 1 && (is_interleaved(out) || has_step(out, 1)) ? 0 : refuse("out: uint8, a line without gaps");
    }
    Py_buffer factors;
    if (PyObject_GetBuffer(scaling, &factors, PyBUF_SIMPLE)) return 1;
    int fits = factors.len == 6 * sizeof(float) && v->itemsize == 4 && (is_interleaved(out) || has_step(out, 4));
    if (fits) {
        const float *both = factors.buf;
        to->kind = !is_interleaved(out) ? PLANES : is_fused ? FUSED : FLOATS;
        for (int k = 0; k < 48; k++) {
            int n = k % 24;
            to->factors[k] = both[3 * (k / 24) + (to->kind == PLANES ? n / 8 : n % 3)];
        }
    }
    PyBuffer_Release(&factors);
    return fits ? 0 : refuse("out: float32, a line without gaps, and scaling float32 [2, 3]");
}

#define SHAPE(s) &(s).height, &(s).width, &(s).components, &(s).across, &(s).down
#define REGION(r) &(r).size, &(r).is_fancy, &(r).top, &(r).left, &(r).height, &(r).width
#define WITHOUT_LOCK(expression)                                                                                       \
    Py_BEGIN_ALLOW_THREADS expression;                                                                                 \
    Py_END_ALLOW_THREADS

static PyObject *result_of(int status) { return status == NO_MEMORY ? PyErr_NoMemory() : PyLong_FromLong(status); }

/* decode(data, shape, region, out): data: coefficients with a header that fits `shape`. Returns 0 or a reason. */
static PyObject *py_decode(PyObject *self, PyObject *args) {
    Py_buffer data;
    PyObject *object;
    Shape s;
    Region r;
    Output out;
    int status = -1;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*(LLLLL)(LLLLLL)O", &data, SHAPE(s), REGION(r), &object)) return NULL;
    if (!check_shape(&s) && !check_region(&s, &r) && !open_output(object, &out, 3)) {
        if (data.len < rows_at(&s) + TAIL_BYTES) refuse("data");
        else if (!check_pixels(&r, &out)) { WITHOUT_LOCK(status = codec->decode_box(data.buf, data.len, &s, &r, out.target)) }
        PyBuffer_Release(&out.view);
    }
    PyBuffer_Release(&data);
    return status < 0 ? NULL : result_of(status);
}

/* Decodes a box of a JPEG. shape: only height and width are compared with its frame. to: null for no resize. */
static int run_jpeg(const Py_buffer *jpeg, const Shape *expected, const Region *r, const Resize *to, Target target) {
    Shape shape;
    Strips strips;
    int status = LEFT_TO_LIBJPEG;
    Codes *codes = malloc(2 * MOST_COMPONENTS * sizeof(Codes));
    u8 *memory = NULL;
    i64 start = codes ? read_head(jpeg->buf, jpeg->len, &shape, codes, &strips) : -1, bytes = jpeg->len - start;
    if (start >= 0 && shape.height == expected->height && shape.width == expected->width &&
        (memory = malloc((size_t)(bytes + SPARE_BYTES)))) {
        const u8 *source = (const u8 *)jpeg->buf + start;
        i64 count = copy_clean(source, source + bytes, memory);
        if (count >= 0) {
            memset(memory + count, 0, SPARE_BYTES);
            strips.bytes = memory, strips.stop = memory + count;
            status = to ? codec->resize_strips(&strips, &shape, r, to, target)
                        : codec->decode_strips(&strips, &shape, r, target);
        }
    }
    free(memory), free(codes);
    return status;
}

/* decode_jpeg(jpeg, shape, region, out): a JPEG with the stored height and width of `shape`. Returns 0, or a reason to leave
 * it to libjpeg. */
static PyObject *py_decode_jpeg(PyObject *self, PyObject *args) {
    Py_buffer jpeg;
    PyObject *object;
    Shape s = {.components = 1, .across = 1, .down = 1};
    Region r;
    Output out;
    int status = -1;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*(LL)(LLLLLL)O", &jpeg, &s.height, &s.width, REGION(r), &object)) return NULL;
    if (!check_shape(&s) && !check_region(&s, &r) && !open_output(object, &out, 3)) {
        if (!check_pixels(&r, &out)) { WITHOUT_LOCK(status = run_jpeg(&jpeg, &s, &r, NULL, out.target)) }
        PyBuffer_Release(&out.view);
    }
    PyBuffer_Release(&jpeg);
    return status < 0 ? NULL : result_of(status);
}

/* A box of an image, resized into a row of a batch. */
typedef struct {
    Py_buffer data;
    Shape shape;
    Region region;
    Resize to;
    Target target;
    int is_jpeg, status;
} Row;
enum { ROW_NUMBERS = 18 };

static int read_row_of(PyObject *list, i64 place, const i64 *n, const Output *out, PyObject *scaling, int is_fused, Row *row) {
    PyObject *data = PySequence_GetItem(list, place);
    int failed = !data || PyObject_GetBuffer(data, &row->data, PyBUF_SIMPLE);
    Py_XDECREF(data);
    if (failed) return 1;
    i64 images = out->images, step = out->image_stride;
    row->is_jpeg = n[1] != 0;
    row->shape = (Shape){n[2], n[3], n[4], n[5], n[6]};
    row->region = (Region){n[7], n[8] != 0, n[9], n[10], n[11], n[12]};
    row->to = (Resize){.rows = n[13], .columns = n[14], .top = n[15], .left = n[16], .flips = n[17] & 3};
    row->target = out->target;
    if (n[0] < 0 || n[0] >= images) return refuse("row");
    row->target.at += n[0] * step;
    if (check_shape(&row->shape) || check_region(&row->shape, &row->region)) return 1;
    if (!row->is_jpeg && row->data.len < rows_at(&row->shape) + TAIL_BYTES) return refuse("data");
    return read_resize(&row->region, out, scaling, is_fused, &row->to);
}

/* resize(images, numbers, out, scaling, is_fused): boxes of images, resized, into rows of a batch [n, height, width, 3].
 * numbers: int64 [images, 18], the row, is_jpeg, shape, region and resize of each; for a JPEG only height and width of
 * the shape count. Returns a byte for each: 0, or a reason. */
static PyObject *py_resize(PyObject *self, PyObject *args) {
    PyObject *list, *object, *scaling, *made = NULL;
    Py_buffer numbers;
    Output out;
    int is_fused;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy*OOp", &list, &numbers, &object, &scaling, &is_fused)) return NULL;
    Py_ssize_t count = PySequence_Size(list), ready = 0;
    if (count < 0 || numbers.len / (ROW_NUMBERS * 8) != count || numbers.len % (ROW_NUMBERS * 8)) {
        if (count >= 0) refuse("numbers");
    } else if (!open_output(object, &out, 4)) {
        Row *rows = calloc((size_t)count + 1, sizeof(Row));
        if (!rows) PyErr_NoMemory();
        while (rows && ready < count &&
               !read_row_of(list, ready, (const i64 *)numbers.buf + ROW_NUMBERS * ready, &out, scaling, is_fused, &rows[ready]))
            ready++;
        if (rows && ready == count) {
            int lacks_memory = 0;
            WITHOUT_LOCK(for (Py_ssize_t k = 0; k < count; k++) {
                Row *r = &rows[k];
                r->status = r->is_jpeg ? run_jpeg(&r->data, &r->shape, &r->region, &r->to, r->target)
                                       : codec->resize_box(r->data.buf, r->data.len, &r->shape, &r->region, &r->to, r->target);
                lacks_memory |= r->status == NO_MEMORY;
            })
            made = lacks_memory ? PyErr_NoMemory() : PyBytes_FromStringAndSize(NULL, count);
            for (Py_ssize_t k = 0; made && k < count; k++) PyBytes_AsString(made)[k] = (char)rows[k].status;
        }
        for (Py_ssize_t k = 0; rows && k <= ready; k++) PyBuffer_Release(&rows[k].data); /* nothing for zeroed buffers */
        free(rows);
        PyBuffer_Release(&out.view);
    }
    PyBuffer_Release(&numbers);
    return made;
}

static int check_scans(const Encoding *e, i64 bytes, i64 count) {
    int is_progressive = e->is_progressive;
    for (i64 k = 0; k < e->scan_count; k++) {
        const Scan *s = &e->scans[k];
        if (s->start < 0 || s->stop < s->start || s->stop > bytes || s->restart < 0 || s->first < 0 || s->last < s->first ||
            s->last > 63 || s->high < 0 || s->low < 0 || s->low > 13 || s->count < 1 || s->count > e->shape.components ||
            (is_progressive && s->first && s->count > 1) || (is_progressive && !s->first && s->last))
            return refuse("scans");
        for (i64 c = 0; c < s->count; c++) {
            i64 component = s->of[c].component, dc = s->of[c].dc, ac = s->of[c].ac;
            int needs_dc = !is_progressive || (!s->first && !s->high), needs_ac = !is_progressive || s->first;
            if (component < 0 || component >= e->shape.components || (c && component <= s->of[c - 1].component) ||
                dc >= count || ac >= count || (needs_dc && dc < 0) || (needs_ac && ac < 0))
                return refuse("scans");
        }
    }
    /* blocks are packed while they are read if a single sequential scan has all of them */
    if (!is_progressive && e->scan_count == 1 && e->scans[0].count != e->shape.components) return refuse("scans");
    return 0;
}

/* encode(jpeg, shape, is_progressive, scans, codes, limits, room): scans: int64 [scans, 17], as `Scan`; limits: int16
 * [components, 65]. Returns coefficients of at most `room` bytes as a bytearray, with room for header and multipliers, or a
 * reason. */
static PyObject *py_encode(PyObject *self, PyObject *args) {
    Py_buffer jpeg, scans, codes, limits;
    Encoding e;
    PyObject *made = NULL;
    i64 room;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*(LLLLL)py*y*y*L", &jpeg, SHAPE(e.shape), &e.is_progressive, &scans, &codes, &limits, &room))
        return NULL;
    e.jpeg = jpeg.buf, e.scans = scans.buf, e.scan_count = scans.len / (i64)sizeof(Scan);
    e.codes = codes.buf, e.limits = limits.buf;
    int fits = !check_shape(&e.shape) && !check_scans(&e, jpeg.len, codes.len / (i64)sizeof(Codes));
    if (fits && (limits.len != e.shape.components * 2 * LIMITS || e.scan_count < 1 || room > UINT32_MAX ||
                 room < rows_at(&e.shape) + TAIL_BYTES))
        fits = !refuse("limits or room");
    if (fits) made = PyByteArray_FromStringAndSize(NULL, room + 12 * blocks_across(&e.shape, 0) + 16);
    if (made) {
        i64 total;
        u8 *out = (u8 *)PyByteArray_AsString(made);
        WITHOUT_LOCK(total = codec->encode(&e, out, room))
        if (total <= 0) {
            Py_DecRef(made);
            made = result_of((int)-total);
        } else if (PyByteArray_Resize(made, total)) {
            Py_DecRef(made);
            made = NULL;
        }
    }
    PyBuffer_Release(&jpeg), PyBuffer_Release(&scans), PyBuffer_Release(&codes), PyBuffer_Release(&limits);
    return made;
}

/* build_codes(counts, symbols, is_raw): a table, as bytes. counts: 16 bytes; symbols: sum(counts) bytes, at most 256. */
static PyObject *py_build_codes(PyObject *self, PyObject *args) {
    Py_buffer counts, symbols;
    PyObject *made = NULL;
    int is_raw, sum = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*p", &counts, &symbols, &is_raw)) return NULL;
    for (Py_ssize_t k = 0; k < counts.len; k++) sum += ((const u8 *)counts.buf)[k];
    if (counts.len != 16 || symbols.len != sum || sum > 256) refuse("counts");
    else made = PyBytes_FromStringAndSize(NULL, sizeof(Codes));
    Codes *codes = made ? malloc(sizeof(Codes)) : NULL;
    if (codes) {
        memset(codes, 0, sizeof(Codes));
        build_codes(counts.buf, symbols.buf, sum, is_raw, codes);
        memcpy(PyBytes_AsString(made), codes, sizeof(Codes));
    } else if (made) {
        Py_DecRef(made);
        made = PyErr_NoMemory();
    }
    free(codes);
    PyBuffer_Release(&counts), PyBuffer_Release(&symbols);
    return made;
}

/* find_marker(data, at): the first marker other than a restart from byte `at` on; len(data) for none. */
static PyObject *py_find_marker(PyObject *self, PyObject *args) {
    Py_buffer data;
    i64 at;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*L", &data, &at)) return NULL;
    i64 place = at < 0 ? data.len : find_marker(data.buf, at, data.len);
    PyBuffer_Release(&data);
    return PyLong_FromLongLong(place);
}

/* choose(name=""): take a variant by name, or the best for this CPU; its name. For tests and measurements. */
static PyObject *py_choose(PyObject *self, PyObject *args) {
    const char *name = "";
    (void)self;
    if (!PyArg_ParseTuple(args, "|s", &name)) return NULL;
    const Codec *one = codec_choose(name);
    if (!one) {
        PyErr_Format(PyExc_ValueError, "this CPU has no variant %s", name);
        return NULL;
    }
    codec = one;
    choose_affine(codec->name);
    return PyUnicode_FromString(codec->name);
}

#define METHOD(name) {#name, py_##name, METH_VARARGS, NULL}
static PyMethodDef methods[] = {METHOD(decode),      METHOD(decode_jpeg), METHOD(resize), METHOD(encode),
                                METHOD(build_codes), METHOD(find_marker), METHOD(choose), METHOD(affine),
                                METHOD(read_file),   METHOD(examine),     METHOD(read_jpeg_facts),
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native(void) {
    codec_start();
    codec = codec_choose("");
    choose_affine(codec->name);
    PyObject *module = PyModule_Create(&definition);
#ifdef __clang__
    const char *compiler = "Clang";
#else
    const char *compiler = "GCC";
#endif
    if (module && (PyModule_AddStringConstant(module, "COMPILER", compiler) || PyModule_AddIntConstant(module, "VERSION", 5))) {
        Py_DecRef(module);
        return NULL;
    }
    return module;
}
