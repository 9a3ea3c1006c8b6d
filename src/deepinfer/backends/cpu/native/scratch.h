// Working memory of one thread, kept between calls.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace deepinfer {

// At least `count` numbers of type T, uninitialised and aligned to 64 bytes; valid until the next call by this
// thread with the same Tag.
template <class Tag, class T = float>
T* scratch(size_t count) {
    thread_local std::unique_ptr<uint8_t[]> memory;
    thread_local size_t size = 0;
    const size_t bytes = count * sizeof(T) + 64;
    if (size < bytes) {
        memory.reset();
        memory.reset(new uint8_t[bytes]);
        size = bytes;
    }
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}

}  // namespace deepinfer
