/* Starts a program on an emulated Cortex-M4 (QEMU's mps2-an386), which talks to the host by semihosting. */
#include <stdint.h>

extern uint32_t stack_top[], data_source[], data_begin[], data_end[], bss_begin[], bss_end[];
int main(void);

static void host(uint32_t request, const void *argument) {
    register uint32_t r0 __asm__("r0") = request;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
}

void print(const char *text) { host(0x04, text); } /* SYS_WRITE0 */

static void leave(int failed) { /* SYS_EXIT: the application has ended, or a run-time error */
    for (;;) host(0x18, (const void *)(failed ? 0x20023u : 0x20026u));
}

int *__errno(void) { /* of newlib's math.h: its own would need 1 KB */
    static int number;
    return &number;
}

static void fault(void) {
    print("fault\n");
    leave(1);
}

static void reset(void) {
    *(volatile uint32_t *)0xE000ED88u |= 0xFu << 20; /* switch the floating-point unit on */
    __asm__ volatile("dsb\n\tisb" : : : "memory");
    for (uint32_t *to = data_begin, *from = data_source; to < data_end;) *to++ = *from++;
    for (uint32_t *to = bss_begin; to < bss_end;) *to++ = 0;
    leave(main());
}

__attribute__((section(".vectors"), used)) static const void *const vectors[16] = {
    stack_top, (void *)reset, (void *)fault, (void *)fault, (void *)fault, (void *)fault, (void *)fault,
};
