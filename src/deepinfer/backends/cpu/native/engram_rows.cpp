#include "engram_rows.h"

#include "scratch.h"

namespace deepinfer {
namespace {

struct Gram;

// Compressed ids of a token and those before it, newest first; false when an id is not in the vocabulary.
// From the first place before the sequence or on an image token, the pad id stands in.
bool read_gram(const Ngrams& ngrams, const Batch& batch, const Cache& ring, const int64_t* tokens, int64_t row,
               int64_t token, int64_t* gram) {
    const int64_t ahead = token - batch.row_offsets[row], slot = ring.slot(batch.row_slots[row]);
    bool is_blocked = false;
    for (int64_t back = 0; back < ngrams.span; ++back) {
        const int64_t position = batch.row_starts[row] + ahead - back;
        int64_t id = 0;
        if (position < 0) is_blocked = true;
        else if (back <= ahead) id = tokens[token - back];
        else id = *reinterpret_cast<const int32_t*>(ring.at(slot, position % ring.entries));
        is_blocked = is_blocked || id == ngrams.image_token;
        if (!is_blocked && (id < 0 || id >= ngrams.vocab)) return false;
        gram[back] = is_blocked ? ngrams.pad : ngrams.token_map[id];
    }
    return true;
}

int64_t remainder(int64_t value, int64_t prime) {
    const int64_t rest = value % prime;
    return rest < 0 ? rest + prime : rest;
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

EXPORT int64_t ngram_rows(const Ngrams* ngrams, const int64_t* tokens, const Batch* batch, const Cache* ring,
                          int64_t* out) {
    const int64_t columns = ngrams->columns();
    int64_t* gram = scratch<Gram, int64_t>(ngrams->span);
    for (int64_t row = 0; row < batch->num_rows; ++row)
        for (int64_t token = batch->row_offsets[row]; token < batch->row_offsets[row + 1]; ++token) {
            if (!read_gram(*ngrams, *batch, *ring, tokens, row, token, gram)) return 1;
            for (int64_t layer = 0; layer < ngrams->layers; ++layer) {
                const int64_t* multipliers = ngrams->multipliers + layer * ngrams->span;
                int64_t* to = out + (layer * batch->num_tokens + token) * columns;
                uint64_t rolling = static_cast<uint64_t>(gram[0]) * multipliers[0];
                for (int64_t size = 1; size < ngrams->span; ++size) {
                    rolling ^= static_cast<uint64_t>(gram[size]) * multipliers[size];
                    for (int64_t head = 0; head < ngrams->heads; ++head, ++to) {
                        const int64_t column = layer * columns + (size - 1) * ngrams->heads + head;
                        *to = remainder(static_cast<int64_t>(rolling), ngrams->primes[column]) +
                              ngrams->first_rows[column];
                    }
                }
            }
        }
    return 0;
}
