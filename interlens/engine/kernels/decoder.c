/* A whole decoder layer of Llama's form: the functions of attention.c and layers.c, called one after the other on the
 * same numbers as when the modules call them, so with the same bits.
 */
#ifndef T
#include "vectors.h"

typedef struct {
    int32_t width, inner, queries, heads, head; /* numbers in a token, in the MLP; heads of queries and of keys; in a head */
    int32_t window, chunk;
    float scale, eps, after_eps, query_eps, key_eps;
    const void *norm, *after, *query_norm, *key_norm;                      /* weights; the norms of heads may be 0 */
    const void *panels[7], *bias[7]; /* query, key, value, output, gate, up, down */
} Block;

#define DECLARE(T, x)                                                                                                     \
    void norm_##x(int n, int D, float eps, const T *in, int64_t stride, const T *w, T *out);                              \
    void silu_##x(int64_t n, const T *in, const T *by, T *out);                                                           \
    void linear_##x(int M, int N, int K, const T *in, int64_t row, const T *w, const T *bias, T *out, int threads);       \
    void rotate_##x(int n_tasks, const int32_t *begin, const int32_t *count, const int32_t *slot, const int32_t *position, \
                    int Hq, int H, int D, int R, const T *q, const T *k, const T *v, const T *cosine, const T *sine,      \
                    T *out, T *K, T *V, int64_t slot_stride, int64_t head_stride);                                        \
    void attend_##x(int n_tasks, const int32_t *begin, const int32_t *count, const int32_t *slot, const int32_t *position, \
                    int H, int g, int D, float scale, int window, int chunk, float cap, const float *sinks,               \
                    const float *slopes, const T *q, int64_t q_token, int64_t q_head, const T *K, const T *V,             \
                    int64_t slot_stride, int64_t head_stride, T *out, int64_t out_token, float *scratch, int stride,      \
                    int threads);
DECLARE(float, f32)
DECLARE(bf16, bf16)

#define THIS "decoder.c"
#include "both.h"

#else /* the rest once per type T */

static void NAME(add)(int64_t n, const T *a, const T *b, T *out) {
    int64_t i = 0;
    for (; i + W <= n; i += W) NAME(put)(out + i, NAME(load)(a + i) + NAME(load)(b + i));
    for (; i < n; i++) out[i] = NAME(narrow)(NAME(wide)(a[i]) + NAME(wide)(b[i]));
}
static void NAME(product)(const Block *b, int which, int M, int N, int K, const T *in, T *out, int threads) {
    NAME(linear)(M, N, K, in, K, b->panels[which], b->bias[which], out, threads);
}
/* `work` holds M * (2 width + queries * head * 2 + 2 heads * head + 2 inner) numbers */
void NAME(layer)(
    const Block *b, int n_tasks, const int32_t *begin, const int32_t *count, const int32_t *slot, const int32_t *position,
    int M, int R, const T *x, const T *cosine, const T *sine, T *K, T *V, int64_t slot_stride, int64_t head_stride, T *out,
    T *work, float *scratch, int stride, int threads) {
    const int D = b->width, d = b->head, wide = b->queries * d, narrow = b->heads * d;
    T *h = work, *sum = h + (int64_t)M * D, *q = sum + (int64_t)M * D, *turned = q + (int64_t)M * wide;
    T *k = turned + (int64_t)M * wide, *v = k + (int64_t)M * narrow;
    T *gate = v + (int64_t)M * narrow, *up = gate + (int64_t)M * b->inner;
    NAME(norm)(M, D, b->eps, x, D, b->norm, h);
    NAME(product)(b, 0, M, wide, D, h, q, threads);
    NAME(product)(b, 1, M, narrow, D, h, k, threads);
    NAME(product)(b, 2, M, narrow, D, h, v, threads);
    if (b->query_norm) NAME(norm)(M * b->queries, d, b->query_eps, q, d, b->query_norm, q);
    if (b->key_norm) NAME(norm)(M * b->heads, d, b->key_eps, k, d, b->key_norm, k);
    NAME(rotate)(n_tasks, begin, count, slot, position, b->queries, b->heads, d, R, q, k, v, cosine, sine, turned, K, V,
                 slot_stride, head_stride);
    NAME(attend)(n_tasks, begin, count, slot, position, b->heads, b->queries / b->heads, d, b->scale, b->window, b->chunk,
                 0.0f, 0, 0, turned, wide, d, K, V, slot_stride, head_stride, q, wide, scratch, stride, threads);
    NAME(product)(b, 3, M, D, wide, q, h, threads);
    NAME(add)((int64_t)M * D, x, h, sum);
    NAME(norm)(M, D, b->after_eps, sum, D, b->after, h);
    NAME(product)(b, 4, M, b->inner, D, h, gate, threads);
    NAME(product)(b, 5, M, b->inner, D, h, up, threads);
    NAME(silu)((int64_t)M * b->inner, gate, up, gate);
    NAME(product)(b, 6, M, D, b->inner, gate, h, threads);
    NAME(add)((int64_t)M * D, sum, h, out);
}

#endif
