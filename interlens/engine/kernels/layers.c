/* Linear layers, norms, activations, draws and digests on the CPU: a row's numbers come from one fixed order of operations,
 * whatever the number of rows and threads.
 */
#ifndef T
#include "vectors.h"

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
                    _tile_loadd(6, a + s * 32, a_row);
                    _tile_dpbf16ps(0, 6, 4);
                    _tile_loadd(5, step + 512, 64);
                    _tile_dpbf16ps(1, 6, 5);
                    if (i == 0)
                        for (int line = 0; line < 32; line++) __builtin_prefetch(step + AHEAD + line * 32, 0, 2);
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

#define THIS "layers.c"
#include "both.h"

#else /* the rest once per type T */

/* x / (1 + exp(-x)) of n numbers, rounded to T, times `by` if there is one; each by the same steps wherever it stands */
static inline vf NAME(gate)(const T *x, const T *by) {
    const vf v = NAME(load)(x), y = v / (1.0f + vexp(-v));
    return by ? NAME(round)(y) * NAME(load)(by) : y;
}
void NAME(silu)(int64_t n, const T *x, const T *by, T *out) {
    int64_t i = 0;
    for (; i + W <= n; i += W) NAME(put)(out + i, NAME(gate)(x + i, by ? by + i : 0));
    if (i == n) return;
    T last[W] = {0}, other[W] = {0};
    memcpy(last, x + i, (n - i) * sizeof(T));
    if (by) memcpy(other, by + i, (n - i) * sizeof(T));
    NAME(put)(last, NAME(gate)(last, by ? other : 0));
    memcpy(out + i, last, (n - i) * sizeof(T));
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

#endif
