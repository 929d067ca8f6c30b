/* Starts one bwrap sandbox and removes every trace of it: the sandbox's watcher on the host.
 *
 *   launcher [options] -- BWRAP ARGS...        fds 0 and 1 are the channel to the owner
 *     -s DIR      stage: an existing directory to mount on (in a private mount namespace)
 *     -z BYTES    size of the sandbox's own writable layer (a tmpfs)
 *     -l DIR      a lower directory, the first on top (repeat)
 *     -b DIR      a host directory to show at /.skyrl/host, read-only
 *     -m UID      map uids and gids 0, 1, 2 -> UID, UID + 1, UID + 2 (needs root); without it
 *                 0 -> own uid
 *     -c DIR      a cgroup directory to make, join and remove (repeat)
 *     -w FILE=V   a value to write after the directories are made (repeat)
 *     -p PID      the owner
 *     -t MS       lifetime
 * It waits for the sandbox's end, the owner's end (its half of the channel closed, or its process
 * gone) or the lifetime; then it kills the sandbox, removes the cgroups and exits. The owner sees
 * end of file only then, so end of file means: nothing is left. Mounts live in the sandbox's mount
 * namespace and end with it. Exit code: 0 the owner asked, 3 the sandbox ended from inside (an 'X'
 * frame with bwrap's last words is sent), 4 lifetime, 5 could not start, 6 not everything died.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "wire.h"

#define MAX_ITEMS 64
#define CLEAN_DEADLINE_MS 8000
#define GRACE_MS 300

static const char *stage = "/tmp", *size_bytes = "0", *shared;
static const char *lowers[MAX_ITEMS], *cgroups[MAX_ITEMS], *writes[MAX_ITEMS];
static int num_lowers, num_cgroups, num_writes, owner_pid, log_fd;
static pid_t launcher_pid;
static long map_base = -1, lifetime_ms = -1;

static int remove_cgroups(void);
static void send_last_words(int status);

static void die(const char *what, const char *name) {
    dprintf(2, "sandbox launcher: %s %s: %s\n", what, name, strerror(errno));
    if (getpid() == launcher_pid) {
        send_last_words(5);
        remove_cgroups();
    }
    _exit(5);
}

static void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) die("cannot write", path);
    close(fd);
}

static void make_cgroups(void) {
    for (int i = 0; i < num_cgroups; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s", cgroups[i]);
        for (char *at = path + 1; *at; at++) {
            if (*at != '/') continue;
            *at = 0;
            mkdir(path, 0755); /* a missing parent shows in the next mkdir */
            *at = '/';
        }
        if (mkdir(path, 0755) && errno != EEXIST) die("cannot make cgroup", path);
    }
    for (int i = 0; i < num_writes; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s", writes[i]);
        char *value = strchr(path, '=');
        if (!value) die("bad -w", path);
        *value = 0;
        write_file(path, value + 1);
    }
}

static void join_cgroups(void) {
    char path[4096];
    for (int i = 0; i < num_cgroups; i++) {
        snprintf(path, sizeof path, "%s/cgroup.procs", cgroups[i]);
        write_file(path, "0");
    }
}

/* The sandbox's root: our own tmpfs holds the upper layer; lower layers are reached through links
 * in it, so that /proc/self/mountinfo shows no host path inside the sandbox. */
static void mount_root(void) {
    char options[MAX_ITEMS * 8 + 128], *at = options;
    uid_t inside = map_base >= 0 ? map_base : 0;
    snprintf(options, sizeof options, "mode=755,size=%s", size_bytes);
    if (mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, options) || chdir(stage))
        die("cannot mount a tmpfs on", stage);
    if (mkdir("u", 0755) || mkdir("w", 0755) || mkdir("m", 0755)) die("cannot fill", stage);
    if (map_base >= 0 && chown("u", inside, inside)) die("cannot chown in", stage);
    at += sprintf(at, "lowerdir=");
    for (int i = 0; i < num_lowers; i++) {
        char name[8];
        snprintf(name, sizeof name, "l%d", i);
        if (access(lowers[i], X_OK) || symlink(lowers[i], name)) die("no layer", lowers[i]);
        at += sprintf(at, "%s%s", i ? ":" : "", name);
    }
    sprintf(at, ",upperdir=u,workdir=w%s", map_base >= 0 ? "" : ",userxattr");
    if (mount("sandbox", "m", "overlay", MS_NOSUID | MS_NODEV, options))
        die("cannot mount an overlay of", lowers[0]);
    /* bound here, where we may still pass folders that are closed to the sandbox's ids; bwrap
     * puts it in its place */
    if (shared && (mkdir("b", 0755) || mount(shared, "b", NULL, MS_BIND, NULL) ||
                   mount(NULL, "b", NULL,
                         MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL)))
        die("cannot share", shared);
}

static void map_ids(pid_t pid) {
    char path[64], text[64];
    snprintf(text, sizeof text, "0 %ld 3\n", map_base);
    snprintf(path, sizeof path, "/proc/%d/uid_map", (int)pid);
    write_file(path, text);
    snprintf(path, sizeof path, "/proc/%d/gid_map", (int)pid);
    write_file(path, text);
}

static void map_own_id(uid_t user, gid_t group) {
    char text[64];
    write_file("/proc/self/setgroups", "deny");
    snprintf(text, sizeof text, "0 %d 1\n", (int)user);
    write_file("/proc/self/uid_map", text);
    snprintf(text, sizeof text, "0 %d 1\n", (int)group);
    write_file("/proc/self/gid_map", text);
}

static void enter_as_root(int to_parent, int from_parent) {
    char byte = 1;
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        die("cannot make", "a mount namespace");
    mount_root();
    if (unshare(CLONE_NEWUSER)) die("cannot make", "a user namespace");
    if (write_full(to_parent, &byte, 1) || read_full(from_parent, &byte, 1)) _exit(5);
    if (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0))
        die("cannot become", "uid 0 of the user namespace");
}

static void enter_as_user(void) {
    uid_t user = getuid();
    gid_t group = getgid();
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS)) die("cannot make", "a user namespace");
    map_own_id(user, group);
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) die("cannot make", "mounts private");
    mount_root();
}

static void run_sandbox(char **argv, int to_parent, int from_parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    join_cgroups();
    if (map_base >= 0) enter_as_root(to_parent, from_parent);
    else enter_as_user();
    /* no namespace may be made inside: the commands get no capability anywhere */
    write_file("/proc/sys/user/max_user_namespaces", "0");
    signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL), signal(SIGHUP, SIG_DFL);
    execvp(argv[0], argv);
    die("cannot run", argv[0]);
}

static pid_t start(char **argv) {
    int up[2], down[2];
    char byte = 0;
    if (pipe2(up, O_CLOEXEC) || pipe2(down, O_CLOEXEC)) die("cannot make", "a pipe");
    pid_t pid = fork();
    if (pid < 0) die("cannot fork", "");
    if (pid == 0) {
        close(up[0]), close(down[1]);
        run_sandbox(argv, up[1], down[0]);
    }
    close(up[1]), close(down[0]);
    if (map_base >= 0 && !read_full(up[0], &byte, 1)) {
        map_ids(pid);
        if (write_full(down[1], &byte, 1)) errno = 0; /* its end is seen by waitpid */
    }
    close(up[0]), close(down[1]);
    return pid;
}

/* Returns the exit code to use; the sandbox may still live. */
static int wait_for_end(int owner, int sandbox) {
    struct pollfd fds[3] = {{0, POLLRDHUP, 0}, {owner, POLLIN, 0}, {sandbox, POLLIN, 0}};
    struct timespec limit = {lifetime_ms / 1000, lifetime_ms % 1000 * 1000000};
    int n;
    do n = ppoll(fds, 3, lifetime_ms < 0 ? NULL : &limit, NULL);
    while (n < 0 && errno == EINTR);
    if (n == 0) return 4;
    if (fds[0].revents || fds[1].revents) return 0;
    return 3;
}

static void kill_members(const char *cgroup) {
    char path[4096], list[4096];
    snprintf(path, sizeof path, "%s/cgroup.procs", cgroup);
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

static int remove_cgroups(void) {
    int left_ms = CLEAN_DEADLINE_MS;
    for (int i = 0; i < num_cgroups; i++) {
        int pause_us = 200;
        while (rmdir(cgroups[i]) && errno != ENOENT) {
            if (left_ms <= 0) return -1;
            if (pause_us > 5000) kill_members(cgroups[i]);
            usleep(pause_us);
            left_ms -= pause_us / 1000;
            if (pause_us < 20000) pause_us *= 2;
        }
    }
    return 0;
}

static void send_last_words(int status) {
    char frame[4096 + 9];
    ssize_t n = pread(log_fd, frame + 9, 4096, 0);
    uint32_t length = 5 + (n > 0 ? n : 0);
    memcpy(frame, &length, 4);
    frame[4] = 'X';
    memcpy(frame + 5, &status, 4);
    send(1, frame, 4 + length, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static char **read_options(char **at) {
    for (; *at && strcmp(*at, "--"); at += 2) {
        const char *value = at[1];
        if (!value || num_lowers >= MAX_ITEMS - 1 || num_cgroups >= MAX_ITEMS - 1 ||
            num_writes >= MAX_ITEMS - 1) _exit(5);
        switch (at[0][1]) {
        case 's': stage = value; break;
        case 'z': size_bytes = value; break;
        case 'l': lowers[num_lowers++] = value; break;
        case 'b': shared = value; break;
        case 'm': map_base = atol(value); break;
        case 'c': cgroups[num_cgroups++] = value; break;
        case 'w': writes[num_writes++] = value; break;
        case 'p': owner_pid = atoi(value); break;
        case 't': lifetime_ms = atol(value); break;
        default: _exit(5);
        }
    }
    if (!*at || !num_lowers) _exit(5);
    return at + 1;
}

int main(int argc, char **argv) {
    (void)argc;
    char **command = read_options(argv + 1);
    syscall(SYS_close_range, 3, ~0u, 0);
    launcher_pid = getpid();
    setsid(); /* a signal to the owner's process group must not stop the clean-up */
    signal(SIGINT, SIG_IGN), signal(SIGTERM, SIG_IGN), signal(SIGHUP, SIG_IGN);
    log_fd = memfd_create("log", MFD_CLOEXEC);
    if (log_fd < 0 || dup2(log_fd, 2) < 0) _exit(5);
    int owner = syscall(SYS_pidfd_open, owner_pid, 0);
    if (owner < 0 && errno == ESRCH) _exit(0);
    make_cgroups();
    pid_t pid = start(command);
    int sandbox = syscall(SYS_pidfd_open, pid, 0), status = 0;
    int code = wait_for_end(owner, sandbox);
    if (code == 0) { /* the supervisor saw the end of the channel too: let the chain end in order */
        struct pollfd end = {sandbox, POLLIN, 0};
        poll(&end, 1, GRACE_MS);
    }
    if (code != 3) kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    if (code == 3) send_last_words(status);
    if (remove_cgroups()) code = 6;
    return code;
}
