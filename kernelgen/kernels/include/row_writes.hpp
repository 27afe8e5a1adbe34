// Writes a block of a row in the order of memory. The lanes of a team leave their channels in shared memory (at `left`,
// STEP elements an access), and each takes WIDTH consecutive elements at a time, so that a team's accesses fill whole
// sectors in both layouts.
template <class How, int STEP, int WIDTH, int MUL, int DIM, int C>
DEVICE void put_rows(const Team& team, Real* left, Real* block, int first_channel, const Real (&r)[DIM][C]) {
    constexpr int TILE = LANES * C;
    team.sync();  // the block before has been taken
    if (MUL_IR) {
        Real flat[DIM * C];
        UNROLL for (int m = 0; m < DIM; ++m) UNROLL for (int c = 0; c < C; ++c) flat[c * DIM + m] = r[m][c];
        store<STEP>(left + team.lane * (DIM * C), flat);
    } else {
        UNROLL for (int m = 0; m < DIM; ++m) store<STEP>(left + m * TILE + team.lane * C, r[m]);
    }
    team.sync();
    UNROLL for (int i = 0; i < DIM * TILE; i += LANES * WIDTH) {
        const int at = i + team.lane * WIDTH;
        const int channel = first_channel + (MUL_IR ? at / DIM : at % TILE);
        if (at < DIM * TILE && (MUL % TILE == 0 || channel < MUL)) {
            Real taken[WIDTH];
            load<WIDTH>(left + at, taken);
            How::template put<WIDTH>(block + (MUL_IR ? first_channel * DIM + at : at / TILE * MUL + channel), taken);
        }
    }
}
