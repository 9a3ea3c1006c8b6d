// Router, routed experts, shared expert.

#include <algorithm>
#include <cmath>

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
constexpr int64_t ALONE_ROWS = 16;    // of each expert on average, so that a thread takes tokens through all by itself
constexpr int64_t MOST_TOKENS = 256;  // that it takes at a time, if all threads run

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
    if (!count) return;
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

Order sort_pairs(const int32_t* chosen, int64_t count, int64_t num_experts) {
    const Order order{scratch<PairScratch, int32_t>(count), scratch<BeginScratch, int64_t>(num_experts + 1)};
    std::fill(order.begins, order.begins + num_experts + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++order.begins[chosen[i] + 1];
    for (int64_t e = 0; e < num_experts; ++e) order.begins[e + 1] += order.begins[e];
    int64_t* next = scratch<NextScratch, int64_t>(num_experts);
    std::copy(order.begins, order.begins + num_experts, next);
    for (int64_t i = 0; i < count; ++i) order.pairs[next[chosen[i]]++] = static_cast<int32_t>(i);
    return order;
}

// Rows of x rounded to fp8 if the matrix wants that, once for all experts of a token.
struct Inputs {
    const float* x;
    int64_t stride;
};

Inputs rounded_for(const Matrix& matrix, const float* x, int64_t stride, int64_t tokens) {
    if (!matrix.rounds) return {x, stride};
    const int64_t width = matrix.columns;
    float* rounded = scratch<RoundedScratch>(tokens * width);
    parallel(tokens, GRAIN, [=](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) round_fp8(x + t * stride, width, rounded + t * width);
    });
    return {rounded, width};
}

// outputs [last - first, hidden] of the sorted pairs first .. last - 1. beside: another feed of the same size, or null.
void feed_pairs(const Experts& experts, const Order& order, int64_t first, int64_t last, Inputs inputs,
                const float* share, int64_t k, float* outputs, const Feed* beside) {
    const int64_t width = experts.gate_up->columns, hidden = experts.down->rows, rows = last - first;
    const bool is_gathered = !is_tiled(*experts.gate_up);
    float* gathered = is_gathered ? scratch<InputScratch>(rows * width) : nullptr;
    int32_t* tokens = scratch<TokenScratch, int32_t>(rows);
    float* shares = scratch<ShareScratch>(rows);
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t pair = order.pairs[first + i];
        tokens[i] = static_cast<int32_t>(pair / k), shares[i] = share[pair];
        if (is_gathered) std::copy_n(inputs.x + tokens[i] * inputs.stride, width, gathered + i * width);
    }
    Feed* feeds = scratch<FeedScratch, Feed>(experts.num_experts + 1);
    int64_t count = 0;
    for (int64_t e = 0; e < experts.num_experts; ++e) {
        const int64_t begin = std::max(order.begins[e], first) - first;
        const int64_t end = std::min(order.begins[e + 1], last) - first;
        if (begin >= end) continue;
        feeds[count++] = {&experts.gate_up[e],
                          &experts.down[e],
                          is_gathered ? gathered + begin * width : inputs.x,
                          end - begin,
                          is_gathered ? width : inputs.stride,
                          shares + begin,
                          outputs + begin * hidden,
                          true,
                          is_gathered ? nullptr : tokens + begin};
    }
    if (beside) feeds[count++] = *beside;
    feed_all(feeds, count, experts.limit);
}

// All threads work on each expert; each token's outputs are added in ascending expert order.
void feed_together(const Experts& experts, const Order& order, Inputs inputs, const float* share, int64_t tokens,
                   int64_t k, float* out, const Feed* beside) {
    const int64_t hidden = experts.down->rows, count = tokens * k;
    float* outputs = scratch<OutputScratch>(count * hidden);
    feed_pairs(experts, order, 0, count, inputs, share, k, outputs, beside);
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
}

// The same on the calling thread, one expert after the other.
void feed_alone(const Experts& experts, const Order& order, Inputs inputs, const float* share, int64_t tokens,
                int64_t k, float* out) {
    const int64_t hidden = experts.down->rows;
    std::fill_n(out, tokens * hidden, 0.0f);
    for (int64_t e = 0; e < experts.num_experts; ++e)
        for (int64_t first = order.begins[e]; first < order.begins[e + 1]; first += CHUNK) {
            const int64_t last = std::min(first + CHUNK, order.begins[e + 1]);
            float* outputs = scratch<OutputScratch>(CHUNK * hidden);
            feed_pairs(experts, order, first, last, inputs, share, k, outputs, nullptr);
            for (int64_t i = first; i < last; ++i)
                add(out + order.pairs[i] / k * hidden, outputs + (i - first) * hidden, hidden);
        }
}

// Whether products with both can be formed together.
bool are_alike(const Matrix& one, const Matrix& other) {
    return one.rows == other.rows && one.columns == other.columns && is_tiled(one) == is_tiled(other);
}

bool are_alike(const Experts& one, const Experts& other) {
    return are_alike(*one.gate_up, *other.gate_up) && are_alike(*one.down, *other.down) && one.limit == other.limit;
}

// Tokens with their experts, and the one that all share or null.
struct Routed {
    const Experts &experts, *shared;
    const float* x;
    int64_t stride;
    const int32_t* chosen;
    const float* share;
    int64_t k;
};

// All threads work on each expert; the shared one is one more of them if it is of their size.
void feed_few(const Routed& all, int64_t tokens, float* out) {
    const int64_t hidden = all.experts.down->rows;
    const Order order = sort_pairs(all.chosen, tokens * all.k, all.experts.num_experts);
    const Inputs inputs = rounded_for(*all.experts.gate_up, all.x, all.stride, tokens);
    if (!all.shared) return feed_together(all.experts, order, inputs, all.share, tokens, all.k, out, nullptr);
    const Feed feed{all.shared->gate_up, all.shared->down, all.x, tokens, all.stride, nullptr, out, false, nullptr};
    const bool is_beside = are_alike(*all.shared, all.experts);
    float* routed = scratch<SumScratch>(tokens * hidden);
    feed_together(all.experts, order, inputs, all.share, tokens, all.k, routed, is_beside ? &feed : nullptr);
    if (is_beside) add(out, routed, tokens * hidden);
    else shared_expert(all.shared, all.x, all.stride, routed, tokens, out);
}

// Each thread takes tokens of its own through all experts.
void feed_many(const Routed& all, int64_t tokens, float* out) {
    const int64_t hidden = all.experts.down->rows, most = num_threads() * MOST_TOKENS;
    const int64_t pieces = (tokens + most - 1) / most * num_threads();
    parallel(tokens, (tokens + pieces - 1) / pieces, [&](int64_t first, int64_t last) {
        const float* x = all.x + first * all.stride;
        float* to = out + first * hidden;
        const Order order = sort_pairs(all.chosen + first * all.k, (last - first) * all.k, all.experts.num_experts);
        const Inputs inputs = rounded_for(*all.experts.gate_up, x, all.stride, last - first);
        float* routed = all.shared ? scratch<SumScratch>((last - first) * hidden) : to;
        feed_alone(all.experts, order, inputs, all.share + first * all.k, last - first, all.k, routed);
        if (all.shared) shared_expert(all.shared, x, all.stride, routed, last - first, to);
    });
}

// False when an expert does not exist.
bool feed_routed(const Routed& all, int64_t tokens, float* out) {
    const int64_t num_experts = all.experts.num_experts;
    const auto is_wrong = [=](int32_t expert) { return expert < 0 || expert >= num_experts; };
    if (std::any_of(all.chosen, all.chosen + tokens * all.k, is_wrong)) return false;
    if (tokens * all.k >= ALONE_ROWS * num_experts * num_threads()) feed_many(all, tokens, out);
    else if (tokens) feed_few(all, tokens, out);
    return true;
}

}  // namespace

int64_t all_experts(const Experts& experts, const Experts& shared, const float* x, int64_t stride,
                    const int32_t* chosen, const float* share, int64_t tokens, int64_t k, float* out) {
    return feed_routed({experts, &shared, x, stride, chosen, share, k}, tokens, out) ? 0 : 1;
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
    return feed_routed({*experts, nullptr, x, stride, chosen, share, k}, tokens, out) ? 0 : 1;
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
