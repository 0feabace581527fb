/* A wide-area network of access links, between network namespaces of one machine, in one single-threaded process.
 *
 * Every node is a network namespace with one TUN device, whose other end is here. A packet passes the sender's uplink
 * (a FIFO of bounded delay at a fixed rate), then the propagation delay of both ends, then the receiver's downlink
 * (another such FIFO). The namespaces have no names: they end with this process, and with them all that was made here.
 *
 * Commands come as lines on stdin; each is answered by one line, "ok ..." or "error ...". End of input ends the process.
 *     node NAME IPV4 MTU BUNDLES                           -> ok FD      enter it through /proc/PID/fd/FD
 *     link NAME UP DOWN DELAY LOSS QUEUE DEAD CLOSED       -> ok         Mbit/s, ms, percent, ms, 0|1, 0|1
 *     stats                                                -> ok JSON
 * DEAD: a black hole, both ways. CLOSED: what did not begin with the node does not get in (as behind a home router):
 * no TCP connection requests, and UDP only from where the node has sent to.
 * BUNDLES 1: packets that TCP sends in one go (a millisecond's worth at the rate of the flow) travel as one, as they do
 * from and to a network card that cuts and joins them: they take the time and the bytes of all, and save most of the
 * processor's. They are also lost as one, so with random loss it must be 0.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/route.h>
#include <linux/virtio_net.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { NODES_MAX = 250, PACKET_BYTES_MAX = 1 << 16, READS_IN_A_ROW = 128, FLOWS = 1 << 16, LATE_NS = 5000000, ROUND_NS = 250000 };
enum { CONTROL = NODES_MAX };

typedef struct {
    char name[32];
    uint32_t address; /* network order */
    int tun;
    double up, down, delay_ms, loss, queue_ms;
    int dead, closed;
    int64_t up_free, down_free; /* when the last byte accepted so far has left the queue */
    uint64_t sent_bytes, sent_packets, received_bytes, received_packets, queue_drops, loss_drops, refused;
} node;

typedef struct packet {
    int64_t due;
    uint64_t serial; /* first in, first out where two are due at once */
    int to, is_downlink_done, num_bytes;
    int wire_bytes, count; /* of the packets it stands for, each with its headers */
    struct virtio_net_hdr how; /* the kernel's word on checksum and bundling, handed on as it is */
    unsigned char bytes[];
} packet;

static node nodes[NODES_MAX];
static int num_nodes, home, poller;
static packet **queue;
static size_t queue_length, queue_room;
static uint64_t serials, late_packets, delivered_packets, deliveries, random_state = 0x9e3779b97f4a7c15u;
static int64_t worst_late;
static uint64_t flows[FLOWS]; /* hashed (inside, outside) pairs that a closed node has sent UDP from and to */

static int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static double uniform(void) { return (mix(random_state += 0x9e3779b97f4a7c15u) >> 11) * 0x1p-53; }

/* ---- packets that are under way: a binary heap by due time ---- */

static int is_before(const packet *a, const packet *b) {
    return a->due != b->due ? a->due < b->due : a->serial < b->serial;
}

static void enqueue(packet *p, int64_t due) {
    p->due = due, p->serial = serials++;
    if (queue_length == queue_room) {
        queue_room = queue_room ? 2 * queue_room : 1024;
        if (!(queue = realloc(queue, queue_room * sizeof *queue))) abort();
    }
    size_t at = queue_length++;
    for (; at && is_before(p, queue[(at - 1) / 2]); at = (at - 1) / 2) queue[at] = queue[(at - 1) / 2];
    queue[at] = p;
}

static packet *dequeue(void) {
    packet *first = queue[0], *last = queue[--queue_length];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= queue_length) break;
        if (child + 1 < queue_length && is_before(queue[child + 1], queue[child])) child++;
        if (!is_before(queue[child], last)) break;
        queue[at] = queue[child], at = child;
    }
    queue[at] = last;
    return first;
}

/* ---- the network ---- */

/* When a packet offered now has passed a link, or -1 if the queue is full. */
static int64_t pass(int64_t now, int64_t *free_at, double mbit, double queue_ms, int num_bytes) {
    int64_t start = *free_at > now ? *free_at : now;
    if (start - now > (int64_t)(queue_ms * 1e6)) return -1;
    return *free_at = start + (int64_t)(num_bytes * 8000.0 / mbit);
}

static uint64_t *flow(const packet *p, int is_outward) {
    int header = 4 * (p->bytes[0] & 15);
    uint32_t from, to;
    uint16_t ports[2];
    if (header + 4 > p->num_bytes) return NULL;
    memcpy(&from, p->bytes + 12, 4), memcpy(&to, p->bytes + 16, 4), memcpy(ports, p->bytes + header, 4);
    uint64_t inside = is_outward ? ((uint64_t)from << 16 | ports[0]) : ((uint64_t)to << 16 | ports[1]);
    uint64_t outside = is_outward ? ((uint64_t)to << 16 | ports[1]) : ((uint64_t)from << 16 | ports[0]);
    uint64_t key = mix(mix(inside) + outside) | 1;
    uint64_t at = key >> 40;
    for (int tries = 0; tries < 64; tries++, at++) {
        uint64_t *slot = &flows[at % FLOWS];
        if (*slot == key || (!*slot && is_outward)) return *slot = key, slot;
        if (!*slot) return NULL;
    }
    return NULL;
}

static int is_refused(const packet *p) {
    int header = 4 * (p->bytes[0] & 15), protocol = p->bytes[9];
    if (protocol == IPPROTO_TCP && header + 14 <= p->num_bytes) return (p->bytes[header + 13] & 0x12) == 0x02;
    return protocol == IPPROTO_UDP && !flow(p, 0);
}

/* What comes out of a node: NULL when there is nothing more, or when it is no packet of ours (then *more is 1). */
static packet *read_packet(const node *from, int *more) {
    static unsigned char buffer[sizeof(struct virtio_net_hdr) + PACKET_BYTES_MAX];
    int got = read(from->tun, buffer, sizeof buffer), size = got - (int)sizeof(struct virtio_net_hdr);
    unsigned char *bytes = buffer + sizeof(struct virtio_net_hdr);
    if (!(*more = got > 0) || size < 20 || bytes[0] >> 4 != 4) return NULL;
    packet *p = malloc(sizeof *p + size);
    if (!p) abort();
    memcpy(&p->how, buffer, sizeof p->how), memcpy(p->bytes, bytes, size);
    p->num_bytes = p->wire_bytes = size, p->count = 1;
    int header = 4 * (bytes[0] & 15);
    if (p->how.gso_type != VIRTIO_NET_HDR_GSO_NONE && p->how.gso_size && header + 20 <= size) {
        header += 4 * (bytes[header + 12] >> 4);
        p->count = (size - header + p->how.gso_size - 1) / p->how.gso_size;
        p->wire_bytes += (p->count - 1) * header;
    }
    return p;
}

static void take_from(int i) {
    node *from = &nodes[i];
    packet *p;
    for (int reads = 0, more = 1; more && reads < READS_IN_A_ROW; reads++) {
        if (!(p = read_packet(from, &more))) continue;
        uint32_t address;
        int j = 0;
        memcpy(&address, p->bytes + 16, 4);
        while (j < num_nodes && nodes[j].address != address) j++;
        if (j == num_nodes || from->dead || nodes[j].dead) { free(p); continue; }
        from->sent_bytes += p->wire_bytes, from->sent_packets += p->count;
        if (from->closed && p->bytes[9] == IPPROTO_UDP) flow(p, 1);
        int64_t out = pass(clock_ns(), &from->up_free, from->up, from->queue_ms, p->wire_bytes);
        double kept = (1 - from->loss) * (1 - nodes[j].loss);
        if (out < 0) { from->queue_drops += p->count, free(p); continue; }
        if (kept < 1 && uniform() >= kept) { from->loss_drops += p->count, free(p); continue; }
        p->to = j, p->is_downlink_done = 0;
        enqueue(p, out + (int64_t)((from->delay_ms + nodes[j].delay_ms) * 1e6));
    }
}

/* Hand a packet to a node's kernel. Whether it was taken. */
static int give(const node *to, packet *p) {
    struct iovec parts[] = {{&p->how, sizeof p->how}, {p->bytes, p->num_bytes}};
    return writev(to->tun, parts, 2) == (ssize_t)sizeof p->how + p->num_bytes;
}

static void deliver_due(void) {
    int64_t now = clock_ns();
    while (queue_length && queue[0]->due <= now) {
        packet *p = dequeue();
        node *to = &nodes[p->to];
        if (!p->is_downlink_done) {
            int64_t in = pass(p->due, &to->down_free, to->down, to->queue_ms, p->wire_bytes);
            if (in < 0) { to->queue_drops += p->count, free(p); continue; }
            p->is_downlink_done = 1, enqueue(p, in);
            continue;
        }
        int64_t late = now - p->due;
        if (late > worst_late) worst_late = late;
        late_packets += late > LATE_NS ? p->count : 0, delivered_packets += p->count, deliveries++;
        if (to->closed && is_refused(p)) to->refused++;
        else if (!to->dead && give(to, p)) to->received_bytes += p->wire_bytes, to->received_packets += p->count;
        free(p);
    }
}

/* ---- making nodes, and commands ---- */

static int configure(const char *address, int mtu, int bundles) {
    struct ifreq device = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR}, loopback = {.ifr_flags = IFF_UP | IFF_RUNNING};
    struct rtentry route = {.rt_flags = RTF_UP};
    struct sockaddr_in *own = (struct sockaddr_in *)&device.ifr_addr, any = {.sin_family = AF_INET};
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    strcpy(loopback.ifr_name, "lo"), strcpy(device.ifr_name, "wan0");
    if (control < 0 || tun < 0 || ioctl(tun, TUNSETIFF, &device) || ioctl(control, SIOCSIFFLAGS, &loopback)) return -1;
    if (ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | (bundles ? TUN_F_TSO4 : 0))) return -1;
    own->sin_family = AF_INET;
    if (inet_pton(AF_INET, address, &own->sin_addr) != 1 || ioctl(control, SIOCSIFADDR, &device)) return -1;
    own->sin_addr.s_addr = INADDR_NONE;
    if (ioctl(control, SIOCSIFNETMASK, &device)) return -1;
    device.ifr_mtu = mtu;
    if (ioctl(control, SIOCSIFMTU, &device)) return -1;
    device.ifr_qlen = 10000; /* queues are ours to bound */
    if (ioctl(control, SIOCSIFTXQLEN, &device)) return -1;
    device.ifr_flags = IFF_UP | IFF_RUNNING;
    if (ioctl(control, SIOCSIFFLAGS, &device)) return -1;
    memcpy(&route.rt_dst, &any, sizeof any), memcpy(&route.rt_genmask, &any, sizeof any);
    route.rt_dev = device.ifr_name;
    if (ioctl(control, SIOCADDRT, &route)) return -1;
    close(control);
    return tun;
}

static void add_node(const char *name, const char *address, int mtu, int bundles) {
    node fresh = {.up = 1000, .down = 1000, .queue_ms = 200};
    if (num_nodes == NODES_MAX || inet_pton(AF_INET, address, &fresh.address) != 1) {
        printf("error no such node can be made\n");
        return;
    }
    snprintf(fresh.name, sizeof fresh.name, "%s", name);
    int inside = -1;
    if (unshare(CLONE_NEWNET) || (inside = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)) < 0) {
        printf("error a network namespace: %s\n", strerror(errno));
        return;
    }
    fresh.tun = configure(address, mtu, bundles);
    int why = errno;
    if (setns(home, CLONE_NEWNET)) abort();
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = num_nodes};
    if (fresh.tun < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, fresh.tun, &event)) {
        printf("error the device of %s: %s\n", name, strerror(why));
        return;
    }
    nodes[num_nodes++] = fresh;
    printf("ok %d\n", inside);
}

static void set_link(const char *line) {
    node read = {0};
    if (sscanf(line, "link %31s %lf %lf %lf %lf %lf %d %d", read.name, &read.up, &read.down, &read.delay_ms, &read.loss,
               &read.queue_ms, &read.dead, &read.closed) == 8 && read.up > 0 && read.down > 0)
        for (int i = 0; i < num_nodes; i++) {
            node *n = &nodes[i];
            if (strcmp(n->name, read.name)) continue;
            n->up = read.up, n->down = read.down, n->delay_ms = read.delay_ms, n->loss = read.loss / 100;
            n->queue_ms = read.queue_ms, n->dead = read.dead, n->closed = read.closed;
            printf("ok\n");
            return;
        }
    printf("error not a link: %s\n", line);
}

static void print_stats(void) {
    printf("ok {\"delivered\":%" PRIu64 ",\"deliveries\":%" PRIu64 ",\"late\":%" PRIu64 ",\"worst_late_ms\":%.3f,\"nodes\":{",
           delivered_packets, deliveries, late_packets, worst_late / 1e6);
    for (int i = 0; i < num_nodes; i++) {
        node *n = &nodes[i];
        printf("%s\"%s\":{\"sent_bytes\":%" PRIu64 ",\"sent_packets\":%" PRIu64 ",\"received_bytes\":%" PRIu64
               ",\"received_packets\":%" PRIu64 ",\"queue_drops\":%" PRIu64 ",\"loss_drops\":%" PRIu64
               ",\"refused\":%" PRIu64 "}", i ? "," : "", n->name, n->sent_bytes, n->sent_packets, n->received_bytes,
               n->received_packets, n->queue_drops, n->loss_drops, n->refused);
    }
    printf("}}\n");
    delivered_packets = deliveries = late_packets = worst_late = 0;
}

static void obey(const char *line) {
    char name[32], address[32];
    int mtu, bundles;
    if (sscanf(line, "node %31s %31s %d %d", name, address, &mtu, &bundles) == 4) add_node(name, address, mtu, bundles);
    else if (!strncmp(line, "link ", 5)) set_link(line);
    else if (!strcmp(line, "stats")) print_stats();
    else printf("error not a command: %s\n", line);
    fflush(stdout);
}

/* Obey the whole lines that have come. Returns 0 at the end of input. */
static int read_commands(void) {
    static char text[8192];
    static size_t length;
    ssize_t got = read(0, text + length, sizeof text - length - 1);
    if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
    text[length += got] = 0;
    char *start = text, *end;
    for (; (end = strchr(start, '\n')); start = end + 1) *end = 0, obey(start);
    memmove(text, start, length -= start - text);
    return length < sizeof text - 1;
}

int main(void) {
    struct epoll_event events[64], event = {.events = EPOLLIN, .data.u32 = CONTROL};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    mlockall(MCL_CURRENT | MCL_FUTURE);
    home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_ctl(poller, EPOLL_CTL_ADD, 0, &event)) { perror("stdin"); return 1; }
    struct sched_param priority = {.sched_priority = 10};
    int is_realtime = !sched_setscheduler(0, SCHED_FIFO, &priority);
    printf("ok %s\n", is_realtime ? "realtime" : "timesharing"), fflush(stdout);
    for (;;) {
        /* With packets under way, look around every ROUND_NS: a timer for every packet would cost more than the packet. */
        struct timespec pause = {.tv_nsec = ROUND_NS};
        if (queue_length) clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
        int count = epoll_wait(poller, events, 64, queue_length ? 0 : -1);
        if (count < 0 && errno != EINTR) { perror("epoll_wait"); return 1; }
        for (int e = 0; e < count; e++) {
            if (events[e].data.u32 < NODES_MAX) take_from(events[e].data.u32);
            else if (!read_commands()) return 0;
        }
        deliver_due();
    }
}
