/* The sandbox's supervisor: runs one command at a time and leaves nothing of it behind.
 *
 * Requests arrive on fd 0, replies leave on fd 1 (see wire.h). Request payload:
 *   u8 kind ('E' run, 'P' put tree, 'G' get tree, 'C' cancel the running one, 'N' nothing: answered
 *   at once), u32 id, and for all but 'C' and 'N': u32 timeout_ms, u32 head_cap, u32 tail_cap, u32 num_args, u32 num_env, u32 stdin_len,
 *   then NUL-ended strings cwd, args, env, then the stdin bytes.
 * Reply payload: 'R', u32 id, i32 code, u32 flags, u64 microseconds, u64 total output bytes,
 *   u32 head length, u32 tail length, head, tail. The first frame sent is 'H'.
 * How the leftovers of a command are found depends on the mode:
 *   pid1       we are PID 1 of the sandbox: kill(-1) reaches everything but us, atomically. The
 *              commands have another uid (--uid), so they cannot signal us.
 *   pidns      no second uid could be mapped: each command gets its own pid namespace and /proc.
 *   subreaper  no isolation (process backend): orphans come to us and are killed one by one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "filter.h"
#include "wire.h"

enum { MODE_PID1, MODE_PIDNS, MODE_SUBREAPER };
enum { TIMED_OUT = 1, TRUNCATED = 2, CANCELLED = 4, STUCK = 8 };
#define MAX_FRAME (256u << 20)
#define REAP_DEADLINE_MS 5000
#define REQUEST_HEAD 29

static int mode = MODE_PID1, channel_in, channel_out;
static long uid = -1, limit_nproc = -1, limit_as = -1, limit_fsize = -1, life_s = -1;
static sigset_t idle_mask; /* the mask during ppoll: SIGCHLD let through */

struct request {
    uint8_t kind;
    uint32_t id, timeout_ms, head_cap, tail_cap, num_args, num_env, stdin_len;
    char *cwd, **args, **env, *stdin_data, *frame;
};

struct output {
    char *head, *tail;
    uint32_t head_cap, tail_cap, head_len;
    uint64_t total;
};

static void on_child(int signal_number) { (void)signal_number; }

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

/* Cuts the frame's strings in place; -1 when the frame is not well formed. */
static int parse(struct request *r, uint32_t length) {
    memset(&r->id, 0, sizeof r->id);
    r->kind = r->frame[0];
    memcpy(&r->id, r->frame + 1, 4);
    if (r->kind == 'C' || r->kind == 'N') return 0;
    if (length < REQUEST_HEAD) return -1;
    memcpy(&r->timeout_ms, r->frame + 5, 24);
    char *at = r->frame + REQUEST_HEAD, *end = r->frame + length;
    if (r->num_args > length || r->num_env > length || r->stdin_len > length) return -1;
    r->args = calloc(r->num_args + r->num_env + 2, sizeof *r->args);
    r->env = r->args + r->num_args + 1;
    for (uint32_t i = 0; i < 1 + r->num_args + r->num_env; i++) {
        char *stop = memchr(at, 0, end - at);
        if (!stop) return -1;
        if (i == 0) r->cwd = at;
        else if (i <= r->num_args) r->args[i - 1] = at;
        else r->env[i - 1 - r->num_args] = at;
        at = stop + 1;
    }
    r->stdin_data = at;
    return (uint32_t)(end - at) == r->stdin_len && r->num_args ? 0 : -1;
}

static int read_request(struct request *r) {
    uint32_t length;
    if (read_full(channel_in, &length, 4) || length < 5 || length > MAX_FRAME) return -1;
    memset(r, 0, sizeof *r);
    r->frame = malloc(length);
    if (!r->frame || read_full(channel_in, r->frame, length)) return -1;
    return parse(r, length);
}

static void fail_child(const char *what) {
    dprintf(2, "sandbox: %s: %s\n", what, strerror(errno));
    _exit(126);
}

static void set_limit(int which, long value) {
    struct rlimit limit = {value, value};
    if (value >= 0 && setrlimit(which, &limit)) fail_child("cannot set a limit");
}

/* no_new_privs is set already, by bwrap or by docker: no program can give power back. */
static void drop_capabilities(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0, 0, 0}, {0, 0, 0}};
    if (mode == MODE_PIDNS) /* uid 0 of the namespace: exec must not give power back */
        for (int cap = 0; cap <= CAP_LAST_CAP; cap++) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    if (syscall(SYS_capset, &head, none)) fail_child("cannot drop capabilities");
}

static void drop_privileges(void) {
    if (uid >= 0 && (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid)))
        fail_child("cannot change the user");
    if (mode == MODE_SUBREAPER) return;
    drop_capabilities();
    if (install_filter()) fail_child("cannot filter system calls");
}

static void prefer_for_oom(void) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, "500", 3) != 3) errno = 0; /* only a preference */
    close(fd);
}

/* The command itself: never returns. fds 0, 1, 2 are set; everything else is close-on-exec. */
static void run_child(const struct request *r) {
    sigset_t none;
    sigemptyset(&none);
    prefer_for_oom();
    drop_privileges();
    set_limit(RLIMIT_NPROC, limit_nproc);
    set_limit(RLIMIT_AS, limit_as);
    set_limit(RLIMIT_FSIZE, limit_fsize);
    signal(SIGCHLD, SIG_DFL);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    umask(022);
    if (r->kind == 'P') _exit(tree_put(r->args[0]));
    if (r->kind == 'G') _exit(tree_get(r->args[0]));
    if (chdir(r->cwd)) fail_child(r->cwd);
    environ = r->env;
    execvp(r->args[0], r->args);
    dprintf(2, "sandbox: cannot run %s: %s\n", r->args[0], strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

static int exit_code(int status) {
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* PID 1 of a command's own namespace; its end kills whatever the command left. */
static void run_namespace_init(const struct request *r) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
        fail_child("cannot mount /proc");
    pid_t command = fork();
    if (command < 0) fail_child("cannot fork");
    if (command == 0) {
        setsid();
        run_child(r);
    }
    drop_privileges();
    close(0), close(1), close(2);
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid == command) _exit(exit_code(status));
        if (pid < 0 && errno != EINTR) _exit(125);
    }
}

static pid_t start(const struct request *r, int in, int out) {
    pid_t pid = mode == MODE_PIDNS
                    ? syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0)
                    : fork();
    if (pid != 0) return pid;
    setsid();
    if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0) _exit(126);
    if (mode == MODE_PIDNS) run_namespace_init(r);
    run_child(r);
    return -1;
}

static void keep(struct output *o, const char *data, size_t n) {
    size_t to_head = o->head_cap - o->head_len;
    if (to_head > n) to_head = n;
    memcpy(o->head + o->head_len, data, to_head);
    o->head_len += to_head, o->total += to_head;
    data += to_head, n -= to_head;
    if (n > o->tail_cap) o->total += n - o->tail_cap, data += n - o->tail_cap, n = o->tail_cap;
    while (n) { /* the tail is a ring indexed by the position after the head */
        size_t at = (o->total - o->head_cap) % o->tail_cap, room = o->tail_cap - at;
        if (room > n) room = n;
        memcpy(o->tail + at, data, room);
        o->total += room, data += room, n -= room;
    }
}

/* Reads what is there; 1 at end of file, 0 when it would block. */
static int drain(int fd, struct output *o, int rounds) {
    static char chunk[1 << 16];
    while (rounds--) {
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n > 0) keep(o, chunk, n);
        else if (n == 0) return 1;
        else if (errno != EINTR) return errno != EAGAIN;
    }
    return 0;
}

static void kill_all(pid_t command) {
    if (mode == MODE_PID1) {
        kill(-1, SIGKILL);
        return;
    }
    if (mode == MODE_PIDNS) {
        kill(command, SIGKILL);
        return;
    }
    char path[64], list[1 << 14];
    kill(-command, SIGKILL);
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, list, sizeof list - 1);
    if (fd >= 0) close(fd);
    list[n > 0 ? n : 0] = 0;
    for (char *at = list, *next; *at; at = next) {
        long pid = strtol(at, &next, 10);
        if (next == at) break;
        if (pid > 1) kill(pid, SIGKILL);
    }
}

/* Kills and reaps until no child is left; -1 when something does not die. */
static int sweep(pid_t command) {
    int64_t deadline = now_us() + REAP_DEADLINE_MS * 1000LL;
    for (;;) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0 && errno == ECHILD) return 0;
        if (pid > 0) continue;
        if (now_us() > deadline) return -1;
        kill_all(command);
        struct timespec pause = {0, 20000000};
        ppoll(NULL, 0, &pause, &idle_mask);
    }
}

struct run {
    pid_t pid;
    int in, out, ended, status;
    uint32_t written, flags;
};

static void check_channel(struct run *run, const struct request *r) {
    struct request other;
    if (read_request(&other)) { /* the owner is gone */
        kill_all(run->pid);
        sweep(run->pid);
        _exit(0);
    }
    if (other.kind == 'C' && other.id == r->id) run->flags |= CANCELLED;
    free(other.args), free(other.frame);
}

static void feed(struct run *run, const struct request *r) {
    ssize_t n = write(run->in, r->stdin_data + run->written, r->stdin_len - run->written);
    if (n > 0) run->written += n;
    if ((n < 0 && errno != EAGAIN && errno != EINTR) || run->written == r->stdin_len) {
        close(run->in);
        run->in = -1;
    }
}

static void watch(struct run *run, const struct request *r, struct output *o) {
    int64_t deadline = now_us() + r->timeout_ms * 1000LL;
    while (!run->ended && !(run->flags & (TIMED_OUT | CANCELLED))) {
        int64_t left = deadline - now_us();
        if (left <= 0) {
            run->flags |= TIMED_OUT;
            return;
        }
        struct pollfd fds[3] = {{channel_in, POLLIN, 0}, {run->out, POLLIN, 0},
                                {run->in, POLLOUT, 0}};
        struct timespec wait = {left / 1000000, left % 1000000 * 1000};
        int n = ppoll(fds, 3, &wait, &idle_mask);
        if (n > 0 && fds[0].revents) check_channel(run, r);
        if (n > 0 && fds[1].revents && drain(run->out, o, 16)) {
            close(run->out); /* everybody closed it; the command may go on */
            run->out = -1;
        }
        if (n > 0 && fds[2].revents) feed(run, r);
        while (!run->ended) {
            int status;
            pid_t pid = waitpid(-1, &status, WNOHANG);
            if (pid <= 0) break;
            if (pid == run->pid) run->ended = 1, run->status = status;
        }
    }
}

static int reply(const struct request *r, const struct run *run, struct output *o, int64_t took) {
    uint64_t after_head = o->total - o->head_len;
    uint32_t tail_len = after_head < o->tail_cap ? after_head : o->tail_cap;
    uint32_t flags = run->flags | (after_head > tail_len ? TRUNCATED : 0);
    int32_t code = run->ended ? exit_code(run->status) : 128 + SIGKILL;
    uint64_t micros = took, total = o->total;
    uint32_t length = 37 + o->head_len + tail_len;
    char head[41], *at = head;
#define ADD(value) (memcpy(at, &(value), sizeof(value)), at += sizeof(value))
    ADD(length);
    *at++ = 'R';
    ADD(r->id), ADD(code), ADD(flags), ADD(micros), ADD(total), ADD(o->head_len), ADD(tail_len);
#undef ADD
    size_t at_ring = o->tail_cap && after_head > o->tail_cap ? after_head % o->tail_cap : 0;
    return write_full(channel_out, head, sizeof head) ||
           write_full(channel_out, o->head, o->head_len) ||
           write_full(channel_out, o->tail + at_ring, tail_len - at_ring) ||
           write_full(channel_out, o->tail, at_ring);
}

static int open_pipes(const struct request *r, int in[2], int out[2]) {
    if (pipe2(out, O_CLOEXEC)) return -1;
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    if (!r->stdin_len) {
        in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC), in[1] = -1;
        return in[0] < 0 ? -1 : 0;
    }
    if (pipe2(in, O_CLOEXEC)) return -1;
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    return 0;
}

static int serve_one(const struct request *r) {
    int in[2], out[2], rc;
    if (r->kind == 'N') return reply(r, &(struct run){.ended = 1}, &(struct output){0}, 0);
    struct output o = {malloc(r->head_cap + 1), malloc(r->tail_cap + 1), r->head_cap,
                       r->tail_cap, 0, 0};
    if (!o.head || !o.tail || open_pipes(r, in, out)) return -1;
    int64_t began = now_us();
    struct run run = {.pid = start(r, in[0], out[1]), .in = in[1], .out = out[0]};
    close(in[0]), close(out[1]);
    if (run.pid < 0) {
        const char *text = "sandbox: cannot start a process: the pids limit is reached\n";
        keep(&o, text, strlen(text));
        run.ended = 1, run.status = 126 << 8;
    } else {
        watch(&run, r, &o);
        if (!run.ended) kill_all(run.pid);
        if (sweep(run.pid)) run.flags |= STUCK;
    }
    if (run.out >= 0) drain(run.out, &o, 1 << 20), close(run.out);
    if (run.in >= 0) close(run.in);
    rc = reply(r, &run, &o, now_us() - began);
    free(o.head), free(o.tail);
    return rc;
}

/* As PID 1 it takes everything of its namespace along. */
static void on_life_over(int number) {
    (void)number;
    _exit(4);
}

static void read_options(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--mode"))
            mode = !strcmp(value, "pidns") ? MODE_PIDNS
                   : !strcmp(value, "subreaper") ? MODE_SUBREAPER : MODE_PID1;
        else if (!strcmp(name, "--uid")) uid = atol(value);
        else if (!strcmp(name, "--nproc")) limit_nproc = atol(value);
        else if (!strcmp(name, "--as")) limit_as = atol(value);
        else if (!strcmp(name, "--fsize")) limit_fsize = atol(value);
        else if (!strcmp(name, "--life")) life_s = atol(value);
    }
}

int main(int argc, char **argv) {
    read_options(argc, argv);
    channel_in = fcntl(0, F_DUPFD_CLOEXEC, 10);
    channel_out = fcntl(1, F_DUPFD_CLOEXEC, 10);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (channel_in < 0 || channel_out < 0 || null < 0) return 1;
    dup2(null, 0), dup2(null, 1);
    if (mode == MODE_SUBREAPER) prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    struct sigaction action = {.sa_handler = on_child};
    sigaction(SIGCHLD, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    if (life_s > 0) {
        struct sigaction over = {.sa_handler = on_life_over};
        sigaction(SIGALRM, &over, NULL);
        alarm(life_s);
    }
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, &idle_mask);
    sigdelset(&idle_mask, SIGCHLD);
    const char hello[5] = {1, 0, 0, 0, 'H'};
    if (write_full(channel_out, hello, sizeof hello)) return 1;
    struct request r;
    while (!read_request(&r)) {
        int rc = r.kind == 'C' ? 0 : serve_one(&r);
        free(r.args), free(r.frame);
        if (rc) return 1;
    }
    return 0;
}
