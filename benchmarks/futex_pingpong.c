/* Two processes that wake each other by futex: what a blocking hop costs without Python.
 *
 * Usage: futex_pingpong WARM_UPS ROUND_TRIPS [apart]
 * Prints each round trip in nanoseconds, one a line. Ends by itself after 30 seconds, with an error.
 * With "apart" each process stays on a core of its own (the first and the last that it may use), so that each hop wakes an
 * idle core; without it the scheduler may keep both on one core, where a hop is only a switch.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define LIMIT_S 30

struct words {
    _Alignas(64) _Atomic uint32_t there;
    _Alignas(64) _Atomic uint32_t back;
};

static void publish(_Atomic uint32_t *word, uint32_t value)
{
    atomic_store(word, value);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void await(_Atomic uint32_t *word, uint32_t value)
{
    uint32_t seen;
    while ((seen = atomic_load(word)) != value)
        syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void stay_on_one_core(int last)
{
    cpu_set_t allowed, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed)) {
            CPU_ZERO(&one);
            CPU_SET(core, &one);
            if (!last)
                break;
        }
    sched_setaffinity(0, sizeof one, &one);
}

static void echo(struct words *words, uint32_t rounds)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(LIMIT_S);
    for (uint32_t i = 1; i <= rounds; i++) {
        await(&words->there, i);
        publish(&words->back, i);
    }
    _exit(0);
}

int main(int argc, char **argv)
{
    int apart = argc == 4 && strcmp(argv[3], "apart") == 0;
    if (argc != 3 && !apart) {
        fprintf(stderr, "usage: %s WARM_UPS ROUND_TRIPS [apart]\n", argv[0]);
        return 2;
    }
    uint32_t warm_ups = (uint32_t)strtoul(argv[1], NULL, 10);
    uint32_t rounds = warm_ups + (uint32_t)strtoul(argv[2], NULL, 10);
    struct words *words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int64_t *taken = calloc(rounds + 1, sizeof *taken);
    if (words == MAP_FAILED || taken == NULL) {
        perror("futex_pingpong");
        return 1;
    }
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        return 1;
    }
    if (apart)
        stay_on_one_core(child == 0);
    if (child == 0)
        echo(words, rounds);
    alarm(LIMIT_S);
    for (uint32_t i = 1; i <= rounds; i++) {
        int64_t start = now_ns();
        publish(&words->there, i);
        await(&words->back, i);
        taken[i] = now_ns() - start;
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) {
        fprintf(stderr, "futex_pingpong: the other process failed\n");
        return 1;
    }
    for (uint32_t i = warm_ups + 1; i <= rounds; i++)
        printf("%lld\n", (long long)taken[i]);
    return 0;
}
