/* Exact attention on the CPU: a query's output is a function of its own vector and of keys and values lo..len-1.
 *
 * Every query goes through one fixed order of operations, whatever is computed beside it: scores are summed over the
 * head's width in order, the softmax over lanes of 16 positions, values over positions in order. Queries that share
 * keys are computed side by side in registers; that changes no query's own order. Sums are fp32.
 *
 * Keys lie in tiles of 16 positions, transposed: [slot][kv head][position / 16][d][16]; values [slot][kv head][position][d].
 */
#ifndef T
#include "vectors.h"

#define MAXQ 12 /* queries side by side */
#define MAXD 256

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

#define THIS "attention.c"
#include "both.h"

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
                    __builtin_prefetch(v + 24 * D + c * W);
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
/* Rotary embedding, and new keys and values into their slots: queries `[tokens][Hq][D]` turned into `out`, keys and
 * values `[tokens][H][D]`, cosines and sines `[tokens][R]`. The first R numbers of a head turn, d with d + R/2; each product
 * and each sum is rounded to T, as transformers rounds them. Tasks as above.
 */
static inline void NAME(turn)(int D, int R, const T *x, const T *cosine, const T *sine, T *out) {
    const int half = R / 2;
    int d = 0;
    for (; d + W <= half; d += W) {
        const vf a = NAME(load)(x + d), b = NAME(load)(x + half + d);
        NAME(put)(out + d, NAME(round)(a * NAME(load)(cosine + d)) - NAME(round)(b * NAME(load)(sine + d)));
        NAME(put)(out + half + d,
                  NAME(round)(b * NAME(load)(cosine + half + d)) + NAME(round)(a * NAME(load)(sine + half + d)));
    }
    for (; d < half; d++) {
        const float a = NAME(wide)(x[d]), b = NAME(wide)(x[half + d]);
        const T ac = NAME(narrow)(a * NAME(wide)(cosine[d])), bs = NAME(narrow)(b * NAME(wide)(sine[d]));
        const T bc = NAME(narrow)(b * NAME(wide)(cosine[half + d])), as = NAME(narrow)(a * NAME(wide)(sine[half + d]));
        out[d] = NAME(narrow)(NAME(wide)(ac) - NAME(wide)(bs));
        out[half + d] = NAME(narrow)(NAME(wide)(bc) + NAME(wide)(as));
    }
    memcpy(out + R, x + R, (D - R) * sizeof(T));
}
void NAME(rotate)(
    int n_tasks, const int32_t *begin, const int32_t *count, const int32_t *slot, const int32_t *position, int Hq, int H,
    int D, int R, const T *q, const T *k, const T *v, const T *cosine, const T *sine, T *out, T *K, T *V,
    int64_t slot_stride, int64_t head_stride) {
    for (int task = 0; task < n_tasks; task++)
        for (int i = 0; i < count[task]; i++) {
            const int64_t t = begin[task] + i;
            const int p = position[task] + i;
            for (int h = 0; h < Hq; h++)
                NAME(turn)(D, R, q + (t * Hq + h) * D, cosine + t * R, sine + t * R, out + (t * Hq + h) * D);
            for (int h = 0; h < H; h++) {
                const int64_t at = slot[task] * slot_stride + h * head_stride;
                T key[MAXD];
                NAME(turn)(D, R, k + (t * H + h) * D, cosine + t * R, sine + t * R, key);
                T *to = K + at + (int64_t)(p / TILE) * D * TILE + p % TILE;
                for (int d = 0; d < D; d++) to[d * TILE] = key[d];
                memcpy(V + at + (int64_t)p * D, v + (t * H + h) * D, D * sizeof(T));
            }
        }
}

#endif
