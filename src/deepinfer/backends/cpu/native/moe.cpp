// Router, routed experts, shared expert.

#include <algorithm>
#include <cmath>
#include <vector>

#include "activation.h"
#include "gemm.h"
#include "ops.h"
#include "round.h"
#include "scratch.h"
#include "threads.h"
#include "tile_products.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t GRAIN = 8;    // tokens a thread takes at least
constexpr int64_t CHUNK = 128;  // rows whose hidden values are kept at a time
constexpr int64_t SHARED_ROWS = 256;  // up to here all threads work on each expert

struct ScoreScratch;
struct InputScratch;
struct TokenScratch;
struct InnerScratch;
struct HiddenScratch;
struct ShareScratch;
struct OutputScratch;
struct RoundedScratch;
struct PairScratch;
struct ProductScratch;
struct FeedScratch;
struct BeginScratch;
struct NextScratch;
struct PlaceScratch;
struct FoundScratch;
struct SumScratch;

void score(const Router& router, float* logits, int64_t count) {
    for (int64_t e = 0; e < count; ++e) logits[e] /= router.temperature;
    if (router.scoring == SOFTMAX) {
        const float top = *std::max_element(logits, logits + count);
        float total = 0;
        for (int64_t e = 0; e < count; ++e) total += logits[e] = std::exp(logits[e] - top);
        for (int64_t e = 0; e < count; ++e) logits[e] /= total;
        return;
    }
    for (int64_t e = 0; e < count; e += LANES) {
        const Vec x = load(logits + e, count - e);
        const Vec plain = select(x > 20.0f, x, log_one_plus(exponential(at_most(x, splat(20.0f)))));
        store(logits + e, router.scoring == SIGMOID ? sigmoid(x) : plain, count - e);
    }
    if (router.scoring == SQRT_SOFTPLUS)
        for (int64_t e = 0; e < count; ++e) logits[e] = std::sqrt(logits[e]);
}

// The best by score + bias, ties to the lower expert; `ranked` [experts] is overwritten.
void choose(const Router& router, const float* scores, const float* bias, float* ranked, int32_t* chosen,
            float* share) {
    const int64_t count = router.matrix.rows;
    float total = 0;
    for (int64_t e = 0; e < count; ++e) ranked[e] = scores[e] + bias[e];
    for (int64_t k = 0; k < router.num_active; ++k) {
        int64_t best = std::find_if(ranked, ranked + count, [](float x) { return x == x; }) - ranked;
        if (best == count) best = 0;
        for (int64_t e = best + 1; e < count; ++e)
            if (ranked[e] > ranked[best]) best = e;
        chosen[k] = static_cast<int32_t>(best), share[k] = scores[best];
        total += scores[best], ranked[best] = NAN;
    }
    const bool normalizes = router.normalize && router.num_active > 1;
    for (int64_t k = 0; k < router.num_active; ++k) {
        if (normalizes) share[k] /= total + 1e-20f;
        share[k] *= router.scaling;
    }
}

// Rows of one expert: x [rows, width] -> out [rows, hidden]; share [rows], null = 1; places as in a Product.
struct Feed {
    const Matrix *gate_up, *down;
    const float* x;
    int64_t rows, stride;
    const float* share;
    float* out;
    bool is_rounded;  // x is, if the matrices want it
    const int32_t* places;
};

// out = down(swiglu(gate_up x) * share) for experts of one size.
void feed_all(const Feed* feeds, int64_t count, float limit) {
    const int64_t inner = feeds->down->columns, hidden = feeds->down->rows;
    int64_t rows = 0;
    for (int64_t i = 0; i < count; ++i) rows += feeds[i].rows;
    float* both = scratch<InnerScratch>(rows * 2 * inner);
    float* kept = scratch<HiddenScratch>(rows * inner);
    Product* products = scratch<ProductScratch, Product>(2 * count);
    for (int64_t i = 0, row = 0; i < count; row += feeds[i++].rows) {
        const Feed& one = feeds[i];
        products[i] = {one.x, one.rows, one.stride, one.gate_up, both + row * 2 * inner, 2 * inner,
                       one.is_rounded, one.places};
        products[count + i] = {kept + row * inner, one.rows, inner, one.down, one.out, hidden};
    }
    gemm_all(products, count);
    parallel(rows, GRAIN, [=](int64_t first, int64_t last) {
        for (int64_t i = 0, row = 0; i < count && row < last; row += feeds[i++].rows)
            for (int64_t r = std::max(first, row); r < std::min(last, row + feeds[i].rows); ++r)
                swiglu(both + r * 2 * inner, inner, limit, feeds[i].share ? feeds[i].share[r - row] : 1.0f,
                       kept + r * inner);
    });
    gemm_all(products + count, count);
}

void add(float* to, const float* what, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store(to + i, load(to + i, count - i) + load(what + i, count - i), count - i);
}

// The pairs of token and place in sorted order: by expert, then by token.
struct Order {
    int32_t* pairs;    // [count] numbers token * k + place
    int64_t* begins;   // [experts + 1] where each expert's pairs begin
};

// False when an expert does not exist.
bool sort_pairs(const int32_t* chosen, int64_t count, int64_t num_experts, const Order& order) {
    std::fill(order.begins, order.begins + num_experts + 1, 0);
    for (int64_t i = 0; i < count; ++i) {
        if (chosen[i] < 0 || chosen[i] >= num_experts) return false;
        ++order.begins[chosen[i] + 1];
    }
    for (int64_t e = 0; e < num_experts; ++e) order.begins[e + 1] += order.begins[e];
    int64_t* next = scratch<NextScratch, int64_t>(num_experts);
    std::copy(order.begins, order.begins + num_experts, next);
    for (int64_t i = 0; i < count; ++i) order.pairs[next[chosen[i]]++] = static_cast<int32_t>(i);
    return true;
}

// Some sorted pairs of one expert.
struct Stretch {
    int64_t expert, first, last;
};

std::vector<Stretch> stretches_of(const Order& order, int64_t num_experts) {
    std::vector<Stretch> stretches;
    for (int64_t e = 0; e < num_experts; ++e)
        for (int64_t first = order.begins[e]; first < order.begins[e + 1]; first += CHUNK)
            stretches.push_back({e, first, std::min(first + CHUNK, order.begins[e + 1])});
    return stretches;
}

// outputs [pairs, hidden] of stretches of sorted pairs; x is rounded already where the matrices want it, once for all
// experts of a token. beside: another feed of the same size, or null.
void feed_stretches(const Experts& experts, const Stretch* stretches, int64_t count, const Order& order, const float* x,
                    int64_t stride, const float* share, int64_t k, float* outputs, const Feed* beside) {
    const int64_t width = experts.gate_up->columns, hidden = experts.down->rows;
    const int64_t begin = stretches[0].first, rows = stretches[count - 1].last - begin;
    const bool is_gathered = !is_tiled(*experts.gate_up);
    float* inputs = is_gathered ? scratch<InputScratch>(rows * width) : nullptr;
    int32_t* tokens = scratch<TokenScratch, int32_t>(rows);
    float* shares = scratch<ShareScratch>(rows);
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t pair = order.pairs[begin + i];
        tokens[i] = static_cast<int32_t>(pair / k), shares[i] = share[pair];
        if (is_gathered) std::copy_n(x + tokens[i] * stride, width, inputs + i * width);
    }
    Feed* feeds = scratch<FeedScratch, Feed>(count + 1);
    for (int64_t i = 0; i < count; ++i) {
        const Stretch& one = stretches[i];
        const int64_t first = one.first - begin;
        feeds[i] = {&experts.gate_up[one.expert], &experts.down[one.expert], is_gathered ? inputs + first * width : x,
                    one.last - one.first, is_gathered ? width : stride, shares + first, outputs + one.first * hidden,
                    true, is_gathered ? nullptr : tokens + first};
    }
    if (beside) feeds[count] = *beside;
    feed_all(feeds, count + (beside ? 1 : 0), experts.limit);
}

// Each token's outputs are added in ascending expert order. beside: fed together with the experts, if all threads work
// on each of these; or null. False when an expert does not exist.
bool feed_routed(const Experts& experts, const float* x, int64_t stride, const int32_t* chosen, const float* share,
                 int64_t tokens, int64_t k, float* out, const Feed* beside) {
    const int64_t num_experts = experts.num_experts, hidden = experts.down->rows, count = tokens * k;
    const Order order{scratch<PairScratch, int32_t>(count), scratch<BeginScratch, int64_t>(num_experts + 1)};
    if (!sort_pairs(chosen, count, num_experts, order)) return false;
    if (experts.gate_up->rounds) {
        const int64_t width = experts.gate_up->columns;
        float* rounded = scratch<RoundedScratch>(tokens * width);
        parallel(tokens, GRAIN, [=](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; ++t) round_fp8(x + t * stride, width, rounded + t * width);
        });
        x = rounded, stride = width;
    }
    float* outputs = scratch<OutputScratch>(count * hidden);
    const auto stretches = stretches_of(order, num_experts);
    const auto num_stretches = static_cast<int64_t>(stretches.size());
    if (count <= SHARED_ROWS && count > 0)
        feed_stretches(experts, stretches.data(), num_stretches, order, x, stride, share, k, outputs, beside);
    else parallel(num_stretches, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            feed_stretches(experts, &stretches[i], 1, order, x, stride, share, k, outputs, nullptr);
    });
    int32_t* places = scratch<PlaceScratch, int32_t>(count);  // [tokens, k] of a token's outputs, ascending
    int32_t* found = scratch<FoundScratch, int32_t>(tokens);
    std::fill(found, found + tokens, 0);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = order.pairs[i] / k;
        places[token * k + found[token]++] = static_cast<int32_t>(i);
    }
    parallel(tokens, GRAIN, [=](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
            for (int64_t h = 0; h < hidden; h += LANES) {
                Vec total{};
                for (int64_t i = 0; i < k; ++i) total += load(outputs + places[t * k + i] * hidden + h, hidden - h);
                store(out + t * hidden + h, total, hidden - h);
            }
        }
    });
    return true;
}

// Whether products with both can be formed together.
bool are_alike(const Matrix& one, const Matrix& other) {
    return one.rows == other.rows && one.columns == other.columns && is_tiled(one) == is_tiled(other);
}

bool are_alike(const Experts& one, const Experts& other) {
    return are_alike(*one.gate_up, *other.gate_up) && are_alike(*one.down, *other.down) && one.limit == other.limit;
}

}  // namespace

// Of few tokens the shared expert is one more of those that all threads work on.
int64_t all_experts(const Experts& experts, const Experts& shared, const float* x, int64_t stride,
                    const int32_t* chosen, const float* share, int64_t tokens, int64_t k, float* out) {
    const int64_t hidden = experts.down->rows;
    float* routed = scratch<SumScratch>(tokens * hidden);
    const Feed feed{shared.gate_up, shared.down, x, tokens, stride, nullptr, out, false, nullptr};
    const bool is_beside = tokens * k <= SHARED_ROWS && tokens * k > 0 && are_alike(shared, experts);
    if (!feed_routed(experts, x, stride, chosen, share, tokens, k, routed, is_beside ? &feed : nullptr)) return 1;
    if (is_beside) add(out, routed, tokens * hidden);
    else shared_expert(&shared, x, stride, routed, tokens, out);
    return 0;
}

}  // namespace deepinfer

using namespace deepinfer;

// is_image [tokens] may be null.
EXPORT void route(const Router* router, const float* x, int64_t stride, const uint8_t* is_image, int64_t tokens,
                  int32_t* chosen, float* share) {
    const int64_t count = router->matrix.rows, k = router->num_active;
    parallel(tokens, GRAIN, [=](int64_t first, int64_t last) {
        float* scores = scratch<ScoreScratch>((CHUNK + 1) * count);
        for (int64_t start = first; start < last; start += CHUNK) {
            const int64_t rows = std::min(CHUNK, last - start);
            gemm(x + start * stride, rows, stride, router->matrix, scores, count);
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t t = start + i;
                const float* bias = is_image && is_image[t] ? router->bias_image : router->bias;
                score(*router, scores + i * count, count);
                choose(*router, scores + i * count, bias, scores + CHUNK * count, chosen + t * k, share + t * k);
            }
        }
    });
}

// Returns 0, or 1 when an expert does not exist.
EXPORT int64_t experts(const Experts* experts, const float* x, int64_t stride, const int32_t* chosen,
                       const float* share, int64_t tokens, int64_t k, float* out) {
    return feed_routed(*experts, x, stride, chosen, share, tokens, k, out, nullptr) ? 0 : 1;
}

// out = routed + expert(x)
EXPORT void shared_expert(const Experts* expert, const float* x, int64_t stride, const float* routed, int64_t tokens,
                          float* out) {
    const int64_t hidden = expert->down->rows;
    for (int64_t t = 0; t < tokens; t += CHUNK) {
        const Feed feed{expert->gate_up, expert->down, x + t * stride, std::min(CHUNK, tokens - t),
                        stride,          nullptr,      out + t * hidden,         false, nullptr};
        feed_all(&feed, 1, expert->limit);
    }
    parallel(tokens, GRAIN, [=](int64_t first, int64_t last) {
        add(out + first * hidden, routed + first * hidden, (last - first) * hidden);
    });
}
