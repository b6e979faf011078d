// Matrices of 8 x 8 through shared memory, and products of tensor cores.
#include "core.hpp"

#define OP [](Warp & w, [[maybe_unused]] const Operation& op, [[maybe_unused]] u32 mask)

static void whole(const Warp& w, const Operation& op, u32 mask) {
    if (mask != ALL) fail(w, op, "an operation of a whole warp without some of its lanes");
}

// lane 8i + r holds the address of row r of matrix i; lane l gets elements 2(l % 4) of row l / 4
template <bool TRANSPOSED>
static void load_matrices(Warp& w, const Operation& op, u32 mask) {
    whole(w, op, mask);
    int many = op.count - 2;
    u32 made[4][LANES];
    const u32* base = w.at<u32>(op.operands[many]);
    for (int i = 0; i < many; i++) {
        u16 rows[8][8];
        for (int r = 0; r < 8; r++)
            memcpy(rows[r], w.block->read(w, op, base[8 * i + r] + op.operands[many + 1], 16), 16);
        for (int l = 0; l < LANES; l++) {
            int r = l / 4, c = 2 * (l % 4);
            made[i][l] = TRANSPOSED ? rows[c][r] | u32(rows[c + 1][r]) << 16
                                    : rows[r][c] | u32(rows[r][c + 1]) << 16;
        }
    }
    for (int i = 0; i < many; i++) memcpy(w.at<u32>(op.operands[i]), made[i], sizeof made[i]);
}

template <bool TRANSPOSED>
static void store_matrices(Warp& w, const Operation& op, u32 mask) {
    whole(w, op, mask);
    const u32* base = w.at<u32>(op.operands[0]);
    for (int i = 0; i < op.count - 2; i++) {
        u16 rows[8][8];
        const u32* given = w.at<u32>(op.operands[2 + i]);
        for (int l = 0; l < LANES; l++) {
            int r = l / 4, c = 2 * (l % 4);
            (TRANSPOSED ? rows[c][r] : rows[r][c]) = u16(given[l]);
            (TRANSPOSED ? rows[c + 1][r] : rows[r][c + 1]) = u16(given[l] >> 16);
        }
        for (int r = 0; r < 8; r++)
            w.block->write(w, op, base[8 * i + r] + op.operands[1], rows[r], 16);
    }
}

struct Half {
    static float of(u16 x) { return from_half(x); }
};
struct Bfloat {
    static float of(u16 x) { return from_bfloat(x); }
};

static float tf32(u32 x) { return as_float(x & 0xffffe000); }

// d = a b + c: d and c as 16 x 8, in four registers
template <int K>
static void multiply(Warp& w, const Operation& op, const float (&a)[16][16], const float (&b)[16][8]) {
    const i32* c = op.operands + op.count - 4;
    float sum[16][8];
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < LANES; l++)
            sum[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2] = w.at<float>(c[i])[l];
    for (int m = 0; m < 16; m++) {
        double row[8] = {};
        for (int k = 0; k < K; k++)
            for (int n = 0; n < 8; n++) row[n] += double(a[m][k]) * b[k][n];
        for (int n = 0; n < 8; n++) sum[m][n] = float(row[n] + sum[m][n]);
    }
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < LANES; l++)
            w.at<float>(op.operands[i])[l] = sum[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
}

template <class T, int K>
static void product(Warp& w, const Operation& op, u32 mask) {
    whole(w, op, mask);
    float a[16][16] = {}, b[16][8] = {};
    const i32 *A = op.operands + 4, *B = op.operands + (K == 16 ? 8 : 6);
    for (int i = 0; i < K / 4; i++) {
        const u32* x = w.at<u32>(A[i]);
        for (int l = 0; l < LANES; l++) {
            int row = l / 4 + 8 * (i % 2), col = 2 * (l % 4) + 8 * (i / 2);
            a[row][col] = T::of(u16(x[l]));
            a[row][col + 1] = T::of(u16(x[l] >> 16));
        }
    }
    for (int i = 0; i < K / 8; i++) {
        const u32* x = w.at<u32>(B[i]);
        for (int l = 0; l < LANES; l++) {
            b[2 * (l % 4) + 8 * i][l / 4] = T::of(u16(x[l]));
            b[2 * (l % 4) + 1 + 8 * i][l / 4] = T::of(u16(x[l] >> 16));
        }
    }
    multiply<K>(w, op, a, b);
}

template <int K>  // 4 or 8
static void product_tf32(Warp& w, const Operation& op, u32 mask) {
    whole(w, op, mask);
    float a[16][16] = {}, b[16][8] = {};
    for (int i = 0; i < K / 2; i++) {
        const u32* x = w.at<u32>(op.operands[4 + i]);
        for (int l = 0; l < LANES; l++) a[l / 4 + 8 * (i % 2)][l % 4 + 4 * (i / 2)] = tf32(x[l]);
    }
    for (int i = 0; i < K / 4; i++) {
        const u32* x = w.at<u32>(op.operands[4 + K / 2 + i]);
        for (int l = 0; l < LANES; l++) b[l % 4 + 4 * i][l / 4] = tf32(x[l]);
    }
    multiply<K>(w, op, a, b);
}

void add_matrices() {
    for (std::string many : {"x1", "x2", "x4"}) {
        add("ldmatrix.m8n8." + many + ".shared.b16", load_matrices<false>);
        add("ldmatrix.m8n8." + many + ".trans.shared.b16", load_matrices<true>);
        add("stmatrix.m8n8." + many + ".shared.b16", store_matrices<false>);
        add("stmatrix.m8n8." + many + ".trans.shared.b16", store_matrices<true>);
    }
    add("mma.m16n8k16.row.col.f32.f16.f16.f32", product<Half, 16>);
    add("mma.m16n8k16.row.col.f32.bf16.bf16.f32", product<Bfloat, 16>);
    add("mma.m16n8k8.row.col.f32.f16.f16.f32", product<Half, 8>);
    add("mma.m16n8k8.row.col.f32.bf16.bf16.f32", product<Bfloat, 8>);
    add("mma.m16n8k8.row.col.f32.tf32.tf32.f32", product_tf32<8>);
    add("mma.m16n8k4.row.col.f32.tf32.tf32.f32", product_tf32<4>);
}
