// A launch: its programs one after another, the warps of each in a random order.
#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "core.hpp"

struct Known {
    Function run;
    i32 operands;
};

static std::unordered_map<std::string, Known>& known() {
    static std::unordered_map<std::string, Known> all;
    return all;
}

void add(const std::string& name, Function function, i32 operands) { known()[name] = {function, operands}; }

std::string hex(u64 x) {
    char text[32];
    snprintf(text, sizeof text, "0x%llx", (unsigned long long)x);
    return text;
}

void fail(const Warp& w, const Operation& op, const std::string& what) {
    throw Fault{std::to_string(op.line) + "|program " + std::to_string(w.block->index) + ", warp " +
                std::to_string(w.number) + ": " + what};
}

struct Constant {  // the same in every lane of every warp
    i32 place, bits;
    u64 value;
};

struct Kernel {
    std::vector<Operation> operations;
    std::vector<Constant> constants;
    i32 thread, program, programs, threads;  // places of special registers, or -1
};

static void fill(Warp& w, i32 place, int bits, u64 value) {
    for (int l = 0; l < LANES; l++) {
        if (bits == 1) w.at<u32>(place)[0] = u32(value);
        else if (bits == 16) w.at<u16>(place)[l] = u16(value);
        else if (bits == 32) w.at<u32>(place)[l] = u32(value);
        else w.at<u64>(place)[l] = value;
    }
}

static void start(const Kernel& kernel, Block& block) {
    Launch& launch = *block.launch;
    block.shared.assign(launch.shared_bytes, 0xff);  // NaN of every type
    block.warps = std::vector<Warp>(launch.warps);
    for (u32 i = 0; i < launch.warps; i++) {
        Warp& w = block.warps[i];
        w.block = &block, w.number = i;
        w.clock.assign(block.agents(), 0);
        w.clock[i] = 1;
        w.memory.assign(launch.register_bytes + 64, 0xff);
        w.registers = w.memory.data() + (64 - u64(w.memory.data()) % 64) % 64;
        for (const Constant& c : kernel.constants) fill(w, c.place, c.bits, c.value);
        if (kernel.thread >= 0)
            for (int l = 0; l < LANES; l++) w.at<u32>(kernel.thread)[l] = i * LANES + l;
        if (kernel.program >= 0) fill(w, kernel.program, 32, block.index);
        if (kernel.programs >= 0) fill(w, kernel.programs, 32, launch.grid);
        if (kernel.threads >= 0) fill(w, kernel.threads, 32, launch.threads());
    }
}

// until it waits, ends, or has had its share
static void go_on(const Kernel& kernel, Warp& w, u64 share) {
    const Operation* operations = kernel.operations.data();
    for (; share && w.state == State::ready; share--) {
        const Operation& op = operations[w.next++];
        u32 mask = w.active;
        if (op.guard >= 0) {
            u32 p = *w.at<u32>(op.guard);
            mask &= op.negated ? ~p : p;
        }
        if (mask) op.run(w, op, mask);
        if (!w.others.empty() && w.state != State::done) settle(w);
        w.block->launch->executed++;
    }
}

static void run(const Kernel& kernel, Block& block) {
    start(kernel, block);
    std::mt19937& random = block.launch->random;
    std::vector<int> order(block.warps.size());
    std::iota(order.begin(), order.end(), 0);
    for (int idle = 0;;) {
        std::shuffle(order.begin(), order.end(), random);
        bool done = true, moved = false;
        for (int i : order) {
            Warp& w = block.warps[i];
            if (w.state == State::yielded) w.state = State::ready;
            if (w.state == State::ready) {
                u64 executed = block.launch->executed;
                go_on(kernel, w, random() % 4 ? ~0ull : 1 + random() % 2000);
                moved |= w.state != State::yielded || block.launch->executed - executed > 64;
            }
            done &= w.state == State::done;
        }
        moved |= land(block, !moved);
        if (done) return;
        idle = moved ? 0 : idle + 1;
        if (idle > 4) {
            for (Warp& w : block.warps)
                if (w.state != State::done)
                    fail(w, kernel.operations[std::max(0, w.next - 1)], "every warp waits for ever");
        }
    }
}

extern "C" {

void* kernel_make(int many, const char* const* names, const i32* lists, const i32* counts,
                  const i32* guards, const u8* negated, const i32* lines, char* unknown) {
    if (known().empty()) add_arithmetic(), add_memory(), add_matrices(), add_hopper();
    auto* kernel = new Kernel();
    kernel->operations.reserve(many);
    for (int i = 0; i < many; i++) {
        auto found = known().find(names[i]);
        if (found == known().end() || (found->second.operands && found->second.operands != counts[i])) {
            snprintf(unknown, 256, "%d|%s", lines[i], names[i]);
            delete kernel;
            return nullptr;
        }
        kernel->operations.push_back({found->second.run, lists, counts[i], guards[i], bool(negated[i]), lines[i]});
        lists += counts[i];
    }
    return kernel;
}

void kernel_fill(void* made, int many, const i32* places, const i32* bits, const u64* values,
                 const i32* specials) {
    auto* kernel = static_cast<Kernel*>(made);
    kernel->constants.clear();
    for (int i = 0; i < many; i++) kernel->constants.push_back({places[i], bits[i], values[i]});
    kernel->thread = specials[0], kernel->program = specials[1];
    kernel->programs = specials[2], kernel->threads = specials[3];
}

// 0, or 1 and a message "line|text"; how many operations of a warp ran
int kernel_launch(void* made, u32 grid, u32 warps, u32 shared, u32 registers, u64 parameters,
                  u64 parameter_bytes, int ranges, const u64* bounds, u32 seed, int ahead, u64* executed,
                  char* message) {
    auto& kernel = *static_cast<Kernel*>(made);
    Launch launch;
    for (int i = 0; i < ranges; i++) launch.ranges.push_back({bounds[2 * i], bounds[2 * i + 1]});
    launch.parameters = parameters, launch.parameter_bytes = parameter_bytes;
    launch.grid = grid, launch.warps = warps;
    launch.shared_bytes = shared, launch.register_bytes = registers;
    launch.random.seed(seed);
    launch.ahead = ahead;
    std::vector<u32> order(grid);
    std::iota(order.begin(), order.end(), 0u);
    if (seed) std::shuffle(order.begin(), order.end(), launch.random);
    int result = 0;
    try {
        for (u32 index : order) {
            Block block;
            block.launch = &launch, block.index = index;
            run(kernel, block);
        }
    } catch (const Fault& fault) {
        snprintf(message, 512, "%s", fault.text.c_str());
        result = 1;
    }
    *executed = launch.executed;
    return result;
}

}
