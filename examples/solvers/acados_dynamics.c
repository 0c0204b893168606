/* Generic discrete dynamics of acados for a model exported by gradgraph:
       ocp.model.dyn_ext_fun_type = "generic"
       ocp.model.dyn_generic_source = "acados_dynamics.c"
       ocp.model.dyn_disc_fun, ocp.model.dyn_disc_fun_jac = "dynamics_fun", "dynamics_fun_jac"
   acados expects the Jacobians transposed, one below the other. A matrix stored by row is its transpose stored by
   column, so they are passed on as they are. */
#include "acados/utils/external_function_generic.h"
#include "blasfeo_d_aux.h"

#include "net_jac.c"

#define NX NET_JAC_X_SIZE
#define NU NET_JAC_U_SIZE

static void read_vector(void *from, float *to, int size) {
    struct blasfeo_dvec_args *vector = from;
    double values[NX + NU];
    blasfeo_unpack_dvec(size, vector->x, vector->xi, values, 1);
    for (int i = 0; i < size; i++) to[i] = (float)values[i];
}

static void write_vector(const float *from, void *to) {
    struct blasfeo_dvec_args *vector = to;
    double values[NX];
    for (int i = 0; i < NX; i++) values[i] = from[i];
    blasfeo_pack_dvec(NX, values, 1, vector->x, vector->xi);
}

static void write_jacobian(const float *from, int columns, struct blasfeo_dmat_args *to, int row) {
    double values[NX * (NX + NU)];
    for (int i = 0; i < NX * columns; i++) values[i] = from[i];
    blasfeo_pack_dmat(columns, NX, values, columns, to->A, to->ai + row, to->aj);
}

int dynamics_fun(void **in, void **out, void *params) {
    net_jac_t memory;
    float x[NX], u[NU], next[NX];
    (void)params;
    read_vector(in[0], x, NX);
    read_vector(in[1], u, NU);
    if (net_jac_run(&memory, x, u, next, 0, 0) != NET_JAC_OK) return 1;
    write_vector(next, out[0]);
    return 0;
}

int dynamics_fun_jac(void **in, void **out, void *params) {
    net_jac_t memory;
    float x[NX], u[NU], next[NX], dx[NX * NX], du[NX * NU];
    (void)params;
    read_vector(in[0], x, NX);
    read_vector(in[1], u, NU);
    if (net_jac_run(&memory, x, u, next, dx, du) != NET_JAC_OK) return 1;
    write_vector(next, out[0]);
    write_jacobian(du, NU, out[1], 0);
    write_jacobian(dx, NX, out[1], NU);
    return 0;
}
