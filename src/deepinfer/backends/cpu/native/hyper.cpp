// Hyper-connections: the mix of a half layer, its input, and the way back into the streams.

#include <algorithm>

#include "gemm.h"
#include "ops.h"
#include "scratch.h"
#include "streams.h"
#include "threads.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t MAX_STREAMS = 16;
constexpr int64_t MAX_WIDTH = (2 + MAX_STREAMS) * MAX_STREAMS;
constexpr int64_t GRAIN = 4;         // tokens a thread takes at least
constexpr int64_t CHUNK = 48;        // tokens whose products are formed together
constexpr int64_t LEAVE_GRAIN = 8;

struct Mixes {
    float *pre, *post, *comb;  // [tokens, m], [tokens, m], [tokens, m, m]
};

struct MixScratch;

// Softmax over rows, then columns and rows brought to sum 1 in turns, columns last; one token in each lane.
// M is the number of streams where the compiler is to know it, else 0.
template <int M>
void sinkhorn(const Hyper& hyper, Vec* comb) {
    const int64_t m = M ? M : hyper.num_streams;
    const Vec eps = splat(hyper.eps);
    const auto normalise = [&](int64_t step, int64_t stride) {  // groups begin `step` apart, elements `stride`
        for (int64_t group = 0; group < m; ++group) {
            Vec* from = comb + group * step;
            Vec total = from[0];
            for (int64_t i = 1; i < m; ++i) total += from[i * stride];
            const Vec factor = 1.0f / (total + eps);
            for (int64_t i = 0; i < m; ++i) from[i * stride] *= factor;
        }
    };
    for (int64_t row = 0; row < m; ++row) {
        Vec* from = comb + row * m;
        Vec top = from[0], total{};
        for (int64_t i = 1; i < m; ++i) top = maximum(top, from[i]);
        for (int64_t i = 0; i < m; ++i) total += from[i] = exponential(from[i] - top);
        for (int64_t i = 0; i < m; ++i) from[i] = from[i] / total + eps;
    }
    normalise(1, m);
    for (int64_t round = 1; round < hyper.num_iterations; ++round) {
        normalise(m, 1);
        normalise(1, m);
    }
}

// Shares of up to LANES tokens from their products with fn [tokens, (2 + m) * m] and rms scales.
template <int M>
void mix_tokens(const Hyper& hyper, const float* products, const float* scales, int64_t count, Mixes out) {
    const int64_t m = M ? M : hyper.num_streams, width = (2 + m) * m;
    Vec mix[M ? (2 + M) * M : MAX_WIDTH];
    for (int64_t w = 0; w < width; ++w) {
        Vec value{};
        for (int64_t t = 0; t < count; ++t) value[t] = products[t * width + w] * scales[t];
        mix[w] = value * hyper.gain[w] + hyper.base[w];
    }
    for (int64_t w = 0; w < 2 * m; ++w) mix[w] = sigmoid(mix[w]);
    sinkhorn<M>(hyper, mix + 2 * m);
    for (int64_t t = 0; t < count; ++t) {
        for (int64_t i = 0; i < m; ++i) {
            out.pre[t * m + i] = mix[i][t] + hyper.eps;
            out.post[t * m + i] = mix[m + i][t] * 2.0f;
        }
        for (int64_t i = 0; i < m * m; ++i) out.comb[t * m * m + i] = mix[2 * m + i][t];
    }
}

void enter(const Hyper& hyper, const float* streams, const float* pre, int64_t tokens, float* x, Mixes out) {
    const int64_t m = hyper.num_streams, size = m * hyper.hidden, width = hyper.fn.rows;
    float* products = scratch<MixScratch>(CHUNK * width);
    for (int64_t start = 0; start < tokens; start += CHUNK) {
        const int64_t count = std::min(CHUNK, tokens - start);
        float scales[CHUNK];
        gemm(streams + start * size, count, size, hyper.fn, products, width);
        for (int64_t t = 0; t < count; ++t) {
            const float* from = streams + (start + t) * size;
            float* to = x + (start + t) * hyper.hidden;
            scales[t] = 1.0f / std::sqrt(dot(from, from, size) / static_cast<float>(size) + hyper.mix_eps);
            collapse(from, pre + (start + t) * m, m, hyper.hidden, to);
            rms_norm(to, hyper.norm, hyper.norm_eps, hyper.hidden, to);
        }
        for (int64_t t = 0; t < count; t += LANES) {
            const Mixes part{out.pre + (start + t) * m, out.post + (start + t) * m, out.comb + (start + t) * m * m};
            const auto mix = m == 4 ? mix_tokens<4> : mix_tokens<0>;
            mix(hyper, products + t * width, scales + t, std::min<int64_t>(LANES, count - t), part);
        }
    }
}

template <int M>
void leave(const float* streams, const float* output, int64_t num_streams, int64_t hidden, const float* post,
           const float* comb, float* out) {
    const int64_t m = M ? M : num_streams;
    for (int64_t h = 0; h < hidden; h += LANES) {
        Vec old[M ? M : MAX_STREAMS];
        const Vec value = load(output + h, hidden - h);
        for (int64_t i = 0; i < m; ++i) {
            __builtin_prefetch(streams + (m + i) * hidden + h);  // of the next token
            old[i] = load(streams + i * hidden + h, hidden - h);
        }
        for (int64_t j = 0; j < m; ++j) {
            Vec total = value * post[j];
            for (int64_t i = 0; i < m; ++i) total = multiply_add(old[i], splat(comb[i * m + j]), total);
            store(out + j * hidden + h, total, hidden - h);
        }
    }
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

EXPORT void hyper_enter(const Hyper* hyper, const float* streams, const float* pre, int64_t tokens, float* x,
                        float* next_pre, float* post, float* comb) {
    const int64_t m = hyper->num_streams, hidden = hyper->hidden;
    const int64_t most = num_threads() * CHUNK, pieces = std::max<int64_t>((tokens + most - 1) / most, 1) * num_threads();
    parallel(tokens, std::max((tokens + pieces - 1) / pieces, GRAIN), [=](int64_t first, int64_t last) {
        enter(*hyper, streams + first * m * hidden, pre + first * m, last - first, x + first * hidden,
              {next_pre + first * m, post + first * m, comb + first * m * m});
    });
}

// new[j] = post[j] * output + sum over i of comb[i][j] * streams[i]
EXPORT void hyper_leave(const float* streams, const float* output, const float* post, const float* comb,
                        int64_t tokens, int64_t num_streams, int64_t hidden, float* out) {
    const int64_t m = num_streams, size = m * hidden;
    parallel(tokens, LEAVE_GRAIN, [=](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
            const auto one = m == 4 ? leave<4> : leave<0>;
            one(streams + t * size, output + t * hidden, m, hidden, post + t * m, comb + t * m * m, out + t * size);
        }
    });
}

// Mean over the streams: [tokens, num_streams, hidden] -> rows of out, `stride` numbers apart.
EXPORT void tap(const float* streams, int64_t tokens, int64_t num_streams, int64_t hidden, float* out, int64_t stride) {
    float share[MAX_STREAMS];
    std::fill_n(share, num_streams, 1.0f / static_cast<float>(num_streams));
    parallel(tokens, GRAIN, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t)
            collapse(streams + t * num_streams * hidden, share, num_streams, hidden, out + t * stride);
    });
}
