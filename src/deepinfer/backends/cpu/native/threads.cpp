#include "threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "export.h"

namespace deepinfer {
namespace {

constexpr int64_t PIECES_PER_THREAD = 4;  // so that a thread which the system holds up leaves its share to others
constexpr auto SPIN_TIME = std::chrono::microseconds(60);  // the next work of a step is usually there sooner
constexpr int SPINS_PER_LOOK = 64;

inline void rest() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// Wait until `is_done` holds, at most for SPIN_TIME; whether it does.
template <class Condition>
bool spin_until(const Condition& is_done) {
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < SPINS_PER_LOOK; ++i) {
            if (is_done()) return true;
            rest();
        }
    } while (std::chrono::steady_clock::now() - start < SPIN_TIME);
    return false;
}

// One piece of work at a time, cut into pieces of which every thread has its share: the same one whenever the same
// count comes, so that the weights it reads stay in its own caches. A thread that is done with its share takes from
// the others'. `left_[i]` counts down the pieces of share i that nobody has taken yet, below a number that changes
// with each work, so that a late thread cannot take a piece of something else. Whoever holds a piece keeps its work
// alive, since the owner waits for all pieces. A thread that finds none soon goes to sleep.
class Pool {
public:
    void resize(int64_t num_threads) {
        std::lock_guard<std::mutex> owner(owner_);
        {
            std::lock_guard<std::mutex> guard(sleep_);
            is_stopping_ = true;
        }
        wake_.notify_all();
        for (auto& helper : helpers_) helper.join();
        helpers_.clear();
        is_stopping_ = false;
        left_ = std::vector<Left>(std::max<int64_t>(num_threads, 1));
        for (int64_t i = 1; i < num_threads; ++i) helpers_.emplace_back([this, i] { help(i); });
    }

    int64_t num_threads() const { return static_cast<int64_t>(left_.size()); }

    void run(int64_t count, int64_t grain, const Work& work) {
        const int64_t grains = (count + grain - 1) / grain, shares = static_cast<int64_t>(left_.size());
        std::unique_lock<std::mutex> owner(owner_, std::defer_lock);
        if (grains < 2 || is_inside || !owner.try_lock() || helpers_.empty()) {
            if (count > 0) work(0, count);
            return;
        }
        const int64_t pieces = std::min(grains, shares * PIECES_PER_THREAD);
        work_ = &work, count_ = count, grain_ = grain, grains_ = grains, pieces_ = pieces;
        finished_.store(0, std::memory_order_relaxed);
        const uint64_t number = ++number_ << 32;
        for (int64_t i = 0; i < shares; ++i)
            left_[i].store(number | static_cast<uint64_t>(share_end(i) - share_end(i - 1)));
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> guard(sleep_);
            wake_.notify_all();
        }
        take_pieces(0);
        while (!spin_until([&] { return finished_.load(std::memory_order_acquire) == pieces; }))
            std::this_thread::yield();
    }

private:
    struct alignas(64) Left : std::atomic<uint64_t> {};

    bool has_pieces() const {
        return std::any_of(left_.begin(), left_.end(), [](const Left& left) { return uint32_t(left.load()) > 0; });
    }

    // The piece behind the last of share `i`.
    int64_t share_end(int64_t i) const { return (i + 1) * pieces_ / static_cast<int64_t>(left_.size()); }

    void take_pieces(int64_t mine) {
        const auto shares = static_cast<int64_t>(left_.size());
        is_inside = true;
        for (int64_t i = 0; i < shares; ++i) take_share((mine + i) % shares);
        is_inside = false;
    }

    void take_share(int64_t i) {
        uint64_t left = left_[i].load();
        int64_t num_done = 0;
        while (static_cast<uint32_t>(left) > 0) {
            if (!left_[i].compare_exchange_weak(left, left - 1)) continue;
            const int64_t piece = share_end(i) - static_cast<uint32_t>(left);
            const int64_t begin = piece * grains_ / pieces_ * grain_, end = (piece + 1) * grains_ / pieces_ * grain_;
            (*work_)(begin, std::min(end, count_));
            ++num_done;
            left = left_[i].load();
        }
        if (num_done) finished_.fetch_add(num_done, std::memory_order_release);
    }

    void help(int64_t number) {
        for (;;) {
            take_pieces(number);
            if (spin_until([this] { return has_pieces(); })) continue;
            std::unique_lock<std::mutex> guard(sleep_);
            sleepers_.fetch_add(1);
            wake_.wait(guard, [this] { return is_stopping_ || has_pieces(); });
            sleepers_.fetch_sub(1);
            if (is_stopping_) return;
        }
    }

    static thread_local bool is_inside;  // this thread is working on a piece

    std::mutex owner_;  // held by the thread whose work the pool does
    std::vector<std::thread> helpers_;
    const Work* work_ = nullptr;
    int64_t count_ = 0, grain_ = 1, grains_ = 0, pieces_ = 0;
    uint64_t number_ = 0;
    std::vector<Left> left_;  // one a thread, the owner's first
    std::atomic<int64_t> finished_{0};
    std::mutex sleep_;  // guards is_stopping_ and the way into sleep
    std::condition_variable wake_;
    std::atomic<int> sleepers_{0};
    bool is_stopping_ = false;
};

thread_local bool Pool::is_inside = false;

Pool& pool() {
    static Pool* shared = new Pool;  // never destroyed: helpers may still sleep in it when the process ends
    return *shared;
}

}  // namespace

void parallel(int64_t count, int64_t grain, const Work& work) { pool().run(count, grain, work); }

int64_t num_threads() { return std::max<int64_t>(pool().num_threads(), 1); }

}  // namespace deepinfer

EXPORT void set_num_threads(int64_t num_threads) { deepinfer::pool().resize(num_threads); }
