/* Exact attention, linear layers, RMS norms and draws on the CPU, every row in one fixed order of operations.
 *
 * Exact attention: a query's output is a function of its own vector and of keys and values lo..len-1.
 *
 * Every query goes through one fixed order of operations, whatever is computed beside it: scores are summed over the
 * head's width in order, the softmax over lanes of 16 positions, values over positions in order. Queries that share
 * keys are computed side by side in registers; that changes no query's own order. Sums are fp32.
 *
 * Keys lie in tiles of 16 positions, transposed: [slot][kv head][position / 16][d][16]; values [slot][kv head][position][d].
 * The same source gives the 16-lane form (AVX-512) and the 8-lane form (AVX2 and FMA), with the same bits.
 */
#ifndef T
#include <math.h>
#include <stdint.h>
#include <string.h>

#define TILE 16
#define MAXQ 12 /* queries side by side */
#define MAXD 256

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
static inline vf load_bf16(const bf16 *p) {
    vu wide = __builtin_convertvector(*(const vh *)p, vu) << 16;
    return (vf)wide;
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

typedef struct {
    int len[MAXQ], lo[MAXQ]; /* positions lo..len-1 are seen */
    float sink[MAXQ];
    float slope[MAXQ]; /* times (key position - query position) is added to a score */
    float inverse[MAXQ];
    void *out[MAXQ];
} Queries;

/* scores to probabilities, unnormalised; the normaliser goes to `inverse` */
static inline void soften(Queries *s, int i, float *row, int first, int last, float cap, int sinks) {
    const int len = s->len[i], lo = s->lo[i];
    if (cap > 0.0f)
        for (int j = first; j < last; j += W) { /* cap * tanh(x / cap) */
            vf e = vexp(load_f32(row + j) * (2.0f / cap));
            *(vf *)(row + j) = cap * (1.0f - 2.0f / (e + 1.0f));
        }
    if (s->slope[i] != 0.0f) {
        vf at;
        for (int l = 0; l < W; l++) at[l] = (float)(first + l - (len - 1));
        for (int j = first; j < last; j += W, at += (float)W) *(vf *)(row + j) = load_f32(row + j) + s->slope[i] * at;
    }
    for (int j = first; j < lo; j++) row[j] = -INFINITY;
    for (int j = len; j < last; j++) row[j] = -INFINITY;
    float top = sinks ? s->sink[i] : -INFINITY;
    vf high = spread(-INFINITY);
    for (int j = first; j < last; j += W) {
        vf x = load_f32(row + j);
        high = choose(x > high, x, high);
    }
    for (int l = 0; l < W; l++) top = high[l] > top ? high[l] : top;
    vf sum[PARTS];
    for (int v = 0; v < PARTS; v++) sum[v] = (vf){};
    for (int j = first; j < last; j += TILE)
        for (int v = 0; v < PARTS; v++) {
            vf x = load_f32(row + j + v * W);
            vf e = choose(x == -INFINITY, (vf){}, vexp(x - top));
            *(vf *)(row + j + v * W) = e;
            sum[v] += e;
        }
    float total = 0.0f;
    for (int v = 0; v < PARTS; v++)
        for (int l = 0; l < W; l++) total += sum[v][l];
    if (sinks) {
        vf e = vexp(spread(s->sink[i] - top));
        total += e[0];
    }
    s->inverse[i] = 1.0f / total;
}

/* exp of what is at most 0; exactly 0 where that is below -87, minus infinity included */
static inline vf weight(vf x) { return choose(x < -87.0f, (vf){}, vexp(x)); }

/* tells the words of a tensor and their places, in one reading */
typedef uint64_t vw __attribute__((vector_size(64), aligned(8)));
void digest(const uint64_t *words, int64_t n, uint64_t *out) {
    vw sum = {}, weighted = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        sum += *(const vw *)(words + i);
        weighted += sum;
    }
    uint64_t a = 0, b = 0;
    for (int l = 0; l < 8; l++) a += sum[l], b += (2 * l + 1) * weighted[l] + a;
    for (; i < n; i++) a += words[i], b += a;
    out[0] = a, out[1] = b;
}

/* the token into which `u` times the sum of all weights exp((x - top) / heat) falls; -1 where there is no weight */
#define BLOCK 512
void draw(int n, int V, const float *logits, const float *heat, const double *u, double *sums, int32_t *token) {
    for (int i = 0; i < n; i++) {
        const float *x = logits + (int64_t)i * V, by = 1.0f / heat[i];
        float top = -INFINITY;
        vf high = spread(top);
        for (int j = 0; j + W <= V; j += W) high = choose(load_f32(x + j) > high, load_f32(x + j), high);
        for (int l = 0; l < W; l++) top = high[l] > top ? high[l] : top;
        for (int j = V / W * W; j < V; j++) top = x[j] > top ? x[j] : top;
        const int blocks = (V + BLOCK - 1) / BLOCK;
        double total = 0.0;
        for (int b = 0; b < blocks; b++) {
            const int begin = b * BLOCK, end = begin + BLOCK < V ? begin + BLOCK : V;
            vf sum[PARTS];
            for (int v = 0; v < PARTS; v++) sum[v] = (vf){};
            int j = begin;
            for (; j + TILE <= end; j += TILE)
                for (int v = 0; v < PARTS; v++) sum[v] += weight((load_f32(x + j + v * W) - top) * by);
            double part = 0.0;
            for (int v = 0; v < PARTS; v++)
                for (int l = 0; l < W; l++) part += sum[v][l];
            for (; j < end; j++) part += weight(spread((x[j] - top) * by))[0];
            sums[b] = part;
            total += part;
        }
        double left = u[i] * total;
        int b = 0;
        while (b < blocks - 1 && left >= sums[b]) left -= sums[b++];
        int last = -1;
        const int end = b * BLOCK + BLOCK < V ? b * BLOCK + BLOCK : V;
        for (int j = b * BLOCK; j < end; j++) {
            const double e = weight(spread((x[j] - top) * by))[0];
            if (e > 0.0) {
                last = j;
                if (left < e) break;
                left -= e;
            }
        }
        for (int j = b * BLOCK - 1; last < 0 && j >= 0; j--)
            if (weight(spread((x[j] - top) * by))[0] > 0.0f) last = j;
        token[i] = last;
    }
}

/* Linear layers. Weights lie in panels of 48 columns, [panel][K][48]: an output sums over K in order, whatever the
 * number of rows and threads. While one panel is used the memory of what comes next is asked for. */
#define PANEL 48
#define WORTH(m, n, k) ((int64_t)((m) + 16) * (n) * (k) > 2000000) /* a team of threads costs some microseconds */
#define AHEAD 6144 /* numbers */
#if W == 16
#define ROWS 8
#define PARTIAL 3
#else
#define ROWS 4
#define PARTIAL 2
#endif
static inline __attribute__((always_inline)) void multiply(
    const int n, int K, const float *x, int64_t x_row, const float *w, const float *next, float *y, int64_t y_row,
    int columns, const float *bias) {
    vf a[ROWS][PARTIAL];
    for (int i = 0; i < n; i++)
        for (int c = 0; c < PARTIAL; c++) a[i][c] = (vf){};
    for (int k = 0; k < K; k++) {
        vf b[PARTIAL];
        for (int c = 0; c < PARTIAL; c++) {
            b[c] = load_f32(w + (int64_t)k * PANEL + c * W);
            if (next) __builtin_prefetch(next + (int64_t)k * PANEL + c * 16, 0, 2);
        }
        for (int i = 0; i < n; i++)
            for (int c = 0; c < PARTIAL; c++) a[i][c] += x[i * x_row + k] * b[c];
    }
    for (int i = 0; i < n; i++)
        for (int c = 0; c < PARTIAL; c++)
            if ((c + 1) * W <= columns)
                put_f32(y + i * y_row + c * W, bias ? a[i][c] + load_f32(bias + c * W) : a[i][c]);
            else
                for (int l = 0; c * W + l < columns; l++)
                    y[i * y_row + c * W + l] = bias ? a[i][c][l] + bias[c * W + l] : a[i][c][l];
}
void linear_f32(
    int M, int N, int K, const float *x, int64_t x_row, const float *w, const float *bias, float *y, int threads) {
    const int panels = (N + PANEL - 1) / PANEL;
    #pragma omp parallel for num_threads(threads) if (threads > 1 && WORTH(M, N, K))
    for (int p = 0; p < panels; p++) {
        const float *panel = w + (int64_t)p * K * PANEL;
        for (int i = 0; i < M; i += ROWS) {
            const int n = M - i < ROWS ? M - i : ROWS;
            const float *next = i == 0 ? panel + AHEAD : i + ROWS >= M ? panel + (int64_t)K * PANEL : 0;
            for (int c = 0; c < PANEL && p * PANEL + c < N; c += PARTIAL * W) {
                const int at = p * PANEL + c;
                switch (n) {
#define CASE(R)                                                                                                    \
    case R:                                                                                                        \
        multiply(R, K, x + i * x_row, x_row, panel + c, next, y + (int64_t)i * N + at, N, N - at, bias ? bias + at : 0); \
        break;
                    CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS == 8
                    CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
                }
            }
        }
    }
}

/* The same in bf16 on matrix units: panels of 32 columns in steps of 32 along K, [panel][K/32][2][16][16][2]. Up to 32
 * rows go through at once; rows that are missing are zeros, so a row meets the same steps whoever is beside it. */
#ifdef __AMX_BF16__
#include <immintrin.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
typedef struct __attribute__((packed, aligned(64))) {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;
int matrix_units(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }
void linear_bf16(
    int M, int N, int K, const bf16 *x, int64_t x_row, const bf16 *w, const bf16 *bias, bf16 *y, int threads) {
    const int panels = (N + 31) / 32, steps = K / 32, whole = M / 16 * 16;
    bf16 *tail = 0;
    if (whole < M) {
        tail = calloc((size_t)16 * K, sizeof(bf16));
        for (int i = whole; i < M; i++) memcpy(tail + (size_t)(i - whole) * K, x + i * x_row, K * sizeof(bf16));
    }
    #pragma omp parallel num_threads(threads) if (threads > 1 && WORTH(M, N, K))
    {
        Tiles tiles = {.palette = 1};
        for (int t = 0; t < 8; t++) tiles.bytes[t] = 64, tiles.rows[t] = 16;
        _tile_loadconfig(&tiles);
        float sums[4][16 * 16] __attribute__((aligned(64)));
        #pragma omp for
        for (int p = 0; p < panels; p++) {
            const bf16 *panel = w + (int64_t)p * steps * 1024;
            for (int i = 0; i < M; i += 32) {
                const int two = M - i > 16;
                const bf16 *a = i < whole ? x + i * x_row : tail, *b = i + 16 < whole ? x + (i + 16) * x_row : tail;
                const int64_t a_row = 2 * (i < whole ? x_row : K), b_row = 2 * (i + 16 < whole ? x_row : K);
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int s = 0; s < steps; s++) {
                    const bf16 *step = panel + s * 1024;
                    _tile_loadd(4, step, 64);
                    _tile_loadd(5, step + 512, 64);
                    _tile_loadd(6, a + s * 32, a_row);
                    if (i == 0)
                        for (int line = 0; line < 32; line++) __builtin_prefetch(step + AHEAD + line * 32, 0, 2);
                    _tile_dpbf16ps(0, 6, 4);
                    _tile_dpbf16ps(1, 6, 5);
                    if (two) {
                        _tile_loadd(7, b + s * 32, b_row);
                        _tile_dpbf16ps(2, 7, 4);
                        _tile_dpbf16ps(3, 7, 5);
                    }
                }
                _tile_stored(0, sums[0], 64);
                _tile_stored(1, sums[1], 64);
                _tile_stored(2, sums[2], 64);
                _tile_stored(3, sums[3], 64);
                for (int r = 0; r < 32 && i + r < M; r++)
                    for (int h = 0; h < 2; h++) {
                        const int at = p * 32 + h * 16;
                        const float *from = sums[r / 16 * 2 + h] + r % 16 * 16;
                        bf16 *to = y + (int64_t)(i + r) * N + at;
                        if (at + 16 <= N)
                            put_bf16(to, bias ? load_f32(from) + load_bf16(bias + at) : load_f32(from));
                        else
                            for (int l = 0; at + l < N; l++)
                                to[l] = narrow_bf16(bias ? from[l] + wide_bf16(bias[at + l]) : from[l]);
                    }
            }
        }
        _tile_release();
    }
    free(tail);
}
#else
int matrix_units(void) { return 0; }
void linear_bf16(int M, int N, int K, const bf16 *x, int64_t x_row, const bf16 *w, const bf16 *bias, bf16 *y, int threads) {}
#endif

/* how many of the queries that are left go side by side: the block sizes that are compiled */
static inline int at_once(int left) {
    return left >= 12 ? 12 : left >= 8 ? 8 : left >= 6 ? 6 : left >= 4 ? 4 : left;
}

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#define T float
#define NAME(x) x##_f32
#include __FILE__
#undef T
#undef NAME
#define T bf16
#define NAME(x) x##_bf16
#include __FILE__

#else /* the rest once per type T */

static inline __attribute__((always_inline)) void NAME(scores)(
    const int NQ, const int TT, int D, const float *q, const T *tile, float *rows, int stride, int position) {
    vf a[MAXQ][4][PARTS];
    for (int i = 0; i < NQ; i++)
        for (int t = 0; t < TT; t++)
            for (int v = 0; v < PARTS; v++) a[i][t][v] = (vf){};
    for (int d = 0; d < D; d++) {
        vf x[4][PARTS];
        for (int t = 0; t < TT; t++)
            for (int v = 0; v < PARTS; v++) {
                __builtin_prefetch(tile + ((int64_t)(t + TT) * D + d) * TILE + v * W);
                x[t][v] = NAME(load)(tile + ((int64_t)t * D + d) * TILE + v * W);
            }
        for (int i = 0; i < NQ; i++)
            for (int t = 0; t < TT; t++)
                for (int v = 0; v < PARTS; v++) a[i][t][v] += q[i * D + d] * x[t][v];
    }
    for (int i = 0; i < NQ; i++)
        for (int t = 0; t < TT; t++)
            for (int v = 0; v < PARTS; v++)
                *(vf *)(rows + (int64_t)i * stride + position + t * TILE + v * W) = a[i][t][v];
}
static inline __attribute__((always_inline)) void NAME(values)(
    const int NQ, const int DV, int D, const T *V, Queries *s, const float *rows, int stride, int first, int last) {
    for (int d = 0; d < D; d += DV * W) {
        const int parts = (D - d) / W < DV ? (D - d) / W : DV;
        vf a[MAXQ][4];
        for (int i = 0; i < NQ; i++)
            for (int c = 0; c < DV; c++) a[i][c] = (vf){};
        if (parts == DV)
            for (int j = first; j < last; j++) {
                const T *v = V + (int64_t)j * D + d;
                vf x[4];
                for (int c = 0; c < DV; c++) {
                    __builtin_prefetch(v + 12 * D + c * W);
                    x[c] = NAME(load)(v + c * W);
                }
                for (int i = 0; i < NQ; i++)
                    for (int c = 0; c < DV; c++) a[i][c] += rows[(int64_t)i * stride + j] * x[c];
            }
        else
            for (int j = first; j < last; j++)
                for (int i = 0; i < NQ; i++)
                    for (int c = 0; c < parts; c++)
                        a[i][c] += rows[(int64_t)i * stride + j] * NAME(load)(V + (int64_t)j * D + d + c * W);
        for (int i = 0; i < NQ; i++)
            for (int c = 0; c < parts; c++)
                for (int l = 0; l < W; l++)
                    ((T *)s->out[i])[d + c * W + l] = NAME(narrow)(a[i][c][l] * s->inverse[i]);
    }
}
static inline __attribute__((always_inline)) void NAME(block)(
    const int NQ, const int TT, int D, const float *q, const T *K, const T *V, Queries *s, float cap, int sinks,
    float *rows, int stride) {
    int last = 0, first = s->lo[0];
    for (int i = 0; i < NQ; i++) {
        last = s->len[i] > last ? s->len[i] : last;
        first = s->lo[i] < first ? s->lo[i] : first;
    }
    const int start = first / TILE * TILE, end = (last + TILE - 1) / TILE * TILE;
    int j = start;
    for (; j + TT * TILE <= end; j += TT * TILE)
        NAME(scores)(NQ, TT, D, q, K + (int64_t)j * D, rows, stride, j);
    for (; j < end; j += TILE) NAME(scores)(NQ, 1, D, q, K + (int64_t)j * D, rows, stride, j);
    for (int i = 0; i < NQ; i++) soften(s, i, rows + (int64_t)i * stride, start, end, cap, sinks);
    NAME(values)(NQ, NQ <= 6 ? 4 : 2, D, V, s, rows, stride, first, last);
}
static void NAME(many)(
    int n, int D, const float *q, const T *K, const T *V, Queries *s, float cap, int sinks, float *rows,
    int stride) {
    switch (n) {
#define CASE(N, TILES) case N: NAME(block)(N, TILES, D, q, K, V, s, cap, sinks, rows, stride); break
        CASE(1, 4);
        CASE(2, 4);
        CASE(3, 4);
        CASE(4, 2);
        CASE(6, 2);
        CASE(8, 1);
        default: NAME(block)(12, 1, D, q, K, V, s, cap, sinks, rows, stride);
#undef CASE
    }
}
/* tasks: for each of `n_tasks`, `count` tokens of one slot from token `begin` on, at positions from `position` on */
void NAME(attend)(
    int n_tasks, const int32_t *begin, const int32_t *count, const int32_t *slot, const int32_t *position, int H,
    int g, int D, float scale, int window, int chunk, float cap, const float *sinks, const float *slopes, const T *q, int64_t q_token,
    int64_t q_head, const T *K, const T *V, int64_t slot_stride, int64_t head_stride, T *out, int64_t out_token,
    float *scratch, int stride, int threads) {
    #pragma omp parallel for collapse(2) schedule(dynamic, 2) num_threads(threads) if (threads > 1 && n_tasks * H > 4)
    for (int task = 0; task < n_tasks; task++)
        for (int h = 0; h < H; h++) {
            const T *k = K + slot[task] * slot_stride + h * head_stride;
            const T *v = V + slot[task] * slot_stride + h * head_stride;
            float *rows = scratch + (int64_t)THREAD * MAXQ * stride;
            const int total = count[task] * g;
            for (int a = 0, n; a < total; a += n) {
                n = at_once(total - a);
                float scaled[MAXQ * MAXD];
                Queries s;
                for (int i = 0; i < n; i++) {
                    const int token = (a + i) / g, head = h * g + (a + i) % g;
                    const T *from = q + (begin[task] + token) * q_token + head * q_head;
                    for (int d = 0; d < D; d++) scaled[i * D + d] = NAME(wide)(from[d]) * scale;
                    s.len[i] = position[task] + token + 1;
                    s.lo[i] = window > 0 && s.len[i] > window ? s.len[i] - window : 0;
                    const int begun = chunk > 0 ? (s.len[i] - 1) / chunk * chunk : 0;
                    s.lo[i] = begun > s.lo[i] ? begun : s.lo[i];
                    s.sink[i] = sinks ? sinks[head] : 0.0f;
                    s.slope[i] = slopes ? slopes[head] : 0.0f;
                    s.out[i] = out + (begin[task] + token) * out_token + (int64_t)head * D;
                }
                NAME(many)(n, D, scaled, k, v, &s, cap, sinks != 0, rows, stride);
            }
        }
}
/* x / (1 + exp(-x)) of n numbers, each by the same steps wherever it stands */
void NAME(silu)(int64_t n, const T *x, T *out) {
    for (int64_t i = 0; i < n; i += W) {
        T kept[W] = {0};
        const int whole = i + W <= n;
        if (!whole) memcpy(kept, x + i, (n - i) * sizeof(T));
        const vf v = NAME(load)(whole ? x + i : kept), y = v / (1.0f + vexp(-v));
        if (whole) {
            NAME(put)(out + i, y);
        } else {
            NAME(put)(kept, y);
            memcpy(out + i, kept, (n - i) * sizeof(T));
        }
    }
}
/* RMS norm of n rows of D numbers: weight * (x / sqrt(mean(x^2) + eps)), rounded to T where transformers rounds */
void NAME(norm)(int n, int D, float eps, const T *x, int64_t stride, const T *w, T *out) {
    for (int i = 0; i < n; i++) {
        const T *from = x + i * stride;
        vf sum[PARTS];
        for (int v = 0; v < PARTS; v++) sum[v] = (vf){};
        for (int d = 0; d < D; d += TILE)
            for (int v = 0; v < PARTS; v++) {
                vf a = NAME(load)(from + d + v * W);
                sum[v] += a * a;
            }
        float total = 0.0f;
        for (int v = 0; v < PARTS; v++)
            for (int l = 0; l < W; l++) total += sum[v][l];
        const float by = 1.0f / sqrtf(total / D + eps);
        for (int d = 0; d < D; d += W)
            NAME(put)(out + (int64_t)i * D + d, NAME(load)(w + d) * NAME(round)(NAME(load)(from + d) * by));
    }
}
/* new keys and values of a pass into their slots; tasks as above */
void NAME(store)(
    int n_tasks, const int32_t *begin, const int32_t *count, const int32_t *slot, const int32_t *position, int H, int D,
    const T *k, const T *v, int64_t token, int64_t head, T *K, T *V, int64_t slot_stride, int64_t head_stride) {
    for (int task = 0; task < n_tasks; task++)
        for (int i = 0; i < count[task]; i++)
            for (int h = 0; h < H; h++) {
                const int p = position[task] + i;
                const int64_t at = slot[task] * slot_stride + h * head_stride;
                const int64_t from = (begin[task] + i) * token + h * head;
                T *to = K + at + (int64_t)(p / TILE) * D * TILE + p % TILE;
                for (int d = 0; d < D; d++) to[d * TILE] = k[from + d];
                memcpy(V + at + (int64_t)p * D, v + from, D * sizeof(T));
            }
}

#endif
