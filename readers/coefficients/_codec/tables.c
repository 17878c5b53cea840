/* Code that needs no variants: tables, bytes of scans; and the choice of a CPU's variant. */
#include "codec.h"
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

u64 codec_spread[256], codec_squeeze[256];
u8 codec_working[256], codec_sparse[256];

static u64 load(const u8 *at) {
    u64 v;
    memcpy(&v, at, 8);
    return v;
}

static int has_ff(u64 v) {
    u64 n = ~v;
    return ((n - 0x0101010101010101ull) & v & 0x8080808080808080ull) != 0;
}

void codec_start(void) {
    for (int mask = 0; mask < 256; mask++) {
        u64 spread = 0, squeeze = 0;
        int count = 0;
        for (int bit = 0; bit < 8; bit++) {
            if (mask >> bit & 1) {
                squeeze |= (u64)bit << 8 * count;
                spread |= (u64)count++ << 8 * bit;
            } else
                spread |= 0x80ull << 8 * bit;
        }
        for (; count < 8; count++) squeeze |= 0x80ull << 8 * count;
        codec_spread[mask] = spread, codec_squeeze[mask] = squeeze;
    }
    memset(codec_working, 64, sizeof codec_working);
    static const u8 vectors[4] = {0, 2, 1, 3}; /* lines (0, 4), (2, 6), (1, 5), (3, 7) of WORKING */
    int line = 0, column = 0;
    for (int k = 0; k < 64; k++) { /* the zigzag of T.81, figure A.6 */
        codec_working[k] = (u8)(16 * vectors[line & 3] + 2 * column + (line >> 2));
        codec_sparse[k] = (u8)(2 * (16 * (line >> 1) + 8 * (column >> 2) + 2 * (column & 3) + (line & 1)));
        int is_up = ((line + column) & 1) == 0;
        if (is_up ? column == 7 : line == 7) line += is_up, column += !is_up;
        else if (is_up) column++, line -= line > 0;
        else line++, column -= column > 0;
    }
}

#if defined(__x86_64__)
static int has_avx2(int *is_slow) {
    unsigned a, b, c, d, family;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!(c >> 27 & 1) || !(c >> 12 & 1) || !(c >> 28 & 1)) return 0; /* OSXSAVE, FMA, AVX */
    family = (a >> 8 & 15) + (a >> 20 & 255);
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6) return 0;
    __get_cpuid(0, &a, &b, &c, &d);
    int is_amd = b == 0x68747541;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    *is_slow = !(b >> 8 & 1) || (is_amd && family < 0x19);
    return b >> 5 & 1;
}

/* Not __builtin_cpu_supports: with the linker of the package ziglang, nothing initialises its data. */
static int has_sse4(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 9 & 1) && (c >> 20 & 1) && (c >> 23 & 1); /* SSSE3, SSE4.2, POPCNT */
}
#endif

const Codec *codec_choose(const char *name) {
    const Codec *codecs[4] = {0};
    int count = 0;
#if defined(__x86_64__)
    int is_slow = 0, has = has_avx2(&is_slow);
    if (has && !is_slow) codecs[count++] = &codec_avx2;
    if (has) codecs[count++] = &codec_avx2_tables;
    if (has_sse4()) codecs[count++] = &codec_base;
#else
    codecs[count++] = &codec_base;
#endif
    codecs[count++] = &codec_plain;
    for (int k = 0; k < count; k++)
        if (!*name || !strcmp(name, codecs[k]->name)) return codecs[k];
    return 0;
}

/* The first marker other than a restart in source[at, stop); `stop` for none. */
i64 find_marker(const u8 *source, i64 at, i64 stop) {
    while (at + 1 < stop) {
        const u8 *next = memchr(source + at, 0xFF, (size_t)(stop - 1 - at));
        if (!next) break;
        u8 marker = next[1];
        at = next - source;
        if (marker != 0 && marker != 0xFF && (marker < 0xD0 || marker > 0xD7)) return at;
        at++;
    }
    return stop;
}

/* Copies bytes without FF, eight at a time. */
static const u8 *copy_plain(const u8 *source, const u8 *stop, u8 **target) {
    for (; stop - source >= 8 && !has_ff(load(source)); source += 8, *target += 8) memcpy(*target, source, 8);
    return source;
}

/* Copies the bytes of a scan without stuffing and restart markers into target[stop - source]; begins: [2][parts], the begin
 * and the end of each restart interval. */
int unstuff(const u8 *source, const u8 *stop, u8 *target, i64 *begins, i64 parts) {
    i64 part = 0;
    u8 *out = target;
    begins[0] = 0;
    while ((source = copy_plain(source, stop, &out)) < stop) {
        u8 byte = *source++;
        if (byte == 0xFF) {
            while (source < stop && *source == 0xFF) source++;
            if (source == stop) return TRUNCATED;
            u8 marker = *source++;
            if (marker) {
                if (part == parts - 1 || marker != 0xD0 + (part & 7)) return RESTART_OUT_OF_TURN;
                begins[parts + part] = out - target;
                begins[++part] = out - target;
                continue;
            }
        }
        *out++ = byte;
    }
    begins[parts + part] = out - target;
    return part == parts - 1 ? 0 : TOO_FEW_RESTARTS;
}

/* The same for a scan without markers before the end marker: returns the number of bytes, -1 for other scans. */
i64 copy_clean(const u8 *source, const u8 *stop, u8 *target) {
    u8 *out = target;
    while ((source = copy_plain(source, stop, &out)) < stop) {
        u8 byte = *source++;
        if (byte == 0xFF) {
            if (source < stop && *source == 0xD9) return out - target;
            if (source == stop || *source) break;
            source++;
        }
        *out++ = byte;
    }
    return -1;
}

/* Entries for the next LOOK_BITS bits. steps: `look`. */
static u64 pair_of(const u32 *steps, u32 index) {
    u32 a = steps[index], used = a & 31, count = a >> 24;
    if (a == 0 || used > LOOK_UP_BITS) return TO_READ_SINGLY;
    if (count < END_OF_BLOCK && used < LOOK_BITS) {
        u32 b = steps[index << used & ((1 << LOOK_BITS) - 1)], bits = b >> 8 & 31;
        if (b && bits <= LOOK_BITS - used && used + (b & 31) <= LOOK_UP_BITS) {
            u32 size = a >> 16 & 15, value = index >> (LOOK_BITS - used) & ((1u << size) - 1);
            if (size && !(value >> (size - 1))) value += 1 - (1u << size);
            return (used + (b & 31)) | (u64)(count + (b >> 24)) << 8 | (u64)count << 16 | (u64)(used + bits) << 24 |
                   (u64)(63 - (b >> 16 & 15)) << 32 | (u64)value << 48;
        }
    }
    return used | (u64)count << 8 | 128 << 16 | (u64)(a >> 8 & 31) << 24 | (u64)(63 - (a >> 16 & 15)) << 32;
}
static u16 skip_of(const u32 *steps, u32 index) {
    u32 used = 0, count = 0;
    while (used < LOOK_BITS && count < END_OF_BLOCK) {
        u32 rest = index << used & ((1 << LOOK_BITS) - 1), step = steps[rest];
        if (step == 0 || (step >> 8 & 31) > LOOK_BITS - used || used + (step & 31) > LOOK_UP_BITS) break;
        if (count + (step >> 24) > 63 + END_OF_BLOCK) break;
        used += step & 31, count += step >> 24;
    }
    return (u16)(used ? count << 8 | used : TO_READ_SINGLY);
}

/* counts: number of codes of 1 to 16 bits, a prefix code; symbols: `number` symbols. is_raw: a code of DC or of a
 * progressive scan, in which no code alone ends a block. */
void build_codes(const u8 *counts, const u8 *symbols, i64 number, int is_raw, Codes *codes) {
    i64 code = 0, first = 0;
    memset(codes->look, 0, sizeof codes->look);
    memcpy(codes->symbols, symbols, (size_t)number);
    memset(codes->symbols + number, 0, (size_t)(256 - number));
    for (int bits = 1; bits <= 16; bits++, code <<= 1) {
        codes->offsets[bits - 1] = first - code;
        for (int k = 0; k < counts[bits - 1]; k++, code++, first++) {
            u32 symbol = symbols[first], size = symbol & 15, count = (symbol >> 4) + 1;
            if (size == 0 && symbol != 0xF0 && !is_raw) count = END_OF_BLOCK;
            u32 step = (bits + size) | (u32)bits << 8 | size << 16 | count << 24;
            for (i64 at = 0; bits <= LOOK_BITS && at < 1 << (LOOK_BITS - bits); at++)
                codes->look[((code << (LOOK_BITS - bits)) + at) & ((1 << LOOK_BITS) - 1)] = step;
        }
        codes->largest[bits - 1] = counts[bits - 1] ? code - 1 : -1;
    }
    if (is_raw) return;
    for (u32 index = 0; index < 1 << LOOK_BITS; index++) {
        codes->skips[index] = skip_of(codes->look, index);
        codes->pairs[index] = pair_of(codes->look, index);
    }
}
