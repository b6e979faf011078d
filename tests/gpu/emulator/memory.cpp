// Loads, stores, asynchronous copies, atomics, barriers and jumps.
#include <algorithm>

#include "core.hpp"

#define OP [](Warp & w, [[maybe_unused]] const Operation& op, [[maybe_unused]] u32 mask)

u8* global(const Warp& w, const Operation& op, u64 address, u32 bytes, u32 alignment) {
    if (address % (alignment ? alignment : bytes)) fail(w, op, "global memory at " + hex(address) + ", misaligned");
    std::vector<Range>& ranges = w.block->launch->ranges;
    for (size_t i = 0; i < ranges.size(); i++)
        if (address >= ranges[i].begin && address + bytes <= ranges[i].end) {
            if (i) std::swap(ranges[0], ranges[i]);
            return reinterpret_cast<u8*>(address);
        }
    std::string nearest = "no tensor is near";
    u64 least = ~0ull;
    for (const Range& r : ranges) {
        u64 far = address < r.begin ? r.begin - address : address + bytes - r.end;
        if (far < least)
            least = far, nearest = std::to_string(far) + (address < r.begin ? " bytes before" : " bytes after") +
                                   " a tensor of " + std::to_string(r.end - r.begin);
    }
    fail(w, op, "global memory at " + hex(address) + ", outside of every tensor: " + nearest);
}

enum Space { GLOBAL, SHARED, PARAMETER, PARAMETER32 };  // the last: half of an address

// the address of a parameter, of its lower half
static u64 whole(const Warp& w, u32 half) {
    u64 first = w.block->launch->parameters;
    return first + u32(half - u32(first));
}

template <int SPACE>
static u8* reach(const Warp& w, const Operation& op, int lane, u32 bytes) {
    i64 more = op.operands[1];
    const Launch& launch = *w.block->launch;
    u64 address;
    if (SPACE == PARAMETER32)
        address = whole(w, w.at<u32>(op.operands[0])[lane]) + more;
    else
        address = w.at<u64>(op.operands[0])[lane] + more;
    if (SPACE == GLOBAL) return global(w, op, address, bytes);
    if (address < launch.parameters || address + bytes > launch.parameters + launch.parameter_bytes)
        fail(w, op, "a parameter outside of the block");
    return reinterpret_cast<u8*>(address);
}

static u32 place(const Warp& w, const Operation& op, int lane) {  // in shared memory
    return w.at<u32>(op.operands[0])[lane] + u32(op.operands[1]);
}

// M: what memory holds, R: what the register does
template <int SPACE, class M, class R>
static void load(Warp& w, const Operation& op, u32 mask) {
    int many = op.operands[2];
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        M found[8];
        const u32 bytes = sizeof(M) * many;
        memcpy(found, SPACE == SHARED ? w.block->read(w, op, place(w, op, l), bytes) : reach<SPACE>(w, op, l, bytes), bytes);
        for (int i = 0; i < many; i++) w.at<R>(op.operands[3 + i])[l] = R(found[i]);
    }
}

template <int SPACE, class M, class R>
static void store(Warp& w, const Operation& op, u32 mask) {
    const int many = op.operands[2];
    const u32 bytes = sizeof(M) * many;
    u8 before[LANES][64];
    for (int l = 0; SPACE == SHARED && l < LANES; l++)
        if (mask >> l & 1) memcpy(before[l], w.block->at(w, op, place(w, op, l), bytes), bytes);
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        M given[8];
        for (int i = 0; i < many; i++) given[i] = M(w.at<R>(op.operands[3 + i])[l]);
        u8* where = SPACE == SHARED ? w.block->at(w, op, place(w, op, l), bytes) : reach<SPACE>(w, op, l, bytes);
        memcpy(where, given, bytes);
    }
    // once all lanes have written: what several of them wrote to one place is what stays there
    for (int l = 0; SPACE == SHARED && l < LANES; l++)
        if (mask >> l & 1) w.block->touch(w, op, w.number, w.clock, place(w, op, l), bytes, before[l]);
}

template <int SPACE, class M, class R>
static void add_access(const std::string& space, const std::string& kind) {
    add("ld." + space + "." + kind, load<SPACE, M, R>);
    if (SPACE <= SHARED) add("st." + space + "." + kind, store<SPACE, M, R>);
}

template <int SPACE>
static void add_accesses(const std::string& space) {
    add_access<SPACE, u8, u16>(space, "8.16");
    add_access<SPACE, int8_t, int16_t>(space, "8.16s");
    add_access<SPACE, u8, u32>(space, "8.32");
    add_access<SPACE, int8_t, i32>(space, "8.32s");
    add_access<SPACE, u8, u64>(space, "8.64");
    add_access<SPACE, int8_t, i64>(space, "8.64s");
    add_access<SPACE, u16, u16>(space, "16.16");
    add_access<SPACE, u16, u32>(space, "16.32");
    add_access<SPACE, u16, u64>(space, "16.64");
    add_access<SPACE, u32, u32>(space, "32.32");
    add_access<SPACE, u32, u64>(space, "32.64");
    add_access<SPACE, i32, i64>(space, "32.64s");
    add_access<SPACE, u64, u64>(space, "64.64");
}

// cp.async: to, +, from, +, bytes[, bytes that are read]. What lies there is no more, and the copy
// comes when it is waited for: a wait that is missing shows, and a barrier before it too.
static void copy(Warp& w, const Operation& op, u32 mask) {
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        u32 to = w.at<u32>(op.operands[0])[l] + op.operands[1];
        u64 from = w.at<u64>(op.operands[2])[l] + op.operands[3];
        u32 bytes = w.first(op.operands[4]);
        u32 given = op.count > 5 ? w.at<u32>(op.operands[5])[l] : bytes;
        if (given) global(w, op, from, bytes);
        static const std::vector<u8> nothing(16, 0xff);
        w.block->write(w, op, to, nothing.data(), bytes);
        w.copies.back().push_back({to, from, bytes, given, op.line});
    }
}

static void copies_until(Warp& w, const Operation& op, size_t left) {
    while (w.copies.size() - 1 > left) {
        for (const Copy& c : w.copies.front()) {
            u8 found[16] = {};
            memcpy(found, reinterpret_cast<u8*>(c.from), std::min(c.bytes, c.given));
            w.block->write(w, op, c.to, found, c.bytes);
        }
        w.copies.pop_front();
    }
}

template <class T, class F>
static void atomic(Warp& w, const Operation& op, u32 mask, F f) {  // d, [a + n], b
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        u64 address = w.at<u64>(op.operands[1])[l] + op.operands[2];
        T* where = reinterpret_cast<T*>(global(w, op, address, sizeof(T)));
        T before = *where;
        *where = f(before, w.at<T>(op.operands[3])[l]);
        w.at<T>(op.operands[0])[l] = before;
    }
}

static void barrier(Warp& w, const Operation& op, bool waits) {
    if (w.active != ~w.exited) fail(w, op, "a barrier where the lanes of a warp went apart");
    Block& block = *w.block;
    u32 number = w.first(op.operands[0]), threads = 0;
    if (op.count > 1) threads = w.first(op.operands[1]);
    else
        for (const Warp& other : block.warps) threads += other.state != State::done ? LANES : 0;
    Barrier& b = block.barriers[number];
    b.arrived += LANES;
    join(b.before, w.clock);
    w.clock[w.number]++;
    if (waits) b.waiting.push_back(&w), w.state = State::waiting;
    if (b.arrived > threads) fail(w, op, "more threads at a barrier than it takes");
    if (b.arrived == threads) {
        for (Warp* other : b.waiting) other->state = State::ready, join(other->clock, b.before);
        b = {};
    }
}

// the lanes that come first in the text go on; those who went elsewhere are met there
void settle(Warp& w) {
    if (w.active) w.others.push_back({w.next, w.active});
    i32 first = w.others[0].first;
    for (auto& o : w.others) first = std::min(first, o.first);
    w.next = first, w.active = 0;
    auto gone = std::remove_if(w.others.begin(), w.others.end(), [&](auto& o) {
        if (o.first == first) w.active |= o.second;
        return o.first == first;
    });
    w.others.erase(gone, w.others.end());
}

void add_memory() {
    add_accesses<GLOBAL>("global");
    add_accesses<SHARED>("shared");
    add_accesses<PARAMETER>("param");
    add_accesses<PARAMETER32>("param32");
    add("cvta.param.u64", OP {
        for (int l = 0; l < LANES; l++)
            if (mask >> l & 1)
                w.at<u64>(op.operands[0])[l] = whole(w, u32(w.at<u64>(op.operands[1])[l]));
    });
    add("cp.async.shared.global", copy);
    add("cp.async.commit_group", OP { w.copies.emplace_back(); });
    add("cp.async.wait_group", OP { copies_until(w, op, w.first(op.operands[0])); });
    add("cp.async.wait_all", OP {
        w.copies.emplace_back();
        copies_until(w, op, 0);
    });
    add("atom.global.add.u32", OP { atomic<u32>(w, op, mask, [](u32 a, u32 b) { return a + b; }); });
    add("atom.global.exch.b32", OP { atomic<u32>(w, op, mask, [](u32, u32 b) { return b; }); });
    for (const char* name : {"bar", "barrier"}) add(name, OP { barrier(w, op, true); });
    for (const char* name : {"bar.arrive", "barrier.arrive"}) add(name, OP { barrier(w, op, false); });
    add("bra", OP {
        u32 rest = w.active & ~mask;
        if (rest) w.others.push_back({w.next, rest});
        w.next = op.operands[0], w.active = mask;
        if (rest) settle(w);
    });
    add("brx", OP {
        u32 where = w.first(op.operands[0]);
        for (int l = 0; l < LANES; l++)
            if (mask >> l & 1 && w.at<u32>(op.operands[0])[l] != where)
                fail(w, op, "a jump by an index on which lanes differ");
        if (where + 2 > u32(op.count)) fail(w, op, "a jump to nowhere");
        w.next = op.operands[1 + where];
    });
    for (const char* name : {"ret", "exit"}) add(name, OP {
        w.exited |= mask, w.active &= ~mask;
        if (w.active) return;
        if (!w.others.empty()) settle(w);
        else w.state = State::done;
    });
    add("trap", OP { fail(w, op, "a trap"); });
}
