// A whole model as one call: what `run_model` of ops/model.py does op by op.

#include <algorithm>

#include "best_tokens.h"
#include "embedding.h"
#include "engram_rows.h"
#include "layers.h"
#include "ops.h"
#include "rings.h"
#include "scratch.h"

namespace deepinfer {
namespace {

struct Model {
    const Ngrams* ngrams;       // or null
    const Cache* token_ring;    // of int32
    const uint16_t* embedding;  // [vocabulary, hidden] bf16
    const Layer* layers;
    const Head* head;
    int64_t vocabulary, hidden, num_streams, num_layers;
};

// The tokens, the rows [image tokens, hidden] that stand for the embeddings of images, and the tokens whose logits are
// wanted: `lines`, or all in order where it is null.
struct Given {
    const int64_t* tokens;
    const float* image_rows;
    const int64_t* lines;
    int64_t num_lines;
};

struct RowBuffer;
struct TokenBuffer;
struct StreamsBuffer;
struct PreBuffer;
struct ChosenStreams;
struct ChosenPre;

void place_images(const uint8_t* is_image, const float* rows, int64_t tokens, int64_t size, int64_t hidden,
                  float* streams) {
    for (int64_t t = 0; t < tokens; ++t) {
        if (!is_image[t]) continue;
        for (int64_t i = 0; i < size; i += hidden) std::copy_n(rows, hidden, streams + t * size + i);
        rows += hidden;
    }
}

void store_tokens(const Batch& batch, const int64_t* tokens, const Cache& ring) {
    int32_t* narrow = scratch<TokenBuffer, int32_t>(batch.num_tokens);
    std::copy_n(tokens, batch.num_tokens, narrow);
    store_ring(batch, narrow, ring);
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

// streams [tokens, m, hidden] and pre [tokens, m] are those after the last layer, or null; logits [lines, vocabulary] with their
// `best_tokens`. Returns 0, or 1 when a token is not in the vocabulary, 2 when an n-gram row does not exist, 3
// when a line does not.
EXPORT int64_t run_model(const Model* model, const Inputs* inputs, const Given* given, float* streams, float* pre,
                         float* logits, int64_t* token_ids, uint8_t* is_finite) {
    const Batch& batch = *inputs->batch;
    const int64_t tokens = batch.num_tokens, m = model->num_streams, hidden = model->hidden, lines = given->num_lines;
    if (!streams) streams = scratch<StreamsBuffer>(tokens * m * hidden), pre = scratch<PreBuffer>(tokens * m);
    if (given->lines && std::any_of(given->lines, given->lines + lines, [=](int64_t i) { return i < 0 || i >= tokens; }))
        return 3;
    Inputs shared = *inputs;
    if (const Ngrams* ngrams = model->ngrams) {
        int64_t* rows = scratch<RowBuffer, int64_t>(ngrams->layers * tokens * ngrams->columns());
        if (ngram_rows(ngrams, given->tokens, &batch, model->token_ring, rows)) return 1;
        shared.ngram_rows = rows, shared.num_columns = ngrams->columns();
    }
    if (embed(given->tokens, tokens, model->embedding, model->vocabulary, hidden, m, streams, pre)) return 1;
    store_tokens(batch, given->tokens, *model->token_ring);
    if (given->image_rows) place_images(inputs->is_image, given->image_rows, tokens, m * hidden, hidden, streams);
    const Choice nothing{};
    if (run_layers(model->layers, model->num_layers, &shared, &nothing, streams, pre, nullptr, nullptr)) return 2;
    if (given->lines) {
        float* chosen = scratch<ChosenStreams>(lines * m * hidden);
        float* weights = scratch<ChosenPre>(lines * m);
        for (int64_t i = 0; i < lines; ++i) {
            std::copy_n(streams + given->lines[i] * m * hidden, m * hidden, chosen + i * m * hidden);
            std::copy_n(pre + given->lines[i] * m, m, weights + i * m);
        }
        streams = chosen, pre = weights;
    }
    head(model->head, streams, pre, lines, m, logits);
    best_tokens(logits, lines, model->head->matrix.rows, token_ids, is_finite);
    return 0;
}
