// Tiles of decode.cu from encoded pages (codec_affine.cuh, codec_fp8.cuh): the head-page of (head,
// frame) lies at k + head * head_stride + frame * frame_stride, K's section before V's; `v` is not
// used. What belongs to 16 tokens are a few runs of a section. Behind each other they make a section
// of 16 tokens, which is what a stage holds.
#pragma once
#include "codec_affine.cuh"
#include "codec_fp8.cuh"

using Stored = uint4;

// Codes, scales and bases.
template <int DIM, int ROWS, int COLUMNS>
struct Integers {
    using Page = Affine<PAGE_TOKENS, DIM, BITS, ROWS, COLUMNS>;
    using Tile = Affine<TILE, DIM, BITS, least(ROWS, TILE), COLUMNS>;
    static_assert(ROWS == 1 || ROWS % TILE == 0, "a tile lies inside one row of groups");

    // Where chunk i of a tile lies in a page's section.
    static DEVICE int chunk(int i, int within) {
        const int group = within / ROWS * Page::ROW_GROUPS;
        if (i < Tile::CODES) return within * DIM * BITS / 128 + i;
        i -= Tile::CODES;
        if (i < Tile::SCALES) return Page::CODES + group * 2 / 16 + i;
        return Page::CODES + Page::SCALES + group * SIZE / 16 + i - Tile::SCALES;
    }
};

// Codes, and the chunk with the scale of the section.
template <int DIM>
struct SmallFloats {
    using Page = Floats<PAGE_TOKENS, DIM>;
    struct Tile : Floats<TILE, DIM> {
        static constexpr int CHUNKS = Floats<TILE, DIM>::CODES + 1;
    };

    static DEVICE int chunk(int i, int within) {
        return i < Tile::CODES ? within * DIM / 16 + i : Page::CODES;
    }
};

template <bool FLOAT, int DIM, int ROWS, int COLUMNS>
struct Choose {
    using Section = Integers<DIM, ROWS, COLUMNS>;
};
template <int DIM, int ROWS, int COLUMNS>
struct Choose<true, DIM, ROWS, COLUMNS> {
    using Section = SmallFloats<DIM>;
};

template <typename S>
struct Encoded {
    using Page = typename S::Page;
    using Tile = typename S::Tile;
    static_assert(Tile::DIM % 8 == 0, "what belongs to 16 tokens begins at a whole chunk");

    static DEVICE void fetch(uint4* stage, const uint4* page, int within, int lane) {
#pragma unroll
        for (int first = 0; first < Tile::CHUNKS; first += LANES) {
            const int i = first + lane;
            if (Tile::CHUNKS % LANES != 0 && i >= Tile::CHUNKS) break;
            copy_async(stage + i, page + S::chunk(i, within));
        }
    }

    template <int PITCH>
    static DEVICE void decode(Element* rows, const uint4* stage, int from, int to, int lane) {
        const unsigned char* const codes = reinterpret_cast<const unsigned char*>(stage);
#pragma unroll 4
        for (int unit = lane; unit < Tile::UNITS; unit += LANES) {
            const int row = unit / Tile::ROW_UNITS, column = unit % Tile::ROW_UNITS * UNIT;
            unsigned words[Tile::CODE_WORDS];
            float x[UNIT];
            load_codes(words, codes + unit * Tile::CODE_BYTES);
            Tile::decode(words, unit, stage + Tile::CODES, x);
            if (row < from || row >= to)
                for (int j = 0; j < UNIT; ++j) x[j] = 0.0f;
            *reinterpret_cast<uint4*>(rows + row * PITCH + column) = narrow(x);
        }
    }

    static DEVICE void load_codes(unsigned (&words)[Tile::CODE_WORDS], const unsigned char* from) {
        if constexpr (Tile::CODE_BYTES == 8) {
            const uint2 both = *reinterpret_cast<const uint2*>(from);
            words[0] = both.x, words[1] = both.y;
        } else if constexpr (Tile::CODE_BYTES == 4) {
            words[0] = *reinterpret_cast<const unsigned*>(from);
        } else {
            words[0] = *reinterpret_cast<const unsigned short*>(from);
        }
    }
};

struct Tiles {
    using Keys = Encoded<Choose<FLOATS, K_DIM, K_ROWS, K_COLUMNS>::Section>;
    using Values = Encoded<Choose<FLOATS, V_DIM, V_ROWS, V_COLUMNS>::Section>;
    static constexpr int STAGE_BYTES = 16 * (Keys::Tile::CHUNKS + Values::Tile::CHUNKS);
    static constexpr int DECODED_BYTES = TILE_BYTES;

    const uint4* pages;  // of one KV head
    long long frame_stride;
    const uint4* unused;
    long long unused_stride;

    // Start copying TILE tokens of a page, from `within` on.
    DEVICE void fetch(unsigned char* stage, long long frame, int within, int, int,
                      int lane) const {
        uint4* const to = reinterpret_cast<uint4*>(stage);
        const uint4* const page = pages + frame * frame_stride;
        Keys::fetch(to, page, within, lane);
        Values::fetch(to + Keys::Tile::CHUNKS, page + Keys::Page::CHUNKS, within, lane);
    }

    // Decode a tile that has arrived to K, then V, in rows of K_PITCH and V_PITCH elements; rows
    // outside [from, to) become zeros. The whole warp calls it, done with the tile before.
    DEVICE const Element* decoded(const unsigned char* stage, unsigned char* memory, int from,
                                  int to, int lane) const {
        const uint4* const codes = reinterpret_cast<const uint4*>(stage);
        Element* const tile = reinterpret_cast<Element*>(memory);
        Keys::template decode<K_PITCH>(tile, codes, from, to, lane);
        Values::template decode<V_PITCH>(tile + TILE * K_PITCH, codes + Keys::Tile::CHUNKS, from,
                                         to, lane);
        __syncwarp();
        return tile;
    }
};
