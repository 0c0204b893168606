/* An external function of CasADi for a dynamics model and its Jacobian, exported by gradgraph:
       next = dynamics(x, u)
       d next / d x, d next / d u = jac_dynamics(x, u, next)
   Load the compiled library by casadi.external("dynamics", "./libdynamics.so"). CasADi passes double precision and
   dense matrices by column; the exported functions have float32 and matrices by row. */
#include "net.h"
#include "net_jac.h"

#define NX NET_X_SIZE
#define NU NET_U_SIZE

typedef double casadi_real;
typedef long long casadi_int;

/* rows, columns, and 1 for dense */
static const casadi_int x_size[] = {NX, 1, 1}, u_size[] = {NU, 1, 1}, dx_size[] = {NX, NX, 1}, du_size[] = {NX, NU, 1};
static const casadi_int unused[] = {NX, 1, 0, 0}; /* a column without stored elements */

static void to_floats(const casadi_real *from, float *to, int size) { /* NULL: zeros */
    for (int i = 0; i < size; i++) to[i] = from ? (float)from[i] : 0.0f;
}

static void to_columns(const float *from, casadi_real *to, int rows, int columns) { /* NULL: not wanted */
    for (int i = 0; to && i < rows; i++)
        for (int j = 0; j < columns; j++) to[j * rows + i] = from[i * columns + j];
}

int dynamics(const casadi_real **arg, casadi_real **res, casadi_int *iw, casadi_real *w, int mem) {
    net_t memory; /* on the stack, so that threads can share the library */
    float x[NX], u[NU], next[NX];
    (void)iw, (void)w, (void)mem;
    to_floats(arg[0], x, NX);
    to_floats(arg[1], u, NU);
    if (net_run(&memory, x, u, next) != NET_OK) return 1;
    to_columns(next, res[0], NX, 1);
    return 0;
}

casadi_int dynamics_n_in(void) { return 2; }
casadi_int dynamics_n_out(void) { return 1; }
const char *dynamics_name_in(casadi_int i) { return i ? "u" : "x"; }
const char *dynamics_name_out(casadi_int i) { return i ? 0 : "next"; }
const casadi_int *dynamics_sparsity_in(casadi_int i) { return i ? u_size : x_size; }
const casadi_int *dynamics_sparsity_out(casadi_int i) { return i ? 0 : x_size; }

int jac_dynamics(const casadi_real **arg, casadi_real **res, casadi_int *iw, casadi_real *w, int mem) {
    net_jac_t memory;
    float x[NX], u[NU], dx[NX * NX], du[NX * NU];
    (void)iw, (void)w, (void)mem;
    to_floats(arg[0], x, NX);
    to_floats(arg[1], u, NU);
    if (net_jac_run(&memory, x, u, 0, dx, du) != NET_JAC_OK) return 1;
    to_columns(dx, res[0], NX, NX);
    to_columns(du, res[1], NX, NU);
    return 0;
}

casadi_int jac_dynamics_n_in(void) { return 3; }
casadi_int jac_dynamics_n_out(void) { return 2; }
const char *jac_dynamics_name_in(casadi_int i) { return i == 2 ? "out_next" : dynamics_name_in(i); }
const char *jac_dynamics_name_out(casadi_int i) { return i ? "jac_next_u" : "jac_next_x"; }
const casadi_int *jac_dynamics_sparsity_in(casadi_int i) { return i == 2 ? unused : dynamics_sparsity_in(i); }
const casadi_int *jac_dynamics_sparsity_out(casadi_int i) { return i ? du_size : dx_size; }
