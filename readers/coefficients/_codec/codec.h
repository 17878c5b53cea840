/* The codec of DCT coefficients: the parts compiled once for each kind of CPU, and the parts that these variants share.
 *
 *   module.c       Python's functions: check their arguments against each other, and release the lock
 *   head.c         the segments of a baseline JPEG
 *   tables.c       Huffman tables, bytes of scans, the choice of a variant
 *   codec.inc      everything done for each coefficient or pixel; included by avx2.c, avx2_tables.c, base.c, plain.c
 *   affine.c       images moved by affine maps
 *   files.c        reading files for packing
 *   simd.h         vectors: AVX2, SSE4.2, NEON, and portable C
 *
 * Bytes of images are not trusted. The codec allocates all memory, by the sizes in an image's header, and compares every
 * length stated in an image with the available bytes before use. Functions return 0 or a reason. */
#ifndef CODEC_H
#define CODEC_H
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef int16_t i16;
typedef uint16_t u16;
typedef int32_t i32;
typedef uint32_t u32;
typedef int64_t i64;
typedef uint64_t u64;

enum { BLOCK_BYTES = 128, HEADER_BYTES = 24, TABLE_BYTES = 128, TAIL_BYTES = 32, LIMITS = 65 };
enum { MOST_COMPONENTS = 3, MOST_SIDE = 65535, MOST_RESIZED = 4096, MOST_SHRINK = 4 };
enum { SPARE_BYTES = 2048 }; /* after entropy-coded bytes: more than the codes of a block */

/* Reasons; readers/coefficients/encode.py has their texts. */
enum {
    TRUNCATED = 1, RESTART_OUT_OF_TURN, TOO_FEW_RESTARTS, BYTES_LEFT_OVER, UNKNOWN_CODE, TOO_MANY_COEFFICIENTS,
    TOO_SHORT, TOO_MANY_BITS, TOO_LONG, TOO_LARGE, DAMAGED, LEFT_TO_LIBJPEG, NO_MEMORY
};

/* An image as stored. across, down: subsampling factors of chroma, 1 or 2. */
typedef struct {
    i64 height, width, components, across, down;
} Shape;

/* A box of its pixels at size / 8 of its sides. is_fancy: chroma is interpolated, not repeated. */
typedef struct {
    i64 size, is_fancy, top, left, height, width;
} Region;

/* The result of a box: resized to rows x columns, of which a part is computed. flips: 1 left to right, 2 upside down.
 * factors: for floats, 24 multipliers and 24 summands, in the order of `kind`. */
enum { BYTES, BYTE_PLANES, FLOATS, FUSED, PLANES };
typedef struct {
    i64 rows, columns, top, left, height, width, flips;
    int kind;
    float factors[48];
} Resize;

/* Lines are `stride` bytes apart; planes of PLANES and BYTE_PLANES are `plane_stride` apart. */
typedef struct {
    u8 *at;
    i64 stride, plane_stride;
} Target;

/* A Huffman code. A step describes the next bits: bits of code and value | bits of the code << 8 | bits of the
 * value << 16 | coefficients << 24, where an end of block counts as END_OF_BLOCK coefficients; 0: no code. */
enum { LOOK_BITS = 10, END_OF_BLOCK = 128 }; /* larger tables cost more to build than they save for a photograph */
enum { LOOK_UP_BITS = 28, TO_READ_SINGLY = 64 << 8 };
typedef struct {
    u32 look[1 << LOOK_BITS];
    i64 largest[16], offsets[16]; /* for codes of 1 to 16 bits: the largest code, -1 for none; offset from code to symbol */
    u8 symbols[256];
    /* Of AC; in both the lowest byte has the bits that are used, and the second the coefficients; where no entry fits they
     * are TO_READ_SINGLY. skips: all codes of the next bits. pairs: the next one or two codes; for the second, or the only
     * one, also where its value begins (byte 3) and 63 - its bits (4); for the first of two its coefficients (2; 128 of
     * one code, a place outside of the block) and its value (6 and 7), which is all in the next bits. */
    u16 skips[1 << LOOK_BITS];
    u64 pairs[1 << LOOK_BITS];
} Codes;

/* The entropy-coded bytes of a JPEG of one scan, and for each component its codes, its multipliers and the largest values of
 * its coefficients, in the order WORKING. */
typedef struct {
    const u8 *bytes, *stop;
    const Codes *dc[MOST_COMPONENTS], *ac[MOST_COMPONENTS];
    i16 steps[MOST_COMPONENTS][64], limits[MOST_COMPONENTS][64];
} Strips;

/* A scan of any JPEG, in the form written by readers/coefficients/encode.py. */
typedef struct {
    i64 start, stop, restart, first, last, high, low, count;
    struct {
        i64 component, dc, ac; /* dc, ac: numbers of tables, -1 for none */
    } of[MOST_COMPONENTS];
} Scan;

typedef struct {
    const u8 *jpeg;
    Shape shape;
    int is_progressive;
    const Scan *scans;
    i64 scan_count;
    const Codes *codes;
    const i16 *limits; /* [components][LIMITS]: of each coefficient, in the order SPARSE; the least of them */
} Encoding;

typedef struct {
    const char *name;
    i64 (*encode)(const Encoding *, u8 *out, i64 room);
    int (*decode_box)(const u8 *data, i64 total, const Shape *, const Region *, Target);
    int (*resize_box)(const u8 *data, i64 total, const Shape *, const Region *, const Resize *, Target);
    int (*decode_strips)(const Strips *, const Shape *, const Region *, Target);
    int (*resize_strips)(const Strips *, const Shape *, const Region *, const Resize *, Target);
} Codec;

extern const Codec codec_avx2, codec_avx2_tables, codec_base, codec_plain;
extern u64 codec_spread[256], codec_squeeze[256]; /* for each mask of a tile: permutations of bytes */
extern u8 codec_working[256]; /* for each coefficient of a JPEG: its place in WORKING; 64 beyond the last */
extern u8 codec_sparse[256];  /* its place in SPARSE, in bytes; 0, the place of DC, beyond the last */

void codec_start(void);
const Codec *codec_choose(const char *name);
i64 find_marker(const u8 *source, i64 at, i64 stop);
int unstuff(const u8 *source, const u8 *stop, u8 *target, i64 *begins, i64 parts);
i64 copy_clean(const u8 *source, const u8 *stop, u8 *target);
void build_codes(const u8 *counts, const u8 *symbols, i64 number, int is_raw, Codes *codes);
i64 read_head(const u8 *jpeg, i64 bytes, Shape *shape, Codes *codes, Strips *strips);

static inline i64 blocks_down(const Shape *s, int component) {
    i64 side = component ? 8 * s->down : 8;
    return (s->height + side - 1) / side;
}
static inline i64 blocks_across(const Shape *s, int component) {
    i64 side = component ? 8 * s->across : 8;
    return (s->width + side - 1) / side;
}
/* The place of an image's index, and of its rows. */
static inline i64 index_at(const Shape *s) { return HEADER_BYTES + TABLE_BYTES * s->components; }
static inline i64 rows_at(const Shape *s) {
    return index_at(s) + 4 * (blocks_down(s, 0) + (s->components - 1) * blocks_down(s, 1) + 1);
}
#endif
