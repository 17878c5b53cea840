/* Portable C without intrinsics: for other CPUs, and for tests. */
#define VARIANT_PLAIN 1
#define VARIANT_AVX2 0
#define VARIANT_PDEP 0
#define NAME codec_plain
#define LABEL plain
#include "variant.inc"
