// SwiGLU with clamps.

#pragma once

#include "vector.h"

namespace deepinfer {

// gate_up [2 * inner]: silu(min(gate, limit)) * clamp(up, -limit, limit) * share -> out [inner]; limit 0 = none.
inline void swiglu(const float* gate_up, int64_t inner, float limit, float share, float* out) {
    const Vec high = splat(limit > 0 ? limit : INFINITY), low = -high;
    for (int64_t i = 0; i < inner; i += LANES) {
        const Vec gate = at_most(load(gate_up + i, inner - i), high);
        const Vec up = at_most(load(gate_up + inner + i, inner - i), high);
        const Vec clamped = select(up < low, low, up);
        store(out + i, gate * sigmoid(gate) * clamped * share, inner - i);
    }
}

}  // namespace deepinfer
