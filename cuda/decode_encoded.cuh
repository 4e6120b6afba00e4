// Tiles of decode.cu from encoded pages (codec_affine.cuh): the head-page of (head, frame) lies at
// k + head * head_stride + frame * frame_stride, K's section before V's; `v` is not used.
//
// The codes, scales and bases of 16 tokens are three runs of a section. Behind each other they make
// a section of 16 tokens, which is what a stage holds.
#pragma once
#include "codec_affine.cuh"

using Stored = uint4;

template <int DIM, int ROWS, int COLUMNS>
struct Encoded {
    using Page = Affine<PAGE_TOKENS, DIM, BITS, ROWS, COLUMNS>;
    using Tile = Affine<TILE, DIM, BITS, least(ROWS, TILE), COLUMNS>;
    static_assert(DIM % 8 == 0, "what belongs to 16 tokens begins at a whole chunk");
    static_assert(ROWS == 1 || ROWS % TILE == 0, "a tile lies inside one row of groups");

    static DEVICE void fetch(uint4* stage, const uint4* page, int within, int lane) {
        const int codes = within * DIM * BITS / 128, group = within / ROWS * Page::ROW_GROUPS;
        const int scales = Page::CODES + group * 2 / 16;
        const int bases = Page::CODES + Page::SCALES + group * SIZE / 16;
#pragma unroll
        for (int first = 0; first < Tile::CHUNKS; first += LANES) {
            const int i = first + lane;
            if (Tile::CHUNKS % LANES != 0 && i >= Tile::CHUNKS) break;
            const int at = i < Tile::CODES ? codes + i
                         : i < Tile::CODES + Tile::SCALES
                             ? scales + i - Tile::CODES
                             : bases + i - Tile::CODES - Tile::SCALES;
            copy_async(stage + i, page + at);
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
    using Keys = Encoded<K_DIM, K_ROWS, K_COLUMNS>;
    using Values = Encoded<V_DIM, V_ROWS, V_COLUMNS>;
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
