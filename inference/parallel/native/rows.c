/* Products of rows with a weight in 8 bits or bf16, read at the speed of memory; attention of single
   tokens, and RMSNorm.

   A weight lies in blocks of 32 outputs, each (groups of inputs, 32 outputs, inputs of a group), with
   4 inputs of 8 bits or 2 of bf16 in a group: a register holds several outputs, and no sum crosses
   its lanes. The groups are filled up with zeros to a multiple of 16, which fill a tile of AMX. A
   row's sums are added up in one order however many rows there are.

   It is compiled with -fopenmp but linked to no library of OpenMP: the symbols are those of the one
   that torch has loaded, and so are the threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 32 };   /* outputs of a block */
enum { AHEAD = 4096 }; /* bytes between what is read and what is asked for */
enum { AT_ONCE = 128 }; /* rows that stay in the second cache while the weights are read */
enum kind { BF16, INT8, INT8_TWO_DIGITS };

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const void *values;
    const float *scale;  /* of each output, 8 bits */
    const int32_t *sums; /* of each output's weights, 8 bits */
    const float *bias;   /* of each output, or NULL */
    int64_t inputs, outputs;
    int64_t kind;
} Weight;

typedef struct {
    const Weight *weight;
    const void *x, *residual;
    void *y;
    int64_t rows;
    int is_bf16;    /* x, residual and y; else they are fp32 */
    int64_t groups; /* of inputs */
    int64_t digits; /* of a row's numbers of 8 bits */
    /* The rows as kernels read them: (rows, inputs) fp32 for bf16, else (rows * digits, inputs) of
       8 bits, whose first digit counts `unit` (rows). */
    void *prepared;
    float *unit;
} Product;

/* Attention of a token of each sequence over what the cache has of it. */
typedef struct {
    const void *query, *keys, *values; /* (sequences, heads, size), see the strides */
    void *out;                         /* (sequences, heads * size) */
    const int64_t *first, *stop;       /* of each sequence: its cached tokens that are seen */
    int64_t heads, key_heads, size;
    int64_t query_stride; /* numbers from one sequence's queries to the next one's */
    int64_t slot_stride, head_stride; /* the same of keys and values, and from head to head */
    float scale;
    int is_bf16;
} Attention;

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

INLINE float get(const void *x, int64_t at, int is_bf16) {
    return is_bf16 ? from_bits((uint32_t)((const uint16_t *)x)[at] << 16) : ((const float *)x)[at];
}

INLINE void put(void *y, int64_t at, float value, int is_bf16) {
    uint32_t bits = to_bits(value), is_nan = (bits & 0x7fffffff) > 0x7f800000;
    uint32_t rounded = is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    if (is_bf16)
        ((uint16_t *)y)[at] = rounded >> 16;
    else
        ((float *)y)[at] = value;
}

INLINE void widen_row(const Product *p, int64_t row) {
    int64_t inputs = p->weight->inputs;
    float *to = (float *)p->prepared + row * p->groups * 2;
    for (int64_t i = 0; i < inputs; i++)
        to[i] = get(p->x, row * inputs + i, p->is_bf16);
    memset(to + inputs, 0, (p->groups * 2 - inputs) * sizeof(*to));
}

/* Divide a row by its largest value and round it to whole numbers up to `most`, with two digits its
   remainders, too. They are stored plus `zero`. */
INLINE void round_row(const Product *p, int64_t row, int most, int zero) {
    int64_t inputs = p->weight->inputs, first = row * inputs, size = p->groups * 4;
    uint32_t largest = 0; /* magnitude, as bits: a NaN is above all numbers */
    for (int64_t i = 0; i < inputs; i++) {
        uint32_t bits = to_bits(get(p->x, first + i, p->is_bf16)) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float factor = largest ? most / from_bits(largest) : 0;
    uint8_t *digit = (uint8_t *)p->prepared + row * p->digits * size;
    p->unit[row] = from_bits(largest) / most;
    for (int64_t i = 0; i < inputs; i++)
        digit[i] = (int)rintf(get(p->x, first + i, p->is_bf16) * factor) + zero;
    memset(digit + inputs, zero, size - inputs);
    if (p->digits == 1)
        return;
    digit += size;
    for (int64_t i = 0; i < inputs; i++) {
        float whole = get(p->x, first + i, p->is_bf16) * factor;
        digit[i] = (int)rintf((whole - rintf(whole)) * (2 * most)) + zero;
    }
    memset(digit + inputs, zero, size - inputs);
}

/* Store `count` outputs plus the residual from number `at`; constant arguments give loops of whole
   registers. */
INLINE void store_some(const Product *p, int64_t at, float *y, int64_t count, const int is_bf16) {
    if (p->residual)
        for (int64_t o = 0; o < count; o++)
            y[o] += get(p->residual, at + o, is_bf16);
    for (int64_t o = 0; o < count; o++)
        put(p->y, at + o, y[o], is_bf16);
}

/* Store a row's outputs of a block, plus bias and residual. */
INLINE void store(const Product *p, int64_t block, int64_t row, float *y) {
    const Weight *w = p->weight;
    int64_t first = block * WIDTH, at = row * w->outputs + first, count = w->outputs - first;
    if (w->bias)
        for (int o = 0; o < WIDTH; o++)
            y[o] += w->bias[first + o];
    if (count < WIDTH)
        store_some(p, at, y, count, p->is_bf16);
    else if (p->is_bf16)
        store_some(p, at, y, WIDTH, 1);
    else
        store_some(p, at, y, WIDTH, 0);
}

/* e to a power of at most 0; the relative error is below 1e-6 where the result is above 1e-3. */
INLINE float exponential(float x) {
    float turns = (x < -87 ? -87 : x) * 1.44269504f, whole = rintf(turns);
    float f = (turns - whole) * 0.693147181f;
    float y = 1 + f * (1 + f * (1 / 2.f + f * (1 / 6.f + f * (1 / 24.f + f * (1 / 120.f + f / 720.f)))));
    return y * from_bits((uint32_t)((int)whole + 127) << 23);
}

/* Attend for one head of one sequence; `room` holds its weights and its output. */
INLINE void attend_head(const Attention *a, int64_t number, float *room, int is_bf16) {
    int64_t sequence = number / a->heads, head = number % a->heads, size = a->size;
    int64_t first = a->first[sequence], count = a->stop[sequence] - first;
    int64_t query = sequence * a->query_stride + head * size;
    int64_t start = sequence * a->slot_stride + first * size +
                    head / (a->heads / a->key_heads) * a->head_stride;
    float *weights = room, *out = room + count, most = -INFINITY, total = 0;
    for (int64_t s = 0; s < count; s++) {
        float score = 0;
#pragma omp simd reduction(+ : score)
        for (int64_t d = 0; d < size; d++)
            score += get(a->query, query + d, is_bf16) * get(a->keys, start + s * size + d, is_bf16);
        weights[s] = score * a->scale;
        most = weights[s] > most ? weights[s] : most;
    }
#pragma omp simd reduction(+ : total)
    for (int64_t s = 0; s < count; s++) {
        weights[s] = exponential(weights[s] - most);
        total += weights[s];
    }
    memset(out, 0, size * sizeof(*out));
    for (int64_t s = 0; s < count; s++)
        for (int64_t d = 0; d < size; d++)
            out[d] += weights[s] * get(a->values, start + s * size + d, is_bf16);
    for (int64_t d = 0; d < size; d++)
        put(a->out, number * size + d, out[d] / total, is_bf16);
}

/* What a kernel needs of a kind of processor: `int8_sums`, n rows' sums with a block, and
   LANES: numbers of 32 bits in a register;
   TILE: the most rows whose sums its registers hold, 2 or 8;
   MOST, ZERO: the largest whole number of a row, and what is added to it. */
#ifdef __x86_64__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))
#define LANES 16
#define TILE 8
#define MOST 127
#define ZERO 128
INLINE TARGET void avx512_int8_sums(
    const int8_t *w, const int32_t *x, int64_t groups, const int n, int32_t out[][WIDTH]
) {
    __m512i sums[TILE][2];
    for (int i = 0; i < n; i++)
        sums[i][0] = sums[i][1] = _mm512_setzero_si512();
    for (int64_t g = 0; g < groups; g++, w += 4 * WIDTH, x++) {
        _mm_prefetch(w + AHEAD, _MM_HINT_T0);
        _mm_prefetch(w + AHEAD + 64, _MM_HINT_T0);
        __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + 64);
        for (int i = 0; i < n; i++) {
            __m512i four = _mm512_set1_epi32(x[i * groups]);
            sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], four, first);
            sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], four, second);
        }
    }
    for (int i = 0; i < n; i++)
        for (int v = 0; v < 2; v++)
            _mm512_storeu_si512(out[i] + 16 * v, sums[i][v]);
}
#include "kernel.h"

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define TILE 2
#define MOST 63 /* sums of two products are kept in 16 bits, which hold those of 7 bits by 8 */
#define ZERO 64
INLINE TARGET void avx2_int8_sums(
    const int8_t *w, const int32_t *x, int64_t groups, const int n, int32_t out[][WIDTH]
) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[TILE][4];
    for (int i = 0; i < n; i++)
        for (int v = 0; v < 4; v++)
            sums[i][v] = _mm256_setzero_si256();
    for (int64_t g = 0; g < groups; g++, w += 4 * WIDTH, x++) {
        _mm_prefetch(w + AHEAD, _MM_HINT_T0);
        _mm_prefetch(w + AHEAD + 64, _MM_HINT_T0);
        for (int v = 0; v < 4; v++) {
            __m256i weights = _mm256_loadu_si256((const __m256i *)(w + 32 * v));
            for (int i = 0; i < n; i++) {
                __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi32(x[i * groups]), weights);
                sums[i][v] = _mm256_add_epi32(sums[i][v], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    for (int i = 0; i < n; i++)
        for (int v = 0; v < 4; v++)
            _mm256_storeu_si256((__m256i *)(out[i] + 8 * v), sums[i][v]);
}
#include "kernel.h"

#if __GNUC__ >= 11 || defined(__clang__)
#define AMX                                                                                            \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,amx-tile,amx-bf16,"  \
                          "amx-int8")))
enum { TILE_ROWS = 16 }; /* of 64 bytes */

AMX static void amx_prepare(const Product *p, int64_t row) {
    if (p->weight->kind == BF16 && p->is_bf16) {
        int64_t inputs = p->weight->inputs, size = p->groups * 2;
        uint16_t *to = (uint16_t *)p->prepared + row * size;
        memcpy(to, (const uint16_t *)p->x + row * inputs, inputs * sizeof(*to));
        memset(to + inputs, 0, (size - inputs) * sizeof(*to));
    } else
        avx512_prepare(p, row);
}

/* Two tiles of rows times two of outputs; bytes beyond the last row are read and not used. */
AMX static void amx_multiply(const Product *p, int64_t block) {
    const struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    int64_t rows = p->rows * p->digits, stride = p->groups * 4;
    const char *weights = (const char *)p->weight->values + block * p->groups * 4 * WIDTH;
    int is_bf16 = p->weight->kind == BF16;
    if (is_bf16 && !p->is_bf16) { /* tiles would round fp32 */
        avx512_multiply(p, block);
        return;
    }
    _tile_loadconfig(&shapes);
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
        const char *x = (const char *)p->prepared + row * stride;
        int64_t count = rows - row < 2 * TILE_ROWS ? rows - row : 2 * TILE_ROWS;
        int32_t sums[2 * TILE_ROWS][WIDTH];
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t at = 0; at < stride; at += 64) {
            const char *w = weights + at * WIDTH;
            for (int line = 0; row == 0 && line < WIDTH * 64; line += 64)
                _mm_prefetch(w + AHEAD + line, _MM_HINT_T0);
            _tile_loadd(6, w, 4 * WIDTH);
            _tile_loadd(7, w + 64, 4 * WIDTH);
            _tile_loadd(4, x + at, stride);
            if (is_bf16) {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            } else {
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 4, 7);
            }
            if (count <= TILE_ROWS)
                continue;
            _tile_loadd(5, x + TILE_ROWS * stride + at, stride);
            if (is_bf16) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            } else {
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
        }
        _tile_stored(0, sums, 4 * WIDTH);
        _tile_stored(1, (char *)sums + 64, 4 * WIDTH);
        _tile_stored(2, sums + TILE_ROWS, 4 * WIDTH);
        _tile_stored(3, (char *)(sums + TILE_ROWS) + 64, 4 * WIDTH);
        avx512_finish(p, block, row, count, sums);
    }
    _tile_release();
}
#endif

static const Kernel kernels[] = {
    {avx2_prepare, avx2_multiply, avx2_attend},
    {avx512_prepare, avx512_multiply, avx512_attend},
#ifdef AMX
    {amx_prepare, amx_multiply, avx512_attend},
#endif
};
static const char *const levels[] = { /* the best comes last */
    "avx2", "avx512",
#ifdef AMX
    "amx",
#endif
};

static int has_level(int level) {
    if (level == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int has_avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    if (level == 1 || !has_avx512)
        return has_avx512;
#ifdef AMX
    /* Linux gives a process the tiles' state (18) when it asks for it (ARCH_REQ_XCOMP_PERM). */
    return __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
           syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#endif
    return 0;
}
#endif

#ifdef __aarch64__
#include <arm_neon.h>
#include <sys/auxv.h>

#define NAME(x) dotprod_##x
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define LANES 4
#define TILE 2
#define MOST 127
#define ZERO 0
INLINE TARGET void dotprod_int8_sums(
    const int8_t *w, const int32_t *x, int64_t groups, const int n, int32_t out[][WIDTH]
) {
    int32x4_t sums[TILE][8];
    for (int i = 0; i < n; i++)
        for (int v = 0; v < 8; v++)
            sums[i][v] = vdupq_n_s32(0);
    for (int64_t g = 0; g < groups; g++, w += 4 * WIDTH, x++) {
        __builtin_prefetch(w + AHEAD);
        __builtin_prefetch(w + AHEAD + 64);
        for (int v = 0; v < 8; v++)
            for (int i = 0; i < n; i++) {
                int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x[i * groups]));
                sums[i][v] = vdotq_s32(sums[i][v], vld1q_s8(w + 16 * v), four);
            }
    }
    for (int i = 0; i < n; i++)
        for (int v = 0; v < 8; v++)
            vst1q_s32(out[i] + 4 * v, sums[i][v]);
}
#include "kernel.h"

static const Kernel kernels[] = {{dotprod_prepare, dotprod_multiply, dotprod_attend}};
static const char *const levels[] = {"dotprod"};

static int has_level(int level) {
    (void)level;
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
}
#endif

/* The checksum of what this was compiled from. */
EXPORT uint32_t slipway_source(void) {
    return SOURCE;
}

/* Return the number of the instructions called `name`, with "auto" of the best, or -1 if the
   processor lacks them. */
EXPORT int slipway_level(const char *name) {
    for (int level = sizeof(levels) / sizeof(*levels) - 1; level >= 0; level--)
        if ((!strcmp(name, "auto") || !strcmp(name, levels[level])) && has_level(level))
            return level;
    return -1;
}

/* Compute y = x W + bias + residual, (rows, outputs); return 0, or -1 if there is no memory. */
EXPORT int slipway_multiply(
    const Weight *w, const void *x, void *y, const void *residual, int64_t rows, int is_bf16,
    int level, int threads
) {
    int64_t group = w->kind == BF16 ? 2 : 4, groups = (w->inputs + 16 * group - 1) / group / 16 * 16;
    int64_t digits = w->kind == INT8_TWO_DIGITS ? 2 : 1;
    int64_t blocks = (w->outputs + WIDTH - 1) / WIDTH, block_bytes = groups * 4 * WIDTH;
    int64_t row_bytes = groups * digits * (w->kind == BF16 ? 8 : 4);
    int64_t size = is_bf16 ? 2 : 4, most = rows < AT_ONCE ? rows : AT_ONCE;
    /* Kernels may read whole tiles, up to 31 rows more. */
    char *room = malloc((most + 31) * row_bytes + most * sizeof(float));
    if (!room)
        return -1;
    float *unit = (float *)(room + (most + 31) * row_bytes);
    /* A thread that is slowed down takes fewer pieces. */
    int64_t piece = 1 + (64 << 10) / block_bytes;
    for (int64_t first = 0; first < rows; first += AT_ONCE) {
        int64_t from = first * w->inputs * size, to = first * w->outputs * size;
        int64_t count = rows - first < AT_ONCE ? rows - first : AT_ONCE;
        const char *added = residual ? (const char *)residual + to : NULL;
        Product p = {
            w, (const char *)x + from, added, (char *)y + to, count, is_bf16, groups, digits, room, unit,
        };
#pragma omp parallel num_threads(threads)
        {
#pragma omp for
            for (int64_t row = 0; row < count; row++)
                kernels[level].prepare(&p, row);
#pragma omp for schedule(dynamic, piece) nowait
            for (int64_t block = 0; block < blocks; block++)
                kernels[level].multiply(&p, block);
        }
    }
    free(room);
    return 0;
}

/* Attend for `sequences` single tokens, each of which sees at most `longest` others; return 0, or -1
   if there is no memory. */
EXPORT int slipway_attend(
    const void *query, const void *keys, const void *values, void *out, const int64_t *spans,
    int64_t sequences, int64_t heads, int64_t key_heads, int64_t size, int64_t query_stride,
    int64_t slot_stride, int64_t head_stride, int64_t longest, float scale, int is_bf16, int level,
    int threads
) {
    Attention a = {
        query, keys, values, out, spans, spans + sequences, heads, key_heads, size,
        query_stride, slot_stride, head_stride, scale, is_bf16,
    };
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *room = malloc((longest + size) * sizeof(float));
        if (!room)
#pragma omp atomic write
            failed = -1;
#pragma omp for schedule(static) nowait
        for (int64_t number = 0; number < sequences * heads; number++)
            if (room)
                kernels[level].attend(&a, number, room);
        free(room);
    }
    return failed;
}

/* Compute the RMSNorm of each row (rows, size): x / sqrt(mean(x^2) + eps) * scale. */
EXPORT void slipway_rms_norm(
    const void *x, const void *scale, void *y, int64_t rows, int64_t size, float eps, int is_bf16,
    int scale_is_bf16, int threads
) {
#pragma omp parallel for num_threads(rows < threads ? rows : threads) if (rows > 16)
    for (int64_t row = 0; row < rows; row++) {
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < size; i++) {
            float value = get(x, row * size + i, is_bf16);
            total += value * value;
        }
        float factor = 1 / sqrtf(total / size + eps);
        for (int64_t i = 0; i < size; i++) {
            float value = get(x, row * size + i, is_bf16) * factor;
            put(y, row * size + i, value * get(scale, i, scale_is_bf16), is_bf16);
        }
    }
}
