/* Reading files for packing: the work per file of a tree, with the lock released during system calls.
 *
 * The functions handle only ordinary files. Python's code handles unusual and damaged ones, and reports errors. */
#define _POSIX_C_SOURCE 200809L
#ifdef __APPLE__
#define _DARWIN_C_SOURCE
#define st_mtim st_mtimespec
#define st_ctim st_ctimespec
#endif
#include "python_abi.h"
#include "codec.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { UNKNOWN = -1, NOT_REGULAR = -2 }; /* as in readers/opening/tree.py */
enum { MOST_SEGMENTS = 1 << 16, LEAST_SCAN_BYTES = 10 };
#define MOST_SCANNED_PIXELS ((i64)1 << 31)

static i64 nanoseconds(struct timespec time) { return time.tv_sec * (i64)1000000000 + time.tv_nsec; }

/* read_file(path, room, size, time): reads a file into `room`. Returns whether it has `size` bytes, fewer than `room`, and
 * was modified at `time` in ns; None for any time. */
PyObject *py_read_file(PyObject *self, PyObject *args) {
    PyObject *path = NULL, *stated;
    Py_buffer room;
    i64 size, time = 0;
    int is_read = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&w*LO", PyUnicode_FSConverter, &path, &room, &size, &stated)) return NULL;
    int is_any = stated == Py_None, failed = !is_any && !PyArg_Parse(stated, "L", &time);
    const char *name = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    int file = failed || size < 0 || size >= room.len ? -1 : open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file >= 0) {
        struct stat status;
        if (is_any || (!fstat(file, &status) && nanoseconds(status.st_mtim) == time)) {
            i64 count = 0, more;
            do more = read(file, (u8 *)room.buf + count, (size_t)(room.len - count));
            while (more > 0 && (count += more) < size);
            is_read = more >= 0 && count == size;
        }
        close(file);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&room);
    Py_DecRef(path);
    return failed ? NULL : PyLong_FromLong(is_read);
}

/* examine(folder, names): for each name in an open folder (names end with zero bytes): int64 size, UNKNOWN or NOT_REGULAR,
 * and the times of modification and change in ns. */
PyObject *py_examine(PyObject *self, PyObject *args) {
    Py_buffer names;
    int folder;
    i64 count = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "iy*", &folder, &names)) return NULL;
    const char *at = names.buf, *end = at + names.len;
    for (const char *c = at; c < end; c++) count += !*c;
    PyObject *made = NULL;
    if (names.len && end[-1]) PyErr_Format(PyExc_ValueError, "native: names");
    else made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * 3 * 8));
    if (made) {
        char *out = PyBytes_AsString(made);
        Py_BEGIN_ALLOW_THREADS
        for (; at < end; at += strlen(at) + 1, out += 3 * 8) {
            struct stat status;
            i64 facts[3] = {UNKNOWN, 0, 0};
            if (!fstatat(folder, at, &status, 0)) {
                facts[0] = S_ISREG(status.st_mode) ? status.st_size : NOT_REGULAR;
                facts[1] = nanoseconds(status.st_mtim), facts[2] = nanoseconds(status.st_ctim);
            }
            memcpy(out, facts, sizeof facts);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&names);
    return made;
}

typedef struct {
    i64 height, width, components, process, exif, exif_stop, xmp, xmp_stop;
} Facts;

static i64 number_at(const u8 *at) { return at[0] << 8 | at[1]; }
static int is_at(const u8 *data, i64 bytes, i64 at, const char *what, i64 length) {
    return length <= bytes - at && !memcmp(data + at, what, (size_t)length);
}

/* As `parse_frame` of readers/headers/formats.py, which documents the checks. */
static int read_facts(const u8 *data, i64 bytes, Facts *facts) {
    static const char exif[] = "Exif\0", xmp[] = "http://ns.adobe.com/xap/1.0/";
    i64 at = 2, size = 0;
    if (!is_at(data, bytes, 0, "\xff\xd8\xff", 3) || bytes > (i64)1 << 31) return 1;
    for (int segments = 0;; segments++, at += 2 + size) {
        if (segments == MOST_SEGMENTS || bytes - at < 4 || data[at] != 0xff) return 1;
        int code = data[at + 1];
        size = number_at(data + at + 2);
        if (code == 0xda) break;
        if (code >= 0xc0 && code <= 0xc2) {
            if (facts->process || bytes - at < 10 || data[at + 4] != 8) return 1;
            facts->height = number_at(data + at + 5), facts->width = number_at(data + at + 7);
            facts->components = data[at + 9], facts->process = code;
            if (!facts->height || !facts->width || (facts->components != 1 && facts->components != 3 && facts->components != 4) ||
                size != 8 + 3 * facts->components)
                return 1;
        } else if (code == 0xe1) {
            if (is_at(data, bytes, at + 4, exif, sizeof exif)) {
                if (facts->exif) return 1;
                facts->exif = at + 10, facts->exif_stop = at + 2 + size;
            } else if (is_at(data, bytes, at + 4, xmp, sizeof xmp))
                facts->xmp = at + 4 + (i64)sizeof xmp, facts->xmp_stop = at + 2 + size;
        } else if (code != 0xc4 && code != 0xdb && code != 0xdd && code != 0xfe && (code & 0xf0) != 0xe0)
            return 1;
        if (size < 2) return 1;
    }
    if (!facts->process || bytes < at + size + 5 || data[bytes - 2] != 0xff || data[bytes - 1] != 0xd9) return 1;
    int has_scans = facts->process == 0xc2 || data[at + 4] != facts->components;
    return has_scans && (bytes - at) / LEAST_SCAN_BYTES * facts->height * facts->width > MOST_SCANNED_PIXELS;
}

/* read_jpeg_facts(data): height, width, components and process of an ordinary JPEG, and the byte ranges [start, stop) of
 * its EXIF and its XMP, zeros for none; None for any other bytes. */
PyObject *py_read_jpeg_facts(PyObject *self, PyObject *args) {
    Py_buffer data;
    Facts f = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "y*", &data)) return NULL;
    int is_other = read_facts(data.buf, data.len, &f);
    PyBuffer_Release(&data);
    if (is_other) return Py_NewRef(Py_None);
    return Py_BuildValue("(LLLLLLLL)", f.height, f.width, f.components, f.process, f.exif, f.exif_stop, f.xmp, f.xmp_stop);
}
