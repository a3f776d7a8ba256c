/* What the kernels share: vectors of 16 positions as one register of 16 lanes (AVX-512) or two of 8 (AVX2 and FMA), with
 * the same bits in both, and bf16 as transformers rounds it. Sums are fp32.
 */
#ifndef INTERLENS_KERNELS
#define INTERLENS_KERNELS
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define TILE 16
#ifdef __AVX512F__
#define W 16
#else
#define W 8
#endif
#define PARTS (TILE / W)

typedef float vf __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(W * 4), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(2)));
typedef uint16_t bf16;

static inline vf load_f32(const float *p) { return *(const vf *)p; }
static inline vf load_bf16(const bf16 *p) { /* one instruction; a plain conversion compiles to five */
#ifdef __AVX512F__
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#endif
}
static inline float wide_f32(float x) { return x; }
static inline float wide_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline float narrow_f32(float x) { return x; }
static inline bf16 narrow_bf16(float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline void put_f32(float *p, vf x) { *(vf *)p = x; }
static inline void put_bf16(bf16 *p, vf x) {
    const vu bits = (vu)x, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vi nan = x != x;
    *(vh *)p = __builtin_convertvector((vu)((nan & (vi)((bits >> 16) | 0x40)) | (~nan & (vi)up)), vh);
}
static inline vf round_f32(vf x) { return x; }
static inline vf round_bf16(vf x) {
    const vu bits = (vu)x, up = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    const vi nan = x != x;
    return (vf)((nan & (vi)bits) | (~nan & (vi)up));
}

static inline vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
static inline vf spread(float x) { return (vf){} + x; }

/* exp by 2^n times a polynomial of degree 6 (Cephes expf), every lane the same steps; arguments are clamped to +-87 */
static inline vf vexp(vf x) {
    x = choose(x < -87.0f, spread(-87.0f), x);
    x = choose(x > 87.0f, spread(87.0f), x);
    vf t = x * 1.44269504f;
    vf half = choose(t < 0.0f, spread(-0.5f), spread(0.5f));
    vi n = __builtin_convertvector(t + half, vi);
    vf fn = __builtin_convertvector(n, vf);
    vf r = x - fn * 0.693359375f;
    r = r + fn * 2.12194440e-4f;
    vf p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return p * (vf)((n + 127) << 23);
}
/* exp of what is at most 0; exactly 0 where that is below -87, minus infinity included */
static inline vf weight(vf x) { return choose(x < -87.0f, (vf){}, vexp(x)); }

#endif
