// Hopper's own: products of four warps (wgmma), mbarriers, and boxes moved by TMA.
#include <algorithm>

#include "core.hpp"

#define OP [](Warp & w, const Operation& op, [[maybe_unused]] u32 mask)

// ------------------------------------------------------------------------------------- wgmma

// A matrix in shared memory as a descriptor tells it: rows of "major" elements, 16 bytes at a time.
struct Matrix {
    u32 start, lead, stride, width;  // bytes; width: of a swizzled row, 16 without a swizzle
    explicit Matrix(u64 told)
        : start(u32(told & 0x3fff) << 4), lead(u32(told >> 16 & 0x3fff) << 4),
          stride(u32(told >> 32 & 0x3fff) << 4) {
        constexpr u32 widths[] = {16, 128, 64, 32};
        width = widths[told >> 62];
    }
    // address of byte `inner` along the contiguous side, of row `outer`
    u32 at(u32 outer, u32 inner) const {
        u32 address = start + outer / 8 * stride + outer % 8 * width + inner / width * lead + inner % width;
        u32 bits = width / 16 - 1;  // which 16 bytes of a row: swapped by the number of its 128 bytes
        return address ^ ((address >> 7 & bits) << 4);
    }
};

struct Half {
    static constexpr u32 bytes = 2, K = 16;
    static float of(const u8* x) { return from_half(*reinterpret_cast<const u16*>(x)); }
};
struct Bfloat {
    static constexpr u32 bytes = 2, K = 16;
    static float of(const u8* x) { return from_bfloat(*reinterpret_cast<const u16*>(x)); }
};
struct Tf32 {
    static constexpr u32 bytes = 4, K = 8;
    static float of(const u8* x) { return as_float(*reinterpret_cast<const u32*>(x) & 0xffffe000); }
};

// [N, K] from shared memory, from its row `first` on: K elements lie side by side, or N with `across`
template <class T, int N, class F>
static void gather(const Warp& w, const Operation& op, const Matrix& m, u32 first, bool across, F element) {
    constexpr u32 many = 16 / T::bytes;  // at a time
    for (u32 outer = 0; outer < (across ? T::K : N); outer++)
        for (u32 inner = 0; inner < (across ? N : T::K); inner += many) {
            u32 row = across ? outer : outer + first, column = across ? inner + first : inner;
            const u8* x = w.block->read(w, op, m.at(row, column * T::bytes), 16);
            for (u32 i = 0; i < many; i++) {
                float value = T::of(x + i * T::bytes);
                if (across) element(inner + i, outer, value);
                else element(outer, inner + i, value);
            }
        }
}

// operands: D, then A (its descriptor or four registers), B, whether to sum, signs, [transposed]
template <class T, int N>
static void compute(Warp& w, const Product& p) {
    const Operation& op = *p.operation;
    const i32 *D = op.operands, *rest = D + N / 2, *end = D + op.count;
    bool loose = op.count - N / 2 >= 8;  // A in registers
    bool across_a = T::bytes == 2 && !loose && w.first(end[-2]);
    bool across_b = T::bytes == 2 && w.first(end[-1]);
    static thread_local float a[16][16], b[16][N], sum[16][N];
    for (u32 i = 0; loose && i < 4; i++) {
        const u32* x = w.at<u32>(rest[i]);
        for (u32 l = 0; l < LANES; l++) {
            u32 row = l / 4 + 8 * (i % 2), per = 4 / T::bytes, col = per * (l % 4 + 4 * (i / 2));
            for (u32 j = 0; j < per; j++)
                a[row][col + j] = T::of(reinterpret_cast<const u8*>(x + l) + j * T::bytes);
        }
    }
    if (!loose)
        gather<T, 16>(w, op, Matrix(p.a), 16 * (w.number % 4), across_a,
                      [](u32 m, u32 k, float x) { a[m][k] = x; });
    gather<T, N>(w, op, Matrix(p.b), 0, across_b, [](u32 n, u32 k, float x) { b[k][n] = x; });
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < N; n++) sum[m][n] = 0;
    for (int m = 0; m < 16; m++)
        for (u32 k = 0; k < T::K; k++)
            for (int n = 0; n < N; n++) sum[m][n] += a[m][k] * b[k][n];
    for (int i = 0; i < N / 2; i++) {
        float* d = w.at<float>(D[i]);
        for (int l = 0; l < LANES; l++) {
            float made = sum[l / 4 + 8 * (i / 2 % 2)][8 * (i / 4) + 2 * (l % 4) + i % 2];
            d[l] = p.sum ? d[l] + made : made;
        }
    }
}

template <class T, int N>
static void begin(Warp& w, const Operation& op, u32 mask) {
    if (mask != ALL) fail(w, op, "an operation of whole warps without some of their lanes");
    const i32* rest = op.operands + N / 2;
    bool loose = op.count - N / 2 >= 8;
    const i32* b = rest + (loose ? 4 : 1);
    if (w.first(b[2]) != 1 || w.first(b[3]) != 1) fail(w, op, "a sign of wgmma that is not 1");
    w.products.back().push_back({&op, loose ? 0 : w.parameter(rest[0]), w.parameter(b[0]), w.first(b[1]) != 0});
}

using Compute = void (*)(Warp&, const Product&);
static std::vector<std::pair<Function, Compute>>& products() {
    static std::vector<std::pair<Function, Compute>> all;
    return all;
}

template <class T, int N>
static void add_product(const std::string& kind) {
    add("wgmma.mma_async.m64n" + std::to_string(N) + "k" + std::to_string(T::K) + ".f32." + kind + "." + kind,
        begin<T, N>);
    products().push_back({begin<T, N>, compute<T, N>});
}

template <class T>
static void add_products(const std::string& kind) {
    add_product<T, 8>(kind), add_product<T, 16>(kind), add_product<T, 32>(kind);
    add_product<T, 64>(kind), add_product<T, 128>(kind), add_product<T, 256>(kind);
}

static void wait_for_products(Warp& w, const Operation& op, u32) {
    while (w.products.size() - 1 > w.first(op.operands[0])) {
        for (const Product& p : w.products.front())
            for (auto& [known, compute] : products())
                if (known == p.operation->run) compute(w, p);
        w.products.pop_front();
    }
}

// ---------------------------------------------------------------------------------- mbarriers

static Phase& phase(Warp& w, const Operation& op, u32 address) {
    auto found = w.block->phases.find(address);
    if (found == w.block->phases.end()) fail(w, op, "an mbarrier that nobody initialised");
    return found->second;
}

static void turn(Phase& p) {  // to the next phase, if this one is complete
    if (p.pending || p.bytes) return;
    p.parity ^= 1, p.pending = p.expected;
    join(p.complete, p.before);
}

template <bool BYTES>
static void arrive(Warp& w, const Operation& op, u32 mask) {  // _, [a + n][, bytes or count]
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        Phase& p = phase(w, op, w.at<u32>(op.operands[1])[l] + op.operands[2]);
        u32 told = op.count > 3 ? w.at<u32>(op.operands[3])[l] : 1, many = BYTES ? 1 : told;
        if (BYTES) p.bytes += told;
        if (p.pending < many) fail(w, op, "more arrivals than an mbarrier expects");
        p.pending -= many;
        join(p.before, w.clock);
        turn(p);
    }
    w.clock[w.number]++;
}

static void try_wait(Warp& w, const Operation& op, u32 mask) {  // p, [a + n], parity
    u32 done = 0, *d = w.at<u32>(op.operands[0]);
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        Phase& p = phase(w, op, w.at<u32>(op.operands[1])[l] + op.operands[2]);
        bool over = p.parity != (w.at<u32>(op.operands[3])[l] & 1);
        if (over) join(w.clock, p.complete);
        done |= u32(over) << l;
    }
    *d = (*d & ~mask) | done;
    if (done != mask) w.state = State::yielded;
}

// ---------------------------------------------------------------------------------------- TMA

struct Descriptor {  // as driver.py writes it
    u64 encoded, address;
    u32 bytes, swizzle;
    u64 columns, rows, stride;
    u32 box_columns, box_rows;
};

enum Way { LOAD, STORE, FORGET };

// element by element: what lies outside of the matrix is zero, or not stored
static void move(const Transfer& t, Way way) {
    Warp& w = *t.warp;
    const Operation& op = *t.operation;
    Descriptor m;
    memcpy(&m, reinterpret_cast<const void*>(t.matrix), sizeof m);
    u32 pitch = m.box_columns * m.bytes, bits = m.swizzle / 16 ? m.swizzle / 16 - 1 : 0;
    for (u32 r = 0; r < m.box_rows; r++)
        for (u32 c = 0; c < m.box_columns; c++) {
            i64 x = i64(t.x) + c, y = i64(t.y) + r;
            bool inside = x >= 0 && y >= 0 && u64(x) < m.columns && u64(y) < m.rows;
            u32 at = t.shared + r * pitch + c * m.bytes;
            at ^= (at >> 7 & bits) << 4;
            u64 there = m.address + y * m.stride + x * m.bytes;
            if (way == FORGET) w.block->write(w, op, at, "\xff\xff\xff\xff", m.bytes);
            else if (way == LOAD)
                w.block->write(t, at, inside ? reinterpret_cast<char*>(global(w, op, there, m.bytes)) : "\0\0\0\0", m.bytes);
            else if (inside)
                memcpy(global(w, op, there, m.bytes), w.block->read(t, at, m.bytes), m.bytes);
        }
}

static Transfer transfer(Warp& w, const Operation& op, int lane, const i32* matrix, const i32* shared,
                         bool loads) {
    u64 descriptor = w.at<u64>(matrix[0])[lane] + matrix[1];
    u32 at = w.at<u32>(shared[0])[lane] + shared[1];
    const Launch& launch = *w.block->launch;
    if (descriptor % 64 || descriptor < launch.parameters ||
        descriptor + 128 > launch.parameters + launch.parameter_bytes)
        fail(w, op, "a descriptor of TMA outside of the parameters");
    w.block->at(w, op, at, 16, 128);
    u32 agent = u32(w.block->warps.size()) + !loads;
    i32 x = w.at<i32>(matrix[2])[lane], y = w.at<i32>(matrix[3])[lane];
    Transfer made{&w, &op, descriptor, at, 0, x, y, agent, w.clock};
    made.clock[agent] = ++w.block->moved;
    return made;
}

bool land(Block& block, bool all) {
    bool any = false;
    std::vector<Transfer> late;
    std::shuffle(block.loads.begin(), block.loads.end(), block.launch->random);
    for (const Transfer& t : block.loads) {
        if (!all && block.launch->random() % 2) {
            late.push_back(t);
            continue;
        }
        move(t, LOAD);
        Descriptor m;
        memcpy(&m, reinterpret_cast<const void*>(t.matrix), sizeof m);
        Phase& p = phase(*t.warp, *t.operation, t.barrier);
        p.bytes -= i64(m.box_columns) * m.box_rows * m.bytes;
        join(p.before, t.clock);
        turn(p);
        any = true;
    }
    block.loads = late;
    return any;
}

static void wait_for_stores(Warp& w, const Operation& op, u32) {
    while (w.stores.size() - 1 > w.first(op.operands[0])) {
        for (const Transfer& t : w.stores.front()) move(t, STORE), join(w.clock, t.clock);
        w.stores.pop_front();
    }
}

void add_hopper() {
    add_products<Half>("f16");
    add_products<Bfloat>("bf16");
    add_products<Tf32>("tf32");
    add("wgmma.commit_group", [](Warp& w, const Operation&, u32) { w.products.emplace_back(); });
    add("wgmma.wait_group", wait_for_products);
    add("mbarrier.init.shared.b64", OP {
        for (int l = 0; l < LANES; l++) {
            if (!(mask >> l & 1)) continue;
            u32 address = w.at<u32>(op.operands[0])[l] + op.operands[1], many = w.at<u32>(op.operands[2])[l];
            w.block->at(w, op, address, 8);
            w.block->phases[address] = {many, many, 0, 0, w.clock, w.clock};
        }
    });
    add("mbarrier.inval.shared.b64", OP {
        for (int l = 0; l < LANES; l++)
            if (mask >> l & 1) w.block->phases.erase(w.at<u32>(op.operands[0])[l] + op.operands[1]);
    });
    add("mbarrier.arrive.shared.b64", arrive<false>);
    add("mbarrier.arrive.expect_tx.shared.b64", arrive<true>);
    add("mbarrier.try_wait.parity.shared.b64", try_wait);
    add("cp.async.bulk.tensor.2d.shared.global.mbarrier::complete_tx::bytes", OP {
        for (int l = 0; l < LANES; l++) {
            if (!(mask >> l & 1)) continue;
            Transfer t = transfer(w, op, l, op.operands + 2, op.operands, true);
            t.barrier = w.at<u32>(op.operands[6])[l] + op.operands[7];
            move(t, FORGET);
            w.block->loads.push_back(t);
        }
        w.clock[w.number]++;
    });
    add("cp.async.bulk.tensor.2d.global.shared.bulk_group", OP {
        for (int l = 0; l < LANES; l++)
            if (mask >> l & 1)
                w.stores.back().push_back(transfer(w, op, l, op.operands, op.operands + 4, false));
        w.clock[w.number]++;
    });
    add("cp.async.bulk.commit_group", [](Warp& w, const Operation&, u32) { w.stores.emplace_back(); });
    add("cp.async.bulk.wait_group.read", wait_for_stores);
    add("cp.async.bulk.wait_group", wait_for_stores);
}
