// Shared memory: its bounds, and who touched it when.
#include "core.hpp"

u8* Block::at(const Warp& w, const Operation& op, u32 address, u32 bytes, u32 alignment) {
    u64 from = u64(address) - SHARED_BASE;
    if (address < SHARED_BASE || from + bytes > shared.size())
        fail(w, op, "shared memory at " + std::to_string(i64(address) - SHARED_BASE) + " of " +
                        std::to_string(shared.size()) + " bytes");
    if (address % (alignment ? alignment : bytes)) fail(w, op, "shared memory at " + hex(address) + ", misaligned");
    return shared.data() + from;
}

void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

static std::string named(const Block& block, u32 agent) {
    u32 warps = u32(block.warps.size());
    return agent < warps ? "warp " + std::to_string(agent) : agent == warps ? "a load by TMA" : "a store by TMA";
}

// Each two bytes have a word for the last write, agent and time, and a word of time per reader.
// Bytes that are written again as they are do no harm: warps may hold copies of a value.
bool Block::touch(const Warp& w, const Operation& op, u32 agent, const Clock& clock, u32 from, u32 bytes,
                  const u8* before) {
    const u32 many = agents(), now = clock[agent];
    bool ordered = true;
    if (bytes < 2) return true;
    if (shadow.empty()) shadow.resize(shared.size() / 2 * (many + 1));
    const u32 first = from - SHARED_BASE;
    for (u32 i = 0; i < bytes; i += 2) {
        u32* cell = &shadow[size_t(first + i) / 2 * (many + 1)];
        u32 writer = cell[0] >> 24, when = cell[0] & 0xffffff;
        bool same = before && !memcmp(&shared[first + i], before + i, 2);
        u32 other = writer;
        bool late = when > clock[writer] && !same, races = late;
        if (before)
            for (u32 a = 0; a < many; a++)
                if (cell[1 + a] > clock[a] && a != agent && !same) races = true, other = a;
        ordered &= !races;
        if (races && (!launch->ahead || (before && late)))
            fail(w, op, "a race on shared memory at " + std::to_string(first + i) + ": " + named(*this, agent) +
                            (before ? " writes" : " reads") + " what " + named(*this, other) +
                            (other == writer && late ? " wrote" : " read") +
                            " without a barrier between");
        if (before) cell[0] = agent << 24 | (now & 0xffffff);
        else cell[1 + agent] = now;
    }
    return ordered;
}

static const u8 nothing[16] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};

const u8* Block::read(const Warp& w, const Operation& op, u32 address, u32 bytes) {
    const u8* found = at(w, op, address, bytes);
    return touch(w, op, w.number, w.clock, address, bytes, nullptr) ? found : nothing;
}

void Block::write(const Warp& w, const Operation& op, u32 address, const void* given, u32 bytes) {
    u8 *where = at(w, op, address, bytes), before[16];
    memcpy(before, where, bytes);
    memcpy(where, given, bytes);
    touch(w, op, w.number, w.clock, address, bytes, before);
}

const u8* Block::read(const Transfer& t, u32 address, u32 bytes) {
    const u8* found = at(*t.warp, *t.operation, address, bytes);
    touch(*t.warp, *t.operation, t.agent, t.clock, address, bytes, nullptr);
    return found;
}

void Block::write(const Transfer& t, u32 address, const void* given, u32 bytes) {
    u8 *where = at(*t.warp, *t.operation, address, bytes), before[16];
    memcpy(before, where, bytes);
    memcpy(where, given, bytes);
    touch(*t.warp, *t.operation, t.agent, t.clock, address, bytes, before);
}
