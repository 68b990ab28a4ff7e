/* The internet between network namespaces: one process that makes them, carries every packet, and takes orders.
 *
 * A host is a network namespace with one TUN device. A line is what a home or a data centre has of the internet: an
 * uplink and a downlink with their queues, a last mile, loss, and a NAT or none. Several hosts may share one line.
 *
 *   host --TUN--> [NAT] -> uplink -> loss -> last mile, path, last mile -> loss -> downlink -> [NAT] --TUN--> host
 *
 * A link sends one packet after the other at its rate; what does not fit into its queue is dropped. Two hosts behind
 * one NAT reach each other by their inner addresses, past the line. Their router is x.x.x.1 there; where the line
 * `maps_ports`, it does so for whoever asks by NAT-PMP (RFC 6886).
 *
 * Orders are lines on standard input, each answered by one line on standard output, `ok ...` or `error ...`. The
 * process ends with its standard input, and with it every TUN. Namespaces have no names: each lives as long as this
 * process or one inside does, so that nothing is ever left to be removed, however either of them ends.
 *
 *   line IP KIND                  another line at that public address; KIND is one of nat_kinds; answers its number
 *   host LINE IP                  another host, IP is its own address; answers its number and its namespace's fd here
 *   seed NUMBER                   of losses, jitter and symmetric NATs' ports
 *   set LINE FIELD NUMBER         FIELD is one of set_field; rates in bit/s, times in ns, loss in [0, 1], maps_ports 0 or 1
 *   path LINE LINE NS JITTER_NS   one way, in both directions
 *   cut LINE | heal LINE          its cable is unplugged, and is plugged in again
 *   sever LINE LINE | join LINE LINE   nothing passes between these two
 *   address LINE IP               the line has another public address; a NAT forgets all that it knew
 *   stats LINE                    bytes carried up and down; packets dropped up and down, lost, refused, misaddressed
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/route.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    HOSTS_MAX = 64,
    PACKET_BYTES_MAX = 1500,
    READ_PACKETS_MAX = 32, /* of one host before the others have their turn */
    TABLE = 65536,         /* ports of a protocol */
};
#define SECOND 1000000000LL
#define TURN_NS 50000 /* we sleep so long at least: at most 0.05 ms on top of a path, for a third less work at 1 Gbit/s */
#define UDP_IDLE_NS (120 * SECOND) /* RFC 4787, REQ-5: two minutes at least */
#define TCP_IDLE_NS (7440 * SECOND) /* RFC 5382, REQ-5 */

enum protocol { TCP = 6, UDP = 17 };
static const char *const nat_kinds[] = {"none", "full-cone", "address-restricted", "port-restricted", "symmetric"};
enum nat_kind { NO_NAT, FULL_CONE, ADDRESS_RESTRICTED, PORT_RESTRICTED, SYMMETRIC, NAT_KINDS };

typedef struct packet {
    struct packet *next;
    int from, to; /* lines */
    int size;
    uint8_t bytes[PACKET_BYTES_MAX];
} packet;

typedef struct {
    double bits_per_s;
    int64_t queue_ns; /* what waits longer than this, at the rate of now, has no room */
    int64_t bytes;
    packet *first, *last; /* the first one is being sent */
    uint64_t carried_bytes, dropped;
} link_t;

/* What a NAT remembers of one inner endpoint; of a symmetric one, of an inner endpoint and whom it speaks to. */
typedef struct permit {
    struct permit *next;
    uint32_t ip;
    uint16_t port;
    int64_t used_ns;
} permit;
typedef struct mapping {
    uint8_t protocol;
    int host;
    uint16_t inner_port, outer_port;
    uint32_t remote_ip; /* symmetric only, else 0 */
    uint16_t remote_port;
    int64_t used_ns;
    int64_t open_until_ns; /* until then whoever comes is let in: it was asked for by NAT-PMP */
    permit *permits; /* the remote endpoints that it has sent to */
    struct mapping *next;
} mapping;

typedef struct {
    uint32_t ip;
    enum nat_kind nat;
    link_t up, down;
    int64_t last_mile_ns, jitter_ns;
    double loss;
    bool is_cut, maps_ports;
    uint64_t lost, refused, misaddressed;
    mapping *mappings;            /* all, newest first */
    mapping *by_port[2][TABLE];   /* by outer port: of TCP, of UDP */
} line_t;

typedef struct {
    int line, tun, namespace;
    uint32_t ip;
} host_t;

static line_t *lines[HOSTS_MAX];
static host_t hosts[HOSTS_MAX];
static int num_lines, num_hosts;
static int64_t path_ns[HOSTS_MAX][HOSTS_MAX], path_jitter_ns[HOSTS_MAX][HOSTS_MAX];
static int64_t newest_arrival_ns[HOSTS_MAX][HOSTS_MAX]; /* jitter lets no packet overtake another of its path */
static bool is_severed[HOSTS_MAX][HOSTS_MAX];
static int home_namespace;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

/* In [0, 1): xorshift64*, so that a seed draws the same losses on every machine. */
static uint64_t random_state = 1;
static double draw(void) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (double)((random_state * 0x2545F4914F6CDD1DULL) >> 11) / (double)(1ULL << 53);
}

/* ---- What happens later: a heap of links that have sent a packet, and of packets that arrive at a line ---- */

typedef struct {
    int64_t at_ns;
    uint64_t number; /* of two at the same time the older one is first */
    int line;
    bool is_up;
    packet *arrives; /* NULL: the link has sent its first packet */
} event;
static event *heap;
static size_t heap_size, heap_room;
static uint64_t num_events;

static bool is_before(const event *a, const event *b) {
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->number < b->number;
}

static void schedule(event what) {
    if (heap_size == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 4096;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap) abort();
    }
    what.number = num_events++;
    size_t hole = heap_size++;
    while (hole && is_before(&what, &heap[(hole - 1) / 2])) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = what;
}

static event take_earliest(void) {
    event earliest = heap[0], moved = heap[--heap_size];
    size_t hole = 0, child;
    while ((child = 2 * hole + 1) < heap_size) {
        if (child + 1 < heap_size && is_before(&heap[child + 1], &heap[child])) child++;
        if (!is_before(&heap[child], &moved)) break;
        heap[hole] = heap[child];
        hole = child;
    }
    heap[hole] = moved;
    return earliest;
}

static packet *free_packets;

static packet *new_packet(void) {
    packet *made = free_packets;
    if (made) free_packets = made->next;
    else if (!(made = malloc(sizeof *made))) abort();
    return made;
}

static void discard(packet *old) {
    old->next = free_packets;
    free_packets = old;
}

/* ---- NAT, in the words of RFC 4787 ----
 * Mapping: one outer port for each inner endpoint, the same number where it is free; symmetric: a random one for each
 * remote endpoint too. Filtering: whoever knows the port (full cone), whose address or whose address and port the inner
 * endpoint has sent to (address- and port-restricted, symmetric). What is not wanted is dropped without a word.
 */

static uint16_t get16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }
static uint32_t get32(const uint8_t *at) { return (uint32_t)get16(at) << 16 | get16(at + 2); }
static void put16(uint8_t *at, uint16_t value) { at[0] = (uint8_t)(value >> 8), at[1] = (uint8_t)value; }

/* Write a 16-bit word that checksums cover: RFC 1624, equation 3. `also` may be NULL. */
static void rewrite16(uint8_t *at, uint16_t value, uint8_t *sum_at, uint8_t *also) {
    for (int i = 0; i < 2; i++) {
        uint8_t *sum = i ? also : sum_at;
        if (!sum) continue;
        uint32_t total = (uint16_t)~get16(sum) + (uint32_t)(uint16_t)~get16(at) + value;
        total = (total & 0xFFFF) + (total >> 16);
        total = (total & 0xFFFF) + (total >> 16);
        put16(sum, (uint16_t)~total);
    }
    put16(at, value);
}

/* Where the ports are, or NULL: neither TCP nor UDP, or not the first fragment, which has them. */
static uint8_t *ports_of(packet *p) {
    int header = (p->bytes[0] & 15) * 4;
    if (get16(p->bytes + 6) & 0x1FFF) return NULL;
    if (p->bytes[9] == TCP && p->size >= header + 20) return p->bytes + header;
    if (p->bytes[9] == UDP && p->size >= header + 8) return p->bytes + header;
    return NULL;
}

static void readdress(packet *p, uint8_t *ip_at, uint32_t ip, uint8_t *port_at, uint16_t port) {
    uint8_t *l4 = p->bytes + (p->bytes[0] & 15) * 4, *l4_sum = l4 + (p->bytes[9] == TCP ? 16 : 6);
    if (p->bytes[9] == UDP && get16(l4_sum) == 0) l4_sum = NULL; /* sent without one */
    rewrite16(ip_at, (uint16_t)(ip >> 16), p->bytes + 10, l4_sum);
    rewrite16(ip_at + 2, (uint16_t)ip, p->bytes + 10, l4_sum);
    if (l4_sum) rewrite16(port_at, port, l4_sum, NULL);
    else put16(port_at, port);
}

static bool is_fresh(int64_t used_ns, uint8_t protocol, int64_t now) {
    return now - used_ns <= (protocol == TCP ? TCP_IDLE_NS : UDP_IDLE_NS);
}

static uint16_t free_port(line_t *line, uint8_t protocol, uint16_t wanted, int64_t now) {
    mapping **by_port = line->by_port[protocol == UDP];
    while (!wanted || (by_port[wanted] && is_fresh(by_port[wanted]->used_ns, protocol, now)))
        wanted = (uint16_t)(1024 + draw() * 64000);
    return wanted;
}

static permit *find_permit(mapping *of, uint32_t ip, uint16_t port, enum nat_kind nat) {
    permit *found = of->permits;
    while (found && (found->ip != ip || (nat != ADDRESS_RESTRICTED && found->port != port))) found = found->next;
    return found;
}

static mapping *find_open(line_t *line, int host, uint8_t protocol, uint16_t inner, int64_t now) {
    mapping *found = line->mappings;
    while (found && (found->open_until_ns <= now || found->protocol != protocol || found->host != host || found->inner_port != inner))
        found = found->next;
    return found;
}

static mapping *map_outward(line_t *line, int host, uint8_t protocol, const uint8_t *ports, uint32_t remote, int64_t now) {
    uint16_t inner = get16(ports), remote_port = get16(ports + 2);
    bool is_symmetric = line->nat == SYMMETRIC;
    mapping *found = find_open(line, host, protocol, inner, now);
    if (found) return found;
    found = line->mappings;
    while (found && (found->protocol != protocol || found->host != host || found->inner_port != inner ||
                     (is_symmetric && (found->remote_ip != remote || found->remote_port != remote_port))))
        found = found->next;
    if (!found) {
        found = calloc(1, sizeof *found);
        if (!found) abort();
        *found = (mapping){.protocol = protocol, .host = host, .inner_port = inner, .next = line->mappings};
        if (is_symmetric) found->remote_ip = remote, found->remote_port = remote_port;
        line->mappings = found;
    }
    mapping **by_port = line->by_port[protocol == UDP];
    if (by_port[found->outer_port] != found || !is_fresh(found->used_ns, protocol, now)) { /* new, or long unused */
        if (by_port[found->outer_port] == found) by_port[found->outer_port] = NULL;
        found->outer_port = free_port(line, protocol, is_symmetric ? 0 : inner, now);
        by_port[found->outer_port] = found;
    }
    permit *allowed = find_permit(found, remote, remote_port, line->nat);
    if (!allowed) {
        allowed = calloc(1, sizeof *allowed);
        if (!allowed) abort();
        *allowed = (permit){.next = found->permits, .ip = remote, .port = remote_port};
        found->permits = allowed;
    }
    found->used_ns = allowed->used_ns = now;
    return found;
}

static bool leave_through_nat(line_t *line, int host, packet *p, int64_t now) {
    uint8_t *ports = ports_of(p);
    if (!ports) return false;
    mapping *by = map_outward(line, host, p->bytes[9], ports, get32(p->bytes + 16), now);
    readdress(p, p->bytes + 12, line->ip, ports, by->outer_port);
    return true;
}

/* Returns: the host to whom the packet goes, readdressed to it; -1: it is refused. */
static int enter_through_nat(line_t *line, packet *p, int64_t now) {
    uint8_t *ports = ports_of(p), protocol = p->bytes[9];
    if (!ports) return -1;
    mapping *by = line->by_port[protocol == UDP][get16(ports + 2)];
    if (!by || (!is_fresh(by->used_ns, protocol, now) && by->open_until_ns <= now)) return -1;
    if (line->nat != FULL_CONE && by->open_until_ns <= now) {
        permit *allowed = find_permit(by, get32(p->bytes + 12), get16(ports), line->nat);
        if (!allowed || !is_fresh(allowed->used_ns, protocol, now)) return -1;
        allowed->used_ns = now;
    }
    by->used_ns = now;
    readdress(p, p->bytes + 16, hosts[by->host].ip, ports + 2, by->inner_port);
    return by->host;
}

/* ---- NAT-PMP, RFC 6886: what a host asks of its router ---- */

enum { PMP_PORT = 5351, PMP_ANSWER = 128 };

static uint32_t router_of(uint32_t ip) { return (ip & 0xFFFFFF00) | 1; }

static void put32(uint8_t *at, uint32_t value) { put16(at, (uint16_t)(value >> 16)), put16(at + 2, (uint16_t)value); }

static uint16_t open_port(line_t *line, int host, uint8_t protocol, uint16_t inner, uint16_t wanted, uint32_t seconds, int64_t now) {
    mapping *found = find_open(line, host, protocol, inner, now);
    if (!found) {
        found = calloc(1, sizeof *found);
        if (!found) abort();
        *found = (mapping){.protocol = protocol, .host = host, .inner_port = inner, .next = line->mappings};
        line->mappings = found;
        found->outer_port = free_port(line, protocol, wanted ? wanted : inner, now);
        line->by_port[protocol == UDP][found->outer_port] = found;
    }
    found->used_ns = now;
    found->open_until_ns = now + seconds * SECOND;
    return found->outer_port;
}

/* Turn a request to the router into its answer. Returns: whether it was one. */
static bool answer_pmp(line_t *line, int host, packet *p, int64_t now) {
    int header = (p->bytes[0] & 15) * 4;
    uint8_t *udp = p->bytes + header, *asked = udp + 8;
    if (!line->maps_ports || p->bytes[9] != UDP || p->size < header + 10 || get16(udp + 2) != PMP_PORT) return false;
    int size = p->size - header - 8, opcode = asked[1];
    uint16_t from_port = get16(udp), result = 0;
    if (asked[0] != 0) result = 1; /* unsupported version: PCP, which may ask again as NAT-PMP */
    else if (opcode == 0) put32(asked + 8, line->ip), size = 12;
    else if ((opcode == 1 || opcode == 2) && size >= 12) {
        uint16_t inner = get16(asked + 4), wanted = get16(asked + 6);
        uint32_t seconds = get32(asked + 8);
        uint16_t outer = open_port(line, host, opcode == 1 ? UDP : TCP, inner, wanted, seconds, now);
        put16(asked + 8, inner), put16(asked + 10, outer), put32(asked + 12, seconds), size = 16;
    } else result = 5; /* unsupported opcode */
    if (result) size = 8;
    asked[0] = 0, asked[1] = (uint8_t)(PMP_ANSWER + opcode);
    put16(asked + 2, result), put32(asked + 4, (uint32_t)(now / SECOND));
    p->size = header + 8 + size;
    put32(p->bytes + 12, router_of(hosts[host].ip)), put32(p->bytes + 16, hosts[host].ip);
    put16(udp, PMP_PORT), put16(udp + 2, from_port), put16(udp + 4, (uint16_t)(8 + size)), put16(udp + 6, 0);
    put16(p->bytes + 2, (uint16_t)p->size), put16(p->bytes + 10, 0);
    uint32_t sum = 0;
    for (int i = 0; i < header; i += 2) sum += get16(p->bytes + i);
    sum = (sum & 0xFFFF) + (sum >> 16);
    put16(p->bytes + 10, (uint16_t)~((sum & 0xFFFF) + (sum >> 16)));
    return true;
}

static void forget_mappings(line_t *line) {
    memset(line->by_port, 0, sizeof line->by_port);
    while (line->mappings) {
        mapping *old = line->mappings;
        line->mappings = old->next;
        while (old->permits) {
            permit *gone = old->permits;
            old->permits = gone->next;
            free(gone);
        }
        free(old);
    }
}

/* ---- A packet's way ---- */

static int64_t sending_ns(const link_t *link, const packet *p) { return (int64_t)(p->size * 8e9 / link->bits_per_s); }

static void enqueue(int line, bool is_up, packet *p, int64_t now) {
    link_t *link = is_up ? &lines[line]->up : &lines[line]->down;
    if (link->bytes * 8e9 / link->bits_per_s > link->queue_ns) {
        link->dropped++;
        discard(p);
        return;
    }
    link->bytes += p->size;
    p->next = NULL;
    if (link->first) link->last->next = p;
    else {
        link->first = p;
        schedule((event){.at_ns = now + sending_ns(link, p), .line = line, .is_up = is_up});
    }
    link->last = p;
}

static void hand_over(int host, packet *p) {
    if (write(hosts[host].tun, p->bytes, (size_t)p->size) != p->size) lines[hosts[host].line]->down.dropped++;
    discard(p);
}

static int host_at(uint32_t ip, int line) {
    for (int i = 0; i < num_hosts; i++)
        if (hosts[i].ip == ip && (line < 0 || hosts[i].line == line)) return i;
    return -1;
}

static int line_to(uint32_t ip) {
    for (int i = 0; i < num_lines; i++)
        if (lines[i]->nat != NO_NAT && lines[i]->ip == ip) return i;
    int host = host_at(ip, -1);
    return host < 0 || lines[hosts[host].line]->nat != NO_NAT ? -1 : hosts[host].line;
}

static void leave_host(int host, packet *p, int64_t now) {
    int from = hosts[host].line;
    line_t *line = lines[from];
    /* A source that is not ours is that of a connection from before a change of address: dead, as it is outside. */
    if (p->size < 20 || p->bytes[0] >> 4 != 4 || get32(p->bytes + 12) != hosts[host].ip) {
        line->misaddressed++;
        discard(p);
        return;
    }
    uint32_t to_ip = get32(p->bytes + 16);
    int beside = host_at(to_ip, from);
    if (beside >= 0) {
        hand_over(beside, p);
        return;
    }
    if (line->nat != NO_NAT && to_ip == router_of(hosts[host].ip) && answer_pmp(line, host, p, now)) {
        hand_over(host, p);
        return;
    }
    p->from = from, p->to = line_to(to_ip);
    if (p->to < 0 || p->to == from) { /* nobody's address, or our own router's: no hairpin */
        line->misaddressed++;
        discard(p);
    } else if (line->nat != NO_NAT && !leave_through_nat(line, host, p, now)) {
        line->refused++;
        discard(p);
    } else enqueue(from, true, p, now);
}

static bool is_lost(line_t *line) {
    if (line->loss <= 0 || draw() >= line->loss) return false;
    line->lost++;
    return true;
}

static void travel(packet *p, int64_t now) {
    line_t *from = lines[p->from], *to = lines[p->to];
    if (from->is_cut || to->is_cut || is_severed[p->from][p->to] || is_lost(from)) {
        discard(p);
        return;
    }
    double jitter_ns = (double)(path_jitter_ns[p->from][p->to] + from->jitter_ns + to->jitter_ns);
    int64_t at_ns = now + from->last_mile_ns + path_ns[p->from][p->to] + to->last_mile_ns;
    if (jitter_ns > 0) at_ns += (int64_t)(draw() * jitter_ns);
    int64_t *newest = &newest_arrival_ns[p->from][p->to];
    *newest = at_ns = at_ns > *newest ? at_ns : *newest;
    schedule((event){.at_ns = at_ns, .line = p->to, .arrives = p});
}

static void enter_host(packet *p, int64_t now) {
    line_t *line = lines[p->to];
    int host = line->nat == NO_NAT ? host_at(get32(p->bytes + 16), p->to) : -1;
    if (line->nat != NO_NAT && get32(p->bytes + 16) == line->ip) host = enter_through_nat(line, p, now);
    if (host >= 0) hand_over(host, p);
    else {
        line->refused++;
        discard(p);
    }
}

static void happen(event what) {
    line_t *line = lines[what.line];
    if (what.arrives) {
        if (line->is_cut || is_lost(line)) discard(what.arrives);
        else enqueue(what.line, false, what.arrives, what.at_ns);
        return;
    }
    link_t *link = what.is_up ? &line->up : &line->down;
    packet *sent = link->first;
    link->first = sent->next;
    link->bytes -= sent->size;
    link->carried_bytes += (uint64_t)sent->size;
    /* By the time at which it should have happened: a late turn of ours costs no rate. */
    if (link->first)
        schedule((event){.at_ns = what.at_ns + sending_ns(link, link->first), .line = what.line, .is_up = what.is_up});
    if (what.is_up) travel(sent, what.at_ns);
    else enter_host(sent, what.at_ns);
}

/* ---- Namespaces ---- */

static void fill_address(struct sockaddr *into, uint32_t ip) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(ip)};
    memcpy(into, &address, sizeof address);
}

/* In the namespace of the host: its address, and everything goes through the device; behind a NAT by the router there,
 * which it then knows. */
static const char *configure(uint32_t ip, bool is_behind_nat) {
    int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING}, wan = {.ifr_name = "wan0"};
    const char *failed = ioctl(any, SIOCSIFFLAGS, &lo) ? "cannot set lo up" : NULL;
    fill_address(&wan.ifr_addr, ip);
    if (ioctl(any, SIOCSIFADDR, &wan)) failed = "cannot set the address";
    fill_address(&wan.ifr_netmask, 0xFFFFFF00);
    if (ioctl(any, SIOCSIFNETMASK, &wan)) failed = "cannot set the mask";
    wan.ifr_flags = IFF_UP | IFF_RUNNING;
    if (ioctl(any, SIOCSIFFLAGS, &wan)) failed = "cannot set wan0 up";
    struct rtentry route = {.rt_flags = is_behind_nat ? RTF_UP | RTF_GATEWAY : RTF_UP, .rt_dev = "wan0"};
    fill_address(&route.rt_dst, 0), fill_address(&route.rt_genmask, 0);
    fill_address(&route.rt_gateway, is_behind_nat ? router_of(ip) : 0);
    if (ioctl(any, SIOCADDRT, &route) && errno != EEXIST) failed = "cannot set the route";
    close(any);
    return failed;
}

/* BBR, which a namespace inherits where the machine has it, does not slow down for loss; most homes have cubic or reno. */
static void take_plain_congestion_control(void) {
    int setting = open("/proc/sys/net/ipv4/tcp_congestion_control", O_WRONLY | O_CLOEXEC);
    if (setting < 0) return;
    if (write(setting, "cubic", 5) != 5 && write(setting, "reno", 4) != 4) fprintf(stderr, "router: the machine's own congestion control\n");
    close(setting);
}

static const char *make_namespace(host_t *host) {
    if (unshare(CLONE_NEWNET)) return "cannot make a namespace";
    const char *failed = NULL;
    struct ifreq device = {.ifr_name = "wan0", .ifr_flags = IFF_TUN | IFF_NO_PI};
    host->namespace = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    host->tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (host->namespace < 0) failed = "cannot open a namespace";
    else if (host->tun < 0 || ioctl(host->tun, TUNSETIFF, &device)) failed = "cannot make a TUN device";
    else failed = configure(host->ip, lines[host->line]->nat != NO_NAT);
    take_plain_congestion_control();
    if (setns(home_namespace, CLONE_NEWNET)) abort();
    return failed;
}

static const char *move_host(host_t *host, uint32_t ip) {
    if (setns(host->namespace, CLONE_NEWNET)) return "cannot enter the namespace";
    const char *failed = configure(host->ip = ip, false);
    if (setns(home_namespace, CLONE_NEWNET)) abort();
    return failed;
}

/* ---- Orders ---- */

static bool parse_ip(const char *text, uint32_t *ip) {
    struct in_addr address;
    if (!text || !inet_aton(text, &address)) return false;
    *ip = ntohl(address.s_addr);
    return true;
}

static bool parse_line(const char *text, int *line) {
    char *end;
    long number = text ? strtol(text, &end, 10) : -1;
    *line = (int)number;
    return text && !*end && number >= 0 && number < num_lines;
}

static const char *set_field(line_t *line, const char *field, double value) {
    if (!strcmp(field, "up_bits_per_s")) line->up.bits_per_s = value;
    else if (!strcmp(field, "down_bits_per_s")) line->down.bits_per_s = value;
    else if (!strcmp(field, "queue_ns")) line->up.queue_ns = line->down.queue_ns = (int64_t)value;
    else if (!strcmp(field, "last_mile_ns")) line->last_mile_ns = (int64_t)value;
    else if (!strcmp(field, "jitter_ns")) line->jitter_ns = (int64_t)value;
    else if (!strcmp(field, "loss")) line->loss = value;
    else if (!strcmp(field, "maps_ports")) line->maps_ports = value != 0;
    else return "there is no such field";
    return NULL;
}

static const char *add_line(const char *ip, const char *kind, char *answer) {
    uint32_t address;
    if (num_lines == HOSTS_MAX) return "too many lines";
    if (!parse_ip(ip, &address)) return "that is no address";
    int nat = 0;
    while (nat < NAT_KINDS && strcmp(nat_kinds[nat], kind)) nat++;
    if (nat == NAT_KINDS) return "there is no such NAT";
    line_t *line = lines[num_lines] = calloc(1, sizeof *line);
    if (!line) abort();
    line->ip = address, line->nat = (enum nat_kind)nat;
    line->up.bits_per_s = line->down.bits_per_s = 1e9;
    line->up.queue_ns = line->down.queue_ns = SECOND / 10;
    sprintf(answer, " %d", num_lines++);
    return NULL;
}

static const char *add_host(int line, const char *ip, char *answer) {
    host_t *host = &hosts[num_hosts];
    if (num_hosts == HOSTS_MAX) return "too many hosts";
    if (!parse_ip(ip, &host->ip)) return "that is no address";
    host->line = line;
    const char *failed = make_namespace(host);
    if (!failed) sprintf(answer, " %d %d", num_hosts++, host->namespace);
    return failed;
}

static const char *change_address(int number, const char *ip) {
    uint32_t address;
    if (!parse_ip(ip, &address)) return "that is no address";
    line_t *line = lines[number];
    const char *failed = NULL;
    if (line->nat != NO_NAT) forget_mappings(line);
    else
        for (int i = 0; i < num_hosts && !failed; i++)
            if (hosts[i].line == number) failed = move_host(&hosts[i], address);
    line->ip = address;
    return failed;
}

static const char *obey(char *order, char *answer) {
    char *words[6] = {0};
    int count = 0, a, b;
    for (char *word = strtok(order, " \n"); word && count < 6; word = strtok(NULL, " \n")) words[count++] = word;
    const char *what = count ? words[0] : "";
    if (!strcmp(what, "seed") && count == 2) random_state = strtoull(words[1], NULL, 10) | 1;
    else if (!strcmp(what, "line") && count == 3) return add_line(words[1], words[2], answer);
    else if (!parse_line(words[1], &a)) return "there is no such line";
    else if (!strcmp(what, "host") && count == 3) return add_host(a, words[2], answer);
    else if (!strcmp(what, "set") && count == 4) return set_field(lines[a], words[2], atof(words[3]));
    else if (!strcmp(what, "cut") && count == 2) lines[a]->is_cut = true;
    else if (!strcmp(what, "heal") && count == 2) lines[a]->is_cut = false;
    else if (!strcmp(what, "address") && count == 3) return change_address(a, words[2]);
    else if (!strcmp(what, "stats") && count == 2) {
        line_t *l = lines[a];
        sprintf(answer, " %lu %lu %lu %lu %lu %lu %lu", l->up.carried_bytes, l->down.carried_bytes, l->up.dropped,
                l->down.dropped, l->lost, l->refused, l->misaddressed);
    } else if (!parse_line(words[2], &b)) return "there is no such order";
    else if (!strcmp(what, "path") && count == 5) {
        path_ns[a][b] = path_ns[b][a] = atoll(words[3]);
        path_jitter_ns[a][b] = path_jitter_ns[b][a] = atoll(words[4]);
    } else if (!strcmp(what, "sever") && count == 3) is_severed[a][b] = is_severed[b][a] = true;
    else if (!strcmp(what, "join") && count == 3) is_severed[a][b] = is_severed[b][a] = false;
    else return "there is no such order";
    return NULL;
}

static void answer_order(char *order) {
    char answer[256] = "";
    errno = 0;
    const char *failed = obey(order, answer);
    int why = errno;
    if (failed) printf("error %s%s%s\n", failed, why ? ": " : "", why ? strerror(why) : "");
    else printf("ok%s\n", answer);
    fflush(stdout);
}

/* Take what there is of standard input. Returns: whether there may be more. */
static bool take_orders(void) {
    static char waiting[4096];
    static size_t size;
    ssize_t got = read(STDIN_FILENO, waiting + size, sizeof waiting - 1 - size);
    if (got <= 0) return got < 0 && errno == EINTR;
    size += (size_t)got;
    waiting[size] = 0;
    char *end;
    while ((end = strchr(waiting, '\n'))) {
        *end = 0;
        answer_order(waiting);
        size -= (size_t)(end + 1 - waiting);
        memmove(waiting, end + 1, size + 1);
    }
    return size < sizeof waiting - 1;
}

/* ---- The loop ---- */

static void read_host(int host) {
    for (int i = 0; i < READ_PACKETS_MAX; i++) {
        packet *p = new_packet();
        ssize_t size = read(hosts[host].tun, p->bytes, PACKET_BYTES_MAX);
        if (size <= 0) {
            discard(p);
            return;
        }
        p->size = (int)size;
        leave_host(host, p, now_ns());
    }
}

int main(void) {
    signal(SIGINT, SIG_IGN); /* a terminal's Ctrl-C is for our parent, whose end is ours */
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1UL);            /* no 50 us on top */
    setpriority(PRIO_PROCESS, 0, -15);        /* before the peers: a busy machine should not lengthen paths */
    home_namespace = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    struct pollfd waiting[HOSTS_MAX + 1];
    for (;;) {
        int64_t now = now_ns();
        while (heap_size && heap[0].at_ns <= now) happen(take_earliest());
        waiting[0] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
        for (int i = 0; i < num_hosts; i++) waiting[i + 1] = (struct pollfd){.fd = hosts[i].tun, .events = POLLIN};
        int64_t left_ns = heap_size ? heap[0].at_ns - now_ns() : 0;
        left_ns = left_ns > TURN_NS ? left_ns : TURN_NS;
        struct timespec left = {.tv_sec = left_ns / SECOND, .tv_nsec = left_ns % SECOND};
        int count = num_hosts; /* an order may add one */
        if (ppoll(waiting, (nfds_t)(count + 1), heap_size ? &left : NULL, NULL) <= 0) continue;
        for (int i = 0; i < count; i++)
            if (waiting[i + 1].revents & POLLIN) read_host(i);
        if (waiting[0].revents && !take_orders()) return 0;
    }
}
