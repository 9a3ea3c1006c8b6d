// Whole layers as one call: what `run_layers` of ops/layers.py does op by op.

#include <algorithm>

#include "cache_formats.h"
#include "layers.h"
#include "ops.h"
#include "rings.h"
#include "scratch.h"

namespace deepinfer {

// A layer and its caches; null for what it lacks.
struct Layer {
    const Engram* engram;
    const Hyper *attention_hyper, *expert_hyper;
    const Attention* attention;
    const Compressor* compressor;
    const Indexer* indexer;
    const Router* router;
    const Experts *experts, *shared_expert;
    const Cache *window, *pages, *index_pages, *state;
    int64_t engram_place, tap_place, reads_entries, keeps_candidates, uses_candidates;  // tap_place -1 = none
};

namespace {

struct XBuffer;
struct OutputBuffer;
struct PostBuffer;
struct CombBuffer;
struct LowRankBuffer;
struct QueryBuffer;
struct WindowBuffer;
struct AttendedBuffer;
struct ChosenBuffer;
struct ShareBuffer;
struct EntryBuffer;
struct CandidateBuffer;

// The mix of a half layer whose `pre` went straight into the caller's.
struct HalfMix {
    float *post, *comb;

    HalfMix(int64_t tokens, int64_t num_streams)
        : post(scratch<PostBuffer>(tokens * num_streams)),
          comb(scratch<CombBuffer>(tokens * num_streams * num_streams)) {}
};

void select_for(const Layer& layer, const Inputs& inputs, const float* x, const float* low_rank, Choice& choice) {
    const Indexer& indexer = *layer.indexer;
    const int64_t tokens = inputs.batch->num_tokens, visible = (inputs.max_position + 1) / indexer.ratio;
    choice.num_entries = std::min(indexer.top_k, visible);
    choice.entries = scratch<EntryBuffer, int32_t>(tokens * choice.num_entries);
    int64_t num_kept = 0;
    int32_t* kept = nullptr;
    if (indexer.keeps_candidates) {
        const int64_t blocks = (visible + indexer.candidate_size - 1) / indexer.candidate_size;
        num_kept = std::min(indexer.candidate_blocks, blocks);
        kept = scratch<CandidateBuffer, int32_t>(tokens * num_kept);
    }
    const int32_t* given = layer.uses_candidates && !kept ? choice.candidates : nullptr;
    select_entries(&indexer, x, layer.attention->down.columns, low_rank, inputs.batch, layer.index_pages, given,
                   given ? choice.num_candidates : 0, inputs.max_position, choice.entries, choice.num_entries, kept,
                   num_kept);
    if (layer.keeps_candidates) choice.candidates = kept, choice.num_candidates = num_kept;
}

void attention_half(const Layer& layer, const Inputs& inputs, float* streams, float* pre, Choice& choice) {
    const Batch& batch = *inputs.batch;
    const Attention& attention = *layer.attention;
    const int64_t tokens = batch.num_tokens, num_streams = layer.attention_hyper->num_streams;
    const int64_t hidden = layer.attention_hyper->hidden, dim = attention.dim;
    float* x = scratch<XBuffer>(tokens * hidden);
    const HalfMix mix(tokens, num_streams);
    hyper_enter(layer.attention_hyper, streams, pre, tokens, x, pre, mix.post, mix.comb);
    if (layer.compressor)
        compress(layer.compressor, x, hidden, &batch, layer.state, layer.pages, layer.index_pages);
    float* low_rank = scratch<LowRankBuffer>(tokens * attention.wq_b.columns);
    float* q = scratch<QueryBuffer>(tokens * attention.wq_b.rows);
    uint8_t* window_rows = scratch<WindowBuffer, uint8_t>(tokens * window_bytes(dim));
    attention_inputs(&attention, x, hidden, batch.positions, tokens, low_rank, q, window_rows);
    if (layer.indexer) select_for(layer, inputs, x, low_rank, choice);
    const bool reads = layer.reads_entries && choice.entries;
    float* attended = scratch<AttendedBuffer>(tokens * attention.wq_b.rows);
    attend(&batch, q, window_rows, layer.window, reads ? layer.pages : nullptr, reads ? choice.entries : nullptr,
           reads ? choice.num_entries : 0, attention.sink, attention.frequencies, attention.num_heads, dim,
           attention.window, attention.num_pairs, attended);
    if (!batch.is_block) store_ring(batch, window_rows, *layer.window);
    float* output = scratch<OutputBuffer>(tokens * hidden);
    project_out(&attention, attended, tokens, output);
    hyper_leave(streams, output, mix.post, mix.comb, tokens, num_streams, hidden, streams);
}

int64_t expert_half(const Layer& layer, const Inputs& inputs, float* streams, float* pre) {
    const int64_t tokens = inputs.batch->num_tokens, num_streams = layer.expert_hyper->num_streams;
    const int64_t hidden = layer.expert_hyper->hidden, k = layer.router->num_active;
    float* x = scratch<XBuffer>(tokens * hidden);
    const HalfMix mix(tokens, num_streams);
    hyper_enter(layer.expert_hyper, streams, pre, tokens, x, pre, mix.post, mix.comb);
    int32_t* chosen = scratch<ChosenBuffer, int32_t>(tokens * k);
    float* share = scratch<ShareBuffer>(tokens * k);
    route(layer.router, x, hidden, inputs.is_image, tokens, chosen, share);
    float* output = scratch<OutputBuffer>(tokens * hidden);
    if (all_experts(*layer.experts, *layer.shared_expert, x, hidden, chosen, share, tokens, k, output)) return 1;
    hyper_leave(streams, output, mix.post, mix.comb, tokens, num_streams, hidden, streams);
    return 0;
}

void copy_out(const int32_t* from, int64_t count, int32_t* to) {
    if (from && to) std::copy_n(from, count, to);
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

// streams [tokens, m, hidden] and pre [tokens, m] are changed in place. `choice` is what the layers before selected;
// `entries` and `candidates`, as wide as these layers leave them, take the selection of the last or are null.
// Returns 0, or 1 when an n-gram row does not exist.
EXPORT int64_t run_layers(const Layer* layers, int64_t count, const Inputs* inputs, const Choice* given, float* streams,
                          float* pre, int32_t* entries, int32_t* candidates) {
    const int64_t tokens = inputs->batch->num_tokens;
    Choice choice = *given;
    for (const Layer* layer = layers; layer < layers + count; ++layer) {
        if (layer->engram) {
            const int64_t* rows = inputs->ngram_rows + layer->engram_place * tokens * inputs->num_columns;
            if (engram(layer->engram, streams, rows, inputs->num_columns, inputs->is_image, tokens, streams)) return 1;
        }
        if (inputs->taps && layer->tap_place >= 0)
            tap(streams, tokens, layer->attention_hyper->num_streams, layer->attention_hyper->hidden,
                inputs->taps + layer->tap_place * layer->attention_hyper->hidden,
                inputs->num_taps * layer->attention_hyper->hidden);
        attention_half(*layer, *inputs, streams, pre, choice);
        if (expert_half(*layer, *inputs, streams, pre)) return 1;
    }
    copy_out(choice.entries, tokens * choice.num_entries, entries);
    copy_out(choice.candidates, tokens * choice.num_candidates, candidates);
    return 0;
}
