// Work split over a few threads.

#pragma once

#include <cstdint>

namespace deepinfer {

// A reference to something that can be called with (begin, end); it must outlive the call that it is given to.
class Work {
public:
    template <class F>
    Work(const F& function)
        : object_(&function),
          call_([](const void* object, int64_t begin, int64_t end) { (*static_cast<const F*>(object))(begin, end); }) {}

    void operator()(int64_t begin, int64_t end) const { call_(object_, begin, end); }

private:
    const void* object_;
    void (*call_)(const void*, int64_t, int64_t);
};

// Call work(begin, end) on stretches that cover 0 .. count - 1, and wait for all of them. Stretches begin at multiples
// of `grain`; which thread takes which, and how many there are, is open, so a result must not depend on either.
// Called from inside such work, or while another thread's work is going on, everything runs on the calling thread.
void parallel(int64_t count, int64_t grain, const Work& work);

// How many threads share such work.
int64_t num_threads();

}  // namespace deepinfer
