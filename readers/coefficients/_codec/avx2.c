/* x86-64 with AVX2, FMA and a quick BMI2: Intel since 2013, AMD since Zen 3. */
#if defined(__x86_64__)
#define VARIANT_AVX2 1
#define VARIANT_PDEP 1
#define NAME codec_avx2
#define LABEL avx2
#define TARGET "avx2,bmi,bmi2,fma,popcnt,lzcnt"
#include "variant.inc"
#else
typedef int none; /* a file without declarations is not C */
#endif
