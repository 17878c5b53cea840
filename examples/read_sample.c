/* Read sample I of a split of a packed set without any library, and write its bytes to standard output.
 *
 *     cc -O2 -o read_sample examples/read_sample.c
 *     cd imagenette2-hdf5
 *     ./read_sample train.index 7 $(jq -r '.splits.train.shards[].path' dataset.json) > 7.jpg
 *
 * Four look-ups in columns, one pread, and the checksum. Needs a machine of 64 bits, little-endian, and POSIX.
 */
#define _FILE_OFFSET_BITS 64
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void fail(const char *what, const char *path) {
    fprintf(stderr, "read_sample: %s: %s\n", path, what);
    exit(1);
}

/* Row `row` of INDEX/NAME.npy, whose values have `bytes` bytes: behind a header whose length is at byte 8. */
static uint64_t look_up(const char *index, const char *name, uint64_t row, size_t bytes) {
    char path[4096];
    unsigned char header[10];
    uint64_t value = 0;
    snprintf(path, sizeof path, "%s/%s.npy", index, name);
    int file = open(path, O_RDONLY);
    if (file < 0 || pread(file, header, 10, 0) != 10) fail("cannot be read", path);
    off_t start = 10 + header[8] + 256 * header[9];
    if (pread(file, &value, bytes, start + (off_t)(row * bytes)) != (ssize_t)bytes) fail("has no such row", path);
    close(file);
    return value;
}

static uint32_t crc32c(const unsigned char *data, uint64_t length) {
    uint32_t crc = ~0u;
    while (length--) {
        crc ^= *data++;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

int main(int count, char **words) {
    if (count < 4) fail("usage: read_sample INDEX ROW SHARD...", words[0]);
    uint64_t row = strtoull(words[2], NULL, 10);
    uint64_t shard = look_up(words[1], "shard", row, 4), offset = look_up(words[1], "image.offset", row, 8);
    uint64_t length = look_up(words[1], "image.length", row, 8), sum = look_up(words[1], "image.crc32c", row, 4);
    if (offset == UINT64_MAX) fail("this sample has no image", words[1]);
    if (shard >= (uint64_t)count - 3) fail("names a shard that was not given", words[1]);
    const char *path = words[3 + shard];
    unsigned char *data = malloc(length ? length : 1);
    int file = open(path, O_RDONLY);
    if (!data || file < 0 || pread(file, data, length, (off_t)offset) != (ssize_t)length) fail("cannot be read", path);
    if (crc32c(data, length) != sum) fail("the bytes are damaged", path);
    return fwrite(data, 1, length, stdout) == length ? 0 : 1;
}
