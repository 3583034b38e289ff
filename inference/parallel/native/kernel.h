/* The kernel of one kind of processor; `rows.c` includes it once for each. */

#ifndef KERNEL_TYPE
#define KERNEL_TYPE
typedef struct {
    void (*prepare)(const Product *, int64_t row);
    void (*multiply)(const Product *, int64_t block); /* all rows with a block */
    void (*attend)(const Attention *, int64_t number, float *room);
} Kernel;
#endif

static TARGET void NAME(prepare)(const Product *p, int64_t row) {
    if (p->weight->kind == BF16)
        widen_row(p, row);
    else
        round_row(p, row, MOST, ZERO);
}

/* A processor's own registers: GCC computes wider vectors in memory. */
typedef uint32_t NAME(Words) __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float NAME(Floats) __attribute__((vector_size(4 * LANES)));

INLINE TARGET void NAME(bf16_tile)(const Product *p, int64_t block, int64_t row, const int n) {
    int64_t groups = p->groups, stride = groups * 2;
    const uint32_t *w = (const uint32_t *)p->weight->values + block * groups * WIDTH;
    const float *x = (const float *)p->prepared + row * stride;
    NAME(Floats) sums[TILE][WIDTH / LANES] = {0};
    for (int64_t g = 0; g < groups; g++, w += WIDTH, x += 2) {
        __builtin_prefetch((const char *)w + AHEAD);
        __builtin_prefetch((const char *)w + AHEAD + 64);
        for (int v = 0; v < WIDTH / LANES; v++) {
            /* Each output's weights of two inputs; bf16 is the upper half of fp32. */
            NAME(Words) pairs = *(const NAME(Words) *)(w + v * LANES);
            NAME(Floats) low = (NAME(Floats))(pairs << 16);
            NAME(Floats) high = (NAME(Floats))(pairs & 0xffff0000);
            for (int i = 0; i < n; i++) {
                sums[i][v] += low * x[i * stride];
                sums[i][v] += high * x[i * stride + 1];
            }
        }
    }
    for (int i = 0; i < n; i++)
        store(p, block, row + i, (float *)sums[i]);
}

/* Store n rows' sums of 8-bit products; the two digits of a row are next to each other. */
INLINE TARGET void NAME(int8_store)(
    const Product *p, int64_t block, int64_t row, int64_t n, int32_t sums[][WIDTH]
) {
    const float *scale = p->weight->scale + block * WIDTH;
    const int32_t *weights = p->weight->sums + block * WIDTH;
    for (int64_t i = 0; i < n; i += p->digits) {
        int64_t number = (row + i) / p->digits;
        float y[WIDTH], unit = p->unit[number];
        for (int o = 0; o < WIDTH; o++)
            y[o] = sums[i][o] - weights[o] * ZERO;
        if (p->digits == 2)
            for (int o = 0; o < WIDTH; o++)
                y[o] += (float)(sums[i + 1][o] - weights[o] * ZERO) / (2 * MOST);
        for (int o = 0; o < WIDTH; o++)
            y[o] *= scale[o] * unit;
        store(p, block, number, y);
    }
}

INLINE TARGET void NAME(int8_tile)(const Product *p, int64_t block, int64_t row, const int n) {
    const int8_t *values = (const int8_t *)p->weight->values + block * p->groups * 4 * WIDTH;
    int32_t sums[TILE][WIDTH];
    NAME(int8_sums)(values, (const int32_t *)p->prepared + row * p->groups, p->groups, n, sums);
    NAME(int8_store)(p, block, row, n, sums);
}

INLINE TARGET void NAME(tile)(const Product *p, int64_t block, int64_t row, const int n) {
    if (p->weight->kind == BF16)
        NAME(bf16_tile)(p, block, row, n);
    else
        NAME(int8_tile)(p, block, row, n);
}

static TARGET void NAME(multiply)(const Product *p, int64_t block) {
    int64_t rows = p->rows * p->digits;
    for (int64_t row = 0; row < rows; row += TILE)
        switch (rows - row) { /* a constant count keeps its sums in registers */
        case 1: NAME(tile)(p, block, row, 1); break;
#if TILE == 8
        case 2: NAME(tile)(p, block, row, 2); break;
        case 3: NAME(tile)(p, block, row, 3); break;
        case 4: NAME(tile)(p, block, row, 4); break;
        case 5: NAME(tile)(p, block, row, 5); break;
        case 6: NAME(tile)(p, block, row, 6); break;
        case 7: NAME(tile)(p, block, row, 7); break;
#endif
        default: NAME(tile)(p, block, row, TILE);
        }
}

/* Store n rows' sums of a block. */
INLINE TARGET void NAME(finish)(
    const Product *p, int64_t block, int64_t row, int64_t n, int32_t sums[][WIDTH]
) {
    if (p->weight->kind != BF16)
        NAME(int8_store)(p, block, row, n, sums);
    else
        for (int64_t i = 0; i < n; i++) {
            float y[WIDTH];
            memcpy(y, sums[i], sizeof(y));
            store(p, block, row + i, y);
        }
}

static TARGET void NAME(attend)(const Attention *a, int64_t number, float *room) {
    if (a->is_bf16)
        attend_head(a, number, room, 1);
    else
        attend_head(a, number, room, 0);
}

#undef NAME
#undef TARGET
#undef TILE
#undef LANES
#undef MOST
#undef ZERO
