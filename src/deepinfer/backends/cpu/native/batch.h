// The tokens of a step, as `TokenBatch` in ops/batch.py describes them, and the caches that they read and write.

#pragma once

#include <cstdint>

namespace deepinfer {

struct Batch {
    const int32_t* positions;      // [tokens]
    const int32_t* rows;           // [tokens]
    const int32_t* row_offsets;    // [rows + 1]
    const int32_t* row_starts;     // [rows]
    const int32_t* row_slots;      // [rows]
    const int32_t* block_table;    // [rows, table_columns]
    const int32_t* window_starts;  // [rows]
    int64_t num_tokens, num_rows, table_columns, block_tokens;
};

// Rings [slots, length, bytes per entry] or pages [blocks, entries, bytes per entry]; the entries of one slot or
// block lie side by side, the slots or blocks `stride` bytes apart.
struct Cache {
    uint8_t* data;
    int64_t stride, count, entries, bytes;

    uint8_t* at(int64_t number, int64_t entry) const { return data + number * stride + entry * bytes; }
    bool has(int64_t number) const { return number >= 0 && number < count; }
};

// Where entry `entry` of a row lies in paged caches; null when the row's block table does not reach it.
inline const uint8_t* find_entry(const Batch& batch, const Cache& pages, int64_t row, int64_t entry) {
    const int64_t column = entry / pages.entries;
    if (entry < 0 || column >= batch.table_columns) return nullptr;
    const int64_t block = batch.block_table[row * batch.table_columns + column];
    return pages.has(block) ? pages.at(block, entry % pages.entries) : nullptr;
}

}  // namespace deepinfer
