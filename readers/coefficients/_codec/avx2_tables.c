/* x86-64 with AVX2 and a slow pdep: AMD before Zen 3. */
#if defined(__x86_64__)
#define VARIANT_AVX2 1
#define VARIANT_PDEP 0
#define NAME codec_avx2_tables
#define LABEL avx2_tables
#define TARGET "avx2,bmi,fma,popcnt,lzcnt"
#include "variant.inc"
#else
typedef int none; /* a file without declarations is not C */
#endif
