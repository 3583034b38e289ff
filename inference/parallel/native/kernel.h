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

INLINE TARGET void NAME(bf16_tile)(const Product *p, int64_t block, int64_t row, const int n) {
    int64_t groups = p->groups, stride = groups * 2;
    const uint32_t *w = (const uint32_t *)p->weight->values + block * groups * WIDTH;
    const float *x = (const float *)p->prepared + row * stride;
    Floats sums[TILE][2] = {0};
    for (int64_t g = 0; g < groups; g++, w += WIDTH, x += 2) {
        __builtin_prefetch((const char *)w + AHEAD);
        __builtin_prefetch((const char *)w + AHEAD + 64);
        Words first = *(const Words *)w, second = *(const Words *)(w + 16);
        /* Of each output the weights of two inputs; bf16 is the upper half of fp32. */
        Floats first0 = (Floats)(first << 16), first1 = (Floats)(first & 0xffff0000);
        Floats second0 = (Floats)(second << 16), second1 = (Floats)(second & 0xffff0000);
        for (int i = 0; i < n; i++) {
            float x0 = x[i * stride], x1 = x[i * stride + 1];
            sums[i][0] += first0 * x0;
            sums[i][1] += second0 * x0;
            sums[i][0] += first1 * x1;
            sums[i][1] += second1 * x1;
        }
    }
    for (int i = 0; i < n; i++)
        store(p, block, row + i, (float *)sums[i]);
}

/* Of two digits a row has both next to each other. */
INLINE TARGET void NAME(int8_tile)(const Product *p, int64_t block, int64_t row, const int n) {
    const Weight *w = p->weight;
    const int8_t *values = (const int8_t *)w->values + block * p->groups * 4 * WIDTH;
    const float *scale = w->scale + block * WIDTH;
    const int32_t *weights = w->sums + block * WIDTH;
    int32_t sums[TILE][WIDTH];
    NAME(int8_sums)(values, (const int32_t *)p->prepared + row * p->groups, p->groups, n, sums);
    for (int i = 0; i < n; i += p->digits) {
        int64_t number = (row + i) / p->digits;
        float y[WIDTH], unit = p->unit[number];
        for (int o = 0; o < WIDTH; o++)
            y[o] = sums[i][o] - weights[o] * ZERO;
        if (p->digits == 2)
            for (int o = 0; o < WIDTH; o++)
                y[o] += (float)(sums[(i + 1) % TILE][o] - weights[o] * ZERO) / (2 * MOST);
        for (int o = 0; o < WIDTH; o++)
            y[o] *= scale[o] * unit;
        store(p, block, number, y);
    }
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

static TARGET void NAME(attend)(const Attention *a, int64_t number, float *room) {
    if (a->is_bf16)
        attend_head(a, number, room, 1);
    else
        attend_head(a, number, room, 0);
}

#undef NAME
#undef TARGET
#undef TILE
#undef MOST
#undef ZERO
