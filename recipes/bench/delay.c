/* A wire with a round-trip time: every frame from one TAP device leaves the other one `one_way_us` later.

   delay TAP_A TAP_B ONE_WAY_US OFFLOAD       OFFLOAD 1: pass the kernel's large segments whole (saves most of the CPU)

   netem does this in the kernel, where it is built. One thread for each direction; a ring holds what is on its way. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { BURST = 64 };

static long delay_ns;
static int offload;
static size_t slot_size, slots;

struct direction {
    int in, out;
};

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static int open_tap(const char *name) {
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request;
    memset(&request, 0, sizeof request);
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    request.ifr_flags = IFF_TAP | IFF_NO_PI | (offload ? IFF_VNET_HDR : 0);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request)) {
        perror(name);
        exit(1);
    }
    if (offload && ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) perror("offload");
    return fd;
}

static void *run(void *argument) {
    struct direction *d = argument;
    char *frames = malloc(slot_size * slots);
    ssize_t *lengths = malloc(slots * sizeof *lengths);
    long *due = malloc(slots * sizeof *due);
    size_t head = 0, tail = 0; /* frames on their way: [head, tail) */
    if (!frames || !lengths || !due) exit(1);
    for (;;) {
        long wait_ns = -1;
        while (head != tail) {
            wait_ns = due[head % slots] - now_ns();
            if (wait_ns > 0) break;
            /* a full device drops it, as a full wire would */
            (void)!write(d->out, frames + head % slots * slot_size, lengths[head % slots]);
            head++;
            wait_ns = -1;
        }
        struct pollfd readable = {d->in, POLLIN, 0};
        struct timespec timeout = {wait_ns / 1000000000L, wait_ns % 1000000000L};
        ppoll(&readable, 1, wait_ns < 0 ? NULL : &timeout, NULL);
        for (int i = 0; i < BURST && tail - head < slots; i++) {
            ssize_t length = read(d->in, frames + tail % slots * slot_size, slot_size);
            if (length <= 0) break;
            lengths[tail % slots] = length;
            due[tail % slots] = now_ns() + delay_ns;
            tail++;
        }
    }
    return NULL;
}

int main(int count, char **arguments) {
    if (count != 5) {
        fprintf(stderr, "usage: %s TAP_A TAP_B ONE_WAY_US OFFLOAD\n", arguments[0]);
        return 2;
    }
    delay_ns = atol(arguments[3]) * 1000;
    offload = atoi(arguments[4]);
    slot_size = offload ? 66000 : 2048;
    slots = offload ? 2048 : 65536;
    int a = open_tap(arguments[1]), b = open_tap(arguments[2]);
    struct direction there = {a, b}, back = {b, a};
    pthread_t thread;
    puts("up");
    fflush(stdout);
    if (pthread_create(&thread, NULL, run, &there)) return 1;
    run(&back);
}
