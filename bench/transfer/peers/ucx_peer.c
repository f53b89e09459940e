/* Bare UCX on the loads of bench/transfer: one put or get for each page, one flush, as lines of JSON.
 *
 *     cc -O2 ucx_peer.c -I$UCX/include -L$UCX/lib -lucp -lucs -o ucx_peer
 *     UCX_TLS=posix ./ucx_peer NAME pages=16384,2000,9 64k=65536,1,200 ...
 *
 * The child process owns memory and drives its worker all the time, as some of UCX's transports need. No checksums, no
 * failure handling: what UCX can do at best. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { MEMORY = 256 << 20, WINDOW = 64 };

struct side {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h memh;
    char *memory;
};

static void must(int good, const char *what) {
    if (!good) {
        fprintf(stderr, "%s failed\n", what);
        exit(1);
    }
}

static void all(int fd, void *bytes, size_t length, int out) {
    for (size_t at = 0; at < length;) {
        ssize_t moved = out ? write(fd, (char *)bytes + at, length - at) : read(fd, (char *)bytes + at, length - at);
        must(moved > 0, "the socket between the processes");
        at += moved;
    }
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static void open_side(struct side *side) {
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA | UCP_FEATURE_AM};
    ucp_config_t *config;
    must(ucp_config_read(NULL, NULL, &config) == UCS_OK, "ucp_config_read");
    must(ucp_init(&params, config, &side->context) == UCS_OK, "ucp_init");
    ucp_config_release(config);
    ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    must(ucp_worker_create(side->context, &worker, &side->worker) == UCS_OK, "ucp_worker_create");
    side->memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(side->memory != MAP_FAILED, "mmap");
    memset(side->memory, 7, MEMORY);
    ucp_mem_map_params_t map = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                                .address = side->memory,
                                .length = MEMORY};
    must(ucp_mem_map(side->context, &map, &side->memh) == UCS_OK, "ucp_mem_map");
}

static void send_blob(int fd, void *blob, size_t length) {
    uint64_t size = length;
    all(fd, &size, sizeof size, 1);
    all(fd, blob, length, 1);
}

static void *receive_blob(int fd) {
    uint64_t size;
    all(fd, &size, sizeof size, 0);
    void *blob = malloc(size);
    all(fd, blob, size, 0);
    return blob;
}

static void owner(int fd, volatile int *stop) {
    struct side side;
    open_side(&side);
    ucp_address_t *address;
    size_t length;
    must(ucp_worker_get_address(side.worker, &address, &length) == UCS_OK, "ucp_worker_get_address");
    send_blob(fd, address, length);
    void *key;
    must(ucp_rkey_pack(side.context, side.memh, &key, &length) == UCS_OK, "ucp_rkey_pack");
    send_blob(fd, key, length);
    send_blob(fd, &side.memory, sizeof side.memory);
    while (!*stop) {
        ucp_worker_progress(side.worker);
    }
    exit(0);
}

static void finish(ucp_worker_h worker, void *request) {
    if (request == NULL) {
        return;
    }
    must(!UCS_PTR_IS_ERR(request), "an operation");
    ucs_status_t status;
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
        ucp_worker_progress(worker);
    }
    must(status == UCS_OK, "an operation");
    ucp_request_free(request);
}

static void pick(size_t *out, size_t pages, size_t page) {
    size_t places = MEMORY / page;
    size_t *table = malloc(places * sizeof *table);
    for (size_t at = 0; at < places; at++) {
        table[at] = at;
    }
    for (size_t at = 0; at < pages; at++) {
        size_t other = at + (size_t)rand() % (places - at), kept = table[at];
        table[at] = table[other];
        table[other] = kept;
        out[at] = table[at] * page;
    }
    free(table);
}

static double once(struct side *side, ucp_ep_h ep, ucp_rkey_h key, uint64_t base, int push, size_t page, size_t pages) {
    size_t *here = malloc(pages * sizeof *here), *there = malloc(pages * sizeof *there);
    pick(here, pages, page);
    pick(there, pages, page);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH, .memh = side->memh};
    ucp_request_param_t plain = {.op_attr_mask = 0};
    void *open[WINDOW] = {0};
    double start = now_ms();
    for (size_t at = 0; at < pages; at++) {
        finish(side->worker, open[at % WINDOW]);
        char *local = side->memory + here[at];
        open[at % WINDOW] = push ? ucp_put_nbx(ep, local, page, base + there[at], key, &param)
                                 : ucp_get_nbx(ep, local, page, base + there[at], key, &param);
    }
    for (size_t at = 0; at < WINDOW; at++) {
        finish(side->worker, open[at]);
    }
    finish(side->worker, ucp_ep_flush_nbx(ep, &plain));
    double took = now_ms() - start;
    free(here);
    free(there);
    return took;
}

int main(int count, char **words) {
    must(count > 2, "usage: ucx_peer NAME LABEL=PAGE,PAGES,REPEATS ...");
    int pair[2];
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    volatile int *stop = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = fork();
    if (child == 0) {
        close(pair[0]);
        owner(pair[1], stop);
    }
    close(pair[1]);
    struct side side;
    open_side(&side);
    ucp_ep_params_t peer = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = receive_blob(pair[0])};
    ucp_ep_h ep;
    must(ucp_ep_create(side.worker, &peer, &ep) == UCS_OK, "ucp_ep_create");
    ucp_rkey_h key;
    must(ucp_ep_rkey_unpack(ep, receive_blob(pair[0]), &key) == UCS_OK, "ucp_ep_rkey_unpack");
    uint64_t base = *(uint64_t *)receive_blob(pair[0]);
    for (int at = 2; at < count; at++) {
        char label[32];
        size_t page, pages, repeats;
        must(sscanf(words[at], "%31[^=]=%zu,%zu,%zu", label, &page, &pages, &repeats) == 4, "a load");
        for (int push = 0; push < 2; push++) {
            once(&side, ep, key, base, push, page, pages);
            printf("{\"way\": \"%s\", \"direction\": \"%s\", \"load\": \"%s\", \"bytes\": %zu, \"ms\": [", words[1],
                   push ? "push" : "pull", label, page * pages);
            for (size_t run = 0; run < repeats; run++) {
                printf("%s%f", run ? ", " : "", once(&side, ep, key, base, push, page, pages));
            }
            printf("]}\n");
            fflush(stdout);
        }
    }
    *stop = 1;
    waitpid(child, NULL, 0);
    _exit(0);
}
