/* Both ends of the gateway's benchmark, in C so that neither is what is measured.
 *
 *   gateway_load serve PORT CHUNK_MS            an instant inference server; a stream sends a chunk every CHUNK_MS
 *   gateway_load load PORT PATH CONNECTIONS SECONDS BODY_FILE   a closed-loop client; prints one JSON line;
 *                                               `%d` in PATH becomes the connection's number
 *
 * One epoll loop each. The replies are shaped as vLLM's, with token ids and logprobs; the requests are read from a file.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define MAX_FD 8192
#define BUFFER 65536
#define CHUNKS 50

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int prepared(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static void watch(int epoll, int fd, unsigned events) {
    struct epoll_event event = {.events = events, .data.fd = fd};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event)) die("epoll_ctl");
}

static void put(int fd, const char *data, size_t length) {
    while (length) {
        ssize_t sent = write(fd, data, length);
        if (sent < 0) {
            if (errno != EAGAIN) return;
            usleep(50);
            continue;
        }
        data += sent;
        length -= sent;
    }
}

/* -- the inference server ------------------------------------------------------------------------------------------ */

static char plain[8192], first[2048], middle[2048], last[2048];

static void fill(void) {
    char ids[512] = "", logprobs[2048] = "", body[4096];
    for (int i = 0; i < 16; i++) {
        sprintf(ids + strlen(ids), "%s%d", i ? "," : "", 1000 + i);
        sprintf(logprobs + strlen(logprobs),
                "%s{\"token\":\" word\",\"logprob\":-1.%04d,\"bytes\":[32,119,111,114,100],\"top_logprobs\":[]}",
                i ? "," : "", i * 37);
    }
    int length = sprintf(
        body,
        "{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1795238787,"
        "\"model\":\"policy@0\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
        "\" word word word word word word word word word word word word word word word word\",\"refusal\":null,"
        "\"tool_calls\":[]},\"logprobs\":{\"content\":[%s]},\"finish_reason\":\"stop\",\"stop_reason\":null,"
        "\"token_ids\":[%s]}],\"usage\":{\"prompt_tokens\":64,\"total_tokens\":80,\"completion_tokens\":16},"
        "\"prompt_token_ids\":[%s,%s,%s,%s]}",
        logprobs, ids, ids, ids, ids, ids);
    sprintf(plain, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", length, body);
    const char *chunk =
        "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1795238787,"
        "\"model\":\"policy@0\",\"choices\":[{\"index\":0,\"delta\":%s,\"logprobs\":%s,\"finish_reason\":%s%s}]%s}\n\n";
    const char *sampled = "{\"content\":[{\"token\":\" word\",\"logprob\":-1.2345,\"bytes\":[32,119],\"top_logprobs\":[]}]}";
    char raw[1024];
    sprintf(raw, chunk, "{\"role\":\"assistant\",\"content\":\"\"}", "null", "null", "", ",\"prompt_token_ids\":[1,2,3,4]");
    sprintf(first,
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
            "%zx\r\n%s\r\n",
            strlen(raw), raw);
    sprintf(raw, chunk, "{\"content\":\" word\"}", sampled, "null", ",\"token_ids\":[1234]", "");
    sprintf(middle, "%zx\r\n%s\r\n", strlen(raw), raw);
    sprintf(raw, chunk, "{\"content\":\"\"}", sampled, "\"stop\",\"stop_reason\":null", ",\"token_ids\":[1235]", "");
    strcat(raw, "data: [DONE]\n\n");
    sprintf(last, "%zx\r\n%s\r\n0\r\n\r\n", strlen(raw), raw);
}

static struct {
    char *in;
    size_t have;
    int chunks;
    double due;
} peer[MAX_FD];

static void reply(int fd, char *request, char *body) {
    static const char small[] = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 38\r\n\r\n"
                                "{\"object\":\"list\",\"data\":[],\"ok\":true} ";
    if (strstr(request, "/v1/chat/completions") == NULL)
        put(fd, small, sizeof small - 1);
    else if (strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true")) {
        put(fd, first, strlen(first));
        peer[fd].chunks = CHUNKS;
        peer[fd].due = now();
    } else
        put(fd, plain, strlen(plain));
}

static void take(int fd) {
    for (;;) {
        peer[fd].in[peer[fd].have] = 0;
        char *end = strstr(peer[fd].in, "\r\n\r\n");
        if (!end) return;
        char *found = strcasestr(peer[fd].in, "content-length:");
        size_t length = found && found < end ? strtoul(found + 15, NULL, 10) : 0;
        size_t whole = end + 4 - peer[fd].in + length;
        if (peer[fd].have < whole) return;
        reply(fd, peer[fd].in, end + 4);
        memmove(peer[fd].in, peer[fd].in + whole, peer[fd].have - whole);
        peer[fd].have -= whole;
    }
}

static void serve(int port, double chunk_s) {
    fill();
    int epoll = epoll_create1(0), listener = socket(AF_INET, SOCK_STREAM, 0), one = 1, top = 0;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096)) die("listen");
    puts("ready");
    fflush(stdout);
    watch(epoll, prepared(listener), EPOLLIN);
    struct epoll_event events[1024];
    double swept = now();
    for (;;) {
        int count = epoll_wait(epoll, events, 1024, 1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                int accepted;
                while ((accepted = accept(listener, NULL, NULL)) >= 0) {
                    if (accepted >= MAX_FD) die("too many connections");
                    peer[accepted].in = peer[accepted].in ? peer[accepted].in : malloc(BUFFER);
                    peer[accepted].have = peer[accepted].chunks = 0;
                    if (accepted > top) top = accepted;
                    watch(epoll, prepared(accepted), EPOLLIN);
                }
                continue;
            }
            ssize_t got = read(fd, peer[fd].in + peer[fd].have, BUFFER - 1 - peer[fd].have);
            if (got <= 0) {
                if (got < 0 && errno == EAGAIN) continue;
                peer[fd].chunks = 0;
                close(fd);
                continue;
            }
            peer[fd].have += got;
            take(fd);
        }
        double at = now();
        if (at - swept < 0.001) continue;
        swept = at;
        for (int fd = 0; fd <= top; fd++)
            if (peer[fd].chunks && at >= peer[fd].due) {
                const char *data = --peer[fd].chunks ? middle : last;
                put(fd, data, strlen(data));
                peer[fd].due += chunk_s;
            }
    }
}

/* -- the client ---------------------------------------------------------------------------------------------------- */

static struct {
    char in[BUFFER];
    size_t have;
    double sent;
    int streamed;
    char *request;
    size_t whole;
    int number;
} call[MAX_FD];

static void compose(int fd, const char *path, const char *body, size_t length) {
    char target[256];
    snprintf(target, sizeof target, path, call[fd].number);
    int head = sprintf(call[fd].request,
                       "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                       target, length);
    memcpy(call[fd].request + head, body, length);
    call[fd].whole = head + length;
}

static float *samples;
static size_t counted, room;

static void sample(double value) {
    if (counted == room) {
        room = room ? room * 2 : 1 << 16;
        samples = realloc(samples, room * sizeof(float));
    }
    samples[counted++] = value;
}

static int ascending(const void *a, const void *b) {
    float difference = *(const float *)a - *(const float *)b;
    return (difference > 0) - (difference < 0);
}

static int load(int port, const char *path, int connections, double seconds, const char *file) {
    char body[BUFFER / 2];
    FILE *in = fopen(file, "rb");
    if (!in) die(file);
    size_t length = fread(body, 1, sizeof body, in);
    fclose(in);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int epoll = epoll_create1(0);
    long done = 0, failed = 0, chunks = 0, closed = 0;
    double start = now(), end = start + seconds;
    for (int i = 0; i < connections; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd >= MAX_FD || connect(fd, (struct sockaddr *)&address, sizeof address)) die("connect");
        watch(epoll, prepared(fd), EPOLLIN);
        call[fd].request = malloc(length + 1024);
        call[fd].number = i;
        compose(fd, path, body, length);
        call[fd].sent = now();
        put(fd, call[fd].request, call[fd].whole);
    }
    struct epoll_event events[1024];
    while (now() < end) {
        int count = epoll_wait(epoll, events, 1024, 10);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            ssize_t got = read(fd, call[fd].in + call[fd].have, BUFFER - 1 - call[fd].have);
            if (got <= 0) {
                if (got < 0 && errno == EAGAIN) continue;
                closed++;
                close(fd);
                continue;
            }
            char *fresh = call[fd].in + call[fd].have;
            call[fd].have += got;
            call[fd].in[call[fd].have] = 0;
            int complete = 0;
            if (!call[fd].streamed) {
                char *body_at = strstr(call[fd].in, "\r\n\r\n");
                if (!body_at) continue;
                if (strncmp(call[fd].in + 9, "200", 3)) failed++;
                char *found = strcasestr(call[fd].in, "content-length:");
                if (found && found < body_at)
                    complete = call[fd].have >= (size_t)(body_at + 4 - call[fd].in) + strtoul(found + 15, NULL, 10);
                else
                    call[fd].streamed = 1;
            }
            if (call[fd].streamed) {
                for (char *p = fresh; (p = strstr(p, "data: {")); p++) chunks++;
                if (strstr(fresh, "\"error\"")) failed++;
                complete = call[fd].have >= 5 && !memcmp(call[fd].in + call[fd].have - 5, "0\r\n\r\n", 5);
                if (!complete && call[fd].have > BUFFER / 2) { /* keep the tail that may begin an end mark */
                    memmove(call[fd].in, call[fd].in + call[fd].have - 8, 8);
                    call[fd].have = 8;
                }
            }
            if (complete) {
                done++;
                sample(now() - call[fd].sent);
                call[fd].have = 0;
                call[fd].streamed = 0;
                call[fd].sent = now();
                put(fd, call[fd].request, call[fd].whole);
            }
        }
    }
    qsort(samples, counted, sizeof(float), ascending);
    printf("{\"requests\": %ld, \"failed\": %ld, \"closed\": %ld, \"chunks\": %ld, \"seconds\": %.3f, "
           "\"p50_ms\": %.4f}\n",
           done, failed, closed, chunks, now() - start, counted ? samples[counted / 2] * 1e3 : 0);
    return 0;
}

int main(int argc, char **argv) {
    struct rlimit files = {MAX_FD, MAX_FD};
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN); /* a peer that goes in mid-stream is no reason to die */
    if (argc == 4 && !strcmp(argv[1], "serve")) serve(atoi(argv[2]), atof(argv[3]) / 1e3);
    if (argc == 7 && !strcmp(argv[1], "load"))
        return load(atoi(argv[2]), argv[3], atoi(argv[4]), atof(argv[5]), argv[6]);
    fprintf(stderr, "usage: see the top of the source\n");
    return 2;
}
