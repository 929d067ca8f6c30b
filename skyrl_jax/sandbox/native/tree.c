/* File trees through the supervisor: a record stream each way, so that the image needs no tar.
 *
 * Record: u8 type ('D' directory, 'F' file, 'L' symbolic link, '.' end), u32 mode, u32 path length,
 * u64 data length, path, data (file content or link target). Paths are relative to the root.
 * Both functions run in a child that already has the commands' uid, so they can do nothing that a
 * command could not do; the host side never follows a path from inside the sandbox.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "wire.h"

#define HEADER 17

static int complain(const char *what, const char *path) {
    dprintf(2, "%s %s: %s\n", what, path, strerror(errno));
    return 1;
}

static int make_parents(char *path, int whole) {
    for (char *at = path + 1; *at; at++) {
        if (*at != '/') continue;
        *at = 0;
        int failed = mkdir(path, 0755) && errno != EEXIST;
        *at = '/';
        if (failed) return -1;
    }
    if (whole && mkdir(path, 0755) && errno != EEXIST) return -1;
    return 0;
}

static int put_file(const char *path, uint32_t mode, uint64_t left) {
    if (unlink(path) && errno != ENOENT) return complain("cannot replace", path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return complain("cannot create", path);
    static char chunk[1 << 16];
    while (left) {
        size_t n = left < sizeof chunk ? left : sizeof chunk;
        if (read_full(0, chunk, n)) return complain("stream ended inside", path);
        if (write_full(fd, chunk, n)) return complain("cannot write", path);
        left -= n;
    }
    if (fchmod(fd, mode & 0777)) return complain("cannot chmod", path);
    close(fd);
    return 0;
}

static int put_record(uint8_t type, uint32_t mode, char *path, uint64_t size) {
    if (make_parents(path, 0)) return complain("cannot make the directory of", path);
    if (type == 'D') {
        if (mkdir(path, 0755) && errno != EEXIST) return complain("cannot make directory", path);
        struct stat st;
        if (!stat(path, &st) && (st.st_mode & 0777) == (mode & 0777)) return 0;
        return chmod(path, mode & 0777) && errno != EPERM ? complain("cannot chmod", path) : 0;
    }
    if (type == 'F') return put_file(path, mode, size);
    char target[PATH_MAX];
    if (type != 'L' || size >= sizeof target) return complain("bad record", path);
    if (read_full(0, target, size)) return complain("stream ended inside", path);
    target[size] = 0;
    if (unlink(path) && errno != ENOENT) return complain("cannot replace", path);
    return symlink(target, path) ? complain("cannot link", path) : 0;
}

int tree_put(const char *root) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", root);
    if (make_parents(path, 1)) return complain("cannot make directory", path);
    if (chdir(root)) return complain("cannot enter", root);
    for (;;) {
        unsigned char head[HEADER];
        if (read_full(0, head, 1)) return complain("stream ended early in", root);
        if (head[0] == '.') return 0;
        if (read_full(0, head + 1, HEADER - 1)) return complain("stream ended early in", root);
        uint32_t mode, path_len;
        uint64_t size;
        memcpy(&mode, head + 1, 4);
        memcpy(&path_len, head + 5, 4);
        memcpy(&size, head + 9, 8);
        if (!path_len || path_len >= sizeof path || read_full(0, path, path_len))
            return complain("bad path in stream for", root);
        path[path_len] = 0;
        if (put_record(head[0], mode, path, size)) return 1;
    }
}

static int emit(uint8_t type, uint32_t mode, const char *path, uint64_t size) {
    unsigned char head[HEADER];
    uint32_t path_len = strlen(path);
    head[0] = type;
    memcpy(head + 1, &mode, 4);
    memcpy(head + 5, &path_len, 4);
    memcpy(head + 9, &size, 8);
    return write_full(1, head, HEADER) || write_full(1, path, path_len);
}

static int get_file(int dir, const char *name, const char *path, const struct stat *st) {
    int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return complain("cannot read", path);
    if (emit('F', st->st_mode & 0777, path, st->st_size)) return 1;
    static char chunk[1 << 16];
    uint64_t left = st->st_size;
    while (left) {
        ssize_t n = read(fd, chunk, left < sizeof chunk ? left : sizeof chunk);
        if (n < 0) return complain("cannot read", path);
        if (n == 0) { /* the file shrank while it was read: keep the record's length */
            n = left < sizeof chunk ? left : sizeof chunk;
            memset(chunk, 0, n);
        }
        if (write_full(1, chunk, n)) return 1;
        left -= n;
    }
    close(fd);
    return 0;
}

static int get_at(int dir, const char *name, const char *path, int depth);

static int get_dir(int dir, const char *name, const char *path, int depth) {
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (!list) return complain("cannot read directory", path);
    int rc = 0;
    struct dirent *entry;
    while (!rc && (entry = readdir(list))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        char child[PATH_MAX];
        if ((size_t)snprintf(child, sizeof child, "%s/%s", path, entry->d_name) >= sizeof child)
            return complain("path too long in", path);
        rc = get_at(fd, entry->d_name, child, depth + 1);
    }
    closedir(list);
    return rc;
}

static int get_at(int dir, const char *name, const char *path, int depth) {
    struct stat st;
    if (depth > 200) return complain("tree too deep at", path);
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW)) return complain("no such path", path);
    if (S_ISREG(st.st_mode)) return get_file(dir, name, path, &st);
    if (S_ISDIR(st.st_mode)) {
        if (emit('D', st.st_mode & 0777, path, 0)) return 1;
        return get_dir(dir, name, path, depth);
    }
    if (!S_ISLNK(st.st_mode)) return 0; /* sockets, pipes and devices are left out */
    char target[PATH_MAX];
    ssize_t n = readlinkat(dir, name, target, sizeof target);
    if (n < 0) return complain("cannot read link", path);
    return emit('L', 0777, path, n) || write_full(1, target, n);
}

int tree_get(const char *path) {
    const char *base = strrchr(path, '/');
    base = base && base[1] ? base + 1 : (strcmp(path, "/") ? path : "root");
    if (get_at(AT_FDCWD, path, base, 0)) return 1;
    return write_full(1, ".", 1) ? 1 : 0;
}
