// What a warp, a program (CTA) and a launch are, and how operations reach registers and memory.
#pragma once
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int LANES = 32;
constexpr u32 ALL = ~0u;
constexpr u32 SHARED_BASE = 1024;  // where shared memory begins, as on Hopper

struct Warp;
struct Operation;
using Function = void (*)(Warp&, const Operation&, u32 mask);

struct Operation {
    Function run;
    const i32* operands;
    i32 count, guard;
    bool negated;
    i32 line;
};

struct Fault {  // ends a launch with a message
    std::string text;
};

struct Range {
    u64 begin, end;
};

struct Launch {
    std::vector<Range> ranges;  // of global memory that may be touched
    u64 parameters;             // address of the block
    u64 parameter_bytes;
    u32 grid, warps, shared_bytes, register_bytes;
    std::mt19937 random;
    bool ahead;  // reads what may not be there yet, and uses none of it: such reads find NaN
    u64 executed = 0;
    u32 threads() const { return warps * LANES; }
};

struct Copy {  // cp.async of one lane: the source is read when it is waited for
    u32 to;
    u64 from;
    u32 bytes, given;
    i32 line;
};

// What happened before, as a vector clock: how far each agent had come. Agents are the warps, then
// TMA's loads and TMA's stores. Two accesses that are in no such order, one of them a write, race.
using Clock = std::vector<u32>;
void join(Clock&, const Clock&);

struct Barrier {
    u32 arrived = 0;
    std::vector<Warp*> waiting;
    Clock before;  // of those who arrived
};

struct Phase {  // an mbarrier
    u32 expected, pending;
    i64 bytes;
    u32 parity;
    Clock before, complete;  // of those who arrived, in this phase and in those that are over
};

struct Transfer {  // by TMA, of one box between shared and global memory
    Warp* warp;
    const Operation* operation;
    u64 matrix;  // address of its descriptor
    u32 shared, barrier;
    i32 x, y;
    u32 agent;
    Clock clock;  // the warp's, and how far the agent has come
};

struct Product {  // of wgmma: it comes when it is waited for
    const Operation* operation;
    u64 a, b;  // descriptors
    bool sum;  // to what is there
};

struct Block {  // a CTA
    Launch* launch;
    u32 index;
    std::vector<u8> shared;
    std::vector<Warp> warps;
    std::map<u32, Barrier> barriers;
    std::map<u32, Phase> phases;
    std::vector<Transfer> loads;  // on their way

    std::vector<u32> shadow;  // of each two bytes of shared memory: its last write, its reads
    u32 moved = 0;            // transfers by TMA

    u32 agents() const { return u32(warps.size()) + 2; }
    // shared memory at an address of a warp's operation; aligned as it is long, unless told
    u8* at(const Warp& w, const Operation& op, u32 address, u32 bytes, u32 alignment = 0);
    // the same, for an access by the warp, or by another agent with its own clock
    const u8* read(const Warp& w, const Operation& op, u32 address, u32 bytes);
    void write(const Warp& w, const Operation& op, u32 address, const void* given, u32 bytes);
    const u8* read(const Transfer& t, u32 address, u32 bytes);
    void write(const Transfer& t, u32 address, const void* given, u32 bytes);
    // Notes an access; of a write, what was there before. Whether it is in order: if not, the launch
    // fails unless it reads ahead.
    bool touch(const Warp&, const Operation&, u32 agent, const Clock&, u32 from, u32 bytes, const u8* before);
};

enum class State { ready, waiting, yielded, done };

struct Warp {
    Block* block;
    u32 number;
    std::vector<u8> memory;
    u8* registers;
    Clock clock;
    State state = State::ready;
    u32 active = ALL, exited = 0;
    i32 next = 0;  // operation
    std::vector<std::pair<i32, u32>> others;  // where lanes wait that went another way
    std::deque<std::vector<Copy>> copies{{}};  // groups; the last one is open
    std::deque<std::vector<Product>> products{{}};
    std::deque<std::vector<Transfer>> stores{{}};

    template <class T>
    T* at(i32 place) const {
        return reinterpret_cast<T*>(registers + place);
    }
    u32 first(i32 place) const { return *at<u32>(place); }  // lane 0's word
    u64 parameter(i32 place) const { return *at<u64>(place); }
};

[[noreturn]] void fail(const Warp&, const Operation&, const std::string&);
u8* global(const Warp&, const Operation&, u64 address, u32 bytes, u32 alignment = 0);
std::string hex(u64);

void add(const std::string& name, Function, i32 operands = 0);  // to the known ones; 0: any number
void add_arithmetic();
void add_memory();
void add_matrices();
void add_hopper();
void settle(Warp&);
bool land(Block&, bool all);  // loads by TMA: some, or all

float from_half(u16);
u16 to_half(float);
inline float from_bfloat(u16 x) {
    u32 bits = u32(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
inline u16 to_bfloat(float x) {  // to nearest, ties to even
    u32 bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float as_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline u32 as_bits(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
