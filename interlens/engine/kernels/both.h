/* The rest of THIS file once per type: T is the type, NAME(x) gives x_f32 and x_bf16. */
#define T float
#define NAME(x) x##_f32
#include THIS
#undef T
#undef NAME
#define T bf16
#define NAME(x) x##_bf16
#include THIS
