// Work split over a few threads that sleep while there is none.

#pragma once

#include <cstdint>
#include <functional>

namespace deepinfer {

// Call work(begin, end) on stretches that cover 0 .. count - 1, one per thread, and wait for all of them.
// Stretches begin at multiples of `grain`. A result must not depend on where they begin.
void parallel(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

}  // namespace deepinfer
