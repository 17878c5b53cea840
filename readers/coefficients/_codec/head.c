/* The segments of a baseline JPEG before its scan (T.81, annex B), for images without a cache of coefficients.
 *
 * Strict: unusual and damaged images, and images for which libjpeg warns, are left to libjpeg. So are progressive JPEGs,
 * restarts, more than one scan, and colours other than grey and YCbCr. */
#include "codec.h"
#include <string.h>

enum { SOF0 = 0xC0, SOF1 = 0xC1, DHT = 0xC4, SOI = 0xD8, EOI = 0xD9, SOS = 0xDA, DQT = 0xDB, DRI = 0xDD };
enum { APP0 = 0xE0, APP1 = 0xE1, APP2 = 0xE2, ADOBE = 0xEE, APP15 = 0xEF, COM = 0xFE };
enum { LARGEST = 8191 }; /* largest coefficient times its multiplier, as in encode.py */

typedef struct {
    const u8 *counts, *symbols; /* in the JPEG; null for none */
    i64 number;
} Huffman;
typedef struct {
    Huffman huffman[2][4]; /* for DC and AC */
    u16 steps[4][64];
    u8 has_steps[4], names[3], quantisation[3];
    i64 profiles, profile;
    int is_jfif, adobe;
} State;

static i64 number_at(const u8 *at) { return at[0] << 8 | at[1]; }

static int read_quantisation(const u8 *at, const u8 *end, State *s) {
    while (at < end) {
        int is_wide = *at >> 4, number = *at & 15, step = is_wide ? 2 : 1;
        if (is_wide > 1 || number > 3 || end - at < 1 + 64 * step) return 1;
        at++;
        for (int k = 0; k < 64; k++, at += step) {
            i64 value = is_wide ? number_at(at) : *at;
            if (value < 1 || value > 32767) return 1; /* libjpeg multiplies by signed 16 bits */
            s->steps[number][k] = (u16)value;
        }
        s->has_steps[number] = 1;
    }
    return 0;
}

static int read_huffman(const u8 *at, const u8 *end, State *s) {
    while (at < end) {
        int kind = *at >> 4, number = *at & 15;
        if (kind > 1 || number > 3 || end - at < 17) return 1;
        Huffman h = {at + 1, at + 17, 0};
        i64 code = 0;
        for (int bits = 1; bits <= 16; bits++, code <<= 1) {
            int count = h.counts[bits - 1];
            code += count, h.number += count;
            if (count && code >= 1 << bits) return 1; /* not a prefix code, or a code of ones only */
        }
        if (h.number > 256 || end - h.symbols < h.number) return 1;
        for (i64 k = 0; kind == 0 && k < h.number; k++)
            if (h.symbols[k] > 15) return 1;
        s->huffman[kind][number] = h;
        at = h.symbols + h.number;
    }
    return 0;
}

static int read_frame(const u8 *at, i64 bytes, State *s, Shape *shape) {
    if (bytes < 6 || shape->components || at[0] != 8) return 1;
    i64 n = at[5];
    if ((n != 1 && n != 3) || bytes != 6 + 3 * n) return 1;
    *shape = (Shape){number_at(at + 1), number_at(at + 3), n, 1, 1};
    if (!shape->height || !shape->width) return 1;
    for (i64 c = 0; c < n; c++) {
        const u8 *one = at + 6 + 3 * c;
        int across = one[1] >> 4, down = one[1] & 15;
        s->names[c] = one[0], s->quantisation[c] = one[2];
        if (one[2] > 3 || across < 1 || across > 4 || down < 1 || down > 4) return 1;
        for (i64 k = 0; k < c; k++)
            if (s->names[k] == one[0]) return 1;
        if (n == 3 && c == 0) shape->across = across, shape->down = down;
        if (n == 3 && (c ? across != 1 || down != 1 : across > 2 || down > 2)) return 1;
    }
    return 0;
}

/* A part of a colour profile; TurboJPEG needs all parts, in order. */
static int read_profile(const u8 *at, i64 bytes, State *s) {
    if (bytes < 14 || memcmp(at, "ICC_PROFILE", 12)) return 0;
    if (s->profile && s->profiles != at[13]) return 1;
    s->profiles = at[13];
    return at[12] != ++s->profile || s->profile > s->profiles;
}

static int read_segment(int marker, const u8 *at, i64 bytes, State *s, Shape *shape) {
    switch (marker) {
    case SOF0:
    case SOF1: return read_frame(at, bytes, s, shape);
    case DQT: return read_quantisation(at, at + bytes, s);
    case DHT: return read_huffman(at, at + bytes, s);
    case DRI: return bytes != 2 || number_at(at);
    case APP2: return read_profile(at, bytes, s);
    case APP0:
        if (bytes >= 14 && !memcmp(at, "JFIF", 5)) {
            s->is_jfif = 1;
            return at[5] != 1; /* libjpeg warns of other versions */
        }
        return 0;
    case ADOBE:
        if (bytes >= 12 && !memcmp(at, "Adobe", 5)) {
            s->adobe = at[11];
            return at[11] > 1;
        }
        return 0;
    default: return !((marker >= APP1 && marker <= APP15) || marker == COM);
    }
}

/* The header of the scan of all components, and the order of its blocks. */
static int read_scan(const u8 *at, i64 bytes, const State *s, const Shape *shape, Codes *codes, Strips *strips) {
    i64 n = shape->components;
    if (!n || bytes != 4 + 2 * n || at[0] != n || at[1 + 2 * n] || at[2 + 2 * n] != 63 || at[3 + 2 * n]) return 1;
    if (n == 3 && (s->adobe == 0 || (!s->is_jfif && s->adobe < 0 && !memcmp(s->names, "RGB", 3)))) return 1;
    if (s->profile != s->profiles) return 1;
    const Codes *made[2][4] = {{0}};
    for (i64 c = 0; c < n; c++) {
        int selectors[2] = {at[2 + 2 * c] >> 4, at[2 + 2 * c] & 15};
        if (at[1 + 2 * c] != s->names[c] || !s->has_steps[s->quantisation[c]]) return 1;
        for (int kind = 0; kind < 2; kind++) {
            int number = selectors[kind];
            if (number > 3 || !s->huffman[kind][number].counts) return 1;
            const Huffman *h = &s->huffman[kind][number];
            if (!made[kind][number]) {
                build_codes(h->counts, h->symbols, h->number, kind == 0, codes);
                made[kind][number] = codes++;
            }
        }
        strips->dc[c] = made[0][selectors[0]], strips->ac[c] = made[1][selectors[1]];
        for (int k = 0; k < 64; k++) {
            int step = s->steps[s->quantisation[c]][k];
            strips->steps[c][codec_working[k]] = (i16)step;
            strips->limits[c][codec_working[k]] = (i16)(LARGEST / step);
        }
    }
    return 0;
}

/* Reads up to the scan. codes: room for 2 tables per component. Returns the byte after the scan's header, or -1 for a JPEG
 * that is left to libjpeg. */
i64 read_head(const u8 *jpeg, i64 bytes, Shape *shape, Codes *codes, Strips *strips) {
    State s = {.adobe = -1};
    *shape = (Shape){0};
    if (bytes < 4 || jpeg[0] != 0xFF || jpeg[1] != SOI) return -1;
    for (i64 at = 2; bytes - at >= 4;) {
        int marker = jpeg[at + 1];
        i64 size = number_at(jpeg + at + 2);
        if (jpeg[at] != 0xFF || size < 2 || size > bytes - at - 2) return -1;
        const u8 *body = jpeg + at + 4;
        at += 2 + size;
        if (marker == SOS) return read_scan(body, size - 2, &s, shape, codes, strips) ? -1 : at;
        if (read_segment(marker, body, size - 2, &s, shape)) return -1;
    }
    return -1;
}
