#include "best_tokens.h"

#include <algorithm>
#include <cmath>

#include "export.h"
#include "threads.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t GRAIN = 4;  // rows a thread takes at least
constexpr int SUMS = 4;       // vectors side by side

// The largest of `count` numbers; NaN if one of them is.
float largest(const float* values, int64_t count) {
    Vec tops[SUMS], rests[SUMS] = {};
    for (Vec& top : tops) top = splat(-INFINITY);
    int64_t done = 0;
    for (; done + SUMS * LANES <= count; done += SUMS * LANES)
        for (int s = 0; s < SUMS; ++s) {
            const Vec value = load(values + done + s * LANES);
            tops[s] = maximum(tops[s], value);
            rests[s] += value - value;  // 0, but NaN for NaN and infinity
        }
    float top = -INFINITY;
    for (int s = 0; s < SUMS; ++s)
        for (int lane = 0; lane < LANES; ++lane) {
            top = std::max(top, tops[s][lane]);
            if (rests[s][lane] != 0.0f) done = 0;  // the slow way
        }
    for (int64_t i = done; i < count; ++i) {
        if (values[i] != values[i]) return values[i];
        top = std::max(top, values[i]);
    }
    return top;
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

EXPORT void best_tokens(const float* logits, int64_t rows, int64_t vocabulary, int64_t* token_ids, uint8_t* is_finite) {
    parallel(rows, GRAIN, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const float* values = logits + row * vocabulary;
            const float top = largest(values, vocabulary);
            is_finite[row] = std::isfinite(top);
            token_ids[row] = is_finite[row] ? std::find(values, values + vocabulary, top) - values : 0;
        }
    });
}
