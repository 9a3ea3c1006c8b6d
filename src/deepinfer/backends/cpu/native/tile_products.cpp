// Rows of x become tiles of bf16 numbers first. Rounded to fp8 or bf16, x is exact there; otherwise it is the sum of
// three bf16 numbers, and each product is three. A sum goes from the first block of 32 columns to the last, the
// parts of x within a block from the largest to the smallest. Few rows leave most of a tile empty; vectors do the same
// sums for them in the same order (few_products.h). Where bf16 pairs are vectors, they do so for any number of rows.

#include "tile_products.h"

#include <algorithm>

#include "bf16.h"
#include "few_products.h"
#include "round.h"
#include "scratch.h"
#include "threads.h"
#include "tiles.h"

namespace deepinfer {
namespace {

constexpr int64_t ROW_GRAIN = 4;      // tiles of rows that a thread makes at least
constexpr int MAX_PANELS = 4;         // that are multiplied together

struct LeftScratch;
struct JobScratch;
struct RightScratch;

// Rows of x as tiles: [tiles][blocks][parts] of [16 rows][32], the rows past the last zero unless there is one tile.
// Where vectors do the sums the rows of a tile lie closer, perhaps as floats: [tiles] of [blocks][parts][rows][32].
struct Left {
    const uint16_t* tiles;
    int64_t rows, blocks, parts;

    bool is_few() const { return rows <= FEW_ROWS; }
    bool is_close() const { return HAS_PAIRS || is_few(); }
    const FewNumber* close() const { return reinterpret_cast<const FewNumber*>(tiles); }

    int64_t num_tiles() const {
        constexpr int64_t most = HAS_PAIRS ? PAIR_ROWS : TILE_ROWS;
        return is_few() ? rows > 0 : (rows + most - 1) / most;
    }
    int64_t first_row(int64_t tile) const {
        return HAS_PAIRS ? tile * rows / num_tiles() : std::min(tile * TILE_ROWS, rows);
    }
    int64_t tile_numbers() const { return blocks * parts * TILE_ROWS * BLOCK; }  // more than a few rows take
    int64_t size() const { return HAS_PAIRS ? rows * blocks * parts * BLOCK : num_tiles() * tile_numbers(); }
};

Left left_of(const Matrix& matrix, int64_t rows) {
    return {nullptr, rows, (matrix.columns + BLOCK - 1) / BLOCK, matrix.rounds ? 1 : PARTS};
}

// Numbers start .. start + 31 of a row, rounded to fp8 or not, zeros behind the last column.
inline void read_block(const float* row, int64_t start, int64_t columns, int64_t rounds, Vec (&values)[SPLIT_VECS]) {
    if (rounds == TO_FP8) return round_block(row + start, values);
    for (int i = 0; i < SPLIT_VECS; ++i) {
        const int64_t left = columns - start - i * LANES;
        values[i] = left > 0 ? load(row + start + i * LANES, left) : Vec{};
    }
}

// 32 numbers as one bf16 number each, or as their bf16 parts, `distance` apart; they are taken off.
inline void put_block(Vec (&values)[SPLIT_VECS], int64_t parts, int64_t distance, uint16_t* to) {
    if (parts == 1) round_bf16(values, to);
    else split_block(values, parts, distance, to);
}

// The same as floats.
[[maybe_unused]] inline void put_block(Vec (&values)[SPLIT_VECS], int64_t parts, int64_t distance, float* to) {
    for (int64_t part = 0; part < parts; ++part)
        for (int i = 0; i < SPLIT_VECS; ++i) {
            const VecInt number = parts == 1 ? nearest_bf16(values[i]) : take_part(values[i]);
            store(to + part * distance + i * LANES, bits(number));
        }
}

inline const float* row_of(const Product& product, int64_t number) {
    return product.x + (product.places ? product.places[number] : number) * product.stride;
}

// Tile `number` of the rows.
void make_tile(const Product& product, const Left& left, int64_t number, uint16_t* tiles) {
    const int64_t columns = product.matrix->columns, begin = left.first_row(number);
    const int64_t rounds = product.is_rounded ? UNROUNDED : product.matrix->rounds;
    const int64_t rows = left.first_row(number + 1) - begin;
    auto* close = reinterpret_cast<FewNumber*>(tiles) + begin * left.blocks * left.parts * BLOCK;
    uint16_t* tile = tiles + number * left.tile_numbers();
    if (!left.is_close() && rows < TILE_ROWS && left.num_tiles() > 1)
        std::fill(tile, tile + left.tile_numbers(), uint16_t{0});
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = row_of(product, begin + row);
        for (int64_t block = 0; block < left.blocks; ++block) {
            Vec values[SPLIT_VECS];
            read_block(from, block * BLOCK, columns, rounds, values);
            if (left.is_close()) {
                FewNumber* to = close + (block * left.parts * rows + row) * BLOCK;
                put_block(values, left.parts, rows * BLOCK, to);
            } else {
                uint16_t* to = tile + (block * left.parts * TILE_ROWS + row) * BLOCK;
                put_block(values, left.parts, TILE_ROWS * BLOCK, to);
            }
        }
    }
}

// A panel of codes as tiles of bf16 numbers.
template <class Source>
void widen_panel(const uint8_t* codes, const uint8_t* exponents, int64_t blocks, uint8_t* to) {
    for (int64_t block = 0; block < blocks; ++block, to += TILE_BYTES) {
        const Source source(codes, exponents, block);
        for (int i = 0; i < 4; ++i) {
            Pairs pairs[4];
            source.get(i, pairs);
            for (int j = 0; j < 4; ++j)
                for (int v = 0; v < VECS; ++v)
                    store(reinterpret_cast<float*>(to + (4 * i + j) * 64) + v * LANES, bits(pairs[j].part[v]));
        }
    }
}

// Where a tile's sums go: `rows` rows of `columns` numbers.
struct Target {
    float* out;
    int64_t stride, rows, columns;
};

template <int T>
void put(const Target& to, bool is_exact) {
    if (is_exact && to.columns >= PANEL) return tile_store<T>(to.out, to.stride * 4);
    alignas(64) float all[TILE_ROWS][PANEL];
    tile_store<T>(all, PANEL * 4);
    for (int64_t row = 0; row < to.rows; ++row)
        std::copy_n(all[row], std::min<int64_t>(to.columns, PANEL), to.out + row * to.stride);
}

// R tiles of rows times P panels.
template <int R, int P>
void multiply_tiles(const Left& left, int64_t tile, const uint8_t* const* panels, int64_t tile_rows, const Target& to) {
    static_assert(R <= 2 && R * P <= NUM_SUM_TILES);
    const uint16_t* rows = left.tiles + tile * left.tile_numbers();
    each<R * P>([](auto i) { tile_zero<i>(); });
    for (int64_t block = 0; block < left.blocks; ++block)
        for (int64_t part = 0; part < left.parts; ++part, rows += TILE_ROWS * BLOCK) {
            each<R>([&](auto r) { tile_load<NUM_SUM_TILES + r>(rows + r * left.tile_numbers(), 64); });
            each<P>([&](auto p) {
                if (P > 2 || part == 0) tile_load<6 + p % 2>(panels[p] + block * TILE_BYTES, 64);
                each<R>([&](auto r) { tile_multiply<r * P + p, NUM_SUM_TILES + r, 6 + p % 2>(); });
            });
        }
    each<R>([&](auto r) {
        const int64_t first = (tile + r) * TILE_ROWS, count = std::min<int64_t>(TILE_ROWS, left.rows - first);
        each<P>([&](auto p) {
            put<r * P + p>({to.out + first * to.stride + p * PANEL, to.stride, count, to.columns - p * PANEL},
                           count == tile_rows);
        });
    });
}

template <int R, int P>
void multiply_some(int64_t num_panels, const Left& left, int64_t tile, const uint8_t* const* panels, int64_t tile_rows,
                   const Target& to) {
    if constexpr (P > 1) {
        if (num_panels < P) return multiply_some<R, P - 1>(num_panels, left, tile, panels, tile_rows, to);
    }
    multiply_tiles<R, P>(left, tile, panels, tile_rows, to);
}

// All rows times a panel of bf16 numbers.
void multiply_close(const Left& left, const uint8_t* panel, const Target& to) {
    for (int64_t tile = 0; tile < left.num_tiles(); ++tile) {
        const int64_t first = left.first_row(tile), rows = left.first_row(tile + 1) - first;
        const FewNumber* x = left.close() + first * left.blocks * left.parts * BLOCK;
        few_rows<PAIR_ROWS>(x, rows, left.parts, panel, left.blocks, to.out + first * to.stride, to.stride, to.columns);
    }
}

// Panels first .. last - 1 with all rows.
void multiply_panels(const Left& left, const Matrix& matrix, float* out, int64_t stride, int64_t first, int64_t last) {
    const int64_t tiles = left.num_tiles(), tile_rows = tiles == 1 ? left.rows : TILE_ROWS;
    const int64_t together = HAS_PAIRS ? 1 : tiles == 1 ? MAX_PANELS : 2, wide_bytes = left.blocks * TILE_BYTES;
    const auto* values = static_cast<const uint8_t*>(matrix.values);
    const bool is_packed = matrix.format != TILED_BF16;
    if (left.is_few()) return few_products(left.close(), left.rows, left.parts, matrix, out, stride, first, last);
    uint8_t* widened = is_packed ? scratch<RightScratch, uint8_t>(together * wide_bytes) : nullptr;
    const TileUse use(static_cast<int>(tile_rows));
    for (int64_t panel = first; panel < last; panel += together) {
        const int64_t count = std::min(together, last - panel);
        const uint8_t* panels[MAX_PANELS];
        for (int64_t p = 0; p < count; ++p) {
            panels[p] = is_packed ? widened + p * wide_bytes : values + (panel + p) * wide_bytes;
            if (!is_packed) continue;
            const uint8_t* codes = values + (panel + p) * panel_bytes(matrix.format, matrix.columns);
            const uint8_t* exponents = matrix.exponents + (panel + p) * left.blocks * PANEL;
            with_block(matrix.format, [&](auto source) {
                widen_panel<typename decltype(source)::Block>(codes, exponents, left.blocks, widened + p * wide_bytes);
            });
        }
        const Target to{out + panel * PANEL, stride, left.rows, matrix.rows - panel * PANEL};
        if constexpr (HAS_PAIRS) {
            multiply_close(left, panels[0], to);
            continue;
        }
        if (tiles == 1) multiply_some<1, MAX_PANELS>(count, left, 0, panels, tile_rows, to);
        int64_t tile = 0;
        for (; tiles > 1 && tile + 2 <= tiles; tile += 2) multiply_some<2, 2>(count, left, tile, panels, tile_rows, to);
        if (tiles > 1 && tile < tiles) multiply_some<1, 2>(count, left, tile, panels, tile_rows, to);
    }
}

// Whether each tile of rows meets so few panels that it is made for them alone, a block at a time.
bool is_narrow(const Product& product) {
    return !HAS_PAIRS && product.num_rows > FEW_ROWS && product.matrix->format == TILED_BF16 &&
           num_panels(*product.matrix) <= MAX_PANELS;
}

// Tiles first .. last - 1 of the rows with all P panels.
template <int P>
void multiply_narrow(const Product& product, int64_t first, int64_t last) {
    alignas(64) uint16_t parts[PARTS * TILE_ROWS * BLOCK];
    const Matrix& matrix = *product.matrix;
    const Left left = left_of(matrix, product.num_rows);
    const auto* panels = static_cast<const uint8_t*>(matrix.values);
    const int64_t rounds = product.is_rounded ? UNROUNDED : matrix.rounds;
    const TileUse use(TILE_ROWS);
    for (int64_t tile = first; tile < last; ++tile) {
        const int64_t row = tile * TILE_ROWS, rows = std::min<int64_t>(TILE_ROWS, left.rows - row);
        if (rows < TILE_ROWS) std::fill_n(parts, PARTS * TILE_ROWS * BLOCK, uint16_t{0});
        each<P>([](auto p) { tile_zero<p>(); });
        for (int64_t block = 0; block < left.blocks; ++block) {
            for (int64_t r = 0; r < rows; ++r) {
                Vec values[SPLIT_VECS];
                read_block(row_of(product, row + r), block * BLOCK, matrix.columns, rounds, values);
                put_block(values, left.parts, TILE_ROWS * BLOCK, parts + r * BLOCK);
            }
            for (int64_t part = 0; part < left.parts; ++part) {
                tile_load<4>(parts + part * TILE_ROWS * BLOCK, 64);
                each<P>([&](auto p) {
                    tile_load<6 + p % 2>(panels + (p * left.blocks + block) * TILE_BYTES, 64);
                    tile_multiply<p, 4, 6 + p % 2>();
                });
            }
        }
        each<P>([&](auto p) {
            float* to = product.out + row * product.out_stride + p * PANEL;
            put<p>({to, product.out_stride, rows, matrix.rows - p * PANEL}, rows == TILE_ROWS);
        });
    }
}

template <int P = MAX_PANELS>
void multiply_narrow_by(const Product& product) {
    if constexpr (P > 1) {
        if (num_panels(*product.matrix) < P) return multiply_narrow_by<P - 1>(product);
    }
    parallel((product.num_rows + TILE_ROWS - 1) / TILE_ROWS, 1,
             [&](int64_t first, int64_t last) { multiply_narrow<P>(product, first, last); });
}

}  // namespace

void tiled_gemm_all(const Product* products, int64_t count) {
    if (count == 1 && is_narrow(*products)) return multiply_narrow_by(*products);
    struct Job {
        int64_t product, tile;
    };
    Left* lefts = scratch<LeftScratch, Left>(count);
    int64_t num_jobs = 0, size = 0;
    for (int64_t i = 0; i < count; ++i) {
        lefts[i] = left_of(*products[i].matrix, products[i].num_rows);
        num_jobs += lefts[i].num_tiles(), size += lefts[i].size();
    }
    uint16_t* tiles = scratch<Job, uint16_t>(size);
    Job* jobs = scratch<JobScratch, Job>(num_jobs);
    for (int64_t i = 0; i < count; ++i) {
        lefts[i].tiles = tiles;
        tiles += lefts[i].size();
        for (int64_t tile = 0; tile < lefts[i].num_tiles(); ++tile) *jobs++ = {i, tile};
    }
    jobs -= num_jobs;
    parallel(num_jobs, ROW_GRAIN, [=](int64_t first, int64_t last) {
        for (const Job* job = jobs + first; job < jobs + last; ++job) {
            const Product& one = products[job->product];
            make_tile(one, lefts[job->product], job->tile, const_cast<uint16_t*>(lefts[job->product].tiles));
        }
    });
    const int64_t panels = count && size ? num_panels(*products->matrix) : 0;
    parallel(panels, panel_grain(products, count), [=](int64_t first, int64_t last) {
        for (int64_t i = 0; i < count; ++i)
            if (products[i].num_rows)
                multiply_panels(lefts[i], *products[i].matrix, products[i].out, products[i].out_stride, first, last);
    });
}

void tiled_gemm_panels(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out,
                       int64_t out_stride, int64_t first, int64_t last) {
    if (!num_rows) return;
    Left left = left_of(matrix, num_rows);
    uint16_t* tiles = scratch<Left, uint16_t>(left.size());
    const Product product{x, num_rows, stride, &matrix, out, out_stride, true};
    for (int64_t tile = 0; tile < left.num_tiles(); ++tile) make_tile(product, left, tile, tiles);
    left.tiles = tiles;
    multiply_panels(left, matrix, out, out_stride, first, last);
}

}  // namespace deepinfer
