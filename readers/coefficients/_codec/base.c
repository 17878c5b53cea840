/* x86-64-v2, which NumPy requires, too; and every aarch64. */
#define VARIANT_AVX2 0
#define VARIANT_PDEP 0
#define NAME codec_base
#if defined(__x86_64__)
#define LABEL sse4
#define TARGET "sse4.2,ssse3,popcnt"
#elif defined(__aarch64__)
#define LABEL neon
#else
#define LABEL base
#endif
#include "variant.inc"
