/* Prints how long a call of the Jacobian takes, in microseconds. */
#include "net_jac.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static net_jac_t memory;

int main(int count, char **arguments) {
    const int calls = count > 1 ? atoi(arguments[1]) : 100000;
    float x[NET_JAC_X_SIZE] = {0}, u[NET_JAC_U_SIZE] = {0}, next[NET_JAC_NEXT_SIZE];
    float dx[NET_JAC_X_JACOBIAN_SIZE], du[NET_JAC_U_JACOBIAN_SIZE], sum = 0;
    const clock_t start = clock();
    for (int i = 0; i < calls; i++) {
        x[0] = (float)(i % 100) / 100;
        if (net_jac_run(&memory, x, u, next, dx, du) != NET_JAC_OK) return 1;
        sum += dx[0];
    }
    printf("%.3f\n", 1e6 * (double)(clock() - start) / CLOCKS_PER_SEC / calls);
    return sum != sum;
}
