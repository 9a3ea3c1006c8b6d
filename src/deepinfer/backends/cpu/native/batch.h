// The tokens of a step, as `TokenBatch` in ops/batch.py describes them, and the caches that they read and write.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace deepinfer {

struct Batch {
    const int32_t* positions;      // [tokens]
    const int32_t* row_offsets;    // [rows + 1]
    const int32_t* row_starts;     // [rows]
    const int32_t* row_slots;      // [rows]
    const int32_t* block_table;    // [rows, table_columns]
    const int32_t* window_starts;  // [rows]
    int64_t num_tokens, num_rows, table_columns, block_tokens;
    int64_t is_block;  // each row is a block of drafts
};

// Rings [slots, length, bytes per entry] or pages [blocks, entries, bytes per entry]; the entries of one slot or
// block lie side by side, the slots or blocks `stride` bytes apart.
struct Cache {
    uint8_t* data;
    int64_t stride, count, entries, bytes;

    uint8_t* at(int64_t number, int64_t entry) const { return data + number * stride + entry * bytes; }
    bool has(int64_t number) const { return number >= 0 && number < count; }
    int64_t slot(int64_t number) const { return has(number) ? number : 0; }  // 0 is the padding slot
};

// Where entry `entry` of a row lies in paged caches; null when the row's block table does not reach it.
inline const uint8_t* find_entry(const Batch& batch, const Cache& pages, int64_t row, int32_t entry) {
    const uint32_t per_block = static_cast<uint32_t>(pages.entries);  // 32-bit division is the fast one
    const uint32_t column = static_cast<uint32_t>(entry) / per_block, place = static_cast<uint32_t>(entry) % per_block;
    if (entry < 0 || column >= batch.table_columns) return nullptr;
    const int64_t block = batch.block_table[row * batch.table_columns + column];
    return pages.has(block) ? pages.at(block, place) : nullptr;
}

// The same for `count` entries from `first` on.
inline void find_entries(const Batch& batch, const Cache& pages, int64_t row, int64_t first, int64_t count,
                         const uint8_t** found) {
    for (int64_t i = 0; i < count;) {
        const int64_t entry = first + i, in_block = std::min(pages.entries - entry % pages.entries, count - i);
        const uint8_t* start = find_entry(batch, pages, row, static_cast<int32_t>(entry));
        for (int64_t end = i + in_block; i < end; ++i) {
            found[i] = start;
            if (start) start += pages.bytes;
        }
    }
}

// Some tokens of one row.
struct Tile {
    int64_t row, first, last;  // tokens first .. last - 1 of the step
    int64_t position;          // of the first
};

// All tokens of the step, at most `size` in a tile.
inline std::vector<Tile> tiles_of(const Batch& batch, int64_t size) {
    std::vector<Tile> tiles;
    for (int64_t row = 0; row < batch.num_rows; ++row) {
        const int64_t begin = batch.row_offsets[row], end = batch.row_offsets[row + 1];
        for (int64_t first = begin; first < end; first += size)
            tiles.push_back({row, first, std::min(first + size, end), batch.row_starts[row] + first - begin});
    }
    return tiles;
}

}  // namespace deepinfer
