// Tiles of decode.cu from raw pages: element (head, frame, token, dim) of K lies at
// k + head * head_stride + frame * frame_stride + token * K_DIM + dim, and of V likewise.
#pragma once

using Stored = Element;

struct Tiles {
    static constexpr int STAGE_BYTES = TILE_BYTES, DECODED_BYTES = 0;

    const Element* k;  // of one KV head
    long long k_frame;
    const Element* v;
    long long v_frame;

    // Start copying TILE tokens of a page, from `within` on; those outside [from, to) become zeros.
    DEVICE void fetch(unsigned char* stage, long long frame, int within, int from, int to,
                      int lane) const {
        Element* const tile = reinterpret_cast<Element*>(stage);
        rows<K_DIM, K_PITCH>(tile, k + frame * k_frame + within * K_DIM, from, to, lane);
        rows<V_DIM, V_PITCH>(tile + TILE * K_PITCH, v + frame * v_frame + within * V_DIM, from, to,
                             lane);
    }

    // Return a tile that has arrived: K, then V, in rows of K_PITCH and V_PITCH elements.
    DEVICE const Element* decoded(const unsigned char* stage, unsigned char*, int, int, int) const {
        return reinterpret_cast<const Element*>(stage);
    }

    template <int DIM, int PITCH>
    static DEVICE void rows(Element* tile, const Element* source, int from, int to, int lane) {
        constexpr int CHUNKS = DIM / CHUNK, COUNT = TILE * CHUNKS;
        const bool whole = from <= 0 && to >= TILE;
#pragma unroll
        for (int i = 0; i < (COUNT + LANES - 1) / LANES; ++i) {
            const int chunk = lane + LANES * i;
            const int token = chunk / CHUNKS;
            if (COUNT % LANES != 0 && chunk >= COUNT) break;
            Element* target = tile + token * PITCH + (chunk - token * CHUNKS) * CHUNK;
            if (whole)
                copy_async(target, source + chunk * CHUNK);
            else
                copy_async_or_zero(target, source + chunk * CHUNK, token >= from && token < to);
        }
    }
};
