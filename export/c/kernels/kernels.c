/* == gemm_rows: sums[j] = sum over k of a[k * a_step] * b[k * b_step + j * b_next], for j < count */
static void gemm_rows(float *sums, int count, const float *a, const float *b, int terms, int a_step, int b_step,
                      int b_next) {
    for (int j = 0; j < count; j++) sums[j] = 0.0f;
    if (TILE > 1 && b_next == 1 && count == TILE) {
        for (int k = 0; k < terms; k++) {
            const float factor = a[k * a_step];
            for (int j = 0; j < TILE; j++) sums[j] += factor * b[k * b_step + j];
        }
        return;
    }
    for (int j = 0; j < count; j++) {
        const float *column = b + j * b_next;
        float sum = 0.0f;
        for (int k = 0; k < terms; k++) sum += a[k * a_step] * column[k * b_step];
        sums[j] = sum;
    }
}

/* == position: a row-major index, taken apart for a shape [*, d1, d2, d3] */
static void position(int at, const int *shape, int *where) {
    where[3] = at % shape[3];
    at /= shape[3];
    where[2] = at % shape[2];
    at /= shape[2];
    where[1] = at % shape[1];
    where[0] = at / shape[1];
}

static void next_position(const int *shape, int *where) {
    if (++where[3] < shape[3]) return;
    where[3] = 0;
    if (++where[2] < shape[2]) return;
    where[2] = 0;
    if (++where[1] < shape[1]) return;
    where[1] = 0;
    where[0]++;
}

/* p of a convolution: channels, height and width of x; channels, height and width of y; height and width of the kernel;
   strides; dilations; pads at the beginning; groups */

/* == stored: element i of integers of type 0: int8, 1: uint8, 2: int4, 3: uint4, two per byte and low bits first */
static int stored(const void *w, int i, int type) {
    if (type == 0) return ((const signed char *)w)[i];
    const int byte = ((const unsigned char *)w)[type == 1 ? i : i / 2];
    if (type == 1) return byte;
    const int half = (byte >> (i % 2 * 4)) & 15;
    return type == 2 ? (half ^ 8) - 8 : half;
}

/* == weight_at (stored): element i of floats (type -1), or of integers less their zero point */
static float weight_at(const void *w, int i, int type, int zero) {
    return type < 0 ? ((const float *)w)[i] : (float)(stored(w, i, type) - zero);
}

/* == conv_sums (position, stored, weight_at): elements of a convolution from index `at` on; q of integer weights has
   their type, and the steps from one output channel to the next in scale and zero */
static void conv_sums(float *sums, int count, const float *x, const void *w, int type, const float *scale,
                      const int32_t *zero, int at, const int *p, const int *q) {
    const int channels = p[0], height = p[1], width = p[2], kh = p[6], kw = p[7];
    const int in_group = channels / p[14], out_group = p[3] / p[14];
    const int shape[4] = {0, p[3], p[4], p[5]};
    int o[4];
    position(at, shape, o);
    for (int t = 0; t < count; t++, next_position(shape, o)) {
        const float *image = x + (o[0] * channels + o[1] / out_group * in_group) * height * width;
        const int kernel = o[1] * in_group * kh * kw, point = type < 0 ? 0 : zero[o[1] * q[2]];
        const int top = o[2] * p[8] - p[12], left = o[3] * p[9] - p[13];
        float sum = 0.0f;
        for (int c = 0; c < in_group; c++)
            for (int u = 0; u < kh; u++) {
                const int row = top + u * p[10];
                if (row < 0 || row >= height) continue;
                for (int v = 0; v < kw; v++) {
                    const int column = left + v * p[11];
                    if (column < 0 || column >= width) continue;
                    sum += image[(c * height + row) * width + column] *
                           weight_at(w, kernel + (c * kh + u) * kw + v, type, point);
                }
            }
        sums[t] = type < 0 ? sum : sum * scale[o[1] * q[1]];
    }
}

/* == conv_rows (position, stored, weight_at, conv_sums): conv_sums with floats as weights */
static void conv_rows(float *sums, int count, const float *x, const float *w, int at, const int *p) {
    conv_sums(sums, count, x, w, -1, NULL, NULL, at, p, NULL);
}

/* == conv_rows_stored (position, stored, weight_at, conv_sums): conv_sums with integers as weights */
static void conv_rows_stored(float *sums, int count, const float *x, const void *w, const float *scale,
                             const int32_t *zero, int at, const int *p, const int *q) {
    conv_sums(sums, count, x, w, q[0], scale, zero, at, p, q);
}

/* == conv_input_sums (position, stored, weight_at): elements of the gradient of a convolution's input, or of a
   transposed convolution; q as in conv_sums */
static void conv_input_sums(float *sums, int count, const float *dy, const void *w, int type, const float *scale,
                            const int32_t *zero, int at, const int *p, const int *q) {
    const int kh = p[6], kw = p[7], out_height = p[4], out_width = p[5];
    const int in_group = p[0] / p[14], out_group = p[3] / p[14];
    const int shape[4] = {0, p[0], p[1], p[2]};
    int i[4];
    position(at, shape, i);
    for (int t = 0; t < count; t++, next_position(shape, i)) {
        const int group = i[1] / in_group, c = i[1] % in_group;
        float sum = 0.0f;
        for (int m = group * out_group; m < (group + 1) * out_group; m++) {
            const int point = type < 0 ? 0 : zero[m * q[2]];
            float part = 0.0f;
            for (int u = 0; u < kh; u++) {
                const int down = i[2] + p[12] - u * p[10], row = down / p[8];
                if (down < 0 || down % p[8] || row >= out_height) continue;
                for (int v = 0; v < kw; v++) {
                    const int right = i[3] + p[13] - v * p[11], column = right / p[9];
                    if (right < 0 || right % p[9] || column >= out_width) continue;
                    part += dy[((i[0] * p[3] + m) * out_height + row) * out_width + column] *
                            weight_at(w, ((m * in_group + c) * kh + u) * kw + v, type, point);
                }
            }
            sum += type < 0 ? part : part * scale[m * q[1]];
        }
        sums[t] = sum;
    }
}

/* == conv_input_rows (position, stored, weight_at, conv_input_sums): conv_input_sums with floats as weights */
static void conv_input_rows(float *sums, int count, const float *dy, const float *w, int at, const int *p) {
    conv_input_sums(sums, count, dy, w, -1, NULL, NULL, at, p, NULL);
}

/* == conv_input_rows_stored (position, stored, weight_at, conv_input_sums): conv_input_sums with integers as weights */
static void conv_input_rows_stored(float *sums, int count, const float *dy, const void *w, const float *scale,
                                   const int32_t *zero, int at, const int *p, const int *q) {
    conv_input_sums(sums, count, dy, w, q[0], scale, zero, at, p, q);
}

/* == conv_weight_rows (position): elements of the gradient of a convolution's weights; the batch size comes last */
static void conv_weight_rows(float *sums, int count, const float *x, const float *dy, int at, const int *p) {
    const int channels = p[0], height = p[1], width = p[2], out_height = p[4], out_width = p[5], batch = p[15];
    const int in_group = channels / p[14], out_group = p[3] / p[14];
    const int shape[4] = {0, in_group, p[6], p[7]};
    int w[4];
    position(at, shape, w);
    for (int t = 0; t < count; t++, next_position(shape, w)) {
        const int c = w[0] / out_group * in_group + w[1];
        float sum = 0.0f;
        for (int n = 0; n < batch; n++) {
            const float *image = x + (n * channels + c) * height * width;
            const float *slope = dy + (n * p[3] + w[0]) * out_height * out_width;
            for (int i = 0; i < out_height; i++) {
                const int row = i * p[8] - p[12] + w[2] * p[10];
                if (row < 0 || row >= height) continue;
                float partial = 0.0f;
                for (int j = 0; j < out_width; j++) {
                    const int column = j * p[9] - p[13] + w[3] * p[11];
                    if (column >= 0 && column < width) partial += image[row * width + column] * slope[i * out_width + j];
                }
                sum += partial;
            }
        }
        sums[t] = sum;
    }
}

/* == max_pool: largest elements of windows and their positions; planes come last in p; y or where may be NULL */
static void max_pool(float *y, int64_t *where, const float *x, const int *p) {
    const int height = p[1], width = p[2];
    for (int plane = 0; plane < p[15]; plane++)
        for (int i = 0; i < p[4]; i++)
            for (int j = 0; j < p[5]; j++) {
                float best = -INFINITY;
                int at = -1;
                for (int u = 0; u < p[6]; u++) {
                    const int row = i * p[8] - p[12] + u * p[10];
                    if (row < 0 || row >= height) continue;
                    for (int v = 0; v < p[7]; v++) {
                        const int column = j * p[9] - p[13] + v * p[11];
                        if (column < 0 || column >= width) continue;
                        const float value = x[(plane * height + row) * width + column];
                        if (at < 0 || value > best) {
                            best = value;
                            at = (plane * height + row) * width + column;
                        }
                    }
                }
                if (y) *y++ = best;
                if (where) *where++ = at;
            }
}

/* == average_pool_rows (position): means of windows; the last number of p is 1 if padding counts */
static void average_pool_rows(float *sums, int count, const float *x, int at, const int *p) {
    const int shape[4] = {0, p[3], p[4], p[5]};
    int o[4];
    position(at, shape, o);
    for (int t = 0; t < count; t++, next_position(shape, o)) {
        const float *image = x + (o[0] * p[0] + o[1]) * p[1] * p[2];
        float sum = 0.0f;
        int taps = 0;
        for (int u = 0; u < p[6]; u++)
            for (int v = 0; v < p[7]; v++) {
                const int row = o[2] * p[8] - p[12] + u * p[10], column = o[3] * p[9] - p[13] + v * p[11];
                if (row < 0 || row >= p[1] || column < 0 || column >= p[2]) continue;
                sum += image[row * p[2] + column];
                taps++;
            }
        sums[t] = sum / (float)(p[15] ? p[6] * p[7] : taps);
    }
}

/* == average_pool_input_rows (position): the gradient of the input of average_pool_rows */
static void average_pool_input_rows(float *sums, int count, const float *dy, int at, const int *p) {
    const int shape[4] = {0, p[0], p[1], p[2]};
    int i[4];
    position(at, shape, i);
    for (int t = 0; t < count; t++, next_position(shape, i)) {
        const float *slope = dy + (i[0] * p[3] + i[1]) * p[4] * p[5];
        float sum = 0.0f;
        for (int u = 0; u < p[6]; u++)
            for (int v = 0; v < p[7]; v++) {
                const int down = i[2] + p[12] - u * p[10], right = i[3] + p[13] - v * p[11];
                const int row = down / p[8], column = right / p[9];
                if (down < 0 || down % p[8] || row >= p[4] || right < 0 || right % p[9] || column >= p[5]) continue;
                int taps = 0;
                for (int a = 0; a < p[6]; a++)
                    for (int b = 0; b < p[7]; b++) {
                        const int y = row * p[8] - p[12] + a * p[10], x = column * p[9] - p[13] + b * p[11];
                        taps += y >= 0 && y < p[1] && x >= 0 && x < p[2];
                    }
                sum += slope[row * p[5] + column] / (float)(p[15] ? p[6] * p[7] : taps);
            }
        sums[t] = sum;
    }
}

/* == place: an index along an axis of `size` elements; negative ones count from the end */
static int place(int64_t index, int size, int *fault) {
    if (index < 0) index += size;
    if ((uint64_t)index < (uint64_t)size) return (int)index;
    *fault = 1;
    return 0;
}

/* == gather (place): slices of x [outer, size, inner] at `indices`, of `width` bytes an element */
static void gather(void *y, const void *x, const int64_t *indices, int outer, int size, int inner, int count, int width,
                   int *fault) {
    const size_t slice = (size_t)inner * (size_t)width;
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < count; i++) {
            const int at = place(indices[i], size, fault);
            memcpy((char *)y + (size_t)(o * count + i) * slice, (const char *)x + (size_t)(o * size + at) * slice, slice);
        }
}

/* == gather_stored (stored, place): gather of integers of this type, as floats */
static void gather_stored(float *y, const void *x, const int64_t *indices, int outer, int size, int inner, int count,
                          int type, int *fault) {
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < count; i++) {
            const int from = (o * size + place(indices[i], size, fault)) * inner;
            for (int k = 0; k < inner; k++) *y++ = (float)stored(x, from + k, type);
        }
}

/* == gather_sum (place): the gradient of gather: slices of dy are added to zeros */
static void gather_sum(float *dx, const float *dy, const int64_t *indices, int outer, int size, int inner, int count,
                       int *fault) {
    for (int i = 0; i < outer * size * inner; i++) dx[i] = 0.0f;
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < count; i++) {
            float *to = dx + (o * size + place(indices[i], size, fault)) * inner;
            const float *from = dy + (o * count + i) * inner;
            for (int k = 0; k < inner; k++) to[k] += from[k];
        }
}

/* == gather_elements (place): y[o, i, k] = x[o, indices[o, i, k], k] */
static void gather_elements(void *y, const void *x, const int64_t *indices, int outer, int size, int inner, int count,
                            int width, int *fault) {
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < count * inner; i++) {
            const int to = o * count * inner + i, at = place(indices[to], size, fault);
            memcpy((char *)y + to * width, (const char *)x + ((o * size + at) * inner + i % inner) * width, (size_t)width);
        }
}

/* == scatter_elements (place): y = x, then y[o, indices[o, i, k], k] is replaced by an update, or increased by it */
static void scatter_elements(float *y, const float *x, const int64_t *indices, const float *updates, int outer, int size,
                             int inner, int count, int add, int *fault) {
    if (y != x) memcpy(y, x, (size_t)(outer * size * inner) * sizeof *y);
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < count * inner; i++) {
            const int from = o * count * inner + i;
            float *to = y + (o * size + place(indices[from], size, fault)) * inner + i % inner;
            *to = add ? *to + updates[from] : updates[from];
        }
}

/* == max_unpool (place): zeros with x at the positions `where` */
static void max_unpool(float *y, const float *x, const int64_t *where, int count, int size, int *fault) {
    for (int i = 0; i < size; i++) y[i] = 0.0f;
    for (int i = 0; i < count; i++) y[place(where[i], size, fault)] = x[i];
}

/* == cross_entropy_gradient (place): d * (onehot(places) - exp(log_p)) for log_p [outer, size, inner] */
static void cross_entropy_gradient(float *dx, const float *log_p, const int64_t *places, const float *d, int outer,
                                   int size, int inner, int *fault) {
    for (int o = 0; o < outer; o++)
        for (int k = 0; k < inner; k++) {
            const float slope = d[o * inner + k];
            const int hot = place(places[o * inner + k], size, fault);
            for (int c = 0; c < size; c++) {
                const int at = (o * size + c) * inner + k;
                const float value = expf(log_p[at]) * -slope;
                dx[at] = c == hot ? value + slope : value;
            }
        }
}

/* == cumulative_sum: sums along an axis of x [outer, size, inner] */
static void cumulative_sum(float *y, const float *x, int outer, int size, int inner, int exclusive, int backwards) {
    for (int o = 0; o < outer; o++)
        for (int k = 0; k < inner; k++) {
            float sum = 0.0f;
            for (int i = 0; i < size; i++) {
                const int at = (o * size + (backwards ? size - 1 - i : i)) * inner + k;
                const float value = x[at];
                if (exclusive) y[at] = sum;
                sum += value;
                if (!exclusive) y[at] = sum;
            }
        }
}

/* == softmax: along an axis of x [outer, size, inner]; y may be x */
static void softmax(float *y, const float *x, int outer, int size, int inner) {
    for (int o = 0; o < outer * inner; o++) {
        const int first = o / inner * size * inner + o % inner, end = first + size * inner;
        float top = x[first], sum = 0.0f;
        for (int i = first; i < end; i += inner)
            if (!(x[i] <= top)) top = x[i];
        for (int i = first; i < end; i += inner) sum += y[i] = expf(x[i] - top);
        for (int i = first; i < end; i += inner) y[i] /= sum;
    }
}

/* == log_softmax: the logarithm of softmax */
static void log_softmax(float *y, const float *x, int outer, int size, int inner) {
    for (int o = 0; o < outer * inner; o++) {
        const int first = o / inner * size * inner + o % inner, end = first + size * inner;
        float top = x[first], sum = 0.0f;
        for (int i = first; i < end; i += inner)
            if (!(x[i] <= top)) top = x[i];
        for (int i = first; i < end; i += inner) sum += expf(y[i] = x[i] - top);
        sum = logf(sum);
        for (int i = first; i < end; i += inner) y[i] -= sum;
    }
}
