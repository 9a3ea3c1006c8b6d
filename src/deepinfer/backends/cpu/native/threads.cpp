#include "threads.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "export.h"

namespace deepinfer {
namespace {

class Pool {
public:
    ~Pool() { resize(1); }

    void resize(int num_threads) {
        std::lock_guard<std::mutex> owner(use_);
        {
            std::lock_guard<std::mutex> guard(state_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
        for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i, round = round_] { serve(i, round); });
    }

    void run(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
        const int64_t pieces = (count + grain - 1) / grain;
        std::unique_lock<std::mutex> owner(use_, std::try_to_lock);  // busy: another engine's thread works with it
        if (pieces < 2 || !owner.owns_lock() || workers_.empty()) {
            if (count > 0) work(0, count);
            return;
        }
        const int64_t parts = std::min<int64_t>(static_cast<int64_t>(workers_.size()) + 1, pieces);
        {
            std::lock_guard<std::mutex> guard(state_);
            count_ = count, grain_ = grain, parts_ = parts, work_ = &work;
            open_ = static_cast<int64_t>(workers_.size());
            ++round_;
        }
        wake_.notify_all();
        do_part(0);
        std::unique_lock<std::mutex> guard(state_);
        done_.wait(guard, [this] { return open_ == 0; });
    }

private:
    void serve(int64_t part, uint64_t round) {
        std::unique_lock<std::mutex> guard(state_);
        for (;;) {
            wake_.wait(guard, [&] { return stopping_ || round_ != round; });
            if (stopping_) return;
            round = round_;
            guard.unlock();
            if (part < parts_) do_part(part);
            guard.lock();
            if (--open_ == 0) done_.notify_one();
        }
    }

    void do_part(int64_t part) {
        const int64_t pieces = (count_ + grain_ - 1) / grain_;
        const int64_t begin = part * pieces / parts_ * grain_, end = (part + 1) * pieces / parts_ * grain_;
        (*work_)(begin, std::min(end, count_));
    }

    std::mutex use_;  // held by the caller whose work the pool does
    std::mutex state_;  // guards everything below
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    const std::function<void(int64_t, int64_t)>* work_ = nullptr;
    int64_t count_ = 0, grain_ = 1, parts_ = 1, open_ = 0;
    uint64_t round_ = 0;
    bool stopping_ = false;
};

Pool& pool() {
    static Pool* shared = new Pool;  // never destroyed: threads of a leaving process may still hold it
    return *shared;
}

}  // namespace

void parallel(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
    pool().run(count, grain, work);
}

}  // namespace deepinfer

EXPORT void set_num_threads(int64_t num_threads) {
    deepinfer::pool().resize(static_cast<int>(num_threads));
}
