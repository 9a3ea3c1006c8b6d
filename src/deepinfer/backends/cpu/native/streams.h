// The residual streams of one token.

#pragma once

#include "vector.h"

namespace deepinfer {

// sum over i of weights[i] * streams[i]: [num_streams, hidden] -> out [hidden]
inline void collapse(const float* streams, const float* weights, int64_t num_streams, int64_t hidden, float* out) {
    for (int64_t h = 0; h < hidden; h += LANES) {
        Vec total = load(streams + h, hidden - h) * weights[0];
        for (int64_t i = 1; i < num_streams; ++i)
            total = multiply_add(load(streams + i * hidden + h, hidden - h), splat(weights[i]), total);
        store(out + h, total, hidden - h);
    }
}

}  // namespace deepinfer
